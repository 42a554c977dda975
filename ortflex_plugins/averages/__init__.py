"""Averages, one in each module: means of the weights over the steps."""
