"""Codecs: the forms of floats on the wire."""
