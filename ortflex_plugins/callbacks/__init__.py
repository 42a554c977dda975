"""What else happens during a training: one callback a module."""
