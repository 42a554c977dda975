"""Transforms, one in each module: changes of the gradients before the optimizer uses them."""
