"""Buckets of parameters, and the pieces of buckets that ranks own."""
