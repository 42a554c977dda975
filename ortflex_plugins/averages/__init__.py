"""Means of the weights along a training: one a module."""
