"""Precisions, one in each module: the types in which the forward and the backward pass compute."""
