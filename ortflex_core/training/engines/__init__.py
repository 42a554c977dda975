"""Code shared by backends: buffers, evaluation, state in host memory, processes, the choice of a backend.

Owns: messages between the processes of a group, their common decisions, and the sum of gradients in
the order of the batches. A group itself is a plugin (:class:`ortflex_core.ProcessGroup`).

Add here: code that several backends or all process groups need.
"""
