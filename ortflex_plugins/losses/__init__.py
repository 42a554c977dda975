"""What a sample costs: one loss a module."""
