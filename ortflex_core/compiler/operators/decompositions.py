"""Decompositions of installed plugins: operators outside the standard, computed by standard ones.

The nodes are replaced in the internal graph before it is analyzed, so shapes, parameters, gradient
rules and backends only see standard operators. The exported file keeps the nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from ortflex_core.compiler.graph.control_flow import constant_of, prefix_names, trace_node
from ortflex_core.compiler.graph.ops import Tensor, Trace
from ortflex_core.compiler.graph.program import build
from ortflex_core.compiler.graph.protos import (
    all_nodes,
    copied,
    node_label,
    opsets_of,
    plain_domain,
    refill,
    subgraphs_of,
)
from ortflex_core.compiler.graph.schemas import schema
from ortflex_core.compiler.operators.decomposition_table import Call, Decomposition
from ortflex_core.kernel.entries import Entry, warn_once
from ortflex_core.kernel.errors import (
    BrokenPlugin,
    NotDecomposed,
    OrtflexError,
    PluginError,
    describe_error,
)
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import Arrays, Shape, shape_of

APART = "ortflex.apart"
"""The domain that :func:`mark` gives to operators that the standard does not have."""
INTEGER_PRODUCTS = ("QLinearConv", "QLinearMatMul")
"""Operators of the standard on integers, through which a gradient passes only after a decomposition."""
Key = tuple[str, str]
"""The domain of an operator, "" for the standard's, and its name."""
Formulas = Mapping[Key, Sequence[tuple[Entry, Decomposition]]]


@attrs.frozen
class Decomposed:
    """The result of decomposing the nodes of a file that are outside the standard."""

    reasons: dict[str, str] = attrs.field(factory=dict)
    """Sentences about nodes that were decomposed, by the name of their first output."""
    refused: dict[str, str] = attrs.field(factory=dict)
    """Sentences about nodes whose form is not decomposed, likewise."""
    firsts: dict[tuple[str, str], str] = attrs.field(factory=dict)
    """The first of these sentences for each operator and reason."""
    origins: dict[str, NodeProto] = attrs.field(factory=dict)
    """The node of the file that each output of an internal node comes from."""
    frozen: dict[str, str] = attrs.field(factory=dict)
    """The initializers that are not trained by default, and why."""
    own: set[str] = attrs.field(factory=set)
    """Initializers that the file does not have, and that no argument can name."""
    packed: dict[str, tuple[str, int]] = attrs.field(factory=dict)
    """Of unpacked integers: the initializer with their bytes, and their number of bits."""
    typed: set[str] = attrs.field(factory=set)
    """The outputs of nodes that are kept and whose types only the decomposition defines."""

    def explanations(self) -> list[str]:
        """Sentences for an error: one for each operator and reason that is refused, five at most."""
        return list(self.firsts.values())[:5]


def decompose(
    model: ModelProto,
    plugins: Plugins | None,
    ruled: Callable[[Plugins, Key], bool],
    formulas: Formulas | None = None,
    large: Arrays | None = None,
) -> tuple[ModelProto, Decomposed]:
    """The model with standard operators in place of others, and what was done.

    Functions are inlined before. Operators that are ``ruled`` have a gradient rule and are kept.
    ``formulas`` are the decompositions, by default those of ``plugins``, which are by default the installed
    ones. ``large`` has the values of large constants, which are inputs of the model. Without changes, the
    result is the model itself.

    Raises:
        PluginError: two plugins decompose an operator of the model, or the one that does is broken.
    """
    opsets = opsets_of(model)
    if not any(_outside(node, opsets.get("", 0)) for node in all_nodes(model.graph.node)):
        return model, Decomposed()
    work = _Work(Plugins.given(plugins), ruled, opsets, formulas)
    out = copied(model)
    work.replace(out.graph, {}, large or {})
    return (out if work.result.reasons or work.result.typed else model), work.result


def mark(model: ModelProto, plugins: Plugins | Formulas | None) -> ModelProto:
    """The model with a domain for operators that onnxruntime adds to the standard domain.

    onnxruntime's optimizer writes LayerNormalization into files of any opset, and operators such as
    SimplifiedLayerNormalization that no opset has. Without a separate domain, such files are
    invalid for onnx. :func:`decompose` replaces the nodes.
    """
    opset = opsets_of(model).get("", 0)
    standard = [n for n in all_nodes(model.graph.node) if not plain_domain(n.domain)]
    unknown = {n.op_type for n in standard if schema(n.op_type, opset, "") is None}
    if not unknown:
        return model
    known = plugins or Plugins.discover()
    formulas = load(known) if isinstance(known, Plugins) else known
    unknown = {name for name in unknown if ("", name) in formulas}
    if not unknown:
        return model
    out = copied(model)
    for node in all_nodes(out.graph.node):
        if not plain_domain(node.domain) and node.op_type in unknown:
            node.domain = APART
    out.opset_import.append(helper.make_opsetid(APART, 1))
    return out


def unmark(model: ModelProto) -> ModelProto:
    """A copy of a model without the changes of :func:`mark`."""
    out = copied(model)
    for node in all_nodes(out.graph.node):
        if node.domain == APART:
            node.domain = ""
    for k, opset in reversed(list(enumerate(out.opset_import))):
        if opset.domain == APART:
            del out.opset_import[k]
    return out


def load(plugins: Plugins, broken: list[str] | None = None) -> Formulas:
    """The decompositions of all families, by operator; a family that cannot be loaded is skipped.

    Those of distributions that ``plugins`` prefers come first. ``broken`` collects the errors of
    skipped families.
    """
    registry = plugins["decompositions"]
    order = [e for owner in plugins.prefer for e in registry if e.owner == owner]
    found: dict[Key, list[tuple[Entry, Decomposition]]] = {}
    for entry in dict.fromkeys([*order, *registry]):
        try:
            family = registry.loaded(entry)
        except PluginError as error:
            warn_once(f"the decompositions of {registry.ask_for(entry)!r} are skipped: {error}")
            if broken is not None:
                broken.append(str(error))
            continue
        for key, formula in family.table.items():
            found.setdefault(key, []).append((entry, formula))
    return found


def _refusals(plugins: Plugins) -> dict[Key, str]:
    """The operators that families refuse in every form, and why."""
    out: dict[Key, str] = {}
    for entry in (registry := plugins["decompositions"]):
        with contextlib.suppress(PluginError):  # :func:`load` warns
            out.update(registry.loaded(entry).refusals)
    return out


def _outside(node: NodeProto, opset: int) -> bool:
    """Whether a node is decomposed: the standard does not have its operator, or on integers only."""
    if plain_domain(node.domain) or node.op_type in INTEGER_PRODUCTS:
        return True
    return schema(node.op_type, opset, "") is None


def domain_of(node: NodeProto) -> str:
    """The domain of an operator as its file has it."""
    return "ai.onnx" if node.domain in ("", APART) else node.domain


class _Work:
    """One pass over the nodes of a model, in their order, with the types of all values so far."""

    def __init__(
        self,
        plugins: Plugins,
        ruled: Callable[[Plugins, Key], bool],
        opsets: Mapping[str, int],
        formulas: Formulas | None,
    ) -> None:
        self.plugins, self.ruled, self.opsets = plugins, ruled, opsets
        self.broken: list[str] = []
        self.formulas = load(plugins, self.broken) if formulas is None else formulas
        self.refusals = _refusals(plugins)
        self.result = Decomposed()
        self.count = 0
        self._stays: dict[Key, bool] = {}

    def replace(self, graph: GraphProto, outer: Mapping[str, Tensor], above: Arrays) -> None:
        """Replace the nodes of a graph and of those inside it."""
        trace = Trace(self.opsets)
        values = {name: trace.input(f"outer/{name}", t.dtype, t.shape) for name, t in outer.items()}
        known = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer if _plain(t)}
        constants = {**above, **known}
        for tensor in graph.initializer:
            values[tensor.name] = (
                trace.constant(known[tensor.name], tensor.data_type)
                if tensor.name in known and known[tensor.name].dtype.kind in "iub"
                else trace.input(f"initializer/{tensor.name}", tensor.data_type, (*tensor.dims,))
            )
        for value in graph.input:
            if value.name not in values and value.type.HasField("tensor_type"):
                values[value.name] = trace.input(f"input/{value.name}", *_type_of(value))
        declared = {
            v.name: _type_of(v)
            for v in (*graph.value_info, *graph.output)
            if v.type.HasField("tensor_type")
        }
        nodes: list[NodeProto] = []
        for node in graph.node:
            for inner in subgraphs_of(node):
                self.replace(inner, values, constants)
            if node.op_type == "Constant" and node.attribute:
                value = constant_of(node)
                if value is not None:
                    constants[node.output[0]] = value
            made, types, more = self._decomposed(node, values, constants)
            graph.initializer.extend(more)
            if not made and node.domain == APART:
                node.domain = ""
            nodes.extend(made or [node])
            results = [] if made else _retraced(trace, node, values)
            for k, name in enumerate(node.output):
                if k < len(results) and isinstance(results[k], Tensor) and results[k].dtype:
                    values[name] = results[k]
                elif name:
                    declared.setdefault(name, (0, None))
                    dtype, shape = types[k] if types else declared[name]
                    if types and not made and declared[name][0] == 0:
                        self._declare(graph, name, dtype, shape)
                    values[name] = trace.input(f"value/{name}", dtype, shape)
        refill(graph.node, nodes)

    def _decomposed(
        self, node: NodeProto, values: Mapping[str, Tensor], constants: Arrays
    ) -> tuple[list[NodeProto], list[tuple[int, Shape | None]], list[TensorProto]]:
        """The nodes that replace a node, the types of its outputs, and initializers; none if it is kept."""
        domain = "" if node.domain == APART else plain_domain(node.domain)
        key = (domain, node.op_type)
        if not _outside(node, self.opsets.get("", 0)):
            return [], [], []
        if key not in self._stays:
            self._stays[key] = bool(key[0]) and self.ruled(self.plugins, key)
        if self._stays[key]:
            return [], self._types(key, node, values, constants), []
        if key not in self.formulas:
            if key in self.refusals:
                self._refuse(node, f"is not computed by standard operators {self.refusals[key]}")
            elif self.broken:
                self._refuse(
                    node,
                    "has no decomposition; a family that was not loaded may have it: "
                    f"{'; '.join(self.broken)}",
                )
            return [], [], []
        entry, formula = self._formula(key)
        try:
            call, outputs = self._traced(node, values, constants, entry, formula)
            return self._replaced(node, call, outputs)
        except NotDecomposed as error:
            self._refuse(node, f"is not computed by standard operators {error}")
        except (BrokenPlugin, KeyboardInterrupt):
            raise
        except BaseException as error:  # code of a plugin
            text = str(error) if isinstance(error, OrtflexError) else describe_error(error)
            raise BrokenPlugin(
                f"the decomposition of {node_label(node)} of {entry.described} fails: {text}. "
                f"{entry.remedy}"
            ) from error
        return [], [], []

    def _refuse(self, node: NodeProto, reason: str) -> None:
        sentence = f"{node_label(node)} of {domain_of(node)} {reason}"
        self.result.refused[node.output[0]] = sentence
        self.result.firsts.setdefault((node.op_type, reason), sentence)

    def _types(
        self, key: Key, node: NodeProto, values: Mapping[str, Tensor], constants: Arrays
    ) -> list[tuple[int, Shape | None]]:
        """The types of the outputs of a kept node, from its decomposition.

        onnx infers no types for operators outside the standard, and a rule does not define them.
        """
        if key not in self.formulas:
            return []
        try:
            _, outputs = self._traced(node, values, constants, *self._formula(key))
        except Exception:  # the rule handles this node
            return []
        return _types_of(node, outputs)

    def _declare(self, graph: GraphProto, name: str, dtype: int, shape: Shape | None) -> None:
        """Write the type of a value into the graph, for the inference of later types."""
        if dtype:
            graph.value_info.append(helper.make_tensor_value_info(name, dtype, shape))
            self.result.typed.add(name)

    def _formula(self, key: Key) -> tuple[Entry, Decomposition]:
        found = self.formulas[key]
        preferred = [
            pair for owner in self.plugins.prefer for pair in found if pair[0].owner == owner
        ]
        if len(found) > 1 and not preferred:
            names = " and ".join(entry.described for entry, _ in found)
            raise PluginError(
                f"two decompositions of {key[1]}: of {names}; choose a distribution with "
                f"prefer=[{found[-1][0].owner!r}]"
            )
        return (preferred or found)[0]

    def _traced(
        self,
        node: NodeProto,
        values: Mapping[str, Tensor],
        constants: Arrays,
        entry: Entry,
        formula: Decomposition,
    ) -> tuple[Call, dict[str, Tensor]]:
        """The traced call of a formula, and the outputs of the node by their names."""
        trace = Trace(self.opsets)
        given: dict[str, Tensor] = {}
        for name in filter(None, node.input):
            known = values.get(name)
            dtype = known.dtype if known is not None else TensorProto.FLOAT
            if name not in given:
                given[name] = trace.input(
                    name, dtype or TensorProto.FLOAT, None if known is None else known.shape
                )
        call = Call(
            trace,
            node.op_type,
            [given[name] if name else None for name in node.input],
            {a.name: a for a in node.attribute},
            list(node.output),
            [constants.get(name) for name in node.input],
        )
        made: Any = formula(trace.op, call)
        good = isinstance(made, list | tuple) and all(
            y is None or (isinstance(y, Tensor) and y.trace is trace) for y in made
        )
        if not good:
            raise BrokenPlugin(
                f"the decomposition of {node.op_type} of {entry.described} returns {made!r}; expected "
                f"a list with a tensor or None for each output. {entry.remedy}"
            )
        call.check_read()
        outputs: dict[str, Tensor] = {}
        for k, name in enumerate(node.output):
            if name:
                if k >= len(made) or made[k] is None:
                    raise NotDecomposed(f"with output {k}")
                outputs[name] = made[k]
        return call, outputs

    def _replaced(
        self, node: NodeProto, call: Call, outputs: Mapping[str, Tensor]
    ) -> tuple[list[NodeProto], list[tuple[int, Shape | None]], list[TensorProto]]:
        """The nodes of a formula, the types of the outputs, and initializers."""
        codes = {name: tensor for name, (tensor, *_) in call.packed.items()}
        nodes, prefix = self._named(node, call.trace, outputs, codes)
        for name, (_, index, bits) in call.packed.items():
            self.result.packed[prefix + name] = node.input[index], bits
        initializers = []
        for name, values in call.initializers.items():
            initializers.append(onnx.numpy_helper.from_array(values, prefix + name))
            self.result.own.add(prefix + name)
        operators = list(dict.fromkeys(n.op_type for n in nodes if n.op_type != "Constant"))
        self.result.reasons[node.output[0]] = (
            f"{node_label(node)} of {domain_of(node)} is computed by "
            f"{', '.join(operators)} in the training, but not in the file"
        )
        for k, reason in call.frozen.items():
            if k < len(node.input) and node.input[k]:
                self.result.frozen[node.input[k]] = reason
        return nodes, _types_of(node, outputs), initializers

    def _named(
        self,
        node: NodeProto,
        trace: Trace,
        outputs: Mapping[str, Tensor],
        inner: Mapping[str, Tensor],
    ) -> tuple[list[NodeProto], str]:
        """The nodes of a formula, with unique names in the model, and what begins these names."""
        self.count += 1
        graph = build(trace, {**outputs, **inner}, name="decomposition").proto().graph
        keep = {*filter(None, node.input), *outputs}
        prefix = f"{node.name or node.output[0]}/{self.count}~"
        prefix_names(graph, prefix, keep)
        nodes = [
            helper.make_node("Constant", [], [t.name], name=f"{t.name}/Constant", value=t)
            for t in graph.initializer
        ]
        nodes += graph.node
        for made in nodes:
            made.doc_string = ""
            self.result.origins.update(dict.fromkeys(made.output, node))
        return nodes, prefix


def _types_of(node: NodeProto, outputs: Mapping[str, Tensor]) -> list[tuple[int, Shape | None]]:
    return [
        (outputs[name].dtype, outputs[name].shape) if name else (0, None) for name in node.output
    ]


def _plain(tensor: TensorProto) -> bool:
    """Whether the values of an initializer are in the graph."""
    outside = tensor.data_location == TensorProto.EXTERNAL
    return not outside and tensor.data_type != TensorProto.STRING


def _type_of(value: onnx.ValueInfoProto) -> tuple[int, Shape | None]:
    return value.type.tensor_type.elem_type, shape_of(value.type.tensor_type)


def _retraced(trace: Trace, node: NodeProto, values: Mapping[str, Tensor]) -> Sequence[Any]:
    """The outputs of a kept node, with the types that can be inferred; empty if none can."""
    arguments = [values.get(name) if name else None for name in node.input]
    known = all(a is not None or not n for a, n in zip(arguments, node.input, strict=True))
    if not known or subgraphs_of(node):
        return ()
    try:
        return trace_node(trace, node, arguments, {})
    except OrtflexError:
        return ()
