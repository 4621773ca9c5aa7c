"""A save: which rank writes what, and the commit."""
