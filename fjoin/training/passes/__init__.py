"""The forward and the backward pass of a step."""
