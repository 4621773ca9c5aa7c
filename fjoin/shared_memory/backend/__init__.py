"""The backend "fjoin" of torch.distributed."""
