"""Several processes in one training: their messages, and the order of their sums.

Owns: messages between the processes of a group, common decisions, and the sum of gradients in the
order of the batches.

Add here: code for all process groups. A group itself is a plugin
(:class:`ortflex_core.kernel.protocols.ProcessGroup`).
"""
