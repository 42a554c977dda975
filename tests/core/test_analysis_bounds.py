"""The analysis of a model never precedes its bounds: a kilobyte costs neither gigabytes nor minutes.

The class: everything that evaluates or stores something before the check of its size: shape inference
with its propagation of values, folding, functions, subgraphs, conversions of opsets. Every bomb is read at
every entrance in a process with 1.5 GB of addresses and 10 s of processor time, and ends well or
in an OrtflexError.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from ortflex_core import ModelError
from ortflex_core.compiler.graph import bounded_inference
from ortflex_core.compiler.graph.bounded_inference import infer_shapes

ADDRESSES, SECONDS = 3 * 2**29, 10
ROOT = Path(__file__).parents[2]
ENTRANCES = ("Trainer", "check_model", "gradient_model", "graph", "compare")


def parsed(body: str, opset: int = 17, tensors: str = "", functions: str = "") -> ModelProto:
    imports = ', "f": 1' if functions else ""
    made: ModelProto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": {opset}{imports}]> g (float[N, 4] x) => (float[N, 1] y) '
        f"<float[4, 1] w = {{1, 2, 3, 4}}{tensors}> {{ m = MatMul(x, w) {body} }}" + functions
    )
    return made


def vector(name: str, *values: float, kind: str = "int64") -> str:
    text = ", ".join(map(str, values))
    return f"{name} = Constant <value = {kind}[{len(values)}] {{{text}}}> () "


def number(name: str, value: float, kind: str = "int64") -> str:
    return f"{name} = Constant <value = {kind} {{{value}}}> () "


def added(name: str = "r", into: str = "y = Add(m, s)") -> str:
    """The largest value of a tensor, added to the output, so that it is computed."""
    return f"r_f = Cast <to = 1> ({name}) s = ReduceMax <keepdims = 0> (r_f) {into}"


def counting(limit: float, kind: str = "int64", step: float = 1) -> str:
    ends = (number(f"r{k}", value, kind) for k, value in enumerate((0, limit, step)))
    return "".join(ends) + "r = Range(r0, r1, r2) "


RANGE = counting(10**9)
BRANCH = "() => (float q) { q = Constant <value = float {1}> () }"


def choice(name: str, inner: str) -> str:
    return (
        f"{name}_m = ReduceMax <keepdims = 0> (m) {name}_c = Greater({name}_m, {name}_m) {name} = "
        f"If ({name}_c) <then_branch = {name}_t () => (float {name}_p) {{ {inner} }}, "
        f"else_branch = {name}_e {BRANCH.replace('q', name + '_q')}> "
    )


def nested(levels: int, inner: str) -> ModelProto:
    for k in range(levels - 1, -1, -1):
        inner = choice(f"o{k}", f"{inner} o{k}_p = Identity(o{k + 1})")
    return parsed(f"{inner} y = Add(m, o0)")


def loop(inner: str, count: int = 2) -> str:
    return (
        number("n", count) + "c = Constant <value = bool {1}> () y = Loop (n, c, m) <body = b "
        "(int64 i, bool go, float[N, 1] v) => (bool on, float[N, 1] u) { on = Identity(go) "
        f"{inner} }}>"
    )


def repeated(step: str, times: int) -> str:
    return (
        " ".join(step.replace("<a>", f"t{k}").replace("<b>", f"t{k + 1}") for k in range(times))
        + f" s = ReduceMax <keepdims = 0> (t{times}) y = Add(m, s)"
    )


def function(body: str, head: str = "big (v) => (u)", imports: str = "") -> str:
    return f'<domain: "f", opset_import: ["": 17{imports}]> {head} {{ {body} }}'


def long_shape() -> ModelProto:
    model = parsed("t0 = Reshape(m, sizes) " + repeated("<b> = Relu(<a>)", 9000))
    sizes = np.r_[np.ones(9999, np.int64), -1]
    model.graph.initializer.append(numpy_helper.from_array(sizes, "sizes"))
    return model


def claimed() -> ModelProto:
    """A vector whose length the file claims to be a symbol."""
    body = vector("a", 10**9) + "b = Mul(a, a1) r = ConstantOfShape(b) q = Add(r, r) "
    model = parsed(number("a1", 1) + body + added("q"))
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("r", 1, ["N"]))
    return model


INNER = RANGE + added(into="")
CALLED = function(RANGE + added(into="u = Add(v, s)"))
BILLION = vector("c", 10**9)
ONE = number("z", 1, "float")
HOT = number("d", 10**9) + vector("v", 0, 1, kind="float") + vector("i", 1, 2)
RESULTS = {
    "Range of 10^7": counting(10**7),
    "Range of 10^8": counting(10**8),
    "Range of 10^10": counting(10**10),
    "Range of 2^62": counting(2**62),
    "Range of floats": counting(1, "float", 1e-9),
    "Range backwards": counting(-(10**9), step=-1),
    "ConstantOfShape": vector("c", 10**10) + "r = ConstantOfShape(c) ",
    "ConstantOfShape of a product": vector("c", 10**5)
    + "d = Mul(c, c) q = ConstantOfShape(d) r = Add(q, q) ",
    "Expand": BILLION + ONE + "q = Expand(z, c) r = Mul(q, q) ",
    "Tile": vector("c", 10**5, 10**5) + "r = Tile(w, c) ",
    "Pad": vector("c", 10**9, 0, 10**9, 0) + "r = Pad(w, c) ",
    "Resize": vector("c", 1e5, 1e5, kind="float") + "r = Resize(w, , c) ",
    "OneHot": HOT + "r = OneHot(i, d, v) ",
    "EyeLike": vector("c", 30000, 30000) + "q = ConstantOfShape(c) r = EyeLike(q) ",
    "HannWindow": number("k", 10**9) + "r = HannWindow(k) ",
    "Gather": BILLION + "q = ConstantOfShape <value = int64[1] {0}> (c) r = Gather(w, q) ",
    "Where": BILLION + ONE + "q = ConstantOfShape <value = bool[1] {1}> (c) r = Where(q, z, z) ",
}
"""The steps to a tensor ``r``, of which the largest value is added to the output."""
BODIES = {
    **{name: steps + added() for name, steps in RESULTS.items()},
    "Range in a loop": loop(INNER + "u = Add(v, s)"),
    "Concat of values": "t0 = Shape(w) "
    + repeated("<b> = Concat <axis = 0> (<a>, <a>)", 25).partition("s = ReduceMax")[0]
    + added("t25"),
    "a Loop without an end": loop("u = Add(v, v)", 10**12),
    "Scan": vector("c", 10**9, 1) + ONE + "e = Expand(z, c) y, k = Scan (m, e) "
    "<num_scan_inputs = 1, body = b (float[N, 1] v, float[1] a) => (float[N, 1] u, float[1] d) "
    "{ u = Add(v, a) d = Identity(a) }>",
    "ranks by Unsqueeze": vector("a", 0)
    + f"t0 = Identity(m) {repeated('<b> = Unsqueeze(<a>, a)', 9000)}",
    "ranks by Gather": "a = Constant <value = int64[1, 1] {0}> () t0 = Identity(m) "
    + repeated("<b> = Gather(<a>, a)", 9000),
}
BOMBS: dict[str, Callable[[], ModelProto]] = {
    **{name: partial(parsed, body) for name, body in BODIES.items()},
    "Range of an old opset": lambda: parsed(RANGE + added(), opset=11),
    "Range of initializers": lambda: parsed(
        "r = Range(i0, i1, i2) " + added(),
        tensors=", int64 i0 = {0}, int64 i1 = {1000000000}, int64 i2 = {1}",
    ),
    "Range in a branch": lambda: nested(1, INNER.replace("s =", "o1 =")),
    "Range in deep subgraphs": lambda: nested(6, INNER.replace("s =", "o6 =")),
    "Range in a function": lambda: parsed("y = f.big(m)", functions=CALLED),
    "Range in nested functions": lambda: parsed(
        "y = f.outer(m)",
        functions=CALLED + function("u = f.big(v)", "outer (v) => (u)", ', "f": 1'),
    ),
    "Range of an attribute": lambda: parsed(
        "y = f.big <k = 1000000000> (m)",
        functions=function(
            RANGE.replace(number("r1", 10**9), "r1 = Constant <value_int: int = @k> () ")
            + added(into="u = Add(v, s)"),
            "big <k> (v) => (u)",
        ),
    ),
    "a length that is claimed to be unknown": claimed,
    "30 levels of subgraphs": lambda: nested(30, "o30 = Constant <value = float {1}> () "),
    "ranks by Reshape": long_shape,
}


def enter(entrance: str, path: Path) -> None:
    import ortflex

    options: dict[str, Any] = {"loss": "squared_error", "backend": "fused", "epochs": 1}
    rows = np.ones((4, 4), np.float32), np.ones((4, 1), np.float32)
    if entrance == "Trainer":
        ortflex.Trainer(path, **options).describe()
    elif entrance == "check_model":
        ortflex.check_model(path)
    elif entrance == "gradient_model":
        ortflex.gradient_model(path, wrt=["w"])
    elif entrance == "compare":
        ortflex.compare(ortflex.Trainer(path, **options), *rows)
    else:
        from ortflex_plugins.cli.main import main

        main.main(["graph", str(path), "-o", str(path.with_suffix(".html"))], standalone_mode=False)


def outcome(entrance: str, path: Path) -> str:
    """How the entrance ends in a process of its own, within the limits."""
    import click

    from ortflex_core import OrtflexError

    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        status = os.waitpid(child, 0)[1]
        return said or f"killed by signal {os.WTERMSIG(status)}"
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (end, end))
    try:
        enter(entrance, path)
        said = "fine"
    except (OrtflexError, click.ClickException) as error:
        said = f"refused: {error}"
    except SystemExit as error:
        said = "refused by the command" if error.code == 1 else f"WRONG {error.code}"
    except BaseException as error:
        said = f"WRONG {type(error).__name__}: {error}"
    os.write(writing, said[:300].encode())
    os._exit(0)


def main() -> None:
    """Print how each bomb in a folder ends at an entrance; what they import is imported once."""
    entrance, folder = sys.argv[1], Path(sys.argv[2])
    import onnxruntime  # noqa: F401

    import ortflex_core.training.trainer  # noqa: F401

    # The first call imports the rest.
    small = parsed("y = Identity(m)")
    (folder / "small.onnx").write_bytes(small.SerializeToString())
    enter(entrance, folder / "small.onnx")
    (folder / "small.onnx").unlink()
    print("\n" + json.dumps({p.stem: outcome(entrance, p) for p in sorted(folder.glob("*.onnx"))}))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of addresses are of Linux")
@pytest.mark.parametrize(
    "entrance", [ENTRANCES[0], *(pytest.param(e, marks=pytest.mark.slow) for e in ENTRANCES[1:])]
)
def test_bombs_are_refused_before_they_are_analyzed(entrance: str, tmp_path: Path) -> None:
    chosen = list(BOMBS.items())[:: 1 if entrance == "Trainer" else 5]
    for name, bomb in chosen:
        raw = bomb().SerializeToString()
        assert len(raw) < 500_000
        (tmp_path / f"{name}.onnx").write_bytes(raw)
    run = subprocess.run(
        [sys.executable, "-m", "tests.core.test_analysis_bounds", entrance, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    ends = json.loads(run.stdout.splitlines()[-1])
    assert len(ends) == len(chosen)
    wrong = {n: e for n, e in ends.items() if not e.startswith(("fine", "refused"))}
    assert not wrong
    if entrance == "Trainer":  # a drawing of a graph, for example, does not compute it
        accepted = {n for n, e in ends.items() if e == "fine"}
        assert "Range of 10^8" not in accepted
        assert len(accepted) < len(chosen) / 2


def test_the_core_infers_shapes_in_one_place() -> None:
    """A second call of onnx's inference would be one without bounds."""
    core = ROOT / "ortflex_core"
    callers = [p.name for p in core.rglob("*.py") if ".infer_shapes(" in p.read_text()]
    assert callers == ["bounded_inference.py"]


def test_long_vectors_are_hidden_and_the_others_are_not() -> None:
    """What inference found before it still finds, in graphs with long vectors, too."""
    text = (
        "sizes = Shape(x) first = Gather(sizes, zero) more = Concat <axis = 0> (first, four) "
        "y = Reshape(x, more) long = Expand(one, by) z = Add(long, long) u = Cast <to = 7> (z)"
    )
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2, 2] x) => (y, u) <int64[1] zero = {0}, '
        f"int64[1] four = {{4}}, float one = {{1}}, int64[1] by = {{{2**40}}}> {{ {text} }}"
    )
    typed = infer_shapes(model)
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*typed.graph.value_info, *typed.graph.output)
    }
    assert shapes["y"] == ["N", 4]
    assert shapes["long"] == [2**40]
    assert [n.op_type for n in typed.graph.node] == [n.op_type for n in model.graph.node]
    assert len(typed.graph.initializer) == 4


def _chain(nested: bool) -> onnx.GraphProto:
    """Tensors of 22 dimensions together, or 28 if a node has branches, which are counted, too."""
    if not nested:  # 2 of x, 2 of a, 10 of the parts, and 8 as four of them are outputs
        ends = ", ".join(f"float[1, 2] y{k}" for k in range(4))
        text = "a = Relu(x)  y0, y1, y2, y3, y4 = Split <axis = 0, num_outputs = 5> (a)"
        return onnx.parser.parse_graph(f"g (float[5, 2] x) => ({ends}) {{ {text} }}")
    # 4 in each branch, up to 3 of a, and 3 of each of the others
    branch = "{0}_branch = {0} () => (float[5, 2] {0}) {{ {0} = Relu(x) }}"
    branches = ", ".join(map(branch.format, ("then", "else")))
    after = " ".join(f"n{k} = Neg(a)" for k in range(5))
    text = f"a = If (c) <{branches}> {after}"
    return onnx.parser.parse_graph(f"g (bool c, float[5, 2] x) => () {{ {text} }}")


@pytest.mark.parametrize(("nested", "total"), [(False, 22), (True, 28)])
def test_the_dimensions_of_all_tensors_are_counted(
    nested: bool, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_inference, "MOST_SIZES", total)
    bounded_inference._check_ranks(_chain(nested), "this model")
    monkeypatch.setattr(bounded_inference, "MOST_SIZES", total - 1)
    with pytest.raises(ModelError, match=f"this model: .* more than {total - 1} dimensions"):
        bounded_inference._check_ranks(_chain(nested), "this model")


if __name__ == "__main__":
    main()
