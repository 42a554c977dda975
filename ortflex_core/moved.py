"""Deprecated import paths of ortflex 0.1: each works in 0.2, with a warning that names the new path."""

from __future__ import annotations

import importlib
import importlib.machinery
import warnings
from types import ModuleType
from typing import Any, cast

_CORE = "ortflex_core."

# Package: the modules that are in it now, as ``old=new`` where the name changed, too.
_PLACES = {
    "": "structure=construct hookspecs=hooks",
    "graph": (
        "ops shortcuts schemas simplify host=host_scalars "
        "folding=constant_folding sequences subgraphs=control_flow program "
        "dropout=counter_rng"
    ),
    "protocols": "formulas=calls",
    "process_groups": "interrupts",
    "runtime": "session binder",
    "opsets": (
        "bodies=function_bodies kernels lowering=downgrade raising=upgrade "
        "shapes=shape_inference equality=equivalence"
    ),
    "autodiff": "rules cotangents families",
    "onnx_files": (
        "modelfile=model_file vetting external=external_data attributes functions exporting=export "
        "loops=loop_bounds"
    ),
    "model": (
        "probe=shape_probe freeing=free_batch inference=inference_mode modes=training_mode targets"
    ),
    "parameters": "uses evidence classical=classical_nodes initialize",
    "data": (
        "batches labels pieces prefetch iterables items=iterable_position windows=shuffle_buffer digests"
    ),
    "problem": "terms=losses updating grouping=groups hyperparameters",
    "programs": (
        "passes=rebuild patterns compose=stages step updates together=flat_parameters rewrites work=cost "
        "identity=cache_key vjp=gradient_model"
    ),
    "engines": (
        "evaluate=evaluator hostengine=array_engine keeping=last_good choosing=backend_choice "
        "scoring=scores diagnosis=failures"
    ),
    "reference": "double=double_precision parting=divergence inference_check=export_check",
    "config": "recipe_parts=components toml arguments",
    "checkpoints": "checkpoint record saved=callback_values folders",
    "feed": "preparation feeding=feed",
    "views": "display=progress",
    "training": (
        "trainer setup live=state judging=state fitting=fit loop checkpointing pickling differences "
        "fingerprint"
    ),
    "comparison": "compare=comparison",
}

MODULES = {
    old: f"{package}.{new or old}".lstrip(".")
    for package, modules in _PLACES.items()
    for old, _, new in (entry.partition("=") for entry in modules.split())
}
"""The new place of every module of 0.1 that has moved, without ``ortflex_core.``."""


class _Loader:
    """Loads a module of 0.1 by its old name; its attributes are those of the new module."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Let Python make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Hand on the attributes of the new module.

        Warns:
            DeprecationWarning: the old and the new name.
        """
        name = _CORE + MODULES[module.__name__.removeprefix(_CORE)]
        warnings.warn(
            f"{module.__name__} is now {name}; the old name goes away in 0.3. The public names are those "
            f"that {name.rpartition('.')[0]} itself has",
            DeprecationWarning,
            stacklevel=2,
        )
        new = importlib.import_module(name)

        def attribute(attribute: str) -> Any:
            return getattr(new, attribute)

        module.__getattr__ = attribute  # type: ignore[method-assign]
        module.__doc__ = new.__doc__


def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return a spec for an old name, None for any other."""
    if name.removeprefix(_CORE) not in MODULES:
        return None
    loader = cast("importlib.machinery.SourceFileLoader", _Loader())  # it has the same two methods
    return importlib.machinery.ModuleSpec(name, loader)
