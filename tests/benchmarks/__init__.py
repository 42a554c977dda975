"""What a training step costs, next to others who do the same: ``python -m tests.benchmarks``."""
