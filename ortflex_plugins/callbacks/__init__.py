"""Callbacks, one in each module: objects that are called during training."""
