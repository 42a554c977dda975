"""What looks at a model or a run from outside."""
