"""Ports: the roles of the values of a program.

A program has inputs and outputs. Each is found by its :class:`Port`: its role, and the object it
belongs to. The names in the ONNX graph are derived from ports for people who read the graph; they
are unique and never parsed, so a tensor of a model may have any name.

An output with the port of an input is its new value: the new weight, the new slot, the new sum of
gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import attrs

_Columns = Literal["data", "label", "sample_weight"]
_State = Literal["parameter", "slot", "average", "buffer", "frozen"]
_Host = Literal["rate", "hyperparameter", "counter", "draw", "scale", "host"]
_Made = Literal["loss", "objective", "penalty", "gradient", "output", "value"]
Role = _Columns | _State | _Host | _Made
"""The role of a value.

``counter`` counts updates and ``draw`` batches, for random masks; ``loss`` is the cost of one term,
or of all, ``objective`` includes the penalty; ``host`` is any host scalar.
"""

Part = Literal["forward", "loss", "backward", "penalty", "transform", "update"]
PARTS: tuple[Part, ...] = get_args(Part)


class InParts:
    """A graph under construction, each of whose nodes belongs to one part of a training step."""

    current_part: Part | None = None

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Nodes that are created in this context belong to this part."""
        before, self.current_part = self.current_part, name
        try:
            yield
        finally:
            self.current_part = before


COLUMNS = get_args(_Columns)  # of the values that differ between batches
_OWN_NAME = ("data", "label", "sample_weight", "parameter", "buffer", "frozen", "output", "value")
_WORDS = {"counter": "step", "objective": "total"}


@attrs.frozen
class Port:
    """The address of an input or output of a program.

    Attributes:
        role: the role of the value.
        of: the object it belongs to: a tensor of the model, a column of the data, a loss term; None
            for a value that a program has once.
        slot: distinguishes several, for example the name of an optimizer's slot.
        step: the step, in a program of several steps.
        batch: the batch of the step, if a step has several.
        group: the group of parameters that share it; None for those outside groups.

    >>> Port("slot", of="W1", slot="m").label
    'm/W1'
    >>> Port("data", of="X", step=2, batch=1).label
    'X@2.1'
    """

    role: Role
    of: str | None = None
    slot: str | None = None
    step: int = 0
    batch: int = 0
    group: int | None = None

    @property
    def label(self) -> str:
        """The port as a string: for people, for the names in a graph, and for host symbols."""
        of = self.of
        if self.role in _OWN_NAME:
            text = str(of)
        elif self.role == "scale":
            text = f"{of}/scale"
        else:
            word = self.slot or _WORDS.get(self.role, self.role)
            if self.role == "loss" and of is not None:
                word = "total"
            text = word if of is None else f"{word}/{of}"
            text += "" if self.group is None else f"#{self.group}"
        place = f"@{self.step}" if self.step or self.batch else ""
        return f"{text}{place}.{self.batch}" if self.batch else text + place


def ports_of(role: Role, names: Iterable[str]) -> dict[str, Port]:
    """The ports of one role, by the objects they belong to."""
    return {name: Port(role, of=name) for name in names}


Key = Port | str
"""The key of a value of a program: its port, or its required name."""
