"""Adam and its variants."""
