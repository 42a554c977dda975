"""The kit of quantizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import attrs
import numpy as np
import onnx

from ortflex_core import Array, Quantizer, Trainer
from ortflex_core.compiler.model.quantize import limits
from ortflex_core.testing import running
from ortflex_core.testing.component import ReferenceKit
from ortflex_core.testing.edit import rows_of, run
from ortflex_core.testing.running import close, require, same_bits

Reference = Callable[[Array, tuple[int, int], bool], tuple[Array, Array]]
_CODES = ((-8, 7), (0, 255), (-2, 1))


class QuantizerKit(ReferenceKit):
    """Override ``component`` and ``reference``.

    ``reference(values, codes, symmetric)`` is the lowest and the highest number that the codes cover, for
    each row of values, in numpy and float64.
    """

    kind: ClassVar[str] = "quantizers"
    has_formula: ClassVar[bool] = False

    def test_value(self, component: Quantizer, reference: Reference) -> None:
        """The ranges are those of the reference, with outliers and of one sign, too."""
        values = _values()
        for codes in _CODES:
            symmetric = codes[0] < 0
            found = limits(component, values, codes, symmetric=symmetric)
            wanted = reference(values, codes, symmetric)
            for what, ours, theirs in zip(("lowest", "highest"), found, wanted, strict=True):
                close(ours, np.asarray(theirs), 1e-9, f"the {what} numbers of {component.name}")

    def test_groups(self, component: Quantizer) -> None:
        """The range of a group depends neither on the other groups nor on the order of its values."""
        values = _values()
        together = limits(component, values, (-8, 7), symmetric=True)
        for k, row in enumerate(values):
            turned = row[::-1][None]
            alone = limits(component, turned, (-8, 7), symmetric=True)
            for ours, theirs in zip(alone, together, strict=True):
                close(ours, theirs[k : k + 1], 1e-9, f"group {k} of {component.name}, alone")

    def test_constants(self, component: Quantizer) -> None:
        """A group of one value, as of a constant activation, has a finite range and a scale > 0."""
        for value, count, symmetric in itertools.product(
            (0.0, 3.0, -1e-30, 1e30), (1, 7), (False, True)
        ):
            values = np.full((2, count), value)
            low, high = limits(component, values, (-128, 127), symmetric=symmetric)
            scale, _ = component.scale_of(low, high, (-128, 127), symmetric=symmetric)
            good = np.isfinite(scale).all() and (scale > 0).all()
            require(good, f"{component.name}: the scale of {count} times {value} is {scale}")

    def test_file(self, component: Quantizer) -> None:
        """The exported model computes what the Trainer predicts; a second one has its file."""
        model = running.network_model()
        x = rows_of(model, 40)
        made = [trainer(model, component) for _ in range(2)]
        for one in made:
            one.calibrate(x)
        files = [one.export() for one in made]
        same = files[0].graph == files[1].graph
        require(same, f"{component.name}: one calibration gives two files")
        close(run(files[0], x), made[0].predict(x), 1e-5, f"the export of {component.name}")

    def test_resume(self, component: Quantizer, tmp_path: Path) -> None:
        """A checkpoint continues bit-identically, with the ranges of the calibration."""
        model = running.network_model()
        x = rows_of(model, 40)
        y = run(model, x)
        one = trainer(model, attrs.evolve(component, train_scales=False))
        one.calibrate(x)
        one.step((x, y))
        one.save(tmp_path / "saved")
        twin = Trainer.resume(tmp_path / "saved", plugins=running.plugins(), trust_code=True)
        for each in (one, twin):
            each.step((x, y))
        same_bits(one.get_state(), twin.get_state(), f"{component.name}, continued")


def trainer(model: onnx.ModelProto, quantizer: Quantizer) -> Trainer:
    """A Trainer of the quantized model."""
    return running.trainer(model, quantize=quantizer, learning_rate=0.01)


def _values() -> Array:
    """Normal values, values of one sign with an outlier, and few different values."""
    draw = np.random.default_rng(11)
    positive = np.abs(draw.standard_normal(300))
    positive[7] = 20
    few = draw.integers(-2, 3, 300) * 0.3
    return np.stack([draw.standard_normal(300), positive, few])
