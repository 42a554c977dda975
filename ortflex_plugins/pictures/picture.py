"""The functions for users: a model or a training step as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import onnx
from onnx import ModelProto

from ortflex_core import (
    ConfigError,
    Model,
    NotDifferentiable,
    OrtflexError,
    Program,
    as_model,
    bind_terms,
    check_model,
    edited_model,
    expected_labels,
    find_changes,
    internals_of,
    read_model,
    short_traceback,
    write_bytes,
)
from ortflex_plugins.pictures import html, layout, reading, svg
from ortflex_plugins.pictures.reading import Marks
from ortflex_plugins.pictures.scene import Level, clean
from ortflex_plugins.pictures.step_parts import parts_of, step_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortflex_core import Changes, Plugins, Trainer

FORMATS = ("svg", "html", "png")


@attrs.frozen(kw_only=True)
class Picture:
    """A graph, ready to be drawn.

    Attributes:
        title: the name of the graph.
        level: its boxes and edges.
        unfold: show the content of folded boxes in SVG and PNG; in HTML, they open at a click.
        note: what is missing in the picture, or "".
        changes: what edits changed: ``new``, ``smaller`` and ``removed``, each in one line.
    """

    title: str
    level: Level
    unfold: bool = False
    note: str = ""
    changes: Mapping[str, str] = attrs.field(factory=dict)

    def svg(self) -> str:
        """An SVG document; it loads nothing."""
        drawing = layout.layout(self.level, unfold=self.unfold)
        return svg.svg(drawing, self.level.kinds(), self.title)

    def html(self) -> str:
        """A page whose folded boxes open at a click; it loads nothing."""
        return html.page(self.title, html.graph(self.level, self.title), note=self.note)

    def figure(self) -> Figure:
        """A matplotlib figure.

        Raises:
            ConfigError: matplotlib is not installed (``pip install "ortflex[plot]"``).
        """
        from ortflex_plugins.pictures import figures

        drawing = layout.layout(self.level, unfold=self.unfold)
        return figures.figure(drawing, self.level.kinds(), self.title)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture; the suffix gives the format.

        Raises:
            ConfigError: the suffix is not .svg, .html or .png, or it is .png and matplotlib is missing.
            OutputError: the file cannot be written; an existing file is not changed.
        """
        target = Path(path)
        kind = target.suffix.lower().lstrip(".")
        if kind not in FORMATS:
            raise ConfigError(
                f"cannot draw {target.name!r}: expected a name that ends with "
                f"{', '.join('.' + f for f in FORMATS)}, got {target.suffix!r}"
            )
        if kind == "png":
            from ortflex_plugins.pictures import figures

            write_bytes(target, figures.png(self.figure()))
        else:
            write_bytes(target, (self.svg() if kind == "svg" else self.html()).encode())
        return target

    def _repr_html_(self) -> str:
        return self.svg()


@short_traceback
def draw(
    model: str | os.PathLike[str] | bytes | ModelProto | Model | Program,
    *,
    loss: Any = None,
    params: str | Iterable[str] | None = None,
    freeze: str | Iterable[str] = (),
    head: Any = None,
    edits: Any = (),
    fold: bool | None = None,
    unfold: bool = False,
    title: str | None = None,
    plugins: Plugins | None = None,
) -> Picture:
    """Draw the graph of a model, or a graph that is used for training.

    Every operator is a box. In a model, its color shows what :func:`ortflex_core.check_model` reports:
    the operator reads a trained parameter, passes a gradient on, is frozen, is not differentiable, or
    has no gradient rule. In a graph from ``Trainer.save_onnx_graph``, the forward pass, the loss, the
    backward pass, the penalty, the transforms and the update have different colors. Nothing is run.

    Args:
        model: a path, the file's bytes, a ModelProto, a :class:`Model`, or a :class:`Program`.
        loss: as for :class:`Trainer`; None is the squared error on every float output.
        params: the parameters that are trained, as for :class:`Trainer`; for a graph that is used for
            training, the names of weights.
        freeze: the parameters that are not trained, as for :class:`Trainer`.
        head: a new last layer, as for :class:`Trainer`; what it changes is marked.
        edits: other edits, as for :class:`Trainer`; what they change is marked.
        fold: whether repeated blocks are drawn as one box; by default if the graph has more than 24
            operators.
        unfold: whether the picture shows the content of these boxes.
        title: the title; by default the name of the file.
        plugins: the plugins with the gradient rules; None for the installed plugins.

    Returns:
        A ``Picture``, which notebooks display. ``save(path)`` writes it as .svg, .html or .png;
        ``svg()`` and ``html()`` return strings, and ``figure()`` returns a figure of matplotlib.

    Raises:
        ModelError: the file is missing or is not an ONNX model, or it has no tensor with a name in
            ``loss`` or ``params``.
        ConfigError, PluginError: the loss is unknown or has wrong parameters.

    Example:
        >>> from onnx import parser
        >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
        ... g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }''')
        >>> picture = draw(model, title="a line")
        >>> [(item.title, item.kind) for item in picture.level.items]
        [('x', 'io'), ('MatMul', 'trainable'), ('y', 'io')]
        >>> picture.svg()[:4]
        '<svg'
    """
    if head is not None or edits:
        given = model.proto() if isinstance(model, Program) else model
        model = edited_model(given, head=head, edits=edits, plugins=plugins)
    options = {"loss": loss, "params": params, "freeze": freeze, "plugins": plugins}
    return draw_changed(model, None, fold=fold, unfold=unfold, title=title, **options)


def draw_changed(
    model: str | os.PathLike[str] | bytes | ModelProto | Model | Program,
    changes: Changes | None,
    *,
    fold: bool | None = None,
    unfold: bool = False,
    title: str | None = None,
    **options: Any,
) -> Picture:
    """A model as :func:`draw` draws it; ``changes`` are those of edits that a file contains."""
    params = options.pop("params", None)
    proto, label = _proto(model)
    heading = clean(title or label, 80)
    parts = parts_of(proto)
    chosen = [params] if isinstance(params, str) else None if params is None else list(params)
    note = ""
    if parts is not None:
        marks = _training_marks(proto, parts, chosen or ())
    else:
        try:
            # If there is a file, large tensors stay in it.
            source = model if isinstance(model, Model | str | os.PathLike) else proto
            known = as_model(source, False)
            marks = _checked(known, proto, params=chosen, **options)
            if known.as_read is not known:
                changes = find_changes(known)
        except OrtflexError as error:
            if options.get("loss") is not None or params is not None:
                raise
            note = f"without the colors of trained operators: {clean(str(error))}"
            marks = Marks()
    if changes is not None:
        marks = attrs.evolve(marks, new=changes.new, new_nodes=changes.nodes)
    return Picture(
        title=heading,
        level=reading.read(proto, marks, fold),
        unfold=unfold,
        note=note,
        changes={} if changes is None else changes.facts,
    )


_STATE = ("slot", "average", "buffer")


@short_traceback
def draw_step(
    trainer: Trainer, *, fold: bool | None = None, unfold: bool = False, title: str | None = None
) -> Picture:
    """Draw one training step of a Trainer: forward, loss, backward, penalty, transforms and update.

    Nothing is compiled, and no data is needed; before the first ``fit``, labels have the shape and type
    that each loss expects by default.

    Args:
        trainer: the Trainer, which is not changed.
        fold: whether repeated blocks are drawn as one box; by default if the graph has more than 24
            operators.
        unfold: whether the picture shows the content of these boxes.
        title: the title; by default it names the model.

    Returns:
        A ``Picture``, as for :func:`draw`.

    Raises:
        NoGradientRule, NotDifferentiable: the loss cannot be differentiated with respect to a parameter.

    Example:
        >>> from onnx import parser
        >>> from ortflex import Trainer
        >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
        ... g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }''')
        >>> picture = draw_step(Trainer(model, loss="squared_error", progress=False))
        >>> sorted({item.kind for item in picture.level.items} - {"io"})
        ['backward', 'forward', 'loss', 'update']
    """
    inner = internals_of(trainer)
    problem = inner.problem
    if not problem.terms:
        requests = inner.setup.requests
        labels = expected_labels(trainer.model, requests)
        problem = attrs.evolve(problem, terms=bind_terms(trainer.model, requests, labels, {}))
    fixed = [i.shape[0] for i in trainer.model.inputs if i.shape and isinstance(i.shape[0], int)]
    rows = fixed[0] if fixed else trainer.batch_size
    try:
        step = step_of(problem, rows)
    except NotDifferentiable as error:
        raise NotDifferentiable(
            f"{error}. Do not train such parameters: params=['*', '!name']"
        ) from None
    proto = step.program.proto()
    marks = _training_marks(proto, [step.parts[node.name] for node in proto.graph.node], ())
    changes = find_changes(trainer.model)
    marks = attrs.evolve(marks, new=changes.new)
    heading = title or f"One step of training {trainer.model.label}"
    return Picture(
        title=clean(heading, 80),
        level=reading.read(proto, marks, fold),
        unfold=unfold,
        changes=changes.facts,
    )


def _proto(model: Any) -> tuple[ModelProto, str]:
    if isinstance(model, Model):
        return model.proto, model.label
    if isinstance(model, Program):
        return model.proto(), model.name
    label = str(model) if isinstance(model, str | os.PathLike) else "the model"
    return read_model(model, label), label


def _training_marks(proto: ModelProto, parts: list[str], params: Iterable[str]) -> Marks:
    """Marks of a graph that training uses; ``params`` are further trained parameters."""
    inputs = {value.name for value in proto.graph.input}
    return Marks(
        kinds=parts,
        trained=_names(proto, "parameter") | (inputs & set(params)),
        slots=_names(proto, *_STATE),
        types=_types(proto),
    )


def _names(proto: ModelProto, *roles: str) -> frozenset[str]:
    """The inputs with some roles, which ortflex's graphs record as doc strings."""
    return frozenset(v.name for v in proto.graph.input if v.doc_string in roles)


def _types(proto: ModelProto) -> dict[str, str]:
    graph = proto.graph
    values = [*graph.input, *graph.value_info, *graph.output]
    return {v.name: f"{v.name} {reading.typed(v)}" for v in values}


def _checked(model: Model, proto: ModelProto, **options: Any) -> Marks:
    report = check_model(model, **options)
    trained = frozenset(c.name for c in report.choices if c.trained)
    nodes = report.nodes
    # The report has the nodes with functions inlined, in the order in which `reading` visits them.
    same_nodes = [n.op_type for n in model.internal.graph.node] == list(_executed(proto))
    types = {n: str(model.value(n)) for n in model.producers}
    marks = Marks(trained=trained, types=types)
    if same_nodes:
        marks = attrs.evolve(
            marks, kinds=[n.status for n in nodes], reasons=[n.reason for n in nodes]
        )
    return marks


def _executed(proto: ModelProto) -> Iterable[str]:
    functions = {(f.domain, f.name, f.overload): f for f in proto.functions}

    def walk(nodes: Iterable[onnx.NodeProto]) -> Iterable[str]:
        for node in nodes:
            function = functions.get((node.domain, node.op_type, node.overload))
            if function is None:
                yield node.op_type
            else:
                yield from walk(function.node)

    return walk(proto.graph.node)
