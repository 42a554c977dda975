"""ortflex: train ONNX models with onnxruntime. This module has the public names for users.

>>> from ortflex import Trainer

Each name is imported when it is first used, so ``import ortflex`` needs neither numpy nor onnx, and
the estimators and layers need scikit-learn and torch only if you use them. Authors of plugins import
from the packages of ``ortflex_core``. ``python -m ortflex`` is the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ortflex_core import __version__

if TYPE_CHECKING:
    from ortflex_core import (
        Batches,
        CheckpointError,
        Comparison,
        ConfigError,
        DataError,
        History,
        ModelError,
        OrtflexError,
        Pieces,
        PluginError,
        Plugins,
        Progress,
        RateSweep,
        Recipe,
        RuntimeUnavailable,
        Shrunk,
        Summary,
        Trainer,
        TrainingDiverged,
        Unsupported,
        Verdict,
        check_model,
        compare,
        gradient_model,
        hook,
        shrink,
        verify,
    )
    from ortflex_plugins.c.export import export_c
    from ortflex_plugins.estimators import OrtClassifier, OrtRegressor, pipeline_to_onnx
    from ortflex_plugins.layers import OnnxFunction, OrtLayer
    from ortflex_plugins.losses.detection import pad_boxes
    from ortflex_plugins.pictures import Measures, draw, draw_step, report

__all__ = [
    "Batches",
    "CheckpointError",
    "Comparison",
    "ConfigError",
    "DataError",
    "History",
    "Measures",
    "ModelError",
    "OnnxFunction",
    "OrtClassifier",
    "OrtLayer",
    "OrtRegressor",
    "OrtflexError",
    "Pieces",
    "PluginError",
    "Plugins",
    "Progress",
    "RateSweep",
    "Recipe",
    "RuntimeUnavailable",
    "Shrunk",
    "Summary",
    "Trainer",
    "TrainingDiverged",
    "Unsupported",
    "Verdict",
    "__version__",
    "check_model",
    "compare",
    "draw",
    "draw_step",
    "export_c",
    "gradient_model",
    "hook",
    "pad_boxes",
    "pipeline_to_onnx",
    "report",
    "shrink",
    "verify",
]

_MODULES = {
    "ortflex_core": (
        "Batches CheckpointError Comparison ConfigError DataError History ModelError "
        "OrtflexError Pieces PluginError Plugins Progress RateSweep Recipe "
        "RuntimeUnavailable Shrunk Summary Trainer TrainingDiverged Unsupported Verdict check_model "
        "compare gradient_model hook shrink verify"
    ),
    "ortflex_plugins.c.export": "export_c",
    "ortflex_plugins.estimators": "OrtClassifier OrtRegressor pipeline_to_onnx",
    "ortflex_plugins.layers": "OnnxFunction OrtLayer",
    "ortflex_plugins.losses.detection": "pad_boxes",
    "ortflex_plugins.pictures": "Measures draw draw_step report",
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}
_EXTRAS = {"skl2onnx": "sklearn", "sklearn": "sklearn", "torch": "torch"}


if not TYPE_CHECKING:  # with it, every name would exist for type checkers

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used.

        Raises:
            AttributeError: there is no such name.
            ImportError: the name needs a package that is not installed; the message has the extra.
        """
        if name not in _PLACES:
            raise AttributeError(f"module 'ortflex' has no attribute {name!r}")
        try:
            value = globals()[name] = getattr(importlib.import_module(_PLACES[name]), name)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _EXTRAS:
                raise
            from ortflex_core import install_command

            raise ImportError(
                f"ortflex.{name} needs {package}, which is not installed: "
                f"{install_command(_EXTRAS[package])}"
            ) from error
        return value


def __dir__() -> list[str]:
    return __all__


if __name__ == "__main__":
    from ortflex_plugins.cli.main import main

    main(prog_name="python -m ortflex")
