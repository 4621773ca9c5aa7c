"""Encoded collectives for torch's own calls."""
