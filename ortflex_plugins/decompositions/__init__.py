"""Decompositions of onnxruntime's own operators; each file is a family, registered as an entry point."""
