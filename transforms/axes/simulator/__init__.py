"""Ranks that are simulated in this process."""
