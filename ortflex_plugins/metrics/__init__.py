"""Metrics, one in each module: measures of the quality of predictions."""
