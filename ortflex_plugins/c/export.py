"""A portable step as a folder of C: training and prediction without a runtime.

The graphs of the portable step (``step.onnx`` for a fixed number of rows, ``predict.onnx``) become two
files of C, ``step.h`` declares functions that any language can call, ``state.h`` has the values at the
start. Names of the model are never text in them: they become identifiers of letters, digits and
underscores, and the header of the state file is a table of bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx

from ortflex_core import (
    Array,
    Host,
    HostInput,
    Program,
    TensorSpec,
    Unsupported,
    make_folder,
    open_step,
    write_bytes,
)
from ortflex_plugins.c.generator import Generated, Layout, Memory, generate
from ortflex_plugins.c.products import Machine
from ortflex_plugins.c.scalars import C_TYPES, literal
from ortflex_plugins.operators.calls import NotTranslatable

FILES = ("step.c", "predict.c", "step.h", "state.h", "main.c", "Makefile", "state.safetensors")
"""The files of the folder; ``manifest.json`` of the portable step is next to them."""
_TEMPLATES = Path(__file__).parent / "templates"
_COLUMNS = ("data", "label", "sample_weight")
_SETTINGS = ("rate", "hyperparameter")
_RESERVED = frozenset(
    re.findall(
        r"\w+",
        """
        alignas alignof and asm auto bool break case catch char class const constexpr
        continue decltype default delete do double else enum explicit export extern false
        float for friend goto if inline int long mutable namespace new noexcept not nullptr
        operator or private protected public register requires restrict return short signed
        sizeof static struct switch template this throw true try typedef typeid typename
        union unsigned using virtual void volatile while xor linux unix main argc argv at
        context cost count data epoch file i j k kept left loss losses memcmp memcpy memory
        memset own piece rand read rows settings size state steps sum t values write written
        wrong column
        """,
    )
)
"""Words of C and C++, and what the functions call their own variables; macros have upper case."""
_MOST_STATE = 64 << 20
"""The bytes of a state that ``state.h`` has as text."""
_PREDICT = """
int step_predict_row(void *state, void *memory, const void *const *data, const int64_t *row) {
    const double none = 0.0;
    double cost = 0.0;
    return ortflex_step(state, memory, data, row, 1, &none, &cost);
}
"""


@attrs.frozen
class Column:
    """An input or a result as C has it: an identifier, the type, the numbers of a row."""

    key: str
    name: str
    kind: str
    width: int


def export_c(
    step: str | os.PathLike[str], folder: str | os.PathLike[str], machine: Machine | None = None
) -> Path:
    """Write a portable step as C.

    Args:
        step: the folder of a portable step of a fixed number of rows.
        folder: the target. Files of an earlier export in it are replaced, and other files are kept.
        machine: the machine for which products are written; without it, they are plain C, which small
            devices need.

    Returns:
        The folder. ``step.h`` declares the functions, which any language can call.

    Raises:
        CheckpointError: ``step`` is not a portable step, or damaged.
        Unsupported: the step accepts any number of rows or has several batches per run, or an operator,
            which the message names, cannot be written in C.
        OutputError: the folder cannot be written to.

    Example:
        >>> export_c("step", "step_in_c")  # doctest: +SKIP
        PosixPath('step_in_c')
    """
    portable = open_step(step)
    source = _Source(portable, machine or Machine())
    target = make_folder(Path(folder))
    for name, content in source.files().items():
        write_bytes(target / name, content)
    return target


class _Source:
    """The text of each file of an export."""

    def __init__(self, portable: Any, machine: Machine) -> None:
        manifest = portable.manifest
        if manifest.rows is None:
            raise Unsupported(
                "C needs batches of a fixed number of rows: export the step with rows=, or --rows on the "
                "command line"
            )
        if manifest.batches_per_run != 1:
            raise Unsupported(
                "C has one batch per step: export with steps_per_run=1 and accumulate=1 (rows= may be the "
                "rows of all batches of a step)"
            )
        self._portable, self._manifest, self._rows = portable, manifest, manifest.rows
        names = _Identifiers()
        self._state = {item.name: item for item in manifest.step if item.name and item.new}
        self._columns = {
            i.name: Column(i.name, names(i.name), _c_type(i.dtype), _width(i, "step"))
            for i in {i.name: i for i in (*manifest.predict, *manifest.step)}.values()
            if i.role in _COLUMNS and i.name
        }
        results = [i for i in manifest.predict if i.new and i.dtype in C_TYPES]
        self._results = [
            Column(i.new, names(f"out_{i.new}"), _c_type(i.dtype), _width(i, "predict"))
            for i in results
        ]
        arrays = portable.state.arrays
        memory = [Memory(n, tuple(i.shape), np.dtype(i.dtype)) for n, i in self._state.items()] + [
            Memory(_result(i.new), (1, *i.shape[1:]), np.dtype(i.dtype)) for i in results
        ]
        self._layout = Layout.of(memory)
        self._arrays: Mapping[str, Array] = arrays
        size = sum(a.nbytes for a in arrays.values())
        if size > _MOST_STATE:
            raise Unsupported(
                f"a state of {size >> 20} MiB is too large for a file of C (at most {_MOST_STATE >> 20} "
                "MiB); step.onnx runs on onnxruntime in C, too"
            )
        try:
            self._step = self._generated(
                portable.step, manifest.step, self._rows, machine, ["loss"]
            )
            self._predict = self._generated(portable.predict, manifest.predict, 1, machine, [])
        except NotTranslatable as error:
            raise Unsupported(
                f"the step has no form in C for {error}; step.onnx runs on onnxruntime in C, too. If only "
                "an output needs it, such as the label of a classifier of scikit-learn, leave it out: "
                'edits = [{ name = "cut", at = "probabilities" }] with the name of a tensor before it'
            ) from error

    def _generated(
        self, path: Path, items: Sequence[Any], rows: int, machine: Machine, costs: Sequence[str]
    ) -> tuple[Generated, list[Any]]:
        """The file of a graph, and its settings."""
        proto = onnx.load(str(path))
        settings = [i for i in items if i.role in _SETTINGS and i.name]
        others = [i for i in items if i.name and i.role not in _SETTINGS]
        inputs = [_spec(i.name, i, rows if i.role in _COLUMNS else None) for i in others]
        given = {i.new: i for i in items if i.new}
        # A program has its outputs in the order of the graph.
        found = [given[o.name] for o in proto.graph.output]
        outputs = [_spec(i.new, i, None) for i in found]
        keys = [i.name or ("loss" if i.role == "loss" else _result(i.new)) for i in found]
        hosts = [_host(i) for i in settings]
        program = Program(
            name=path.stem,
            model=proto.SerializeToString(),
            inputs=tuple(inputs),
            hosts=tuple(hosts),
            outputs=tuple(outputs),
            nodes=len(proto.graph.node),
            input_keys=tuple(spec.name for spec in inputs),
            output_keys=tuple(keys),
        )
        columns = [i.name for i in others if i.role in _COLUMNS]
        return generate(program, self._layout, columns, costs, machine), settings

    def files(self) -> dict[str, bytes]:
        """The content of every file."""
        (step, settings), (predict, _) = self._step, self._predict
        train = [self._columns[str(key)] for key in step.columns]
        given = [self._columns[str(key)] for key in predict.columns]
        names = _Identifiers()
        values = {
            "rows": str(self._rows),
            "state_bytes": str(self._layout.size),
            "memory_bytes": str(max(step.arena, predict.arena, 64)),
            "widths": "\n".join(
                f"#define STEP_{c.name.upper()}_WIDTH {c.width}"
                for c in dict.fromkeys([*train, *given, *self._results])
            ),
            "settings": "".join(f"STEP_{names(i.name).upper()}, " for i in settings),
            "rate_note": (
                ""
                if self._manifest.rates is None
                else " The rate is NaN: that of\n   the schedule, whose rates the step has."
            ),
            "columns_text": "\n   ".join(
                f"{c.name:<9} a column: rows of {c.width} numbers" for c in train
            ),
            "train_parameters": ", ".join(f"const {c.kind} *{c.name}" for c in train),
            "predict_parameters": ", ".join(f"const {c.kind} *{c.name}" for c in given),
            "results": ", ".join(f"{c.kind} *{c.name}" for c in self._results),
            "train_names": ", ".join(c.name for c in train),
            "predict_names": ", ".join(c.name for c in given),
            "copies": "\n        ".join(self._copies()),
            "files": " ".join(f"{c.name}.bin" for c in train),
            "arguments": str(2 + len(train)),
            "names": ", ".join(c.name for c in train),
            "reads": "\n    ".join(
                f"{c.kind} *{c.name} = column(argv[{k}], {c.width} * sizeof({c.kind}), &count);"
                for k, c in enumerate(train, 2)
            ),
        }
        functions = _filled("functions.c", values)
        own = ("EXPORT int ortflex_step(", "static int ortflex_step(")
        texts = {
            "step.c": step.source.replace(*own) + functions,
            "predict.c": predict.source.replace(*own) + _PREDICT,
            "step.h": _filled("step.h", values),
            "state.h": self._state_header(settings),
            "main.c": _filled("main.c", values),
            "Makefile": _filled("Makefile", values),
            "manifest.json": self._manifest.text(),
        }
        files = {name: text.encode() for name, text in texts.items()}
        files["state.safetensors"] = (self._portable.folder / "state.safetensors").read_bytes()
        return files

    def _copies(self) -> Iterable[str]:
        """Statements that copy the results of a row out of the state."""
        for column in self._results:
            start = self._layout.by_key[_result(column.key)].start
            size = f"{column.width} * sizeof *{column.name}"
            yield (
                f"memcpy({column.name} + i * {column.width}, (const char *)state + {start}, {size});"
            )

    def _state_header(self, settings: Sequence[Any]) -> str:
        """The text of ``state.h``: values, the header of the state file, and what is where."""
        raw = (self._portable.folder / "state.safetensors").read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        table = {k: v for k, v in json.loads(raw[8:end]).items() if k != "__metadata__"}
        places = self._layout.by_key
        lines = ["/* The values of the state at the start, and its file. */", ""]
        lines += _numbers("static const unsigned char step_header[]", map(str, raw[:end]))
        entries: list[str] = []
        for name in sorted(table, key=lambda n: table[n]["data_offsets"][0]):
            array = self._arrays[name]
            values = "0"
            if array.size and (array.any() or np.signbit(array).any()):
                values = f"step_values_{len(entries)}"
                kind = C_TYPES[array.dtype.name]
                dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
                text = (literal(v, dtype) for v in array.ravel())
                lines += _numbers(f"static const {kind} {values}[]", text)
            elif name not in places and array.size:
                values = f"step_values_{len(entries)}"
                lines.append(f"static const unsigned char {values}[{array.nbytes}] = {{ 0 }};")
            start = places[name].start if name in places else -1
            entries.append(f"    {{ {start}, {array.nbytes}, {values} }},")
        lines += [
            "struct step_tensor { int64_t start, bytes; const void *values; };",
            "static const struct step_tensor step_tensors[] = {",
            *entries,
            "};",
        ]
        defaults = [literal(float(i.default), onnx.TensorProto.DOUBLE) for i in settings]
        lines += _numbers("static const double step_settings[]", defaults or ["0.0"])
        return "\n".join(lines) + "\n"


class _Identifiers:
    """Identifiers of C for names of a model, none of them twice."""

    def __init__(self) -> None:
        self._taken = set(_RESERVED)

    def __call__(self, name: str) -> str:
        short = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")[:32] or "unnamed"
        wanted = short = short if short[0].isalpha() else f"n{short}"
        k = 1
        while wanted in self._taken:
            k += 1
            wanted = f"{short}_{k}"
        self._taken.add(wanted)
        return wanted


def _result(name: str) -> str:
    """The key of a result of a prediction among the tensors of the state."""
    return f"result {name}"


def _c_type(dtype: str) -> str:
    if dtype not in C_TYPES:
        raise Unsupported(f"C has no column of the type {dtype}")
    return C_TYPES[dtype]


def _width(item: Any, what: str) -> int:
    sizes = item.shape[1:]
    if not all(isinstance(n, int) for n in sizes):
        raise Unsupported(
            f"C needs all sizes, but {(item.name or item.new)!r} of {what}.onnx has the shape "
            f"{list(item.shape)}"
        )
    return int(np.prod(sizes, dtype=np.int64))


def _spec(name: str, item: Any, rows: int | None) -> TensorSpec:
    shape = tuple(item.shape) if rows is None else (rows, *item.shape[1:])
    dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(item.dtype))
    return TensorSpec(name, dtype, shape)


def _host(item: Any) -> HostInput:
    dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(item.dtype))
    return HostInput(TensorSpec(item.name, dtype, ()), Host.symbol(item.name))


def _numbers(declaration: str, numbers: Iterable[str]) -> list[str]:
    """An array, in lines of at most 100 characters."""
    lines, line = [f"{declaration} = {{"], "   "
    for number in numbers:
        if len(line) + len(number) > 98:
            lines.append(line)
            line = "   "
        line += f" {number},"
    return [*lines, line, "};"]


def _filled(name: str, values: Mapping[str, str]) -> str:
    """A template with its values; ``$(CC)`` and other strings with a dollar stay."""
    text = (_TEMPLATES / f"{name}.txt").read_text("utf-8")
    return re.sub(r"\$([a-z_]+)\b", lambda m: values[m[1]], text)
