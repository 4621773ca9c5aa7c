"""Optimizers in step_param style."""
