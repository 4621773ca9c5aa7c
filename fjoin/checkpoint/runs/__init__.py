"""Saves and loads runs: what each rank has, who writes it, and the agreement of the ranks."""
