"""Components of other libraries, such as losses of torch, given in place of those of ortflex."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from ortflex_core.kernel.component import Component
from ortflex_core.kernel.errors import ConfigError, PluginError
from ortflex_core.kernel.registry import Plugins

_LIBRARIES = frozenset(
    (
        *("torch", "torchmetrics", "lightning", "pytorch_lightning", "transformers"),
        *("keras", "tensorflow", "tf_keras", "flax", "jax", "optax"),
    )
)
_VALUES = ("dtype", "device")
"""The types of torch whose values have a name in ortflex: torch.bfloat16, torch.device("cuda")."""

_MODULES = {
    "swa_utils": "averages",
    "schedule": "schedules",
    "optim": "optimizers",
    "clip_grad": "transforms",
    "callback": "callbacks",
    "metric": "metrics",
    "loss": "losses",
    "entropy": "losses",
}
"""Words in the names of classes and modules of other libraries, with the kind of the component."""
_PLACES = {
    "averages": "averaging",
    "schedules": "schedule",
    "optimizers": "optimizer",
    "losses": "loss",
}
"""The arguments of components, where the name of the kind is another."""


def refuse_foreign(kind: str, value: Any, plugins: Plugins, where: str) -> None:
    """Refuse an object or a class of another library, or a function of torch; nothing is imported for that.

    Functions of other libraries may compute a metric from arrays.
    """
    own = value if hasattr(value, "__qualname__") else type(value)  # a class or a function
    library = str(own.__module__).partition(".")[0]
    if library not in _LIBRARIES or isinstance(value, Component):
        return
    if isinstance(value, FunctionType) and library != "torch":
        return
    name = str(own.__name__)
    if name in _VALUES:
        name = str(value).rpartition(".")[2]
    meant = next(
        (k for word, k in _MODULES.items() if word in f"{own.__module__}.{name}".lower()), kind
    )
    try:
        hint = f"its name in ortflex is {plugins[meant].entry(name).name!r}"
    except PluginError as error:
        hint = str(error).partition("; ")[2]
    if meant != kind and meant in plugins.kinds:
        place = _PLACES.get(meant, meant)
        hint = f"it belongs to {place}=; {hint}"
    raise ConfigError(
        f"{where}: expected a name, a table or an object of ortflex, got {name} of {library}; {hint}"
    )
