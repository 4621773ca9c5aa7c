"""The numbers that ranks agree on, and the decisions on steps that follow from them."""
