"""Backends: ways to run a training step."""
