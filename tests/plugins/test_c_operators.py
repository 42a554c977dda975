"""The operators in C, by the standard's own cases: ``python -m tests.plugins.test_c_operators`` runs all.

Every case is written as C; the ones of a sample are compiled, too, and their outputs compared.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from ortflex_core import Program, TensorSpec
from ortflex_plugins.c import compiler
from ortflex_plugins.c.arrays import Tracing
from ortflex_plugins.c.generator import Generated, Layout, Memory, generate
from ortflex_plugins.c.products import Machine
from ortflex_plugins.operators.calls import NotTranslatable
from tests import models
from tests.plugins.test_operators import as_array, check, standard_cases

pytestmark = pytest.mark.once
SAMPLE = int(os.environ.get("ORTFLEX_TEST_SAMPLE", "8")) * 24
NOT_IN_C = ("float16", "bfloat16", "bf16", "float8", "float4", "int4", "int2", "string", "fp16")
MACHINE = Machine(lanes=8)


def program_of(case: Any) -> tuple[Program, list[Any]]:
    """The model of a case with the sizes of its data, and its inputs."""
    proto = onnx.ModelProto()
    proto.CopyFrom(case.model)
    given = [as_array(v) for v in case.data_sets[0][0]]
    for value, own in list(zip(proto.graph.input, given, strict=True))[1:]:
        # Sizes and axes are known in a training step.
        if own.dtype == np.int64 and own.ndim <= 1:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(own, value.name))
    known = {t.name for t in proto.graph.initializer}
    whole = list(zip(proto.graph.input, given, strict=True))
    names = [i.name for i, _ in whole if i.name not in known]
    arrays = [a for i, a in whole if i.name not in known]
    specs = [
        TensorSpec(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, arrays, strict=True)
    ]
    outputs = [
        TensorSpec(o.name, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for o, a in zip(proto.graph.output, map(as_array, case.data_sets[0][1]), strict=False)
    ]
    made = Program(
        name="case",
        model=proto.SerializeToString(),
        inputs=tuple(specs),
        hosts=(),
        outputs=tuple(outputs),
        nodes=len(proto.graph.node),
        input_keys=tuple(names),
        output_keys=tuple(o.name for o in outputs),
    )
    return made, arrays


def written(case: Any, machine: Machine = MACHINE) -> tuple[Generated, Layout, list[Any]]:
    """A case as C; its outputs are the state."""
    program, arrays = program_of(case)
    layout = Layout.of([Memory(o.name, tuple(o.shape or ()), o.numpy) for o in program.outputs])
    generated = generate(program, layout, (), (), machine)
    return generated, layout, arrays


def computed(case: Any, machine: Machine = MACHINE) -> list[Any]:
    """The outputs of a case in C."""
    generated, layout, _ = written(case, machine)
    library = compiler.load_library(generated.source, ("-O1",))
    state = np.zeros(layout.size + 64, np.uint8)
    memory = np.zeros(generated.arena + 64, np.uint8)
    every = [as_array(v) for v in case.data_sets[0][0]]
    by_name = dict(zip([i.name for i in case.model.graph.input], every, strict=True))
    data = [np.ascontiguousarray(by_name[str(k)]) for k in generated.frozen]
    pointers = (ctypes.c_void_p * (len(data) + 1))(*(a.ctypes.data for a in data))
    nothing = ctypes.c_void_p()
    wrong = library.ortflex_step(
        *(ctypes.c_void_p(-(-a.ctypes.data // 64) * 64) for a in (state, memory)),
        pointers,
        nothing,
        ctypes.c_int64(1),
        nothing,
        nothing,
    )
    assert not wrong, case.name
    start = -state.ctypes.data % 64
    out = []
    for own, place in zip(layout.memory, layout.places, strict=True):
        size = int(np.prod(own.shape, dtype=np.int64)) * own.dtype.itemsize
        raw = state[start + place.start : start + place.start + size]
        out.append(raw.view(own.dtype).reshape(own.shape))
    return out


def plain_cases() -> list[tuple[str, Any]]:
    """The cases of types that C has."""
    return [
        (operator, case)
        for operator, case in standard_cases()
        if not any(word in case.name.lower() for word in NOT_IN_C)
    ]


@pytest.mark.slow
def test_operators_are_written_as_c_or_refused_by_name() -> None:
    counts: dict[str, int] = defaultdict(int)
    for operator, case in plain_cases():
        try:
            written(case)
        except NotTranslatable:
            continue
        counts[operator] += 1
    assert len(counts) >= 140


@pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle()))
def test_operators_in_c_give_the_outputs_of_the_standard() -> None:
    seen = 0
    for _, case in plain_cases()[::SAMPLE]:
        try:
            found = computed(case)
        except NotTranslatable:
            continue
        check(case, found)
        seen += 1
    assert seen >= 5


INDICES = (
    *(0, 2, -1, slice(None), slice(1, None), slice(None, None, -1), slice(-1, 0, -2)),
    *(None, ..., np.array([1]), np.array([2, 1, 0])),
)


def test_views_have_the_elements_that_numpy_would_show() -> None:
    """A single element too, of which numpy gives the value."""
    seen = 0
    for shape in [(4,), (3, 4), (3, 4, 5)]:
        whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for index in itertools.product(INDICES, repeat=len(shape)):
            try:
                wanted = whole[index]
                x = Tracing().input("data", 0, shape, np.float32)[index]
                base, offset, strides = x.strided()
            except (IndexError, NotTranslatable):
                continue
            if base.op == "input":
                steps = [4 * n for n in strides]
                found = np.lib.stride_tricks.as_strided(whole.ravel()[offset:], x.shape, steps)
                np.testing.assert_array_equal(found, wanted, strict=True)
                seen += 1
    assert seen > 300


SCALARS = """
    k = Constant <value = int64 {2}> ()
    a = Gather(x, k) b = Relu(a) c = Neg(a)
    p = Unsqueeze(b, z) q = Unsqueeze(c, z) y = Concat <axis = 0> (p, q, p)
"""


@pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle()))
def test_single_elements_are_read_and_put_together() -> None:
    x = np.arange(5, dtype=np.float32)
    model = models.parsed(SCALARS, {"z": np.array([0])}, "float[5] x", "float[3] y")
    lists = [[onnx.numpy_helper.from_array(a)] for a in (x, np.zeros(3, np.float32))]
    case = SimpleNamespace(model=model, data_sets=[lists], name="scalars")
    np.testing.assert_array_equal(computed(case)[0], [2, -2, 2])


# Matrix products: every number of columns, in registers of every width.

COLUMNS = [*range(1, 36), *range(47, 53), *range(63, 69), 79, 81, 97, 130]
"""Whole vectors, narrow last ones, those that overlap, and last ones that are alone in their tile."""


def products(rows: int, kind: type, numbers: list[int]) -> tuple[Any, list[Any]]:
    """A product for each number of columns, alone and with an epilogue; its results are exact."""
    rng = np.random.default_rng(rows)
    inputs: dict[str, Any] = {"x": rng.integers(-3, 4, (rows, 7)).astype(kind)}
    nodes, results = [], {}
    for n in numbers:
        w, v, b = f"w{n}", f"v{n}", f"b{n}"
        inputs |= {
            w: rng.integers(-3, 4, (7, n)).astype(kind),
            v: rng.integers(-3, 4, (7, n)).astype(kind),
            b: rng.integers(-9, 9, n).astype(kind),
        }
        nodes += [
            helper.make_node("MatMul", ["x", w], [f"y{n}"]),
            helper.make_node("MatMul", ["x", v], [f"p{n}"]),
            helper.make_node("Add", [f"p{n}", b], [f"s{n}"]),
            helper.make_node("Relu", [f"s{n}"], [f"z{n}"]),
        ]
        with_epilogue = np.maximum(inputs["x"] @ inputs[v] + inputs[b], 0)
        results |= {f"y{n}": inputs["x"] @ inputs[w], f"z{n}": with_epilogue}
    infos = [
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for k, a in arrays.items()
        ]
        for arrays in (inputs, results)
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "products", *infos), opset_imports=[helper.make_opsetid("", 17)]
    )
    lists = [
        [onnx.numpy_helper.from_array(a) for a in group.values()] for group in (inputs, results)
    ]
    made = SimpleNamespace(model=model, data_sets=[lists], name="products")
    return made, list(results.items())


@pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle()))
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_every_number_of_columns(lanes: int, rows: int, kind: type) -> None:
    machine = Machine(lanes=lanes, registers=32 if lanes == 16 else 16)
    wrong = []
    numbers = COLUMNS if lanes >= 8 else COLUMNS[:35]
    for k in range(0, len(numbers), 7):  # the text of a file is limited
        made, results = products(rows, kind, numbers[k : k + 7])
        for (name, wanted), got in zip(results, computed(made, machine), strict=True):
            wrong += [] if np.array_equal(got, wanted) else [name]
    assert wrong == []


def main() -> None:
    """All cases (or every so many, as the argument says), with what is wrong and refused."""
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    right: dict[str, int] = defaultdict(int)
    refused: dict[str, str] = {}
    wrong = 0
    for operator, case in plain_cases()[::every]:
        try:
            check(case, computed(case))
            right[operator] += 1
        except NotTranslatable as refusal:
            refused[operator] = str(refusal)
        except Exception as error:  # a case that is wrong
            wrong += 1
            print("WRONG", case.name, type(error).__name__, str(error)[:300], flush=True)
    for operator, why in refused.items():
        if operator not in right:
            print("refused", operator, why[:100])
    print(f"{sum(right.values())} cases of {len(right)} operators right, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
