"""Real files to begin with: small models of every sort, a checkpoint, a recipe, data."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, helper

from tests import models
from tests.training import make, regression

node = helper.make_node


def parsed(body: str, weights: str = "float[3] w", opset: int = 17) -> ModelProto:
    """A model from the text format; ``weights`` are declared and get values of their own."""
    made: ModelProto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "local": 1]> '
        f"g (float[N, 3] x, {weights}) => (float[N, 3] y) {{ {body} }}"
    )
    rng = np.random.default_rng(0)
    for value in [v for v in made.graph.input if v.name != "x"]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        array = rng.standard_normal(shape).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        made.graph.input.remove(value)
    return made


def control() -> ModelProto:
    return parsed(
        """
        n = Constant <value = int64 {3}> ()  x0 = MatMul(x, w0)
        a = Loop(n, , x0) <body = b (int64 i, bool go, float[] s) => (bool on, float[] t) {
            on = Identity(go)  m = Mul(s, w)  t = Tanh(m)
        }>
        c = Constant <value = bool {1}> ()
        y = If(c) <then_branch = t () => (float[] p) { q = Mul(a, w)  p = Exp(q) },
                   else_branch = e () => (float[] r) { s = Mul(a, w)  r = Tanh(s) }>
        """,
        "float[3, 3] w0, float[3] w",
    )


def shapes() -> ModelProto:
    return parsed(
        """
        s = Shape(x)  zero = Constant <value = int64 {0}> ()  n = Gather(s, zero)
        ax = Constant <value = int64[1] {0}> ()  n1 = Unsqueeze(n, ax)
        three = Constant <value = int64[1] {3}> ()  to = Concat <axis = 0> (n1, three)
        h = MatMul(x, w)  f = Expand(h, to)  r = Reshape(f, to)
        fill = ConstantOfShape <value = float[1] {0.5}> (to)  y = Add(r, fill)
        """,
        "float[3, 3] w",
    )


def norms() -> ModelProto:
    return parsed(
        """
        h = MatMul(x, w)
        l = LayerNormalization <axis = -1> (h, scale, shift)
        ratio = Constant <value = float {0.5}> ()  on = Constant <value = bool {1}> ()
        d = Dropout <seed = 3> (l, ratio, on)
        b = BatchNormalization (d, scale, shift, mean, var)
        y = Softmax <axis = -1> (b)
        """,
        "float[3, 3] w, float[3] scale, float[3] shift, float[3] mean, float[3] var",
    )


def sequences() -> ModelProto:
    return parsed(
        """
        h = MatMul(x, w)  parts = SplitToSequence <axis = 1> (h)
        zero = Constant <value = int64 {0}> ()  first = SequenceAt(parts, zero)
        rest = ConcatFromSequence <axis = 1> (parts)  y = Sub(rest, first)
        """,
        "float[3, 3] w",
    )


def functions() -> ModelProto:
    made = parsed("h = local.twice(x, w)  y = local.twice(h, w)", "float[3, 3] w")
    body = helper.make_function(
        "local",
        "twice",
        ["a", "b"],
        ["d"],
        [node("MatMul", ["a", "b"], ["c"]), node("Tanh", ["c"], ["d"])],
        [helper.make_opsetid("", 17)],
    )
    made.functions.append(body)
    return made


def recurrent() -> ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"W": (1, 8, 4), "R": (1, 8, 2), "B": (1, 16)}
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return models.parsed(
        "t = Transpose<perm = [1, 0, 2]>(x) e, h, c = LSTM<hidden_size = 2>(t, W, R, B) "
        "y = Squeeze(h, axis)",
        values | {"axis": np.array([0])},
        "float[N, 3, 4] x",
        "float[N, 2] y",
    )


def embedding() -> ModelProto:
    made = models.parsed(
        "e = Gather(table, x) m = ReduceMean<axes = [1], keepdims = 0>(e) "
        "y = Gemm<transB = 1, alpha = 0.5>(m, V, c)",
        {"table": np.ones((5, 3)), "V": np.ones((2, 3)), "c": np.zeros(2)},
        "int64[N, 2] x",
        "float[N, 2] y",
    )
    table = made.graph.initializer[0]
    table.ClearField("raw_data")
    table.float_data.extend([0.5] * 15)  # the other way to write a tensor
    return made


def old() -> ModelProto:
    made = models.mlp((3, 4, 1))
    made.opset_import[0].version = 11
    made.ir_version = 6
    return made


@functools.cache
def all_models() -> dict[str, bytes]:
    """Serialized models by name; the one called ``outside`` has its weights in ``w.bin``."""
    made = {
        "mlp": models.mlp((3, 4, 1)),
        "relu": models.mlp((3, 4, 1), "Relu"),
        "conv": models.conv_net(4, 2, 3),
        "classifier": models.classifier(),
        "two_headed": models.two_headed(),
        "control": control(),
        "shapes": shapes(),
        "norms": norms(),
        "sequences": sequences(),
        "functions": functions(),
        "recurrent": recurrent(),
        "embedding": embedding(),
        "old": old(),
        "outside": outside(),
    }
    return {name: model.SerializeToString() for name, model in made.items()}


def outside() -> ModelProto:
    made = models.mlp((3, 4, 1))
    offset = 0
    for tensor in made.graph.initializer:
        size = len(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, "w.bin", offset, size)
        tensor.ClearField("raw_data")
        offset += size
    return made


def weights() -> bytes:
    """What ``w.bin`` next to the model ``outside`` holds."""
    return b"".join(t.raw_data for t in models.mlp((3, 4, 1)).graph.initializer)


RECIPE = """
model = "model.onnx"
loss = { name = "huber", delta = 0.5, factor = 2.0 }
optimizer = { name = "adam", beta1 = 0.8 }
schedule = { name = "cosine", by = "epoch" }
penalty = { "W*" = { name = "l2", l2 = 1e-3 } }
groups = [{ params = ["b*"], rate = 0.1 }, { params = "W1", start_epoch = 1 }]
learning_rate = 0.01
batch_size = 8
epochs = 2
seed = 3
metrics = ["mae"]
callbacks = [{ name = "early_stopping", patience = 2 }]
clip_norm = 1.0
averaging = "ema"
validation = 0.25
dropout = "off"

[data]
name = "csv"
path = "data.csv"
target = ["y"]
"""


def checkpoint(folder: Path) -> Path:
    """A checkpoint in the middle of a training; of the model in ``folder``."""
    x, y = regression(rows=12, features=3)
    trainer = make(
        models.mlp((3, 4, 1)),
        backend="fused",
        optimizer="adam",
        batch_size=4,
        epochs=3,
        schedule="cosine",
        averaging="ema",
        callbacks=[{"name": "early_stopping", "monitor": "loss"}],
    )
    trainer.fit(x, y)
    return trainer.save(folder)


def portable_step(folder: Path) -> Path:
    """A portable step of a trained model, next to the model."""
    trainer = make(models.mlp((3, 4, 1)), backend="fused", optimizer="adam", batch_size=4, epochs=1)
    trainer.fit(*regression(rows=12, features=3))
    trainer.export_step(folder / "step")
    (folder / "m.onnx").write_bytes(all_models()["mlp"])
    return folder


def adapter(folder: Path) -> Path:
    """A folder of PEFT with patterns, next to its model."""
    from ortflex_plugins.adapters.lora import Lora

    path = folder / "m.onnx"
    path.write_bytes(all_models()["mlp"])
    trainer = make(path, backend="fused", adapters=Lora(rank=2), batch_size=4, epochs=1)
    trainer.fit(*regression(rows=12, features=3))  # B is 0 before
    trainer.export_adapter(folder / "peft")
    config = folder / "peft" / "adapter_config.json"
    entries = json.loads(config.read_text())
    entries["alpha_pattern"] = {"W[0-9]": 3, "(a|b)*c": 5}
    entries |= {"target_modules": ["W1", "W2"], "exclude_modules": None, "layers_pattern": "layers"}
    config.write_text(json.dumps(entries))
    return folder


def finished_run(folder: Path) -> Path:
    """The run folder of ``ortflex train``."""
    from ortflex_plugins.cli.main import main

    (folder / "model.onnx").write_bytes(all_models()["mlp"])
    (folder / "data.csv").write_bytes(table())
    (folder / "train.toml").write_text(RECIPE)
    place = folder / "run"
    main(["train", f"{folder}/train.toml", f"output={place}"], standalone_mode=False)
    return place


def arrays() -> dict[str, np.ndarray]:
    """Rows of the models' data."""
    x, y = regression(rows=12, features=3)
    return {"X": x, "y": y, "sample_weight": np.linspace(0.5, 1, 12)}


def columns(kind: str) -> bytes:
    """The same as a parquet or an arrow file."""
    import pyarrow.parquet

    x, y = regression(rows=12, features=3)
    made = pyarrow.table({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y[:, 0]})
    out = pyarrow.BufferOutputStream()
    if kind == "parquet":
        pyarrow.parquet.write_table(made, out, row_group_size=5)
    else:
        with pyarrow.ipc.new_file(out, made.schema) as file:
            file.write_table(made, max_chunksize=5)
    return bytes(out.getvalue())


def table() -> bytes:
    """The same as text."""
    x, y = regression(rows=12, features=3)
    rows = [",".join(f"{v:.4g}" for v in (*a, *b)) for a, b in zip(x, y, strict=True)]
    return "\n".join(["a,b,c,y", *rows, ""]).encode()
