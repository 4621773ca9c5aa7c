"""How a pipeline runs, as data."""
