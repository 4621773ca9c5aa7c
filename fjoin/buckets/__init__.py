"""Flat buckets of parameters and gradients, and the hooks of autograd that fill them."""
