"""What a plugin and a training loop need."""
