"""Transforms made of others."""
