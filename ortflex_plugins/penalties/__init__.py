"""What a weight costs: one penalty a module."""
