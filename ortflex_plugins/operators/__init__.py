"""The operators of ONNX as functions over an array namespace: numpy, JAX, or the arrays of C.

:mod:`.calls` defines the form of an operator, the other modules the operators by family,
:mod:`.translation` runs a program through them. A library without a kind of its own, which backends import.
"""
