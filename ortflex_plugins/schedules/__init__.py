"""Schedules, one in each module: the learning rate over time."""
