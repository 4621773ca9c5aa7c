"""Optimizers in step_param style, and their common functions."""
