"""Mutants of our sources, and whether a test fails for each: ``python -m tests.mutation``."""
