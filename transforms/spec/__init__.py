"""Transforms as data: their names and arguments, as text, as JSON and as a fingerprint."""
