"""Optimizers in the shape of torch.optim's."""
