"""Uneven inputs in loops of one's own: Join, loops, evaluation."""
