"""Every pattern: the graph with it computes what the graph without it does, and it was at work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from operator import add, mul, sub, truediv
from typing import Any

import numpy as np
import pytest

from ortflex_core import Host, HostProgram, Ops, Port, Program, Tensor, Trace, build
from ortflex_core.compiler.programs import rebuild
from tests.gradcheck import runner

RNG = np.random.default_rng(5)
Outputs = Mapping[Any, Tensor]
Formula = Callable[..., Outputs]


def array(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


TOTAL, NEW_B = Port("loss", of="0"), Port("parameter", of="b")


def run(program: Program, arrays: Mapping[str, Any]) -> dict[str, Any]:
    numbers = HostProgram([h.expression for h in program.hosts])({"rate": 0.25, "beta": 0.9})
    feeds = {}
    for key, spec in program.takes.items():  # a parameter may have become a row
        array = arrays[key.of if isinstance(key, Port) else key]
        feeds[spec.name] = array if array.ndim == len(spec.shape or ()) else array[None]
    for host, number in zip(program.hosts, numbers, strict=True):
        feeds[host.spec.name] = np.asarray(number, host.spec.numpy)
    values = runner(program.model, False)(feeds)
    return {o.name: v for o, v in zip(program.outputs, values, strict=True)}


def both(
    formula: Formula,
    arrays: Mapping[str, Any],
    *,
    rows: tuple[str, ...] = (),
    symbolic: bool = False,
    tolerance: float = 2e-6,
) -> Counter[str]:
    """Compare; returns the operators of the graph that the passes made."""
    trace = Trace({"": 17})
    ports = {name: Port("parameter", of=name) for name in rows}
    inputs = {
        n: trace.input(
            ports.get(n, n), a.dtype, ("B", *a.shape[1:]) if symbolic and a.ndim else a.shape
        )
        for n, a in arrays.items()
    }
    outputs = formula(trace.op, **inputs)
    plain = build(trace, outputs, name="plain")
    small = build(*rebuild.optimize(trace, outputs, parameters=list(ports.values())), name="small")
    want, got = run(plain, arrays), run(small, arrays)
    for name, value in want.items():
        scale = max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(
            np.reshape(got[name], value.shape), value, rtol=tolerance, atol=tolerance * scale
        )
        assert got[name].dtype == value.dtype
    return Counter(n.op_type for n in small.proto().graph.node)


A, B, W = array(6, 4), array(6, 3), array(4, 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_step_along_a_product_is_one_gemm(dtype: Any) -> None:
    arrays = {"w": W.astype(dtype), "a": A.astype(dtype), "b": B.astype(dtype)}
    found = both(lambda op, w, a, b: {"y": w - op.Gemm(a, b, transA=1, alpha=0.5)}, arrays)
    assert found == Counter(Gemm=1)


@pytest.mark.parametrize("swap", [False, True])
def test_an_addend_of_a_product_is_its_c(swap: bool) -> None:
    def formula(op: Ops, w: Tensor, a: Tensor, b: Tensor) -> Outputs:
        old, product = 0.9 * w, op.Gemm(a, b, transA=1)
        return {"y": product + old if swap else old + product}

    assert both(formula, {"w": W, "a": A, "b": B}) == Counter(Mul=1, Gemm=1)
    bias: Formula = lambda op, a, w, b: {"y": op.MatMul(a, w) + b}  # noqa: E731
    assert both(bias, {"a": A, "w": W, "b": array(3)}) == Counter(Gemm=1)
    two: Formula = lambda op, a, w, c: {"y": op.MatMul(a, w) + op.MatMul(c, w)}  # noqa: E731
    assert both(two, {"a": A, "w": W, "c": array(6, 4)})["Add"] == 0


@pytest.mark.parametrize(
    ("case", "shapes"),
    [
        ("the product has another reader", [(6, 4), (4, 3), (6, 3)]),
        ("more axes than two", [(2, 6, 4), (4, 3), (3,)]),
        ("an addend that makes it larger", [(1, 4), (4, 3), (6, 3)]),
        ("an addend by column", [(6, 4), (4, 3), (6, 1)]),
    ],
)
def test_sums_that_are_no_gemm_stay(case: str, shapes: list[tuple[int, ...]]) -> None:
    def formula(op: Ops, a: Tensor, w: Tensor, c: Tensor) -> Outputs:
        product = op.MatMul(a, w)
        return {"y": product + c} | ({"twice": 2 * product} if "reader" in case else {})

    found = both(formula, dict(zip("awc", (array(*s) for s in shapes), strict=True)))
    assert found["Add"] == 1


def test_a_bias_minus_the_sum_of_rows_is_held_as_a_row() -> None:
    def formula(op: Ops, x: Tensor, w: Tensor, b: Tensor) -> Outputs:
        out: dict[Port, Tensor] = {}
        for k in range(2):  # a chain of two steps
            y = op.Gemm(x, w, b)
            out[Port("loss", of=str(k))] = op.ReduceSum(y * y, keepdims=0)
            b = b - op.ReduceSum(y, axes=[0], keepdims=0)
        return {**out, NEW_B: b}

    found = both(formula, {"x": A, "w": W, "b": array(3)}, rows=("b",), tolerance=1e-5)
    assert found == Counter(Gemm=4, ReduceSumSquare=2)


def test_a_bias_that_is_read_otherwise_stays_a_vector() -> None:
    def formula(op: Ops, x: Tensor, w: Tensor, b: Tensor) -> Outputs:
        new = b - op.ReduceSum(op.Gemm(x, w, b), axes=[0], keepdims=0)
        return {NEW_B: new, "penalty": op.ReduceSum(op.Abs(b), keepdims=0)}

    found = both(formula, {"x": A, "w": W, "b": array(3)}, rows=("b",))
    assert found["Sub"] == 1
    assert found["MatMul"] == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_of_rows_is_a_product_with_ones(dtype: Any) -> None:
    assert both(summed(axes=[0], keepdims=0), {"x": A.astype(dtype)}) == Counter(MatMul=1)


def summed(**settings: Any) -> Formula:
    return lambda op, x: {"y": op.ReduceSum(x, **settings)}


def test_other_sums_stay() -> None:
    for settings in ({"axes": [1], "keepdims": 0}, {"axes": [0], "keepdims": 1}, {"keepdims": 0}):
        assert both(summed(**settings), {"x": A}) == Counter(ReduceSum=1)
    whole = {"x": RNG.integers(0, 9, (3, 4))}
    assert both(summed(axes=[0], keepdims=0), whole)["MatMul"] == 0


def test_weighted_sums_are_dot_products() -> None:
    dot: Formula = lambda op, x, y: {TOTAL: op.ReduceSum(x * y, keepdims=0)}  # noqa: E731
    columns = {"x": array(7, 1), "y": array(7, 1)}
    assert both(dot, columns, rows=("x",)[:0]) == Counter(Mul=1, ReduceSum=1)
    assert both(dot, {"x": array(7), "y": array(7)}) == Counter(MatMul=1)
    assert both(dot, {"x": array(7, 2), "y": array(7, 2)}) == Counter(Mul=1, ReduceSum=1)


def test_a_total_that_only_the_host_reads_may_be_a_matrix_of_one() -> None:
    def formula(op: Ops, x: Tensor, b: Tensor) -> Outputs:
        return {TOTAL: op.ReduceSum(x * x, keepdims=0), NEW_B: 2 * b}

    arrays = {"x": array(7, 1), "b": array(3)}
    assert both(formula, arrays, rows=("b",)) == Counter(Gemm=1, Mul=1)
    assert both(formula, arrays) == Counter(ReduceSumSquare=1, Mul=1)


def test_a_sum_of_squares() -> None:
    def formula(op: Ops, x: Tensor) -> Outputs:
        return {"a": op.ReduceSum(x * x, keepdims=0), "b": op.ReduceSum(x * x, axes=[1])}

    assert both(formula, {"x": A}) == Counter(ReduceSumSquare=2)


def test_the_sign_of_a_relu() -> None:
    x = np.array([-np.inf, -3, -1e-38, -0.0, 0, 1.2e-38, 1e-20, 2, np.inf], np.float32)
    signs: Formula = lambda op, x: {"y": op.Sign(op.Relu(x)), "other": op.Sign(x)}  # noqa: E731
    assert both(signs, {"x": x}, tolerance=0) == Counter(Relu=1, HardSigmoid=1, Sign=1)
    assert both(signs, {"x": x.astype(np.float64)})["HardSigmoid"] == 0


def test_log_loss_at_any_score() -> None:
    def formula(op: Ops, x: Tensor, y: Tensor) -> Outputs:
        logarithm = op.Log(1 + op.Exp(-op.Abs(x)))
        return {"loss": op.Max(x, 0.0) - x * y + logarithm, "tiny": logarithm}

    x = np.array([-100, -88, -20, -1, -1e-6, 0, 1e-6, 1, 20, 88, 100], np.float32)
    found = both(formula, {"x": x, "y": (x > 0).astype(np.float32)})
    assert found == Counter(Relu=1, Mul=1, Sub=1, Abs=1, Neg=1, Softplus=1, Add=1)


def test_softplus_is_for_few_elements_of_float32() -> None:
    formula: Formula = lambda op, x: {"y": op.Log(1 + op.Exp(x))}  # noqa: E731
    assert both(formula, {"x": A})["Softplus"] == 1
    assert both(formula, {"x": A}, symbolic=True)["Softplus"] == 0
    assert both(formula, {"x": array(100, 50)})["Softplus"] == 0
    assert both(formula, {"x": A.astype(np.float64)})["Softplus"] == 0


def test_where_a_mask_has_zeros_already() -> None:
    def formula(op: Ops, x: Tensor) -> Outputs:
        kept = op.Greater(x, 0.0)
        scaled = op.Mul(Host.symbol("rate"), op.Cast(kept, to=1))
        return {"y": op.Where(kept, scaled, 0.0)}

    def otherwise(op: Ops, x: Tensor) -> Outputs:
        kept, other = op.Greater(x, 0.0), op.Greater(x, 0.5)
        scaled = op.Mul(2.0, op.Cast(kept, to=1))
        return {
            "another mask": op.Where(other, scaled, 0.0),
            "another value": op.Where(kept, scaled, 1.0),
            "not finite": op.Where(kept, x * op.Cast(kept, to=1), 0.0),
        }

    assert both(formula, {"x": A}) == Counter(Greater=1, Cast=1, Mul=1)
    assert both(otherwise, {"x": A})["Where"] == 3


def test_a_product_replaced_by_what_the_seeds_made() -> None:
    trace = Trace({"": 17})
    x = trace.input("x", np.float32, (2,))
    stand_in = trace.input("stand_in", np.float32, (2,))
    made, product = 0.5 * x, 3 * stand_in
    outputs = {"y": x - product}
    small = build(*rebuild.optimize(trace, outputs, {product: made}), name="small")
    assert [i.name for i in small.inputs] == ["x"]
    np.testing.assert_allclose(run(small, {"x": np.float32([2, 4])})["y"], [1, 2])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scalars_go_into_products(dtype: Any) -> None:
    def formula(op: Ops, a: Tensor, w: Tensor, c: Tensor) -> Outputs:
        scaled = 3.0 * a
        sums = op.ReduceSum(scaled, axes=[0], keepdims=0)
        return {"y": 0.5 * op.Gemm(scaled, w, c), "sums": sums}

    arrays = {"a": A.astype(dtype), "w": W.astype(dtype), "c": array(3, dtype=dtype)}
    assert both(formula, arrays) == Counter(Gemm=1, MatMul=1)

    of_sum: Formula = lambda op, a, b, w: {"y": w - op.Gemm(a, 0.5 * b, transA=1, alpha=3.0)}  # noqa: E731
    assert both(of_sum, {"a": A, "b": B, "w": W}) == Counter(Gemm=1)


def test_scalars_stay_where_the_product_has_another_reader() -> None:
    def formula(op: Ops, a: Tensor, w: Tensor) -> Outputs:
        y = op.Gemm(a, w)
        return {"y": y, "half": 0.5 * y, "host": op.Gemm(a * Host.symbol("rate"), w)}

    assert both(formula, {"a": A, "w": W}) == Counter(Gemm=2, Mul=2)


def test_a_bias_minus_scaled_rows() -> None:
    def formula(op: Ops, x: Tensor, w: Tensor, b: Tensor) -> Outputs:
        y = op.Gemm(x, w, b)
        total = op.ReduceSum(y * y, keepdims=0)
        return {TOTAL: total, NEW_B: b - op.ReduceSum(0.5 * y, axes=[0], keepdims=0)}

    found = both(formula, {"x": A, "w": W, "b": array(3)}, rows=("b",))
    assert found == Counter(Gemm=2, ReduceSumSquare=1)


def test_transpositions_meet() -> None:
    def formula(op: Ops, x: Tensor) -> Outputs:
        turned = op.Transpose(x, perm=[2, 0, 1])
        return {
            "same": op.Abs(op.Transpose(turned, perm=[1, 2, 0])),
            "one": op.Transpose(op.Transpose(turned, perm=[0, 2, 1]), perm=[1, 0, 2]),
        }

    assert both(formula, {"x": array(2, 3, 4)}) == Counter(Abs=1, Transpose=1)


def test_division_by_a_host_scalar_multiplies() -> None:
    def formula(op: Ops, x: Tensor, y: Tensor) -> Outputs:
        return {"host": x / Host.symbol("rate"), "tensor": x / y, "over": Host.symbol("rate") / x}

    assert both(formula, {"x": A, "y": array(6, 4)}) == Counter(Mul=1, Div=2)


def optimized(formula: Formula, arrays: Mapping[str, Any]) -> Any:
    trace = Trace({"": 17})
    inputs = {n: trace.input(n, a.dtype, a.shape) for n, a in arrays.items()}
    return rebuild.optimize(trace, formula(trace.op, **inputs))


@pytest.mark.parametrize("combine", [add, sub, mul, truediv])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["constant", "host", "input"])
def test_a_scalar_beside_sizes_of_1_has_as_many_axes(combine: Any, turned: bool, kind: str) -> None:
    arrays: dict[str, Any] = {"w": array(80, 60, 1, 1) + 3}
    arrays |= {"s": np.asarray(0.7, np.float32)} if kind == "input" else {}

    def formula(op: Ops, w: Tensor, s: Tensor | None = None) -> Outputs:
        other = op.constant(0.7, w.dtype) if kind == "constant" else Host.symbol("rate")
        scalar: Any = s if kind == "input" else other
        return {"y": combine(scalar, w) if turned else combine(w, scalar)}

    both(formula, arrays)
    made, _ = optimized(formula, arrays)
    shapes = [[len(i.shape or ()) for i in n.inputs if i is not None] for n in made.nodes]
    assert shapes[-1] == [4, 4]


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("read_again", [False, True])
def test_a_sum_of_negated_elements_negates_the_sum(keepdims: int, read_again: bool) -> None:
    def formula(op: Ops, x: Tensor) -> Outputs:
        negated = -x
        more = {"z": negated * 2} if read_again else {}
        return {"y": op.ReduceSum(negated, axes=[0, 2], keepdims=keepdims), **more}

    arrays = {"x": array(3, 4, 5)}
    both(formula, arrays)
    _, out = optimized(formula, arrays)
    last = out["y"].node
    assert last is not None
    assert last.op_type == ("ReduceSum" if read_again else "Neg")
