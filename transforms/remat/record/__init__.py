"""The record of the first run of a block."""
