"""Networks of torchvision, timm and transformers with a head of 5 classes, fine-tuned here and by torch.

``python -m tests.end_to_end.head_campaign`` needs those three packages beside torch. A network with
random weights is exported by both exporters of torch with 10 classes. Ours trains it with ``head=5``;
torch trains the same network with the same initial head, in float32 and in float64: 20 steps of SGD, the
head alone or all layers. A run is right if our scores are as near to those of float64 as 1e-5 and a
hundredth of what the training changed, or as four times the distance of torch's own float32.
``--only resnet`` chooses networks by a part of a name.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ortflex_core import OrtflexError, Trainer
from tests import torch_files

ROOT = Path(__file__).parents[2]
ROWS, STEPS, RATE, CLASSES = 4, 20, 2e-4, 5
TOLERANCE, SHARE, FACTOR = 1e-5, 1e-2, 4.0
TORCHVISION = """
resnet18 squeezenet1_1 densenet121 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large
shufflenet_v2_x0_5 mnasnet0_5 efficientnet_b0 regnet_y_400mf regnet_x_400mf swin_t googlenet
lraspp_mobilenet_v3_large
"""
TIMM = """
vit_tiny_patch16_224 deit_tiny_patch16_224 mixer_s32_224 resmlp_12_224 gmlp_ti16_224 convnext_atto
convnextv2_atto edgenext_xx_small poolformer_s12 mobilenetv4_conv_small ghostnet_100 repvgg_a0
tf_efficientnet_lite0 hardcorenas_a levit_128s mobilevit_xxs xcit_nano_12_p16_224 pvt_v2_b0 resnet10t
"""
SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Bert": SMALL,
    "Roberta": SMALL,
    "XLMRoberta": SMALL,
    "Camembert": SMALL,
    "Electra": SMALL | {"embedding_size": 64},
    "Albert": SMALL | {"embedding_size": 32},
    "MPNet": SMALL,
    "ConvBert": SMALL | {"embedding_size": 64, "head_ratio": 2, "conv_kernel_size": 3},
    "SqueezeBert": SMALL | {"embedding_size": 64},
    "MobileBert": SMALL
    | {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "DistilBert": {"vocab_size": 100, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
}


class Scores(nn.Module):
    """The first tensor of what a network returns."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.network(x)
        if isinstance(found, torch.Tensor):
            return found
        return next(iter(found.values()))


def names() -> Iterator[str]:
    """``torchvision/resnet18`` and the others."""
    yield from (f"torchvision/{name}" for name in TORCHVISION.split())
    yield from (f"timm/{name}" for name in TIMM.split())
    yield from (f"transformers/{name}" for name in TRANSFORMERS)


def network(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A network with 10 classes and 12 rows of its input."""
    torch.manual_seed(7)
    package, _, kind = name.partition("/")
    if package == "transformers":
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            **TRANSFORMERS[kind], num_labels=10, attn_implementation="eager"
        )
        made = getattr(transformers, f"{kind}ForSequenceClassification")(config)
        x = torch.randint(3, 100, (3 * ROWS, 8))
    elif package == "timm":
        import timm

        made = timm.create_model(kind, num_classes=10)
        x = torch.randn(3 * ROWS, *made.default_cfg["input_size"])
        if not made.default_cfg.get("fixed_input_size", False):
            x = x[:, :, :96, :96]
    else:
        import torchvision

        models = {**vars(torchvision.models), **vars(torchvision.models.segmentation)}
        options = (
            {"weights_backbone": None} if kind in vars(torchvision.models.segmentation) else {}
        )
        made = models[kind](weights=None, num_classes=10, **options)
        x = torch.randn(3 * ROWS, 3, 64, 64)
        if kind.startswith("vit"):
            x = torch.randn(3 * ROWS, 3, 224, 224)
    made = Scores(made).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # exporters merge equal tensors
            parameter += 0.01 * torch.randn_like(parameter)
    return made, x


def exported(net: nn.Module, x: torch.Tensor, dynamo: bool, merge: bool) -> bytes:
    """The file of one of torch's exporters, with a free number of rows.

    Without ``merge``, BatchNormalization stays beside its convolution, whose weights torch trains.
    """
    if dynamo:
        options: dict[str, Any] = {"optimize": merge}
    else:  # a folded product of a parameter and a number would be trained in its place
        options = {} if merge else torch_files.AS_TRAINED
    return torch_files.exported(net, x, dynamo=dynamo, **options).SerializeToString()


def with_head(net: nn.Module, values: list[np.ndarray]) -> tuple[nn.Module, list[nn.Parameter]]:
    """A copy with last layers of 5 classes and these values; the parameters of the layers."""
    net = copy.deepcopy(net)
    weights = [value for value in values if value.ndim > 1]
    biases = iter([value for value in values if value.ndim == 1])
    layers = [
        module
        for module in net.modules()
        if 10 in (getattr(module, "out_features", 0), getattr(module, "out_channels", 0))
    ][-len(weights) :]
    for layer, value in zip(layers, weights, strict=True):
        weight = torch.from_numpy(value.copy())
        shape = (CLASSES, *layer.weight.shape[1:])
        if weight.shape != shape:
            weight = weight.T.reshape(shape)
        layer.weight = nn.Parameter(weight.contiguous())
        if layer.bias is not None:
            layer.bias = nn.Parameter(torch.from_numpy(next(biases).copy()))
        for attribute in ("out_features", "out_channels"):
            if hasattr(layer, attribute):
                setattr(layer, attribute, CLASSES)
    # Other modules know the number of classes, too, and use it as a size.
    for module in net.modules():
        for attribute in ("num_classes", "num_labels"):
            if getattr(module, attribute, None) == 10 and attribute in vars(module):
                setattr(module, attribute, CLASSES)
    return net, [parameter for layer in layers for parameter in layer.parameters()]


def fine_tune(
    net: nn.Module, head: list[nn.Parameter] | None, x: torch.Tensor, y: torch.Tensor
) -> np.ndarray:
    weights = list(net.parameters()) if head is None else head
    optimizer = torch.optim.SGD(weights, lr=RATE)
    for rows in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        return net(x).double().numpy()


def batches() -> Iterator[slice]:
    for step in range(STEPS):
        yield slice(ROWS * (step % 3), ROWS * (step % 3 + 1))


def compare(name: str, dynamo: bool, freeze: Any) -> str:
    """``right`` or ``wrong`` with the largest differences from float64, or why there is no run."""
    net, x = network(name)
    try:
        file = exported(net, x[:ROWS], dynamo, merge=bool(freeze))
    except Exception as error:
        return f"not exported: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    try:
        # torch is in evaluation mode, so that statistics stay there, too.
        trainer = Trainer(
            file,
            head=CLASSES,
            freeze=freeze,
            loss="softmax_cross_entropy",
            optimizer="sgd",
            learning_rate=RATE,
            batch_size=ROWS,
            batch_norm="freeze",
            progress=False,
        )
    except OrtflexError as error:
        return f"refused: {str(error).splitlines()[0][:200]}"
    values = [trainer.model.initializer(each) for each in trainer.model.new_head]
    single, head = with_head(net, values)
    sizes = list(single(x).shape)
    del sizes[1]
    y = torch.from_numpy(np.random.default_rng(3).integers(0, CLASSES, sizes))
    double, head64 = with_head(net, values)
    double = double.double()
    with torch.no_grad():
        before = double(exact(x)).numpy()
    wanted = fine_tune(double, head64 if freeze else None, exact(x), y)
    torchs = fine_tune(single, head if freeze else None, x, y)
    for rows in batches():
        trainer.step((x[rows].numpy(), y[rows].numpy()))
    got = trainer.predict(x.numpy())
    ours, theirs = (float(np.abs(found - wanted).max()) for found in (got, torchs))
    moved = float(np.abs(wanted - before).max())
    right = ours <= max(min(TOLERANCE, SHARE * moved), FACTOR * theirs)
    return (
        f"{'right' if right else 'wrong'}: ours {ours:.1e}, torch {theirs:.1e}, moved {moved:.1e}"
    )


def exact(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


RUNS: dict[str, tuple[bool, Any]] = {
    "torchscript, head": (False, "backbone"),
    "torchscript, all": (False, ()),
    "dynamo, head": (True, "backbone"),
    "dynamo, all": (True, ()),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names to run")
    parser.add_argument("--here", action="store_true", help="in this process")
    given = parser.parse_args(arguments)
    if given.here:
        for run, (dynamo, freeze) in RUNS.items():
            began = time.monotonic()
            verdict = compare(given.only, dynamo, freeze)
            print(f"{given.only}, {run}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
        return
    right, wrong, rest = 0, 0, 0
    networks: set[str] = set()
    for name in filter(lambda each: given.only in each, names()):
        # A process for each, so that none meets another's memory or crash.
        call = [sys.executable, "-m", "tests.end_to_end.head_campaign", "--here", "--only", name]
        ended = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
        lines = [line for line in ended.stdout.splitlines() if line.startswith(name)]
        if ended.returncode:
            lines.append(f"{name}: ended with {ended.returncode}: {ended.stderr[-200:]!r}")
        print(*lines, sep="\n", flush=True)
        right += sum(": right: " in line for line in lines)
        wrong += sum(": wrong: " in line for line in lines)
        rest += sum(": right: " not in line and ": wrong: " not in line for line in lines)
        networks |= {name for line in lines if ": right: " in line}
    print(
        f"{right} right, {wrong} wrong, {rest} not run; {len(networks)} networks with a right run"
    )


if __name__ == "__main__":
    main()
