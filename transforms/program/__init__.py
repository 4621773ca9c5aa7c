"""A step as data: its operations in order, and their executor."""
