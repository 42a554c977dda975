"""Networks of torch, torchvision, timm and transformers, tiny and with random weights.

Each builder gives a module and its example inputs; :func:`networks` yields those that the installed
packages can build. What their files say about parameters is compared with what torch trains.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests import parameter_transformers
from tests.parameter_modules import (
    Builder,
    Built,
    Call,
    Causal,
    Experts,
    First,
    Frozen,
    Latents,
    Normalized,
    OneAndScale,
    Positions,
    Standardized,
    Tokens,
    TwoInputs,
    image,
    sequence,
    tokens,
)


def _torch() -> Iterator[tuple[str, Builder]]:
    def rows(*layers: nn.Module) -> Builder:
        return lambda: (nn.Sequential(*layers), (torch.randn(3, 8),))

    def pictures(*layers: nn.Module) -> Builder:
        return lambda: (nn.Sequential(*layers), (image(8),))

    def recurrent(cls: type[nn.Module], **options: Any) -> Builder:
        return lambda: (First(cls(8, 6, batch_first=True, **options)), (sequence(),))

    norm = nn.utils.parametrizations
    yield "mlp", rows(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    yield "mlp_one", rows(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    yield "mlp_norm", rows(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3))
    yield "mlp_batch_norm", rows(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    yield "batch_norm_first", rows(nn.BatchNorm1d(8), nn.Linear(8, 3))
    yield "layer_norm_first", rows(nn.LayerNorm(8), nn.Linear(8, 3))
    yield "rms_norm", rows(nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 3))
    yield "prelu", rows(nn.Linear(8, 6), nn.PReLU(), nn.Linear(6, 6), nn.PReLU(6))
    yield "cnn", pictures(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    first = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    second = nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)
    yield "cnn_batch_norm", pictures(*first, *second, nn.Flatten(), nn.Linear(4, 3))
    yield "group_norm", pictures(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3))
    first = nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU()
    yield "instance_norm", pictures(*first, nn.Conv2d(4, 2, 3))
    first = nn.Conv2d(3, 4, 3, stride=2), nn.ReLU()
    yield "transposed", pictures(*first, nn.ConvTranspose2d(4, 3, 3, stride=2))
    first = norm.weight_norm(nn.Linear(8, 6)), nn.ReLU()
    yield "weight_norm", rows(*first, norm.weight_norm(nn.Linear(6, 3)))
    yield "weight_norm_conv", pictures(norm.weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU())
    first = norm.spectral_norm(nn.Linear(8, 6)), nn.ReLU()
    yield "spectral_norm", rows(*first, norm.spectral_norm(nn.Linear(6, 3)))
    first = Standardized(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()
    yield "standardized", pictures(*first, Standardized(4, 4, 3))
    yield "lstm", recurrent(nn.LSTM)
    yield "gru", recurrent(nn.GRU)
    yield "rnn", recurrent(nn.RNN)
    yield "lstm_deep", recurrent(nn.LSTM, num_layers=2, bidirectional=True)
    yield "gru_deep", recurrent(nn.GRU, num_layers=2, bidirectional=True)
    yield "rnn_deep", recurrent(nn.RNN, num_layers=2, bidirectional=True, nonlinearity="relu")
    yield "lstm_no_bias", recurrent(nn.LSTM, bias=False)
    yield "lstm_projected", recurrent(nn.GRU, bias=False, num_layers=2)
    yield "attention", _attention
    yield "encoder", _encoder
    yield "transformer", _transformer
    yield "positions", lambda: (Positions(), (sequence(),))
    yield "tokens", lambda: (Tokens(), (tokens(),))
    yield "one_and_scale", lambda: (OneAndScale(), (torch.randn(3, 8),))
    yield "experts", lambda: (Experts(), (torch.randn(3, 8),))
    yield "latents", lambda: (Latents(), (sequence(),))
    yield "normalized", lambda: (Normalized(), (image(8),))
    yield "causal", lambda: (Causal(), (sequence(),))
    yield "scale_and_shift", lambda: (Frozen(), (torch.randn(3, 8),))
    yield "two_inputs", lambda: (TwoInputs(), (tokens(), torch.randn(2, 8)))


def _attention() -> Built:
    net = Call(nn.MultiheadAttention(8, 2, batch_first=True), ("query", "key", "value"))
    return net, (sequence(), sequence(length=4), sequence(length=4))


def _encoder() -> Built:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (sequence(),)


def _transformer() -> Built:
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (sequence(), sequence(length=4))


# ---------------------------------------------------------------- torchvision


TORCHVISION = """
resnet18 resnet50 resnext50_32x4d mobilenet_v2 mobilenet_v3_small efficientnet_b0 efficientnet_v2_s
convnext_tiny densenet121 regnet_y_400mf shufflenet_v2_x0_5 squeezenet1_1 mnasnet0_5
"""


def _torchvision() -> Iterator[tuple[str, Builder]]:
    from torchvision import models

    def of(name: str, size: int = 64, **options: Any) -> Builder:
        own = {"weights": None, "num_classes": 5, **options}
        return lambda: (getattr(models, name)(**own), (image(size),))

    for name in TORCHVISION.split():
        yield name, of(name)
    for name in ("alexnet", "vgg11_bn"):
        yield name, of(name, 224)
    yield "googlenet", of("googlenet", aux_logits=False, init_weights=False)
    yield "inception_v3", of("inception_v3", 128, aux_logits=False, init_weights=False)
    sizes, windows = ([4, 4], 12, [2, 2], [2, 2], [4, 4]), ((64, 64), 8, 2, [8, 16], 8, [1, 1], 0.1)
    vit = (32, 8, 2, 2, 16, 32)
    yield "vit", lambda: (models.VisionTransformer(*vit, num_classes=5), (image(32),))
    yield "swin", lambda: (models.SwinTransformer(*sizes, num_classes=5), (image(32),))
    yield "swin_v2", lambda: (_swin_v2(*sizes), (image(32),))
    yield "maxvit", lambda: (models.MaxVit(*windows, num_classes=5), (image(64),))


def _swin_v2(*sizes: Any) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    newer = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return swin.SwinTransformer(*sizes, num_classes=5, **newer)


# ---------------------------------------------------------------- timm


TIMM = """
resnetv2_50d_gn resnetv2_50x1_bit nf_resnet26 dm_nfnet_f0 poolformer_s12 poolformerv2_s12
convnextv2_atto convmixer_768_32 repvgg_a0 ghostnet_100 mobilevit_xxs hrnet_w18_small
res2net50_14w_8s skresnet18 caformer_s18
"""
TIMM_LARGE = """
mixer_s16_224 resmlp_12_224 gmlp_ti16_224 efficientformer_l1 levit_128s pit_ti_224
coatnet_nano_rw_224
"""


def _timm() -> Iterator[tuple[str, Builder]]:
    import timm

    def of(name: str, size: int = 64, label: str = "", **options: Any) -> tuple[str, Builder]:
        def build() -> Built:
            net = timm.create_model(name, pretrained=False, num_classes=5, **options)
            return net, (image(size),)

        return label or name, build

    for name in TIMM.split():
        yield of(name)
    for name in TIMM_LARGE.split():
        yield of(name, 224)
    small = {"embed_dim": 24, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8}
    yield of("vit_tiny_patch16_224", 32, **small)
    registers = {"reg_tokens": 3, "class_token": False, "global_pool": "avg"}
    yield of("vit_tiny_patch16_224", 32, "vit_registers", **registers, **small)
    yield of("deit_tiny_distilled_patch16_224", 32, **small)
    yield of("cait_xxs24_224", 32, init_values=0.1, **small)
    sizes = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}
    yield of("xcit_nano_12_p16_224", 32, **sizes)
    yield of("eva02_tiny_patch14_224", 32, patch_size=8, **sizes)
    yield of("beit_base_patch16_224", 32, **small)
    yield of("beitv2_base_patch16_224", 32, **small)
    yield of("crossvit_tiny_240", 240)
    yield of("tnt_s_patch16_224", 224, depth=2)
    yield of("swinv2_cr_tiny_ns_224", 224, depths=(1, 1, 1, 1), embed_dim=24)
    sequencer = {"embed_dims": (24, 48, 48, 48), "hidden_sizes": (6, 12, 12, 12)}
    yield of("sequencer2d_s", 224, layers=(1, 1, 1, 1), **sequencer)


_PACKAGES: dict[str, Callable[[], Iterator[tuple[str, Builder]]]] = {
    "torch": _torch,
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": parameter_transformers.networks,
}


def networks(*packages: str) -> Iterator[tuple[str, str, Builder]]:
    """(package, name, builder) of every network of the packages that are installed."""
    for package in packages or tuple(_PACKAGES):
        if importlib.util.find_spec(package) is not None:
            for name, build in _PACKAGES[package]():
                yield package, name, build
