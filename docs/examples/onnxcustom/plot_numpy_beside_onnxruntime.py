"""
numpy compared with onnxruntime on simple functions
===================================================

When is it faster to compute a few elementwise operations with onnxruntime? A call costs some microseconds,
so numpy is faster for small arrays. For larger arrays, onnxruntime needs fewer passes over memory and has
faster exponentials.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import onnx.parser
import onnxruntime

functions = {
    "square error": ("y = Mul(d, d)", lambda d: d * d),
    "sigmoid": ("y = Sigmoid(d)", lambda d: 1 / (1 + np.exp(-d))),
    "log loss": (
        "s = Neg(d)  y = Softplus(s)",
        lambda d: np.maximum(-d, 0) + np.log1p(np.exp(-np.abs(d))),
    ),
}
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
sizes = [10, 100, 1_000, 10_000, 100_000, 1_000_000]


def best(run):
    """The time of the fastest of some calls, in µs."""
    times = []
    for _ in range(15):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


figure, all_axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True, layout="constrained")
for axes, (name, (body, plain)) in zip(all_axes, functions.items(), strict=True):
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[N] d) => (float[N] y) {{ {body} }}'
    session = onnxruntime.InferenceSession(
        onnx.parser.parse_model(text).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )
    ours, theirs = [], []
    for size in sizes:
        d = np.random.default_rng(0).standard_normal(size).astype(np.float32)
        np.testing.assert_allclose(session.run(None, {"d": d})[0], plain(d), rtol=1e-4, atol=1e-6)
        ours.append(best(lambda s=session, d=d: s.run(None, {"d": d})))
        theirs.append(best(lambda f=plain, d=d: f(d)))
    axes.loglog(sizes, theirs, label="numpy")
    axes.loglog(sizes, ours, label="onnxruntime")
    axes.set_title(name)
    axes.set_xlabel("elements")
    pays = [s for s, a, b in zip(sizes, ours, theirs, strict=True) if a < b]
    print(f"{name}: onnxruntime is quicker from {pays[0] if pays else 'no'} elements on")
all_axes[0].set_ylabel("µs")
all_axes[0].legend()
