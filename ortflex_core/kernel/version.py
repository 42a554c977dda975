"""The version of ortflex."""

__version__ = "0.2.0"
