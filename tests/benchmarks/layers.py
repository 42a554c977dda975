"""An ONNX layer inside torch next to the same layer in torch: µs of forward and backward, and ratio.

``python -m tests.benchmarks layers [--case NAME …] [--rounds N]``. The same network, input and cotangent;
gradients of the input and of all parameters, which are compared first. Both take turns in one
process with one thread each; the median of the ratios counts. Above 1 the ONNX layer is quicker.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.workloads import WORKLOADS, Workload, data, weights

CASES = {
    "mlp, 15 rows": "W1",
    "mlp, 128 rows": "W3",
    "convolutions": "W7",
    "transformer": "W8",
}
_SECONDS = 0.05  # of one measurement, at least one pass


def main(arguments: list[str]) -> None:
    """Print a line per case and engine."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks layers")
    parser.add_argument("--case", action="append", choices=CASES, help="one of the layers")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of measurements")
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    print(
        f"{'a layer, forward and backward':32}{'engine':16}{'torch':>10}{'onnx':>10}  torch / onnx"
    )
    for case in options.case or CASES:
        workload = WORKLOADS[CASES[case]]
        for engine in engines():
            theirs, ours, ratio = measure(workload, engine, options.rounds)
            line = f"{case:32}{engine:16}{theirs:10.1f}{ours:10.1f}"
            print(f"{line}{ratio:14.2f}", flush=True)


def engines() -> list[str]:
    """The engines that work with the installed runtime."""
    from ortflex_core import require_runtime

    return ["fused", *(["training_agent"] if require_runtime().has_training_agent else [])]


def measure(workload: Workload, engine: str, rounds: int) -> tuple[float, float, float]:
    """µs of torch's layer and of ours (medians), and the median of their ratios."""
    theirs, ours = passes(workload, engine)
    check(theirs(), ours())
    often = max(1, round(_SECONDS * 1e6 / _microseconds(theirs, 3)))
    pairs = [(_microseconds(theirs, often), _microseconds(ours, often)) for _ in range(rounds)]
    one, two = (statistics.median(side) for side in zip(*pairs, strict=True))
    return one, two, statistics.median(a / b for a, b in pairs)


def passes(workload: Workload, engine: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward by torch and by us; each call returns outputs and gradients."""
    import torch

    from ortflex_plugins.layers import OrtLayer
    from tests.benchmarks.onnx_network import network
    from tests.benchmarks.torch_network import forward

    x = torch.from_numpy(data(workload)[0][: workload.batch].copy()).requires_grad_()
    layer = OrtLayer(network(workload), engine=engine)
    parameters = [torch.from_numpy(a).requires_grad_() for a in weights(workload)]
    with torch.no_grad():
        cotangent = torch.ones_like(forward(workload, x, parameters))
    mine = [getattr(layer, f"p{k}") for k in range(len(parameters))]

    def run(call: Callable[[Any], Any], wrt: list[Any]) -> Any:
        y = call(x)
        return y, torch.autograd.grad(y, [x, *wrt], cotangent)

    return (
        lambda: run(lambda rows: forward(workload, rows, parameters), parameters),
        lambda: run(layer, mine),
    )


def check(theirs: Any, ours: Any) -> None:
    """Outputs and gradients are the same to float32 rounding."""
    import torch

    for expected, got in zip((theirs[0], *theirs[1]), (ours[0], *ours[1]), strict=True):
        scale = expected.detach().abs().max()
        torch.testing.assert_close(got / scale, expected / scale, rtol=1e-3, atol=1e-4)


def _microseconds(run: Callable[[], Any], often: int) -> float:
    start = time.perf_counter()
    for _ in range(often):
        run()
    return 1e6 * (time.perf_counter() - start) / often
