"""Transforms, and the context of their calls."""
