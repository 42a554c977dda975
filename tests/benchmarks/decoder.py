"""A decoder of Qwen2's shape with weights of 4 bits, under LoRA: seconds and peak memory of each stage.

The weights are drawn. With the default sizes there are 1.8 billion of them, in a file of 1.9 GB.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

TOKENS, BLOCK = 64, 32
SIZES = {"layers": 28, "width": 1536, "heads": 12, "groups": 2, "inner": 8960, "words": 151936}


class _Graph:
    def __init__(
        self, layers: int, width: int, heads: int, groups: int, inner: int, words: int
    ) -> None:
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.rng = np.random.default_rng(0)
        self.width, self.one = width, width // heads
        t, one = TOKENS, self.one
        self.add("eps", np.float32(1e-6))
        self.add("last", np.array([-1]))
        self.add("two", np.float32(2))
        self.add("scale", np.float32(1 / math.sqrt(one)))
        self.add("mask", np.triu(np.full((t, t), -1e9, np.float32), 1))
        angles = np.arange(t)[:, None] / 10000 ** (np.arange(0, one, 2) / one)
        for name, function in (("cos", np.cos), ("sin", np.sin)):
            self.add(name, np.concatenate([function(angles)] * 2, axis=1).astype(np.float32))
        shapes = {
            "queries": (0, t, heads, one),
            "keys": (0, t, groups, one),
            "flat": (0, t, width),
            "grouped": (0, groups, 1, t, one),
            "repeated": (1, groups, heads // groups, t, one),
            "whole": (0, heads, t, one),
        }
        for name, shape in shapes.items():
            self.add(name, np.array(shape))
        table = self.rng.standard_normal((words, width)).astype(np.float32) * np.float32(0.02)
        x = self.node("Gather", [self.add("embed.weight", table), "ids"], "h")
        for k in range(layers):
            x = self.layer(x, f"layers.{k}.", groups, inner)
        y = self.linear(self.norm(x, "norm"), "lm_head", width, words)
        self.node("Identity", [y], "logits")

    def add(self, name: str, values: Any) -> str:
        self.tensors.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, kind: str, inputs: list[str], name: str, domain: str = "", **given: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [name], name, domain=domain, **given))
        return name

    def linear(self, x: str, name: str, inputs: int, outputs: int, bias: bool = False) -> str:
        shape = (outputs, inputs // BLOCK, BLOCK // 2)
        codes = self.add(f"{name}.codes", self.rng.integers(0, 256, shape, dtype=np.uint8))
        size = np.full(outputs * inputs // BLOCK, 0.2 / math.sqrt(inputs), np.float32)
        read = [x, codes, self.add(f"{name}.scales", size)]
        given = {"K": inputs, "N": outputs, "bits": 4, "block_size": BLOCK}
        y = self.node("MatMulNBits", read, f"{name}/MatMul", "com.microsoft", **given)
        if not bias:
            return y
        added = self.add(f"{name}.bias", np.zeros(outputs, np.float32))
        return self.node("Add", [y, added], f"{name}/Add")

    def norm(self, x: str, name: str) -> str:
        square = self.node("Pow", [x, "two"], f"{name}/Pow")
        mean = self.node("ReduceMean", [square, "last"], f"{name}/Mean", keepdims=1)
        root = self.node("Sqrt", [self.node("Add", [mean, "eps"], f"{name}/Add")], f"{name}/Sqrt")
        weight = self.add(f"{name}.weight", np.ones(self.width, np.float32))
        return self.node("Mul", [self.node("Div", [x, root], f"{name}/Div"), weight], f"{name}/Mul")

    def turned(self, x: str, name: str, shape: str, outputs: int) -> str:
        y = self.linear(x, name, self.width, outputs, bias=True)
        y = self.node("Reshape", [y, shape], f"{name}/Reshape")
        return self.node("Transpose", [y], f"{name}/Transpose", perm=[0, 2, 1, 3])

    def rotary(self, x: str, name: str) -> str:
        halves = [f"{name}/first", f"{name}/second"]
        self.nodes.append(helper.make_node("Split", [x], halves, axis=-1, num_outputs=2))
        other = self.node("Neg", [halves[1]], f"{name}/Neg")
        other = self.node("Concat", [other, halves[0]], f"{name}/Concat", axis=-1)
        terms = [self.node("Mul", [a, b], f"{name}/{b}") for a, b in ((x, "cos"), (other, "sin"))]
        return self.node("Add", terms, f"{name}/rotary")

    def repeat(self, x: str, name: str) -> str:
        x = self.node("Reshape", [x, "grouped"], f"{name}/grouped")
        x = self.node("Expand", [x, "repeated"], f"{name}/Expand")
        return self.node("Reshape", [x, "whole"], f"{name}/whole")

    def layer(self, x: str, p: str, groups: int, inner: int) -> str:
        h, few = self.norm(x, f"{p}ln1"), groups * self.one
        q = self.rotary(self.turned(h, f"{p}q_proj", "queries", self.width), f"{p}q")
        k = self.repeat(self.rotary(self.turned(h, f"{p}k_proj", "keys", few), f"{p}k"), f"{p}k")
        v = self.repeat(self.turned(h, f"{p}v_proj", "keys", few), f"{p}v")
        k = self.node("Transpose", [k], f"{p}kt", perm=[0, 1, 3, 2])
        s = self.node("Mul", [self.node("MatMul", [q, k], f"{p}qk"), "scale"], f"{p}scaled")
        s = self.node(
            "Softmax", [self.node("Add", [s, "mask"], f"{p}masked")], f"{p}softmax", axis=-1
        )
        a = self.node("MatMul", [s, v], f"{p}sv")
        a = self.node("Transpose", [a], f"{p}at", perm=[0, 2, 1, 3])
        a = self.linear(
            self.node("Reshape", [a, "flat"], f"{p}ar"), f"{p}o_proj", self.width, self.width
        )
        x = self.node("Add", [x, a], f"{p}attended")
        h = self.norm(x, f"{p}ln2")
        gate, up = (self.linear(h, f"{p}{n}_proj", self.width, inner) for n in ("gate", "up"))
        gate = self.node("Mul", [gate, self.node("Sigmoid", [gate], f"{p}sigmoid")], f"{p}silu")
        down = self.node("Mul", [gate, up], f"{p}gated")
        down = self.linear(down, f"{p}down_proj", inner, self.width)
        return self.node("Add", [x, down], f"{p}out")


def write(path: Path, **sizes: int) -> None:
    """Write the decoder, with its tensors in another file."""
    made = _Graph(**sizes)
    graph = helper.make_graph(
        made.nodes,
        "decoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", TOKENS])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", TOKENS, sizes["words"]])],
        made.tensors,
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")


def measure(path: str, words: int, recompute: bool, threads: int) -> None:
    """Print the seconds since the start, and the peak memory so far, after each stage."""
    from ortflex import Trainer

    started = time.perf_counter()

    def print_line(what: str) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(f"{what:16} {time.perf_counter() - started:7.1f} s {peak:8.0f} MiB", flush=True)

    print_line("imports")
    trainer = Trainer(
        path,
        loss="causal_lm",
        adapters={"name": "lora", "rank": 8},
        optimizer="adam",
        batch_size=1,
        recompute=recompute,
        threads=threads,
        progress=False,
    )
    print_line("Trainer")
    ids = np.random.default_rng(0).integers(0, words, (1, TOKENS))
    for k in range(3):
        loss = trainer.step((ids, ids))
        print_line(f"step {k}: {loss:.4f}")
    with tempfile.TemporaryDirectory() as folder:
        trainer.export_adapter(Path(folder, "adapter"))
    print_line("export_adapter")


def main(arguments: list[str] | None = None) -> None:
    """Print the stages."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks decoder", description=__doc__)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-recompute", action="store_true")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.write:
        write(Path(options.write), **{name: getattr(options, name) for name in SIZES})
        return
    if options.measure:
        measure(options.measure, options.words, not options.no_recompute, options.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "decoder.onnx")
        given = sys.argv[2:] if arguments is None else arguments
        command = [sys.executable, "-m", "tests.benchmarks", "decoder", *given]
        # In two processes, as a new process begins with the peak memory of the one that starts it.
        for stage in ("--write", "--measure"):
            subprocess.run([*command, stage, str(path)], check=True)


if __name__ == "__main__":
    main()
