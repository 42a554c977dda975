"""Figures of merit on predictions: one metric a module."""
