"""The caching binder: nothing is bound twice, and everything bound stays alive."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from ortflex_core import Binder, GraphError, Host, HostVector, Trace, build, get_session
from ortflex_plugins.devices import Cpu

CPU = Cpu()


@pytest.fixture
def program() -> Any:
    trace = Trace({"": 17})
    x = trace.input("x", np.float32, ("N", 2))
    return build(trace, {"y": Host.symbol("a") * (x * x) + Host.symbol("b")}, name="parabola")


def bound(program: Any, x: Any) -> tuple[Binder, HostVector, Any, Any]:
    binder = Binder(get_session(program, CPU), program.name)
    hosts = HostVector(program, CPU, {"b": 0.5})
    given, out = CPU.put(x), CPU.empty(x.shape, x.dtype)
    binder.input("x", given)
    binder.output("y", out)
    binder.hosts(hosts)
    return binder, hosts, given, out


def test_only_what_changed_is_bound_again(program: Any) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    binder, hosts, given, out = bound(program, x)
    assert (binder.made, binder.reused) == (4, 0)
    for a in (1.0, 2.0):
        hosts.update({"a": a})
        binder.input("x", given)
        binder.output("y", out)
        binder.hosts(hosts)
        binder.run()
        np.testing.assert_allclose(CPU.read(out), a * x**2 + 0.5)
    assert (binder.made, binder.reused) == (4, 4)
    # Another array in the same memory needs no binding; other memory does.
    CPU.write(given, x + 1)
    binder.run()
    np.testing.assert_allclose(CPU.read(out), 2 * (x + 1) ** 2 + 0.5)
    assert (binder.made, binder.reused) == (4, 8)
    binder.input("x", CPU.put(x))
    assert (binder.made, binder.reused) == (5, 8)
    binder.run()
    assert (binder.made, binder.reused) == (5, 11)


def test_another_shape_is_bound_again(program: Any) -> None:
    x = np.ones((3, 2), np.float32)
    binder, hosts, *_ = bound(program, x)
    hosts.update({"a": 3.0})
    small, out = CPU.put(x[:1]), CPU.empty((1, 2), np.float32)
    binder.input("x", small)
    binder.output("y", out)
    assert binder.made == 6
    binder.run()
    np.testing.assert_allclose(CPU.read(out), 3.5)


def test_what_is_bound_stays_alive(program: Any) -> None:
    x = np.ones((1000, 2), np.float32)
    binder, hosts, _, out = bound(program, x)
    hosts.update({"a": 1.0})
    for k in range(20):
        binder.input("x", CPU.put(np.full_like(x, k)))
        gc.collect(0)
        # Memory that was let go would be taken by these.
        noise = [CPU.put(np.full_like(x, -1)) for _ in range(5)]
        binder.run()
        np.testing.assert_allclose(CPU.read(out), k * k + 0.5)
        del noise


def test_host_scalars_are_computed_in_float64_and_only_if_they_changed() -> None:
    trace = Trace({"": 17})
    x = trace.input("x", np.float32, ())
    beta, step = Host.symbol("beta"), Host.symbol("step")
    program = build(trace, {"y": x * (1 - beta**step)}, name="correction")
    hosts = HostVector(program, CPU, {"beta": 0.999})
    assert hosts.varying == ("step",)
    binder = Binder(get_session(program, CPU))
    out = CPU.empty((), np.float32)
    binder.input("x", CPU.put(np.float32(1).reshape(())))
    binder.output("y", out)
    binder.hosts(hosts)
    for t in (1, 1, 2):
        hosts.update({"step": t})
        binder.run()
        assert CPU.read(out).item() == np.float32(1 - 0.999**t)


def test_the_error_of_a_failing_graph_has_no_place_in_c_code(program: Any) -> None:
    binder, hosts, *_ = bound(program, np.ones((3, 2), np.float32))
    hosts.update({"a": 1.0})
    binder.output("y", CPU.empty((5, 2), np.float32))
    with pytest.raises(GraphError, match="the parabola graph failed: ") as caught:
        binder.run()
    assert "\n" not in str(caught.value)
    assert ".cc:" not in str(caught.value).split(" ")[0]
