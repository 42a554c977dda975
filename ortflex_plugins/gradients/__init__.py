"""Gradient rules: one entry an operator, one formula an argument."""
