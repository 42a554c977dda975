"""The kit of families of decompositions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex_core import (
    Array,
    Decompositions,
    Entry,
    Model,
    TensorSpec,
    gradient_model,
    onnx_dtype,
    session_options,
)
from ortflex_core.compiler.operators import decompositions
from ortflex_core.compiler.operators.decomposition_table import MICROSOFT
from ortflex_core.compiler.runtime.session import cpu_session
from ortflex_core.testing import running
from ortflex_core.testing.component import FamilyKit
from ortflex_core.testing.running import close, require

_STEP = 3e-3
_DIRECTIONS = 3


@attrs.frozen(kw_only=True)
class DecompositionCase:
    """One call to an operator.

    The oracle is ``reference``, which takes the inputs and returns an array, or a tuple of arrays for
    several outputs; without a reference, it is the kernel of the installed onnxruntime. If the operator
    is smooth at the inputs, the gradient is by its inputs of float32.
    """

    op_type: str
    inputs: Sequence[Array | None]
    attributes: Mapping[str, Any] = attrs.field(factory=dict)
    domain: str = MICROSOFT
    outputs: Sequence[bool] = (True,)
    """Which of its outputs the node has."""
    constants: Sequence[int] = ()
    """The inputs that are initializers of the file."""
    reference: Callable[..., Any] | None = None
    smooth: bool = True
    """Whether the first output has a gradient by every input of float32 that is not a constant."""
    opset: int = running.OPSET
    """The opset of the standard's operators in the file."""
    tolerance: float = 1e-5

    def __str__(self) -> str:
        """The operator, its attributes and the shapes of its inputs."""
        shapes = [None if a is None else a.shape for a in self.inputs]
        return f"{self.op_type} {dict(self.attributes)} of {shapes}"


class DecompositionKit(FamilyKit):
    """Override ``component``, the ``Decompositions``, and ``cases``: a call or more of every operator."""

    kind: ClassVar[str] = "decompositions"
    attribute: ClassVar[str] = "DECOMPOSITIONS"

    def check_unique(self, component: Decompositions) -> None:
        """Fail if another family decomposes the same operators."""
        found = decompositions.load(running.plugins())
        twice = [key for key in component.table if len(found[key]) > 1]
        require(not twice, f"another installed family decomposes {twice}")

    def test_every_operator_has_a_case(
        self, component: Decompositions, cases: Sequence[DecompositionCase]
    ) -> None:
        """Every operator of the family has at least one case."""
        tried = {(c.domain, c.op_type) for c in cases}
        missing = sorted(op for _, op in set(component.table) - tried)
        require(not missing, f"no case calls {', '.join(missing)}")

    def test_values(self, component: Decompositions, cases: Sequence[DecompositionCase]) -> None:
        """The standard operators compute the outputs of the kernel or the reference."""
        for case in cases:
            wanted = _wanted(case)
            for symbolic in (False, True):
                got = _run(_decomposed(component, case, wanted, symbolic), case)
                for k, (one, other) in enumerate(zip(got, wanted, strict=True)):
                    what = f"output {k} of {case}" + (", sizes unknown" if symbolic else "")
                    require(one.dtype == other.dtype, f"{what} is {one.dtype}, not {other.dtype}")
                    require(one.shape == other.shape, f"{what} is {one.shape}, not {other.shape}")
                    close(one, other, case.tolerance, what)

    def test_gradient(self, component: Decompositions, cases: Sequence[DecompositionCase]) -> None:
        """The gradient of the first output is the slope of the kernel or the reference."""
        for case in cases:
            if case.smooth:
                _check_gradient(component, case)

    def test_an_unknown_attribute_is_refused(
        self, component: Decompositions, cases: Sequence[DecompositionCase]
    ) -> None:
        """A node with an attribute that the formula does not read is not decomposed."""
        for case in cases:
            odd = attrs.evolve(case, attributes={**case.attributes, "no_such_attribute": 1.5})
            model = _model(odd, [np.zeros((1,), np.float32)] * sum(case.outputs), False)
            _, done = _decompose(component, model)
            require(
                any("'no_such_attribute'" in text for text in done.refused.values()),
                f"the decomposition of {case.op_type} ignores an attribute that it does not know",
            )


def _floats(case: DecompositionCase) -> list[int]:
    return [
        k
        for k, a in enumerate(case.inputs)
        if a is not None and a.dtype == np.float32 and k not in case.constants
    ]


def _model(case: DecompositionCase, outputs: Sequence[Array], symbolic: bool) -> ModelProto:
    """A file of one node; if ``symbolic``, the first two sizes of inputs are names, but not the last."""
    names = ["" if a is None else f"i{k}" for k, a in enumerate(case.inputs)]
    results = [f"o{k}" if wanted else "" for k, wanted in enumerate(case.outputs)]
    node = helper.make_node(
        case.op_type, names, results, name="node", domain=case.domain, **case.attributes
    )

    def value(name: str, array: Array, free: int) -> onnx.ValueInfoProto:
        """``array`` as an input or output whose first ``free`` sizes are names."""
        sizes = [f"{name}_{j}" if j < free else d for j, d in enumerate(array.shape)]
        return TensorSpec(name, onnx_dtype(array.dtype), tuple(sizes)).to_proto()

    given = {f"i{k}": a for k, a in enumerate(case.inputs) if a is not None}
    fixed = {f"i{k}" for k in case.constants}
    graph = helper.make_graph(
        [node],
        "case",
        [
            value(n, a, min(2, a.ndim - 1) if symbolic else 0)
            for n, a in given.items()
            if n not in fixed
        ],
        [value(n, a, a.ndim) for n, a in zip(filter(None, results), outputs, strict=True)],
        [onnx.numpy_helper.from_array(given[n], n) for n in sorted(fixed & set(given))],
    )
    imports = {"": case.opset, case.domain: case.opset if not case.domain else 1}
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid(d, v) for d, v in imports.items()], ir_version=8
    )


def _run(model: ModelProto, case: DecompositionCase) -> list[Array]:
    """The outputs, by the installed onnxruntime without optimizations."""
    import onnxruntime

    options = session_options(1)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return [np.asarray(y) for y in cpu_session(model, options).run(None, _feeds(case))]


def _feeds(case: DecompositionCase) -> dict[str, Array]:
    return {
        f"i{k}": a for k, a in enumerate(case.inputs) if a is not None and k not in case.constants
    }


def _wanted(case: DecompositionCase) -> list[Array]:
    """The outputs by the reference or the kernel; the test is skipped if there is neither."""
    if case.reference is not None:
        made = case.reference(*case.inputs)
        return [np.asarray(y) for y in (made if isinstance(made, tuple) else (made,))]
    blank = _model(case, [np.zeros((1,), np.float32)] * sum(case.outputs), False)
    for output in blank.graph.output:
        output.ClearField("type")
    try:
        return _run(blank, case)
    except Exception as error:  # onnxruntime has its own exception classes, made in C++
        pytest.skip(f"the installed onnxruntime has no kernel for {case}: {str(error)[:200]}")


def _decompose(
    component: Decompositions, model: ModelProto
) -> tuple[ModelProto, decompositions.Decomposed]:
    point = importlib.metadata.EntryPoint("under test", "under:test", "ortflex.decompositions")
    entry = Entry("decompositions", "under test", "under:test", "under-test", "0", point)
    table = {key: [(entry, formula)] for key, formula in component.table.items()}
    marked = decompositions.mark(model, table)
    return decompositions.decompose(marked, running.plugins(), lambda *_: False, table)


def _decomposed(
    component: Decompositions, case: DecompositionCase, wanted: Sequence[Array], symbolic: bool
) -> ModelProto:
    model, done = _decompose(component, _model(case, wanted, symbolic))
    refused = "; ".join(done.refused.values())
    require(done.reasons, f"{case} is not decomposed: {refused or 'nothing was done'}")
    return model


def _check_gradient(component: Decompositions, case: DecompositionCase) -> None:
    wanted = _wanted(case)
    model = _decomposed(component, case, wanted, False)
    names = [f"i{k}" for k in _floats(case)]
    made = gradient_model(Model(model), wrt=names, outputs=["o0"])
    rng = np.random.default_rng(11)
    seed = running.signed(rng, wanted[0].shape).astype(np.float32)
    feeds = {**_feeds(case), "cotangent/o0": seed}
    session = cpu_session(made)
    asked = [i.name for i in session.get_inputs()]
    slopes = session.run(
        [f"gradient/{n}" for n in names], {n: feeds[n] for n in asked if n in feeds}
    )
    for k, slope in zip(_floats(case), slopes, strict=True):
        x = case.inputs[k]
        assert x is not None
        for _ in range(_DIRECTIONS):
            direction = running.signed(rng, x.shape).astype(np.float32)
            ends = []
            for step in (_STEP, -_STEP):
                moved = [
                    x + np.float32(step) * direction if j == k else a
                    for j, a in enumerate(case.inputs)
                ]
                y = _wanted(attrs.evolve(case, inputs=moved))[0]
                ends.append((seed.astype(np.float64) * y).sum())
            difference = (ends[0] - ends[1]) / (2 * _STEP)
            close(
                (slope.astype(np.float64) * direction).sum(),
                difference,
                2e-2,
                f"the slope of {case} along input {k}",
            )
