"""Functional optimizers in the style of `step_param`: the type, its lifting to trees, and common functions."""
