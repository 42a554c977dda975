"""Gradient rules: one entry per operator, one formula per argument.

Each module is a family:

- ``elementwise``: arithmetic and activations; ``reduction``: sums, means, maxima, Softmax, CumSum
- ``matmul``: MatMul, Gemm, Det; ``einsum``: Einsum
- ``shape``: Reshape, Transpose, Concat, Split, Slice, Pad, Expand
- ``indexing``: Gather, Scatter, TopK, Unique
- ``convolution``, ``pooling``, ``normalization``, ``recurrent``, ``attention``: layers of networks
- ``image``: Resize, DepthToSpace, Col2Im; ``sampling``: GridSample, RoiAlign, DeformConv
- ``control``: If, Loop, Scan; ``losses``: the losses of the standard
- ``quantization``: QuantizeLinear and integer products
- ``classical``: ai.onnx.ml; ``signal``: Fourier transforms

Families share the modules whose names start with an underscore. A new rule belongs to the family of
similar operators; a new family is an entry point of ``ortflex.gradients``.
"""
