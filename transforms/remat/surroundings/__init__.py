"""What a block depends on beside its arguments."""
