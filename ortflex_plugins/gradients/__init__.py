"""Gradient rules: one entry per operator, one formula per argument."""
