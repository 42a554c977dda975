"""Several processes in one training: their messages, and the order of their sums.

Owns: messages between the processes of a group, common decisions, and the sum of gradients in the
order of the batches.

May import: protocols and the packages before it.

Add here: code for all process groups. A group itself is a plugin
(:class:`ortflex_core.protocols.ProcessGroup`).
"""

from ortflex_core.process_groups.gradient_sum import GradientExchange
from ortflex_core.process_groups.peers import Peers, RankFailed, RanksDiffer

__all__ = ["GradientExchange", "Peers", "RankFailed", "RanksDiffer"]
