"""Code shared by backends: buffers, evaluation, the state in host memory, and the choice of a backend.

Add here: code that several backends need.
"""
