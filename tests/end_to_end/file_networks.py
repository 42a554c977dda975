"""Small networks of the usual families with random weights, as torch modules with one output.

Those of transformers come from its configurations; convolutional ones are written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

ROWS, LENGTH = 2, 6


class Taken(nn.Module):
    """A network that returns one tensor of what it computes."""

    def __init__(self, network: nn.Module, output: str, keywords: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.output, self.keywords = network, output, keywords

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self.keywords, inputs, strict=True))
        return getattr(self.network(**given), self.output)


class Causal(nn.Module):
    """The logits of a language model, which gets its mask of the future as a matrix.

    The mask that transformers makes by itself has operators that torch's older exporter lacks.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        future = torch.triu(torch.full((length, length), -1e4), 1)[None, None]
        return self.network(input_ids=input_ids, attention_mask=future, use_cache=False).logits


def ids(words: int = 40) -> torch.Tensor:
    return torch.randint(3, words, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))


def mask() -> torch.Tensor:
    out = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    out[1, -2:] = 0
    return out


def pixels(size: int = 16, channels: int = 3) -> torch.Tensor:
    return torch.randn(ROWS, channels, size, size, generator=torch.Generator().manual_seed(4))


Made = tuple[nn.Module, dict[str, torch.Tensor]]
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_ENCODER: dict[str, Any] = _SIZES | {"vocab_size": 40, "max_position_embeddings": 32}
_STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DISTIL: dict[str, Any] = {"vocab_size": 40, "dim": 32, "n_layers": 2, "n_heads": 4}
_DISTIL |= {"hidden_dim": 64, "max_position_embeddings": 32}
_DISTIL |= {"dropout": 0.0, "attention_dropout": 0.0}
_GPT2: dict[str, Any] = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4}
# Tied embeddings: one gradient of torch would belong to two tensors of a file.
_GPT2 |= {"n_positions": 32, "tie_word_embeddings": False, "use_cache": False}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GROUPED = _ENCODER | {"num_key_value_heads": 2, "use_cache": False}
_PICTURE: dict[str, Any] = _SIZES | {"image_size": 16, "patch_size": 4}
_T5: dict[str, Any] = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 64}
_T5 |= {"num_layers": 2, "num_heads": 4}
_WHISPER: dict[str, Any] = {"vocab_size": 40, "num_mel_bins": 8, "d_model": 32}
_WHISPER |= {"max_source_positions": 6, "encoder_layers": 2}
_WHISPER |= {"encoder_attention_heads": 4, "encoder_ffn_dim": 64}
_WHISPER |= {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def _of(kind: str, network: str, options: Mapping[str, Any], **more: Any) -> nn.Module:
    """A network of transformers whose attention is written out."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options, attn_implementation="eager")
    return getattr(transformers, f"{kind}{network}")(config, **more)


def _text(network: nn.Module) -> Made:
    inputs = {"input_ids": ids(), "attention_mask": mask()}
    return Taken(network, "last_hidden_state", tuple(inputs)), inputs


def _causal(kind: str, options: Mapping[str, Any], network: str = "ForCausalLM") -> Made:
    return Causal(_of(kind, network, options)), {"input_ids": ids()}


def _seeing(network: nn.Module) -> Made:
    return Taken(network, "last_hidden_state", ("pixel_values",)), {"pixel_values": pixels()}


def whisper() -> Made:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    network = WhisperEncoder(WhisperConfig(**_WHISPER, attn_implementation="eager"))
    sound = torch.randn(ROWS, 8, 12, generator=torch.Generator().manual_seed(5))
    return Taken(network, "last_hidden_state", ("input_features",)), {"input_features": sound}


def t5() -> Made:
    from transformers import T5Config, T5EncoderModel

    return _text(T5EncoderModel(T5Config(**_T5, dropout_rate=0.0, use_cache=False)))


class Block(nn.Module):
    """A block of BERT, written out, for environments without transformers."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask
        seen = (torch.softmax(scores, -1) @ v).permute(0, 2, 1, 3).contiguous()
        x = self.first(self.out(seen.view(x.shape[0], x.shape[1], -1)) + x)
        return self.second(self.down(nn.functional.gelu(self.up(x))) + x)


class Encoder(nn.Module):
    """Embeddings of words and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(40, 32), nn.LayerNorm(32)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        keep = attention_mask.unsqueeze(1).unsqueeze(2).to(torch.float32)
        mask = (1.0 - keep) * -10000.0
        x = self.norm(self.words(input_ids))
        for block in self.blocks:
            x = block(x, mask)
        return x


def encoder() -> Made:
    return Encoder(), {"input_ids": ids(), "attention_mask": mask()}


# Convolutional networks


def _conv(before: int, after: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
    )


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = _conv(before, after, 3, stride)
        self.second = _conv(after, after)
        self.short = _conv(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.short(x))


class Inverted(nn.Module):
    """MobileNet's block; with ``squeeze`` that of EfficientNet."""

    def __init__(self, width: int, activation: type[nn.Module], squeeze: bool) -> None:
        super().__init__()
        wide = 3 * width
        self.expand = nn.Sequential(_conv(width, wide, 1), activation())
        self.depth = nn.Sequential(_conv(wide, wide, groups=wide), activation())
        self.squeeze = squeeze
        self.down, self.up = nn.Conv2d(wide, 4, 1), nn.Conv2d(4, wide, 1)
        self.project = _conv(wide, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depth(self.expand(x))
        if self.squeeze:
            scale = nn.functional.silu(self.down(y.mean((2, 3), keepdim=True)))
            y = y * torch.sigmoid(self.up(scale))
        return x + self.project(y)


class Pooled(nn.Module):
    """Blocks, then a mean over the picture and a linear layer."""

    def __init__(self, *blocks: nn.Module, width: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


class UNet(nn.Module):
    """Two levels down and up again, with a connection across."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = _conv(3, 8), _conv(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last, self.head = _conv(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = torch.relu(self.one(x))
        low = torch.relu(self.two(nn.functional.max_pool2d(high, 2)))
        return self.head(torch.relu(self.last(torch.cat([self.up(low), high], 1))))


class Yolo(nn.Module):
    """A backbone with SiLU, a pyramid by nearest neighbors, and two heads in one output."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.SiLU
        self.stem = nn.Sequential(_conv(3, 8, 3, 2), act())
        self.down = nn.Sequential(_conv(8, 16, 3, 2), act())
        self.mix = nn.Sequential(_conv(24, 16), act())
        self.heads = nn.ModuleList([nn.Conv2d(16, 6, 1), nn.Conv2d(16, 6, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.stem(x)
        low = self.down(high)
        up = nn.functional.interpolate(low, scale_factor=2.0, mode="nearest")
        near = self.mix(torch.cat([up, high], 1))
        boxes = [head(t).flatten(2) for head, t in zip(self.heads, (near, low), strict=True)]
        return torch.cat(boxes, 2).transpose(1, 2)


def _seen(network: nn.Module) -> Made:
    """With running statistics and scales that are not 0 and 1."""
    generator = torch.Generator().manual_seed(6)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.bias):
                tensor.data.normal_(0, 0.2, generator=generator)  # type: ignore[union-attr]
            for tensor in (module.running_var, module.weight):
                tensor.data.uniform_(0.5, 1.5, generator=generator)  # type: ignore[union-attr]
    return network, {"x": pixels()}


def resnet() -> Made:
    stem = nn.Sequential(_conv(3, 8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return _seen(Pooled(stem, Residual(8, 8), Residual(8, 16, 2), width=16))


def mobilenet() -> Made:
    stem = nn.Sequential(_conv(3, 8, 3, 2), nn.Hardswish())
    return _seen(Pooled(stem, *(Inverted(8, nn.ReLU6, False) for _ in range(2)), width=8))


def efficientnet() -> Made:
    stem = nn.Sequential(_conv(3, 8, 3, 2), nn.SiLU())
    return _seen(Pooled(stem, *(Inverted(8, nn.SiLU, True) for _ in range(2)), width=8))


def yolo() -> Made:
    return _seen(Yolo())


def unet() -> Made:
    return _seen(UNet())


FAMILIES: Mapping[str, Callable[[], Made]] = {
    "Transformer": encoder,
    "BERT": lambda: _text(_of("Bert", "Model", _ENCODER | _STILL, add_pooling_layer=False)),
    "RoBERTa": lambda: _text(_of("Roberta", "Model", _ENCODER | _STILL, add_pooling_layer=False)),
    "DistilBERT": lambda: _text(_of("DistilBert", "Model", _DISTIL)),
    "GPT-2": lambda: _causal("GPT2", _GPT2, "LMHeadModel"),
    "Llama": lambda: _causal("Llama", _GROUPED),
    "Qwen2": lambda: _causal("Qwen2", _GROUPED),
    "ViT": lambda: _seeing(_of("ViT", "Model", _PICTURE | _STILL, add_pooling_layer=False)),
    "CLIP": lambda: _seeing(_of("CLIPVision", "Model", _PICTURE | {"attention_dropout": 0.0})),
    "Whisper": whisper,
    "T5 encoder": t5,
    "ResNet": resnet,
    "MobileNet": mobilenet,
    "EfficientNet": efficientnet,
    "YOLO-like": yolo,
    "U-Net": unet,
}


def make(name: str) -> Made:
    """A network in inference mode, always with the same weights, and its inputs."""
    torch.manual_seed(0)
    network, inputs = FAMILIES[name]()
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():  # no two are equal, such as biases of 0
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return network.eval(), inputs
