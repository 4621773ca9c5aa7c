"""Which values a block keeps for its backward pass, and where."""
