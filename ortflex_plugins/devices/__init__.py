"""Devices: where tensors live and what computes on them."""
