"""Error feedback, and the methods built on it."""
