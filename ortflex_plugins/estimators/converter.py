"""The estimators inside scikit-learn pipelines that skl2onnx converts."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto

from ortflex_plugins.estimators.classifier import OrtClassifier
from ortflex_plugins.estimators.regressor import OrtRegressor


def register_converters() -> None:
    """Tell skl2onnx how both estimators are converted.

    Raises:
        ImportError: skl2onnx is not installed: ``pip install "ortflex[sklearn]"``.

    Source: skl2onnx's ``update_registered_converter``.
    """
    from skl2onnx import update_registered_converter

    for cls in (OrtRegressor, OrtClassifier):
        classifier = cls is OrtClassifier
        options: dict[str, Any] = {"zipmap": [True, False, "columns"], "nocl": [True, False]}
        update_registered_converter(
            cls,
            f"Ortflex{cls.__name__}",
            _classifier_shape if classifier else _regressor_shape,
            _convert,
            options=options if classifier else {},
        )


def pipeline_to_onnx(pipeline: Any, X: Any, **options: Any) -> onnx.ModelProto:
    """A fitted pipeline that ends in one of the estimators as one ONNX model.

    Args:
        pipeline: fitted; its other steps are converted by skl2onnx.
        X: some rows, for the types of the inputs.
        options: of ``skl2onnx.to_onnx`` (``target_opset``, ``options``).

    Raises:
        ImportError: skl2onnx is not installed.
    """
    from skl2onnx import to_onnx

    register_converters()
    options.setdefault("target_opset", 17)
    model: onnx.ModelProto = to_onnx(pipeline, X[:1], **options)
    return model


def _regressor_shape(operator: Any) -> None:
    from skl2onnx.common.data_types import FloatTensorType

    last = operator.raw_operator.to_onnx().graph.output[0].type.tensor_type.shape.dim[-1]
    operator.outputs[0].type = FloatTensorType([None, last.dim_value or None])


def _classifier_shape(operator: Any) -> None:
    from skl2onnx.common.data_types import FloatTensorType, Int64TensorType, StringTensorType

    classes = operator.raw_operator.classes_
    text = classes.dtype.kind not in "iubf"
    operator.outputs[0].type = (StringTensorType if text else Int64TensorType)([None])
    operator.outputs[1].type = FloatTensorType([None, len(classes)])


def _convert(scope: Any, operator: Any, container: Any) -> None:
    """Put the trained graph's nodes into skl2onnx's, under names of their own."""
    graph = operator.raw_operator.to_onnx().graph
    names: dict[str, str] = {"": ""}
    wanted = graph.input[0].type.tensor_type.elem_type
    source = scope.get_unique_variable_name("features")
    container.add_node(
        "Cast",
        [operator.inputs[0].full_name],
        [source],
        name=scope.get_unique_operator_name("Cast"),
        to=wanted,
    )
    names[graph.input[0].name] = source
    finals = {o.name: v for o, v in zip(graph.output, operator.outputs, strict=False)}
    for tensor in graph.initializer:
        names[tensor.name] = scope.get_unique_variable_name(tensor.name)
        copy = TensorProto()
        copy.CopyFrom(tensor)
        copy.name = names[tensor.name]
        container.initializers.append(copy)
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = scope.get_unique_operator_name(node.name or node.op_type)
        for name in node.output:
            names[name] = scope.get_unique_variable_name(name)
        copy.input[:] = [names[i] for i in node.input]
        copy.output[:] = [names[o] for o in node.output]
        container.nodes.append(copy)
        container.node_domain_version_pair_sets.add((node.domain, _opset(container, node.domain)))
    for inner, outer in finals.items():
        to = {"FloatTensorType": TensorProto.FLOAT, "Int64TensorType": TensorProto.INT64}
        kind = to.get(type(outer.type).__name__)
        extra = {} if kind is None else {"to": kind}
        container.add_node(
            "Identity" if kind is None else "Cast",
            [names[inner]],
            [outer.full_name],
            name=scope.get_unique_operator_name("Output"),
            **extra,
        )


def _opset(container: Any, domain: str) -> int:
    return int(container.target_opset if not domain else container.target_opset_any_domain(domain))
