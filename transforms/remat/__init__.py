"""Rematerialisation: activations computed again in the backward pass, or kept elsewhere, under every transform."""
