"""Plugins of ortflex itself; they use the core's public names only."""
