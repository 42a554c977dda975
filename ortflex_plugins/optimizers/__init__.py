"""How a weight moves along its gradient: one optimizer a module."""
