"""Optimizers, one in each module: how a weight moves along its gradient."""
