"""A library without a loop: ONNX graphs are read, differentiated, composed and optimized."""
