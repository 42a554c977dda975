"""The workloads in JAX: a jitted step, and an epoch as one lax.scan."""

from __future__ import annotations

import os
from typing import Any

from tests.benchmarks.workloads import (
    DEVICE,
    HEADS,
    LENGTH,
    THREADS,
    WIDTH,
    Workload,
    data,
    weights,
)

if THREADS == 1:
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    )

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_platforms", "cpu" if DEVICE == "cpu" else f"{DEVICE},cpu")
# JAX has no option for the number of threads that it keeps: it may see as many processors.
if DEVICE == "cpu" and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-THREADS:])


def _normalized(x: Any, scale: Any, shift: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + shift


def _forward(workload: Workload, p: list[Any], x: Any) -> Any:
    if workload.kind == "mlp":
        for k in range(0, len(p), 2):
            x = x @ p[k] + p[k + 1]
            if k < len(p) - 2:
                x = jax.nn.relu(x)
        return x
    if workload.kind == "lenet":
        for k in (0, 2):
            x = jax.lax.conv(x, p[k], (1, 1), "VALID") + p[k + 1][None, :, None, None]
            window, low = (1, 1, 2, 2), -jnp.inf
            x = jax.lax.reduce_window(jax.nn.relu(x), low, jax.lax.max, window, window, "VALID")
        return jax.nn.relu(x.reshape(x.shape[0], -1) @ p[4] + p[5]) @ p[6] + p[7]
    rows, depth = x.shape[0], WIDTH // HEADS
    for k in (0, 12):
        heads = (x @ p[k] + p[k + 1]).reshape(rows, LENGTH, 3, HEADS, depth)
        q, key, v = heads.transpose(2, 0, 3, 1, 4)
        share = jax.nn.softmax(q @ key.swapaxes(-1, -2) / np.float32(np.sqrt(depth)), -1)
        mixed = (share @ v).transpose(0, 2, 1, 3).reshape(rows, LENGTH, WIDTH)
        x = _normalized(x + mixed @ p[k + 2] + p[k + 3], p[k + 4], p[k + 5])
        inner = jax.nn.gelu(x @ p[k + 6] + p[k + 7], approximate=False)
        x = _normalized(x + inner @ p[k + 8] + p[k + 9], p[k + 10], p[k + 11])
    return x.mean(1) @ p[24] + p[25]


def _start(workload: Workload) -> tuple[Any, Any, Any]:
    """A step, and the state before the first one."""

    def cost(p: list[Any], x: Any, y: Any, weight: Any) -> Any:
        scores = _forward(workload, p, x)
        if workload.loss == "squared_error":
            return ((scores - y) ** 2).sum()
        if workload.loss == "softmax_cross_entropy":
            logs = jax.nn.log_softmax(scores)
            return -jnp.take_along_axis(logs, y[:, None].astype(int), 1).mean()
        return (weight[:, None] * (jax.nn.softplus(scores) - scores * y)).sum()

    def update(p: list[Any], state: Any, g: list[Any]) -> tuple[list[Any], Any]:
        rate = workload.rate
        if workload.optimizer == "sgd":
            return [w - rate * d for w, d in zip(p, g, strict=True)], state
        if workload.optimizer == "momentum":
            v = [0.9 * a + d for a, d in zip(state, g, strict=True)]
            return [w - rate * a for w, a in zip(p, v, strict=True)], v
        m, v, t = state
        t = t + 1
        m = [0.9 * a + 0.1 * d for a, d in zip(m, g, strict=True)]
        v = [0.999 * a + 0.001 * d * d for a, d in zip(v, g, strict=True)]
        b1, b2 = 1 - 0.9**t, 1 - 0.999**t
        moved = [
            w - rate * (a / b1) / (jnp.sqrt(c / b2) + 1e-8) for w, a, c in zip(p, m, v, strict=True)
        ]
        return moved, (m, v, t)

    def step(p: list[Any], state: Any, *batch: Any) -> tuple[list[Any], Any, Any]:
        loss, g = jax.value_and_grad(cost)(p, *batch)
        return *update(p, state, g), loss

    p = [jnp.asarray(w) for w in weights(workload)]
    zeros = [jnp.zeros_like(w) for w in p]
    more = [jnp.zeros_like(w) for w in p]
    states = {"sgd": (), "momentum": zeros, "adam": (zeros, more, jnp.zeros(()))}
    return step, p, states[workload.optimizer]


def steps(workload: Workload) -> Any:
    """Batches from numpy, one call a step."""
    step, p, state = _start(workload)
    call = jax.jit(step, donate_argnums=(0, 1))
    columns = data(workload)
    rng = np.random.default_rng(0)

    def epochs(count: int) -> Any:
        nonlocal p, state
        losses: Any = []
        for _ in range(count):
            losses = []
            order = rng.permutation(workload.rows)
            for start in range(0, workload.rows, workload.batch):
                rows = order[start : start + workload.batch]
                batch = [None if c is None else c[rows] for c in columns]
                p, state, loss = call(p, state, *batch)
                losses.append(loss)
            losses = np.asarray(jnp.stack(losses))
        return losses

    return epochs


def scan(workload: Workload) -> Any:
    """The data stay where JAX has them; rows are drawn and gathered inside."""
    step, p, state = _start(workload)
    columns = [None if c is None else jnp.asarray(c) for c in data(workload)]

    def epoch(p: Any, state: Any, key: Any, columns: Any) -> Any:
        order = jax.random.permutation(key, workload.rows).reshape(-1, workload.batch)

        def one(carry: Any, rows: Any) -> Any:
            batch = [None if c is None else c[rows] for c in columns]
            *after, loss = step(*carry, *batch)
            return tuple(after), loss

        return jax.lax.scan(one, (p, state), order)

    call = jax.jit(epoch, donate_argnums=(0, 1))
    key = jax.random.key(0)

    def epochs(count: int) -> Any:
        nonlocal p, state, key
        losses: Any = None
        for _ in range(count):
            key, here = jax.random.split(key)
            (p, state), losses = call(p, state, here, columns)
            losses = np.asarray(losses)
        return losses

    return epochs
