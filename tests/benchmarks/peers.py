"""Who takes part. Each is a function of a workload that returns a function of a number of epochs.

Every peer starts from the same weights, shuffles again each epoch, keeps the loss of every step and
computes with as many threads. An epoch function returns the losses of its last epoch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.benchmarks.workloads import DEVICE, THREADS, Workload, data, weights

Epochs = Callable[[int], Any]
"""Trains so many epochs; the losses of the last one's steps, or what the peer keeps of them."""


class Absent(Exception):
    """A peer that cannot take part here, and why."""


def trainer_of(
    workload: Workload, backend: Any = "fused", device: str = "cpu", **arguments: Any
) -> Any:
    """The Trainer of a workload, everything but its threads at its default."""
    from ortflex_core import Trainer
    from tests.benchmarks.onnx_network import network

    model: Any = None
    if workload.kind == "image":
        from tests.benchmarks.large_networks import exported

        model = exported(_images(workload), data(workload)[0][:2])
    return Trainer(
        network(workload) if model is None else model,
        loss=workload.loss,
        optimizer=workload.optimizer,
        learning_rate=workload.rate,
        reduction=workload.reduction,
        batch_size=workload.batch,
        epochs=1,
        backend=backend,
        device=device,
        threads=THREADS,
        progress=False,
        **arguments,
    )


def ours_recorded(workload: Workload) -> Epochs:
    """The same with CUDA graphs."""
    if DEVICE == "cpu":
        raise Absent("needs a CUDA device")
    return _fit(workload, {"name": "fused", "cuda_graph": "auto"}, DEVICE)


def ours_in_c(workload: Workload) -> Epochs:
    """The same on the backend c."""
    from ortflex_plugins.c.compiler import obstacle

    if reason := obstacle():
        raise Absent(reason)
    return _fit(workload, "c")


def ours_by(backend: str) -> Callable[[Workload], Epochs]:
    """The same on a backend that another onnxruntime has."""

    def made(workload: Workload) -> Epochs:
        from ortflex_core import Plugins, require_runtime

        kind = Plugins.discover()["backends"].load(backend)
        if reasons := kind.available(require_runtime()):
            raise Absent(reasons[0])
        return _fit(workload, backend)

    return made


def ours_on_xla(workload: Workload, **arguments: Any) -> Epochs:
    """The same on the backend xla, on as many processors as JAX."""
    # It limits the processors that JAX sees, before the first of its arrays.
    importlib.import_module("tests.benchmarks.jax_network")
    return _fit(workload, {"name": "xla", "platform": DEVICE}, **arguments)


def ours_on_openvino(workload: Workload, **options: Any) -> Epochs:
    """The same on the backend openvino."""
    if importlib.util.find_spec("openvino") is None:
        raise Absent("openvino is not installed")
    return _fit(workload, {"name": "openvino", **options})


def _fit(workload: Workload, backend: Any, device: str = "cpu", **arguments: Any) -> Epochs:
    x, y, weight = data(workload)
    trainer = trainer_of(workload, backend, device, **arguments)

    def epochs(count: int) -> Any:
        trainer.epochs = count
        trainer.fit(x, y, weight)
        return trainer.train_losses_[-1:]

    return epochs


def torch_compiled(workload: Workload) -> Epochs:
    """Forward and backward pass by ``torch.compile(mode="reduce-overhead")``, and a fused optimizer."""
    epochs = _torch(workload, {"fused": True}, compiled=True)
    try:
        epochs(1)
    except Exception as error:  # of torch's compiler, which needs one of C++ or of CUDA
        raise Absent(f"torch.compile: {str(error).strip().splitlines()[0]}") from error
    return epochs


def _images(workload: Workload) -> Any:
    """The network of W9 or W10, the same weights in every process."""
    import torch

    from tests.benchmarks import large_networks

    torch.manual_seed(0)
    return getattr(large_networks, workload.sizes[0])()


def _torch(
    workload: Workload, options: dict[str, Any], compiled: bool = False, bf16: bool = False
) -> Epochs:
    import torch

    from tests.benchmarks.torch_network import forward, loss_of

    torch.set_num_threads(THREADS)
    x, y, weight = (a if a is None else torch.from_numpy(a).to(DEVICE) for a in data(workload))
    if weight is not None:
        weight = weight[:, None]
    if workload.kind == "image":
        network = _images(workload).to(DEVICE).train()
        parameters = list(network.parameters())
    else:
        network = None
        values = (torch.from_numpy(p).to(DEVICE) for p in weights(workload))
        parameters = [p.requires_grad_() for p in values]

    def cost(x: Any, y: Any, weight: Any) -> Any:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
            scores = forward(workload, x, parameters) if network is None else network(x)
        return loss_of(workload, scores.float(), y, weight)

    if compiled:
        cost = torch.compile(cost, mode="reduce-overhead")
    optimizer: Any
    if workload.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, lr=workload.rate, **options)
    else:
        momentum = 0.9 if workload.optimizer == "momentum" else 0.0
        optimizer = torch.optim.SGD(parameters, lr=workload.rate, momentum=momentum, **options)

    def epochs(count: int) -> Any:
        losses: list[Any] = []
        for _ in range(count):
            losses = []
            order = torch.randperm(workload.rows, device=DEVICE)
            for start in range(0, workload.rows, workload.batch):
                rows = order[start : start + workload.batch]
                optimizer.zero_grad()
                of_rows = None if weight is None else weight[rows]
                loss = cost(x[rows], y[rows], of_rows)
                loss.backward()
                optimizer.step()
                # The next run of a compiled function overwrites its results.
                losses.append(loss.detach().clone() if compiled else loss.detach())
            losses = torch.stack(losses).tolist()
        return losses

    return epochs


def scikit_learn(workload: Workload) -> Epochs:
    """MLPRegressor or MLPClassifier continued; both shuffle by themselves."""
    if workload.name not in ("W1", "W2", "W3"):
        raise Absent("scikit-learn has no such training loop, or takes too long")
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from threadpoolctl import threadpool_limits

    x, y, _ = data(workload)
    kind = MLPRegressor if workload.loss == "squared_error" else MLPClassifier
    model = kind(
        hidden_layer_sizes=workload.sizes[1:-1],
        solver="sgd",
        alpha=0,
        batch_size=workload.batch,
        learning_rate_init=workload.rate,
        momentum=0.9 if workload.optimizer == "momentum" else 0,
        nesterovs_momentum=False,
        tol=0,
        n_iter_no_change=10**9,
        warm_start=True,
        random_state=0,
    )
    labels = y.ravel()

    def epochs(count: int) -> Any:
        model.max_iter = count
        with threadpool_limits(THREADS), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(x, labels)
        return model.loss_curve_[-1:]

    return epochs


def jax_step(workload: Workload) -> Epochs:
    """A jitted step; rows are taken by numpy."""
    from tests.benchmarks.jax_network import steps

    return steps(workload)


def jax_scan(workload: Workload) -> Epochs:
    """A jitted epoch: lax.scan over batches that are gathered inside."""
    if workload.kind == "image":
        raise Absent("this network is not written in JAX")
    from tests.benchmarks.jax_network import scan

    return scan(workload)


def on_device(workload: Workload) -> Epochs:
    """onnxruntime's on-device training API, Module and Optimizer."""
    try:
        from tests.benchmarks.on_device import made
    except (ImportError, AttributeError) as error:
        raise Absent(f"needs onnxruntime-training-cpu 1.19.2 and torch ({error})") from None
    return made(workload)


PEERS: dict[str, tuple[Callable[[Workload], Epochs], tuple[str, ...]]] = {
    "ortflex": (
        lambda w: _fit(w, "fused", DEVICE),
        ("onnxruntime", "onnxruntime-gpu", "onnxruntime-training-cpu", "onnxruntime-training"),
    ),
    "ortflex c": (ours_in_c, ("onnxruntime",)),
    "ortflex training_agent": (ours_by("training_agent"), ("onnxruntime-training-cpu",)),
    "ortflex training_session": (ours_by("training_session"), ("onnxruntime-training",)),
    "ortflex xla": (ours_on_xla, ("jax",)),
    "ortflex xla bf16": (lambda w: ours_on_xla(w, precision="bf16_mixed"), ("jax",)),
    "ortflex openvino": (ours_on_openvino, ("openvino",)),
    "ortflex openvino bf16": (
        lambda w: ours_on_openvino(w, inference_precision="bf16"),
        ("openvino",),
    ),
    "ortflex recorded": (ours_recorded, ("onnxruntime-gpu",)),
    "torch": (lambda w: _torch(w, {}), ("torch",)),
    "torch fused": (lambda w: _torch(w, {"fused": True}), ("torch",)),
    "torch fused bf16": (lambda w: _torch(w, {"fused": True}, bf16=True), ("torch",)),
    "torch compiled": (torch_compiled, ("torch",)),
    "scikit-learn": (scikit_learn, ("scikit-learn",)),
    "jax step": (jax_step, ("jax",)),
    "jax scan": (jax_scan, ("jax",)),
    "on-device": (on_device, ("onnxruntime-training-cpu", "onnxruntime-training")),
}
"""By name: what makes it, and the distributions whose version is noted."""


def version(name: str) -> str:
    """Distribution and version of a peer, as it is installed here."""
    for distribution in PEERS[name][1]:
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def mean(losses: Any) -> float:
    """The mean of an epoch's losses."""
    return float(np.mean(np.asarray(losses)))
