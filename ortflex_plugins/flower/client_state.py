"""The state that stays on a client between two rounds, in Flower's ``context.state``.

It has the optimizer's slots, the tensors that are not shared, and the number of calls of ``fit``,
from which the order of rows is drawn. So rounds on a client give the same result as calls of
``fit`` one after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ortflex_core import Array, ConfigError, internals_of
from ortflex_plugins.flower import shared
from ortflex_plugins.flower.shared import require_flower

if TYPE_CHECKING:
    from flwr.app import Context

    from ortflex_core import Trainer

_NUMBERS, _SLOTS, _PRIVATE = "ortflex", "ortflex-slots", "ortflex-private"


def keep(trainer: Trainer, context: Context, share: shared.Share) -> None:
    """Write the part of a Trainer's state that is not shared into the client's state."""
    inner = internals_of(trainer)
    app = require_flower()
    names = set(shared.shared_names(trainer, share))
    private = {n: a for n, a in shared.tensors(trainer).items() if n not in names}
    slots = {n: np.asarray(a) for n, a in inner.live.slots().items()}
    context.state[_NUMBERS] = app.ConfigRecord({"fits": int(inner.live.standing.fits)})
    context.state[_SLOTS] = shared.as_record(slots)
    context.state[_PRIVATE] = shared.as_record(private)


def restore(trainer: Trainer, context: Context, *, slots: bool = True) -> None:
    """Load the state that :func:`keep` wrote, if there is any."""
    if _NUMBERS not in context.state:
        return
    private = shared.as_arrays(context.state[_PRIVATE])
    now = shared.tensors(trainer)
    wrong = [n for n, a in private.items() if n not in now or now[n].shape != a.shape]
    if wrong:
        raise _differs(f"the tensor {wrong[0]!r}")
    shared.put(trainer, private)
    standing = internals_of(trainer).live.standing
    standing.fits = int(context.state[_NUMBERS]["fits"])
    if slots:
        standing.slots = _slots(trainer, shared.as_arrays(context.state[_SLOTS]))


def _slots(trainer: Trainer, kept: dict[str, Array]) -> dict[str, Array]:
    problem = internals_of(trainer).setup.problem
    specs = {spec.name: spec for spec in problem.slot_specs.values()}
    counters = {"step", *(group.own_step for group in problem.updating.groups)}
    out = {}
    for name, array in kept.items():
        if name in counters:
            out[name] = array
            continue
        spec = specs.get(name)
        if spec is None or tuple(spec.shape or ()) != array.shape:
            raise _differs(f"the slot {name!r} of the optimizer")
        out[name] = array.astype(spec.numpy)
    # Parameters that are trained from a later epoch on have no state before it.
    missing = [n for n in {s.name for s in problem.phase(0).slot_specs.values()} if n not in out]
    if missing:
        raise _differs(f"the slot {missing[0]!r} of the optimizer, which is missing there")
    return out


def _differs(what: str) -> ConfigError:
    return ConfigError(
        "the state that this client kept from the last round belongs to another run: "
        f"{what} differs. make_trainer has to return the same model, params and optimizer in "
        "every round; client_app(keep='nothing') starts the optimizer again in each"
    )
