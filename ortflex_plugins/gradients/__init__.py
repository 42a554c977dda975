"""Gradient rules: one entry per operator, one formula per argument.

Each module is a family:

- ``elementwise``: arithmetic and activations; ``reduction``: sums, means, maxima, Softmax, CumSum
- ``matmul``: MatMul, Gemm; ``einsum``: Einsum
- ``shape``: Reshape, Transpose, Concat, Split, Slice, Pad, Expand; ``indexing``: Gather, Scatter, TopK
- ``convolution``, ``pooling``, ``normalization``, ``recurrent``, ``attention``: layers of networks
- ``image``: Resize, DepthToSpace, Col2Im; ``sampling``: GridSample, RoiAlign, DeformConv
- ``control``: If, Loop, Scan; ``losses``: the standard's losses as operators
- ``quantization``: QuantizeLinear and integer products
- ``classical``: ai.onnx.ml; ``rest``: Fourier transforms, Det, Unique and others

Modules with an underscore are shared by families. A new rule goes into the family of its neighbours;
a new family is an entry point of ``ortflex.gradients``.
"""
