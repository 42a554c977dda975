"""What becomes of a network's file: exported, optimized, converted, quantized, as its users do it.

``python -m tests.end_to_end.file_table`` writes the page with the table of families and forms. It needs
transformers next to torch, onnxscript and onnxruntime, and takes about ten minutes.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ortflex import Trainer
from ortflex_core import OrtflexError
from tests.end_to_end import file_networks
from tests.end_to_end.file_networks import FAMILIES

_MODEL_TYPES = {"GPT-2": "gpt2", "T5 encoder": "t5", "ViT": "vit", "CLIP": "clip"}
_HEADS, _WIDTH = 4, 32
_RATE = 1.0


def _export(name: str, path: Path, dynamo: bool) -> None:
    network, inputs = file_networks.make(name)
    names = list(inputs)
    options: dict[str, Any] = {"input_names": names, "output_names": ["out"], "opset_version": 18}
    if dynamo:
        rows = torch.export.Dim("rows", min=1, max=64)
        options["dynamic_shapes"] = tuple({0: rows} for _ in names)
        if not isinstance(network, file_networks.Taken):
            options["dynamic_shapes"] = {n: {0: rows} for n in names}
        else:
            options["dynamic_shapes"] = {"inputs": options["dynamic_shapes"]}
    else:
        options["opset_version"] = 17
        options["dynamic_axes"] = {n: {0: "rows"} for n in [*names, "out"]}
    torch.onnx.export(network, tuple(inputs.values()), str(path), dynamo=dynamo, **options)


def script(name: str, path: Path, before: Path) -> None:
    _export(name, path, dynamo=False)


def dynamo(name: str, path: Path, before: Path) -> None:
    _export(name, path, dynamo=True)


def transformers_optimizer(name: str, path: Path, before: Path) -> None:
    from onnxruntime.transformers import optimizer

    made = optimizer.optimize_model(
        str(before),
        model_type=_MODEL_TYPES.get(name, "bert"),
        num_heads=_HEADS,
        hidden_size=_WIDTH,
        opt_level=1,
    )
    made.save_model_to_file(str(path))


def extended(name: str, path: Path, before: Path) -> None:
    _saved(path, before, "ORT_ENABLE_EXTENDED")


def all_optimizations(name: str, path: Path, before: Path) -> None:
    _saved(path, before, "ORT_ENABLE_ALL")


def _saved(path: Path, before: Path, level: str) -> None:
    """The file that onnxruntime saves after its own optimizations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # files of ORT_ENABLE_ALL are for such machines only, it warns
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(str(before), options, providers=["CPUExecutionProvider"])


def float16(name: str, path: Path, before: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(before), keep_io_types=True), path)


def dynamic(name: str, path: Path, before: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(before, path, weight_type=QuantType.QUInt8)


def optimized_dynamic(name: str, path: Path, before: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    between = path.with_suffix(".optimized.onnx")
    transformers_optimizer(name, between, before)
    # onnx infers no types after the operators of the optimizer.
    options = {"DefaultTensorType": onnx.TensorProto.FLOAT}
    quantize_dynamic(between, path, weight_type=QuantType.QUInt8, extra_options=options)


def four_bits(name: str, path: Path, before: Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    tool = MatMulNBitsQuantizer(onnx.load(before), block_size=16, is_symmetric=False)
    tool.process()
    onnx.save(tool.model.model, path)


FORMS: Mapping[str, Callable[[str, Path, Path], None]] = {
    "TorchScript": script,
    "dynamo": dynamo,
    "transformers.optimizer": transformers_optimizer,
    "ORT_ENABLE_EXTENDED": extended,
    "ORT_ENABLE_ALL": all_optimizations,
    "float16": float16,
    "int8, dynamic": dynamic,
    "optimizer, int8": optimized_dynamic,
    "4 bits": four_bits,
}
TOLERANCES = {"float16": 0.1, "int8, dynamic": 0.3, "optimizer, int8": 0.3, "4 bits": 0.5}
"""The largest ‖gradient − torch's‖ / ‖torch's‖ of a parameter; 0.002 where nothing is rounded."""


@attrs.frozen
class Outcome:
    """What became of a training: ``trained``, ``refused``, ``wrong`` or ``crashed``, and why."""

    status: str
    why: str = ""
    compared: int = 0
    error: float = 0.0
    operators: tuple[str, ...] = ()
    """Those outside the standard, in the file."""


def reference(name: str) -> tuple[Any, dict[str, Any]]:
    """The labels, and the gradient of the squared error by every parameter, of torch in float32."""
    network, inputs = file_networks.make(name)
    network = _folded(network)
    out = network(*inputs.values())
    labels = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    ((out - labels) ** 2).mean().backward()
    found = {n: p for n, p in network.named_parameters() if p.grad is not None}
    pairs = {n: (p.detach().numpy(), p.grad.numpy()) for n, p in found.items()}
    return labels.numpy(), pairs


def _folded(network: nn.Module) -> nn.Module:
    """Each BatchNormalization in the convolution before it, as exporters of inference do it."""
    for part in list(network.modules()):
        if (
            isinstance(part, nn.Sequential)
            and len(part) == 2
            and isinstance(part[1], nn.BatchNorm2d)
        ):
            part[0] = fuse_conv_bn_eval(part[0], part[1])
            part[1] = nn.Identity()
    return network


def _partner(value: Any, pairs: Mapping[str, Any], half: bool) -> Any:
    """The gradient of torch's parameter that has the same values, transposed or not."""
    tolerance = 1e-3 if half else 3e-6
    for weight, slope in pairs.values():
        for w, g in ((weight, slope), (weight.T, slope.T)):
            # Ones and zeros occur more than once: such a tensor has no single partner.
            if w.shape != value.shape or np.ptp(w) == 0:
                continue
            if np.allclose(w, value, rtol=tolerance, atol=tolerance):
                return g
    return None


def train(name: str, form: str, path: Path, labels: Any, pairs: Mapping[str, Any]) -> Outcome:
    """One step of plain gradient descent, whose change of each parameter is its gradient."""
    _, inputs = file_networks.make(name)
    try:
        trainer = Trainer(
            path,
            loss="squared_error",
            optimizer="sgd",
            learning_rate=_RATE,
            backend="fused",
            batch_norm="freeze",
            progress=False,
        )
        before = {n: np.array(a, np.float32) for n, a in trainer.get_state().items()}
        wanted = {i.name for i in trainer.model.inputs}
        feeds = {n: t.numpy() for n, t in inputs.items() if n in wanted}
        given = next(iter(feeds.values())) if len(feeds) == 1 else feeds
        trainer.step((given, labels))
        after = trainer.get_state()
        kept = [n.op_type for n in trainer.export().graph.node]
        assert kept == [n.op_type for n in onnx.load(path).graph.node]
    except OrtflexError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("crashed", f"{type(error).__name__}: {error}")
    compared, worst, which = 0, 0.0, ""
    for parameter, value in before.items():
        slope = _partner(value, pairs, form == "float16")
        if slope is None or np.linalg.norm(slope) < 1e-4:
            continue
        own = (value - np.asarray(after[parameter], np.float32)) / _RATE
        error = float(np.linalg.norm(own - slope) / np.linalg.norm(slope))
        compared += 1
        if error > worst or not np.isfinite(error):
            worst, which = error, parameter
    if not compared:
        return Outcome("wrong", "no parameter has a partner in torch")
    if not worst <= TOLERANCES.get(form, 2e-3):
        return Outcome("wrong", f"the gradient of {which} differs by {worst:.2g}", compared, worst)
    return Outcome("trained", "", compared, worst)


def outcome(name: str, form: str, folder: Path) -> Outcome:
    """Make the file of a network in a form, and train it."""
    labels, pairs = reference(name)
    before, path = folder / f"{name}.onnx", folder / f"{name}-{form}.onnx"
    quiet = io.StringIO()
    try:
        with redirect_stdout(quiet), redirect_stderr(quiet):
            if not before.exists():
                try:
                    script(name, before, before)
                except Exception:  # torch's older exporter lacks an operator
                    dynamo(name, before, before)
            FORMS[form](name, path, before)
    except Exception as error:  # of torch or onnxruntime: there is no such file to train
        return Outcome("no file", f"{type(error).__name__}: {str(error)[:300]}")
    found = train(name, form, path, labels, pairs)
    return attrs.evolve(found, operators=_outside(path))


def _outside(path: Path) -> tuple[str, ...]:
    """The operators outside the standard in a file; onnxruntime puts some into the standard's domain."""
    nodes = onnx.load(path).graph.node
    return tuple(sorted({n.op_type for n in nodes if n.domain or not onnx.defs.has(n.op_type, "")}))


# The page of the table ----------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "files.md"
Rows = Mapping[tuple[str, str], Outcome]


def measure(folder: Path) -> Rows:
    rows = {}
    for name in FAMILIES:
        for form in FORMS:
            rows[name, form] = outcome(name, form, folder)
            print(name, form, rows[name, form], flush=True)
    return rows


def page(rows: Rows) -> str:
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: Rows) -> Iterator[str]:
    made = {key: o for key, o in rows.items() if o.status != "no file"}
    counts = Counter(o.status for o in made.values())
    trained = counts["trained"] / max(1, len(made))
    yield "# Tested models"
    yield ""
    yield "<!-- Generated by `python -m tests.end_to_end.file_table`; edit that instead. -->"
    yield ""
    yield (
        "This page lists the files that ortflex is tested with, and shows how closely its gradients agree "
        "with those of torch."
    )
    yield ""
    yield (
        f"The files are small networks with random weights from {len(FAMILIES)} families, such as BERT "
        "and ResNet, exported from torch. Most of the files "
        "were then optimized with `onnxruntime.transformers.optimizer` (the transformers optimizer), "
        "optimized by onnxruntime itself with ORT_ENABLE_EXTENDED or ORT_ENABLE_ALL, "
        "converted to float16, or quantized. Dynamic quantization to 8-bit integers was applied to both "
        "the exported file and the output of the transformers optimizer, and quantization of matrix "
        "products to 4 bits was applied to the exported file. Each of these "
        "variants of a network is called a *form* on this page."
    )
    yield ""
    yield (
        "Each test trains a file for one step of plain gradient descent and compares the change in each "
        "parameter with torch's gradient in the float32 network. Parameters are matched by their values. "
        "Fused parameters, such as query, key and value weights that were merged into one matrix, have no "
        "counterpart in torch and are not compared."
    )
    yield ""
    yield (
        f"ortflex trains {counts['trained']} of the {len(made)} files ({100 * trained:.0f} %) correctly. "
        f"For {_count(counts['refused'])}, it raises an error that states the reason. "
        f"{_failures(counts['wrong'], counts['crashed'])}"
    )
    yield ""
    yield "## Gradient errors"
    yield ""
    yield (
        "In the following tables, each column stands for a form. TorchScript and dynamo are torch's two "
        'exporters, and "optimizer" is the transformers optimizer. Each number is the largest relative '
        "error, ‖gradient − torch's gradient‖ / ‖torch's gradient‖, among the compared parameters. "
        'The word "error" means that ortflex cannot train the file and raises an error.'
    )
    yield ""
    # Three tables: one of ten columns would leave the screen.
    for forms in (list(FORMS)[:3], list(FORMS)[3:6], list(FORMS)[6:]):
        heads = [form.removeprefix("transformers.") for form in forms]
        yield f"| family | {' | '.join(heads)} |"
        yield "|---" * (len(forms) + 1) + "|"
        for name in dict.fromkeys(name for name, _ in rows):
            cells = [_cell(rows.get((name, form))) for form in forms]
            yield f"| {name} | {' | '.join(cells)} |"
        yield ""
    limits = ", ".join(f'{limit:g} for "{form}"' for form, limit in TOLERANCES.items())
    yield (
        f"A file passes if its error is at most {limits}, or 0.002 for the other forms. The limits for "
        "float16 and quantized files are larger because rounding the weights of a network changes its "
        "gradients. In files whose integer weights are frozen, only the gradients of biases, normalization "
        "layers and embeddings are compared."
    )
    yield ""
    yield "## Non-standard operators in these files"
    yield ""
    yield (
        "The next table lists the operators in these files that are not part of the ONNX standard. Some of "
        "them, such as Conv in the ORT_ENABLE_ALL form, have the same name as a standard operator but "
        "belong to one of onnxruntime's own domains."
    )
    yield ""
    yield "| form | operators |"
    yield "|---|---|"
    for form in FORMS:
        names = {o for (_, f), found in rows.items() if f == form for o in found.operators}
        if names:
            yield f"| {form.removeprefix('transformers.')} | {', '.join(sorted(names))} |"
    others = {key: o for key, o in rows.items() if o.status != "trained"}
    if others:
        yield ""
        yield "## Files that cannot be trained"
        yield ""
        yield "Each item names the form and the families of the files, and quotes the error message:"
        yield ""
        reasons: dict[tuple[str, str, str], list[str]] = {}
        for (name, form), found in others.items():
            reasons.setdefault((form, found.status, _plain(found.why)), []).append(name)
        for (form, status, why), names in reasons.items():
            note = "" if status == "refused" else f" ({_shown(status)})"
            yield f"- **{form.removeprefix('transformers.')}**, {', '.join(names)}{note}: {why}"


def _cell(found: Outcome | None) -> str:
    if found is None:
        return ""
    return f"{found.error:.0e}" if found.status == "trained" else _shown(found.status)


def _count(files: int) -> str:
    return {0: "no file", 1: "1 file"}.get(files, f"{files} files")


def _failures(wrong: int, crashed: int) -> str:
    if not wrong and not crashed:
        return "None of the files causes wrong gradients or a crash."
    return f"It computes wrong gradients for {_count(wrong)} and crashes for {_count(crashed)}."


def _shown(status: str) -> str:
    return {"refused": "error"}.get(status, status)


def _plain(text: str) -> str:
    """The reason why an operator is not decomposed, if there is one; else the beginning of the text."""
    if found := re.search(r"(\w+) '.*' of (\S+) (is not computed by standard .*)", text):
        text = f"{found[1]} of {found[2]} {found[3]}"
    words = " ".join(re.sub(r"\x1b\[\d*m", "", text).split())
    return (words[:300] + " …" if len(words) > 300 else words).replace("<", "‹").replace(">", "›")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    PAGE.write_text(page(rows), "utf-8")


if __name__ == "__main__":
    main()
