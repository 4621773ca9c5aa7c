"""What ranks agree on besides gradients."""
