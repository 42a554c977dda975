"""Devices, one in each module: the memory of tensors and the execution provider that computes."""
