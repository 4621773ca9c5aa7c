"""Sharded reductions: a mean that leaves each rank its piece, and the gather of parameters."""
