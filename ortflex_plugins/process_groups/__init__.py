"""Groups of processes that make one training."""
