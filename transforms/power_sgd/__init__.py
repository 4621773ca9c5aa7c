"""PowerSGD."""
