"""Loaders and the positions in them."""
