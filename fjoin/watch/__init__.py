"""Watching a run: its numbers, and a timeline of its messages."""
