"""Penalties, one in each module: the cost of a weight."""
