"""Axes over process groups and over the memory of a host."""
