"""A training step in float64, and where two runs differ.

The conformance kits and the comparison of backends measure with it; no training does.

May import: engines and the packages before it.
"""
