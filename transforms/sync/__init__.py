"""Who agrees on what, and when."""
