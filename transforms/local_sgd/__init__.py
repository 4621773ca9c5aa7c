"""Local SGD: transforms of the parameters after the optimizer, and pipelines made of them."""
