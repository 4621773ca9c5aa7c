"""Trees of tensors by path, and their checks."""
