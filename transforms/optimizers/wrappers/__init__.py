"""Optimizers around other optimizers."""
