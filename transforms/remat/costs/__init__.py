"""The time and memory that blocks cost, and the choice of some under a budget."""
