"""scikit-learn estimators around ONNX models: a Trainer with scikit-learn's interface.

``_networks`` builds the network that parameters describe, ``_base`` is the common base of regressor
and classifier, ``converter`` exports them through skl2onnx.

>>> from ortflex_plugins.estimators import OrtClassifier, OrtRegressor
"""

from ortflex_plugins.estimators.classifier import OrtClassifier
from ortflex_plugins.estimators.converter import pipeline_to_onnx, register_converters
from ortflex_plugins.estimators.regressor import OrtRegressor

__all__ = ["OrtClassifier", "OrtRegressor", "pipeline_to_onnx", "register_converters"]
