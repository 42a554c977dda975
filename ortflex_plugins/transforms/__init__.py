"""What stands between gradients and the optimizer."""
