"""torch's ZeroRedundancyOptimizer."""
