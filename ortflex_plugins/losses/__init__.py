"""Losses, one in each module: the cost of one sample."""
