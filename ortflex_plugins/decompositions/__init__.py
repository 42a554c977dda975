"""Decompositions of onnxruntime's own operators, one family a file, registered as entry points."""
