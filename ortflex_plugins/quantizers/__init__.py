"""Quantizers: formulas of the range of real numbers that codes cover."""
