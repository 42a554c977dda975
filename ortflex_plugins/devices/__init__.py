"""Devices: the memory of tensors, and the execution provider that computes on it."""
