"""State that ranks synchronize in addition to gradients."""
