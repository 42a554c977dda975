"""Module paths of the older package: its optimizers."""
