"""Transforms made of other transforms."""
