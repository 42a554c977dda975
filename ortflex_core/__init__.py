"""ortflex: train ONNX models with onnxruntime."""

__version__ = "0.1.0"
