"""The operators in C, by the standard's own cases: ``python -m tests.plugins.test_c_operators`` runs all.

Every case is written as C; the ones of a sample are compiled, too, and their outputs compared.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Program, TensorSpec
from ortflex_plugins.c import compiler
from ortflex_plugins.c.generator import Generated, Layout, Memory, generate
from ortflex_plugins.c.products import Machine
from ortflex_plugins.operators.calls import NotTranslatable
from tests.plugins.test_xla_operators import array, check, every_case

pytestmark = pytest.mark.once
SAMPLE = int(os.environ.get("ORTFLEX_TEST_SAMPLE", "8")) * 24
NOT_IN_C = ("float16", "bfloat16", "bf16", "float8", "float4", "int4", "int2", "string", "fp16")
MACHINE = Machine(lanes=8)


def program_of(case: Any) -> tuple[Program, list[Any]]:
    """The model of a case with the sizes of its data, and its inputs."""
    proto = onnx.ModelProto()
    proto.CopyFrom(case.model)
    given = [array(v) for v in case.data_sets[0][0]]
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
        for o, a in zip(proto.graph.output, map(array, case.data_sets[0][1]), strict=False)
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
    every = [array(v) for v in case.data_sets[0][0]]
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
        for operator, case in every_case()
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
