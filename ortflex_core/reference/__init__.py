"""A training step in float64, and the search for the difference between two runs.

The conformance kits and the comparison of backends use this package; trainings do not.

May import: engines and the packages before it.
"""
