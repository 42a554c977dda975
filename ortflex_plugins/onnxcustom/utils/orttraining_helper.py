"""Losses added to graphs, at their module path of the older package."""

from ortflex_plugins.onnxcustom.loss_output import add_loss_output
from ortflex_plugins.onnxcustom.weights import get_train_initializer

__all__ = ["add_loss_output", "get_train_initializer"]
