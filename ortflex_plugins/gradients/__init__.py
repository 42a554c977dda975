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
similar operators, and its operator to the list below; a new family is an entry point of
``ortflex.gradients``.
"""

from __future__ import annotations

_LISTED = {
    "elementwise": """
        Abs Acos Acosh Add And Asin Asinh Atan Atanh Bernoulli BitCast BitShift BitwiseAnd
        BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Constant ConstantOfShape
        Cos Cosh Div Dropout Elu Equal Erf Exp EyeLike Floor Gelu Greater GreaterOrEqual
        HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min
        Mish Mod Mul Multinomial Neg Not OptionalHasElement Or PRelu Pow RandomNormal
        RandomNormalLike RandomUniform RandomUniformLike Reciprocal RegexFullMatch Relu Round
        Selu SequenceEmpty SequenceLength Shape Shrink Sigmoid Sign Sin Sinh Size Softplus
        Softsign Sqrt StringConcat StringNormalizer StringSplit Sub Sum Swish Tan Tanh
        TfIdfVectorizer ThresholdedRelu Where Xor
    """,
    "reduction": """
        ArgMax ArgMin CumProd CumSum Hardmax LogSoftmax ReduceL1 ReduceL2 ReduceLogSum
        ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
        Softmax
    """,
    "shape": """
        Concat Expand Flatten Pad Reshape ReverseSequence Slice Split Squeeze Tile Transpose
        Trilu Unsqueeze
    """,
    "matmul": "Det Gemm MatMul",
    "indexing": """
        Compress Gather GatherElements GatherND NonZero OneHot Range ScatterElements ScatterND
        TensorScatter TopK Unique
    """,
    "convolution": "Conv ConvTranspose",
    "pooling": """
        AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool MaxUnpool
    """,
    "image": """
        CenterCropPad Col2Im DepthToSpace ImageDecoder NonMaxSuppression Resize SpaceToDepth
    """,
    "sampling": "AffineGrid DeformConv GridSample MaxRoiPool RoiAlign",
    "control": "If Loop Scan",
    "einsum": "Einsum",
    "losses": "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss",
    "quantization": """
        Clip ConvInteger DepthToSpace DequantizeLinear DynamicQuantizeLinear Expand Flatten
        Gather GatherElements GatherND Identity MatMulInteger MaxPool Pad QuantizeLinear Reshape
        Resize Slice SpaceToDepth Split Squeeze Tile Transpose Unsqueeze
    """,
    "signal": "BlackmanWindow DFT HammingWindow HannWindow MelWeightMatrix STFT",
    "normalization": """
        BatchNormalization GroupNormalization InstanceNormalization LRN LayerNormalization
        LpNormalization MeanVarianceNormalization RMSNormalization
    """,
    "recurrent": "GRU LSTM RNN",
    "attention": "Attention RotaryEmbedding",
    "classical": """
        ai.onnx.ml:ArrayFeatureExtractor ai.onnx.ml:Binarizer ai.onnx.ml:CastMap
        ai.onnx.ml:CategoryMapper ai.onnx.ml:DictVectorizer ai.onnx.ml:Imputer
        ai.onnx.ml:LabelEncoder ai.onnx.ml:LinearRegressor ai.onnx.ml:Normalizer
        ai.onnx.ml:OneHotEncoder ai.onnx.ml:Scaler ai.onnx.ml:TreeEnsemble
        ai.onnx.ml:TreeEnsembleClassifier ai.onnx.ml:TreeEnsembleRegressor ai.onnx.ml:ZipMap
    """,
}

OPERATORS = {
    family: frozenset(
        (domain, name) for domain, _, name in (n.rpartition(":") for n in names.split())
    )
    for family, names in _LISTED.items()
}
"""The operators, as (domain, name), that each family has a rule for or passes on: a training imports the
families of its operators only."""
