"""Groups of processes that train together."""
