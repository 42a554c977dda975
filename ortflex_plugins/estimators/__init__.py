"""scikit-learn estimators around ONNX models.

>>> from ortflex_plugins.estimators import OrtClassifier, OrtRegressor
"""

from ortflex_plugins.estimators.classifier import OrtClassifier
from ortflex_plugins.estimators.converter import pipeline_to_onnx, register_converters
from ortflex_plugins.estimators.regressor import OrtRegressor

__all__ = ["OrtClassifier", "OrtRegressor", "pipeline_to_onnx", "register_converters"]
