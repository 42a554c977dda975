"""The training part of the older package onnxcustom, by its names, on ortflex.

It has the names, arguments and formulas of the older package on the same graphs, sessions and backends;
nothing else imports it. It also has the module paths of that package:
``ortflex_plugins.onnxcustom.training.optimizers``, ``….training.optimizers_partial`` and
``….utils.orttraining_helper``.

>>> from ortflex_plugins.onnxcustom import OrtGradientOptimizer, add_loss_output
"""

from importlib.metadata import version

from ortflex_plugins.onnxcustom.base import BaseLearningOnnx, BaseOnnxClass
from ortflex_plugins.onnxcustom.data_loader import OrtDataLoader
from ortflex_plugins.onnxcustom.derivative import DerivativeOptions, onnx_derivative
from ortflex_plugins.onnxcustom.devices import (
    get_ort_device,
    numpy_to_ort_value,
    ort_device_to_string,
)
from ortflex_plugins.onnxcustom.estimator import BaseEstimator
from ortflex_plugins.onnxcustom.exceptions import (
    ConvergenceError,
    ConvergenceWarning,
    EvaluationError,
    ProviderError,
)
from ortflex_plugins.onnxcustom.forward_backward import (
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardFunction,
)
from ortflex_plugins.onnxcustom.forward_backward_optimizer import (
    OrtGradientForwardBackwardOptimizer,
)
from ortflex_plugins.onnxcustom.learning_loss import (
    AbsoluteLearningLoss,
    BaseLearningLoss,
    ElasticLearningLoss,
    NegLogLearningLoss,
    SquareLearningLoss,
)
from ortflex_plugins.onnxcustom.learning_penalty import (
    BaseLearningPenalty,
    ElasticLearningPenalty,
    NoLearningPenalty,
)
from ortflex_plugins.onnxcustom.learning_rate import (
    BaseLearningRate,
    LearningRateSGD,
    LearningRateSGDNesterov,
)
from ortflex_plugins.onnxcustom.loss_output import add_loss_output
from ortflex_plugins.onnxcustom.optimizer import OrtGradientOptimizer
from ortflex_plugins.onnxcustom.weights import get_train_initializer, onnx_rename_weights

__all__ = [
    "AbsoluteLearningLoss",
    "BaseEstimator",
    "BaseLearningLoss",
    "BaseLearningOnnx",
    "BaseLearningPenalty",
    "BaseLearningRate",
    "BaseOnnxClass",
    "ConvergenceError",
    "ConvergenceWarning",
    "DerivativeOptions",
    "ElasticLearningLoss",
    "ElasticLearningPenalty",
    "EvaluationError",
    "LearningRateSGD",
    "LearningRateSGDNesterov",
    "NegLogLearningLoss",
    "NoLearningPenalty",
    "OrtDataLoader",
    "OrtGradientForwardBackward",
    "OrtGradientForwardBackwardFunction",
    "OrtGradientForwardBackwardOptimizer",
    "OrtGradientOptimizer",
    "ProviderError",
    "SquareLearningLoss",
    "add_loss_output",
    "get_ort_device",
    "get_train_initializer",
    "numpy_to_ort_value",
    "onnx_derivative",
    "onnx_rename_weights",
    "ort_device_to_string",
]

__version__ = version("ortflex")
