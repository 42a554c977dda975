"""The learning rate over time: one schedule a module."""
