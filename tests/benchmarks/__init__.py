"""What a training step costs, beside others who do the same: ``python -m tests.benchmarks``."""
