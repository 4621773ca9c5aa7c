"""The state of training, and the transforms at the end of a step."""
