"""Gradients on their way: flat parameters, buckets, hooks on gradients, and the reductions of a step."""
