"""Files of torch's two exporters."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import onnx
import torch

AS_TRAINED = {
    "training": torch.onnx.TrainingMode.PRESERVE,
    "do_constant_folding": False,  # folded constants have no longer the parameters' names
}
"""Options of the older exporter that keep BatchNormalization, Dropout and parameters as they are."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporters announce one another, and warn of their own use of torch."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def exported(
    net: Any,
    inputs: Any,
    names: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    *,
    dynamo: bool = False,
    fixed: bool = False,
    **options: Any,
) -> onnx.ModelProto:
    """The file of a module with a free number of rows, unless it is fixed; ``inputs``: one or several."""
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    named = {"input_names": list(names), "output_names": list(outputs)}
    with _quiet():
        if dynamo:
            rows = None if fixed else tuple({0: torch.export.Dim.DYNAMIC} for _ in given)
            known = {"dynamic_shapes": rows, "verbose": False, **named}
            program = torch.onnx.export(net, given, dynamo=True, **known | options)
            assert program is not None
            return program.model_proto
        file = io.BytesIO()
        axes = None if fixed else {name: {0: "N"} for name in (*names, *outputs)}
        known = {"dynamic_axes": axes, "opset_version": 17, **named}
        torch.onnx.export(net, given, file, dynamo=False, **known | options)
    return onnx.load_model_from_string(file.getvalue())
