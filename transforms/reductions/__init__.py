"""Reductions of gradients over named axes."""
