"""What crosses the network: the forms of floats on their way, and reductions in them."""
