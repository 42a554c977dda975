"""Constraints, one in each module: the values that weights may have."""
