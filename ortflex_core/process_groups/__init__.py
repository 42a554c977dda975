"""Several processes that make one training: what they say to one another, and in which order they add.

Owns: messages between the processes of a group, what they decide together, and the sum of gradients in the
order of the batches.

May import: protocols and the packages before it.

Add here: what all process groups share. A group itself is a plugin
(:class:`ortflex_core.protocols.ProcessGroup`).
"""

from ortflex_core.process_groups.gradient_sum import GradientExchange
from ortflex_core.process_groups.peers import Peers, RankFailed, RanksDiffer

__all__ = ["GradientExchange", "Peers", "RankFailed", "RanksDiffer"]
