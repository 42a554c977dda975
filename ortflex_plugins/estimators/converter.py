"""The conversion of scikit-learn pipelines with these estimators by skl2onnx."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnx.inliner
import onnx.version_converter
from onnx import TensorProto, numpy_helper
from sklearn.utils.validation import check_is_fitted

from ortflex_core import Model, ModelError, captured_names, opsets_of, short_traceback
from ortflex_plugins.estimators._networks import OPSET
from ortflex_plugins.estimators.classifier import OrtClassifier
from ortflex_plugins.estimators.regressor import OrtRegressor


def register_converters() -> None:
    """Register converters of both estimators with skl2onnx.

    Raises:
        ImportError: skl2onnx is not installed; the extra ``sklearn`` of ortflex installs it.

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


@short_traceback
def pipeline_to_onnx(pipeline: Any, X: Any, **options: Any) -> onnx.ModelProto:
    """Convert a fitted pipeline that ends in one of the estimators to one ONNX model.

    Args:
        pipeline: fitted; its other steps are converted by skl2onnx.
        X: some rows, for the types of the inputs.
        options: arguments of ``skl2onnx.to_onnx``: ``options`` and ``target_opset``, which is the opset
            of the estimator's model by default.

    Raises:
        ImportError: skl2onnx is not installed.
        NotFittedError: the pipeline was not fitted.
        ModelError: ``target_opset`` is lower than the model's.
    """
    from skl2onnx import to_onnx

    register_converters()
    last = pipeline.steps[-1][1] if hasattr(pipeline, "steps") else pipeline
    if "target_opset" not in options:
        check_is_fitted(pipeline)
        ours = isinstance(last, OrtRegressor | OrtClassifier)
        options["target_opset"] = opsets_of(last.to_onnx())[""] if ours else OPSET
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
    """Put the trained graph's nodes into skl2onnx's graph, under unique names."""
    estimator = operator.raw_operator
    model = _in_opset(estimator.to_onnx(), int(container.target_opset))
    spec = Model(model).inputs[0]
    prefix = scope.get_unique_variable_name("trained") + "_"
    graph = onnx.compose.add_prefix(model, prefix).graph
    source, first = operator.inputs[0].full_name, graph.input[0].name
    sizes = [d for d in (spec.shape or ())[1:] if isinstance(d, int)]
    images = len(spec.shape or ()) > 2 and len(sizes) == len(spec.shape or ()) - 1
    cast = f"{prefix}features" if images else first
    _add(container, scope, "Cast", [source], cast, to=spec.dtype)
    if images:
        shape = np.array([-1, *sizes], np.int64)
        container.initializers.append(numpy_helper.from_array(shape, f"{prefix}image"))
        _add(container, scope, "Reshape", [cast, f"{prefix}image"], first)
    container.initializers.extend(graph.initializer)
    versions = {o.domain: o.version for o in model.opset_import}
    for node in graph.node:
        if captured_names(node):
            raise ModelError(
                f"the body of the {node.op_type} {node.name!r} reads tensors of the graph around it, "
                "which skl2onnx ignores when it sorts nodes; convert the other steps alone, and "
                "join the two models by onnx.compose.merge_models"
            )
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = scope.get_unique_operator_name(node.name or node.op_type)
        container.nodes.append(copy)
        container.node_domain_version_pair_sets.add((node.domain, versions.get(node.domain, 1)))
    kinds = {"FloatTensorType": TensorProto.FLOAT, "Int64TensorType": TensorProto.INT64}
    for inner, outer in zip(graph.output, operator.outputs, strict=False):
        kind = kinds.get(type(outer.type).__name__)
        extra = {} if kind is None else {"to": kind}
        to = "Identity" if kind is None else "Cast"
        _add(container, scope, to, [inner.name], outer.full_name, **extra)


def _add(
    container: Any, scope: Any, operator: str, inputs: list[str], output: str, **attributes: Any
) -> None:
    name = scope.get_unique_operator_name(operator)
    container.add_node(operator, inputs, [output], name=name, **attributes)


def _in_opset(model: onnx.ModelProto, wanted: int) -> onnx.ModelProto:
    """The model with the operators of the opset of the pipeline."""
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    own = opsets_of(model)[""]
    if own > wanted:
        raise ModelError(
            f"the estimator's model has opset {own}, the pipeline is converted to opset {wanted}; "
            f"pass target_opset={own}"
        )
    return model if own == wanted else onnx.version_converter.convert_version(model, wanted)
