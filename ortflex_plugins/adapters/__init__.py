"""Adapters, one a module."""
