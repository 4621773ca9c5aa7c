"""Optimizers in step_param style, and what they share."""
