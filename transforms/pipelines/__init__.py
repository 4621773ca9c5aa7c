"""Pipelines: a hook, an optimizer and a parameter transform."""
