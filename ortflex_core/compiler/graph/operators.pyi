"""The operators of ONNX opset 28 as methods, for type checkers and editors.

Written by ``python -m tests.core.typed_operators`` from the schemas: change the generator, not this file.
Inputs stand first, attributes are keywords. ``outputs=n`` asks for n outputs, where there can be
several. Arithmetic of host scalars alone gives a host scalar.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, overload

import numpy as np
from onnx import GraphProto, SparseTensorProto, TensorProto, TypeProto

from ortflex_core import Array, Host, Tensor
from ortflex_core.compiler.graph.ops import Operand

_Scalar: TypeAlias = Host | float
_Array: TypeAlias = Tensor | Array | np.generic | Sequence[float]

class Operators:
    """One method an operator; :class:`ortflex_core.Ops` has them."""

    @overload
    def Abs(self, X: _Scalar) -> Host:
        """ONNX operator Abs, since opset 13. Output: Y."""

    @overload
    def Abs(self, X: _Array) -> Tensor:
        """ONNX operator Abs, since opset 13. Output: Y."""

    def Acos(self, input: Operand) -> Tensor:
        """ONNX operator Acos, since opset 22. Output: output."""

    def Acosh(self, input: Operand) -> Tensor:
        """ONNX operator Acosh, since opset 22. Output: output."""

    @overload
    def Add(self, A: _Scalar, B: _Scalar) -> Host:
        """ONNX operator Add, since opset 14. Output: C."""

    @overload
    def Add(self, A: _Array, B: Operand) -> Tensor:
        """ONNX operator Add, since opset 14. Output: C."""

    @overload
    def Add(self, A: Operand, B: _Array) -> Tensor:
        """ONNX operator Add, since opset 14. Output: C."""

    def AffineGrid(self, theta: Operand, size: Operand, *, align_corners: int = 0) -> Tensor:
        """ONNX operator AffineGrid, since opset 20. Output: grid."""

    def And(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator And, since opset 7. Output: C."""

    def ArgMax(
        self, data: Operand, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0
    ) -> Tensor:
        """ONNX operator ArgMax, since opset 13. Output: reduced."""

    def ArgMin(
        self, data: Operand, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0
    ) -> Tensor:
        """ONNX operator ArgMin, since opset 13. Output: reduced."""

    def Asin(self, input: Operand) -> Tensor:
        """ONNX operator Asin, since opset 22. Output: output."""

    def Asinh(self, input: Operand) -> Tensor:
        """ONNX operator Asinh, since opset 22. Output: output."""

    def Atan(self, input: Operand) -> Tensor:
        """ONNX operator Atan, since opset 22. Output: output."""

    def Atanh(self, input: Operand) -> Tensor:
        """ONNX operator Atanh, since opset 22. Output: output."""

    @overload
    def Attention(
        self,
        Q: Operand,
        K: Operand,
        V: Operand,
        attn_mask: Operand | None = None,
        past_key: Operand | None = None,
        past_value: Operand | None = None,
        nonpad_kv_seqlen: Operand | None = None,
        *,
        outputs: Literal[1] = 1,
        is_causal: int = 0,
        kv_num_heads: int | None = None,
        left_window_size: int = -1,
        q_num_heads: int | None = None,
        qk_matmul_output_mode: int = 0,
        right_window_size: int = -1,
        scale: float | None = None,
        softcap: float = 0.0,
        softmax_precision: int | None = None,
    ) -> Tensor:
        """ONNX operator Attention, since opset 25.

        Outputs: Y, present_key, present_value, qk_matmul_output.
        """

    @overload
    def Attention(
        self,
        Q: Operand,
        K: Operand,
        V: Operand,
        attn_mask: Operand | None = None,
        past_key: Operand | None = None,
        past_value: Operand | None = None,
        nonpad_kv_seqlen: Operand | None = None,
        *,
        outputs: Literal[2],
        is_causal: int = 0,
        kv_num_heads: int | None = None,
        left_window_size: int = -1,
        q_num_heads: int | None = None,
        qk_matmul_output_mode: int = 0,
        right_window_size: int = -1,
        scale: float | None = None,
        softcap: float = 0.0,
        softmax_precision: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator Attention, since opset 25.

        Outputs: Y, present_key, present_value, qk_matmul_output.
        """

    @overload
    def Attention(
        self,
        Q: Operand,
        K: Operand,
        V: Operand,
        attn_mask: Operand | None = None,
        past_key: Operand | None = None,
        past_value: Operand | None = None,
        nonpad_kv_seqlen: Operand | None = None,
        *,
        outputs: Literal[3],
        is_causal: int = 0,
        kv_num_heads: int | None = None,
        left_window_size: int = -1,
        q_num_heads: int | None = None,
        qk_matmul_output_mode: int = 0,
        right_window_size: int = -1,
        scale: float | None = None,
        softcap: float = 0.0,
        softmax_precision: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ONNX operator Attention, since opset 25.

        Outputs: Y, present_key, present_value, qk_matmul_output.
        """

    @overload
    def Attention(
        self,
        Q: Operand,
        K: Operand,
        V: Operand,
        attn_mask: Operand | None = None,
        past_key: Operand | None = None,
        past_value: Operand | None = None,
        nonpad_kv_seqlen: Operand | None = None,
        *,
        outputs: Literal[4],
        is_causal: int = 0,
        kv_num_heads: int | None = None,
        left_window_size: int = -1,
        q_num_heads: int | None = None,
        qk_matmul_output_mode: int = 0,
        right_window_size: int = -1,
        scale: float | None = None,
        softcap: float = 0.0,
        softmax_precision: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ONNX operator Attention, since opset 25.

        Outputs: Y, present_key, present_value, qk_matmul_output.
        """

    @overload
    def Attention(
        self,
        Q: Operand,
        K: Operand,
        V: Operand,
        attn_mask: Operand | None = None,
        past_key: Operand | None = None,
        past_value: Operand | None = None,
        nonpad_kv_seqlen: Operand | None = None,
        *,
        outputs: int,
        is_causal: int = 0,
        kv_num_heads: int | None = None,
        left_window_size: int = -1,
        q_num_heads: int | None = None,
        qk_matmul_output_mode: int = 0,
        right_window_size: int = -1,
        scale: float | None = None,
        softcap: float = 0.0,
        softmax_precision: int | None = None,
    ) -> tuple[Tensor, ...]:
        """ONNX operator Attention, since opset 25.

        Outputs: Y, present_key, present_value, qk_matmul_output.
        """

    def AveragePool(
        self,
        X: Operand,
        *,
        kernel_shape: Sequence[int],
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
        count_include_pad: int = 0,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """ONNX operator AveragePool, since opset 22. Output: Y."""

    @overload
    def BatchNormalization(
        self,
        X: Operand,
        scale: Operand,
        B: Operand,
        input_mean: Operand,
        input_var: Operand,
        *,
        outputs: Literal[1] = 1,
        epsilon: float = 1e-05,
        momentum: float = 0.9,
        training_mode: int = 0,
    ) -> Tensor:
        """ONNX operator BatchNormalization, since opset 15.

        Outputs: Y, running_mean, running_var.
        """

    @overload
    def BatchNormalization(
        self,
        X: Operand,
        scale: Operand,
        B: Operand,
        input_mean: Operand,
        input_var: Operand,
        *,
        outputs: Literal[2],
        epsilon: float = 1e-05,
        momentum: float = 0.9,
        training_mode: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator BatchNormalization, since opset 15.

        Outputs: Y, running_mean, running_var.
        """

    @overload
    def BatchNormalization(
        self,
        X: Operand,
        scale: Operand,
        B: Operand,
        input_mean: Operand,
        input_var: Operand,
        *,
        outputs: Literal[3],
        epsilon: float = 1e-05,
        momentum: float = 0.9,
        training_mode: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ONNX operator BatchNormalization, since opset 15.

        Outputs: Y, running_mean, running_var.
        """

    @overload
    def BatchNormalization(
        self,
        X: Operand,
        scale: Operand,
        B: Operand,
        input_mean: Operand,
        input_var: Operand,
        *,
        outputs: int,
        epsilon: float = 1e-05,
        momentum: float = 0.9,
        training_mode: int = 0,
    ) -> tuple[Tensor, ...]:
        """ONNX operator BatchNormalization, since opset 15.

        Outputs: Y, running_mean, running_var.
        """

    def Bernoulli(
        self, input: Operand, *, dtype: int | None = None, seed: float | None = None
    ) -> Tensor:
        """ONNX operator Bernoulli, since opset 22. Output: output."""

    def BitCast(self, input: Operand, *, to: int) -> Tensor:
        """ONNX operator BitCast, since opset 26. Output: output."""

    def BitShift(self, X: Operand, Y: Operand, *, direction: str) -> Tensor:
        """ONNX operator BitShift, since opset 28. Output: Z."""

    def BitwiseAnd(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator BitwiseAnd, since opset 18. Output: C."""

    def BitwiseNot(self, X: Operand) -> Tensor:
        """ONNX operator BitwiseNot, since opset 18. Output: Y."""

    def BitwiseOr(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator BitwiseOr, since opset 18. Output: C."""

    def BitwiseXor(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator BitwiseXor, since opset 18. Output: C."""

    def BlackmanWindow(
        self, size: Operand, *, output_datatype: int = 1, periodic: int = 1
    ) -> Tensor:
        """ONNX operator BlackmanWindow, since opset 17. Output: output."""

    def Cast(self, input: Operand, *, to: int, round_mode: str = "up", saturate: int = 1) -> Tensor:
        """ONNX operator Cast, since opset 28. Output: output."""

    def CastLike(
        self, input: Operand, target_type: Operand, *, round_mode: str = "up", saturate: int = 1
    ) -> Tensor:
        """ONNX operator CastLike, since opset 25. Output: output."""

    @overload
    def CausalConvWithState(
        self,
        input: Operand,
        weight: Operand,
        bias: Operand | None = None,
        past_state: Operand | None = None,
        *,
        outputs: Literal[1] = 1,
        activation: str = "none",
    ) -> Tensor:
        """ONNX operator CausalConvWithState, since opset 27. Outputs: output, present_state."""

    @overload
    def CausalConvWithState(
        self,
        input: Operand,
        weight: Operand,
        bias: Operand | None = None,
        past_state: Operand | None = None,
        *,
        outputs: Literal[2],
        activation: str = "none",
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator CausalConvWithState, since opset 27. Outputs: output, present_state."""

    @overload
    def CausalConvWithState(
        self,
        input: Operand,
        weight: Operand,
        bias: Operand | None = None,
        past_state: Operand | None = None,
        *,
        outputs: int,
        activation: str = "none",
    ) -> tuple[Tensor, ...]:
        """ONNX operator CausalConvWithState, since opset 27. Outputs: output, present_state."""

    def Ceil(self, X: Operand) -> Tensor:
        """ONNX operator Ceil, since opset 13. Output: Y."""

    def Celu(self, X: Operand, *, alpha: float = 1.0) -> Tensor:
        """ONNX operator Celu, since opset 28. Output: Y."""

    def CenterCropPad(
        self, input_data: Operand, shape: Operand, *, axes: Sequence[int] | None = None
    ) -> Tensor:
        """ONNX operator CenterCropPad, since opset 18. Output: output_data."""

    def Clip(
        self, input: Operand, min: Operand | None = None, max: Operand | None = None
    ) -> Tensor:
        """ONNX operator Clip, since opset 13. Output: output."""

    def Col2Im(
        self,
        input: Operand,
        image_shape: Operand,
        block_shape: Operand,
        *,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """ONNX operator Col2Im, since opset 18. Output: output."""

    def Compress(self, input: Operand, condition: Operand, *, axis: int | None = None) -> Tensor:
        """ONNX operator Compress, since opset 28. Output: output."""

    def Concat(self, *inputs: Operand, axis: int) -> Tensor:
        """ONNX operator Concat, since opset 13. Output: concat_result."""

    def ConcatFromSequence(
        self, input_sequence: Operand, *, axis: int, new_axis: int = 0
    ) -> Tensor:
        """ONNX operator ConcatFromSequence, since opset 11. Output: concat_result."""

    def Constant(
        self,
        *,
        sparse_value: SparseTensorProto | None = None,
        value: TensorProto | None = None,
        value_float: float | None = None,
        value_floats: Sequence[float] | None = None,
        value_int: int | None = None,
        value_ints: Sequence[int] | None = None,
        value_string: str | None = None,
        value_strings: Sequence[str] | None = None,
    ) -> Tensor:
        """ONNX operator Constant, since opset 25. Output: output."""

    def ConstantOfShape(self, input: Operand, *, value: TensorProto | None = None) -> Tensor:
        """ONNX operator ConstantOfShape, since opset 25. Output: output."""

    def Conv(
        self,
        X: Operand,
        W: Operand,
        B: Operand | None = None,
        *,
        auto_pad: str = "NOTSET",
        dilations: Sequence[int] | None = None,
        group: int = 1,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """ONNX operator Conv, since opset 22. Output: Y."""

    def ConvInteger(
        self,
        x: Operand,
        w: Operand,
        x_zero_point: Operand | None = None,
        w_zero_point: Operand | None = None,
        *,
        auto_pad: str = "NOTSET",
        dilations: Sequence[int] | None = None,
        group: int = 1,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """ONNX operator ConvInteger, since opset 10. Output: y."""

    def ConvTranspose(
        self,
        X: Operand,
        W: Operand,
        B: Operand | None = None,
        *,
        auto_pad: str = "NOTSET",
        dilations: Sequence[int] | None = None,
        group: int = 1,
        kernel_shape: Sequence[int] | None = None,
        output_padding: Sequence[int] | None = None,
        output_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """ONNX operator ConvTranspose, since opset 22. Output: Y."""

    def Cos(self, input: Operand) -> Tensor:
        """ONNX operator Cos, since opset 22. Output: output."""

    def Cosh(self, input: Operand) -> Tensor:
        """ONNX operator Cosh, since opset 22. Output: output."""

    def CumProd(self, x: Operand, axis: Operand, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
        """ONNX operator CumProd, since opset 26. Output: y."""

    def CumSum(self, x: Operand, axis: Operand, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
        """ONNX operator CumSum, since opset 14. Output: y."""

    def DFT(
        self,
        input: Operand,
        dft_length: Operand | None = None,
        axis: Operand | None = None,
        *,
        inverse: int = 0,
        onesided: int = 0,
    ) -> Tensor:
        """ONNX operator DFT, since opset 20. Output: output."""

    def DeformConv(
        self,
        X: Operand,
        W: Operand,
        offset: Operand,
        B: Operand | None = None,
        mask: Operand | None = None,
        *,
        dilations: Sequence[int] | None = None,
        group: int = 1,
        kernel_shape: Sequence[int] | None = None,
        offset_group: int = 1,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """ONNX operator DeformConv, since opset 22. Output: Y."""

    def DepthToSpace(self, input: Operand, *, blocksize: int, mode: str = "DCR") -> Tensor:
        """ONNX operator DepthToSpace, since opset 28. Output: output."""

    def DequantizeLinear(
        self,
        x: Operand,
        x_scale: Operand,
        x_zero_point: Operand | None = None,
        *,
        axis: int = 1,
        block_size: int = 0,
        output_dtype: int = 0,
    ) -> Tensor:
        """ONNX operator DequantizeLinear, since opset 28. Output: y."""

    def Det(self, X: Operand) -> Tensor:
        """ONNX operator Det, since opset 22. Output: Y."""

    @overload
    def Div(self, A: _Scalar, B: _Scalar) -> Host:
        """ONNX operator Div, since opset 14. Output: C."""

    @overload
    def Div(self, A: _Array, B: Operand) -> Tensor:
        """ONNX operator Div, since opset 14. Output: C."""

    @overload
    def Div(self, A: Operand, B: _Array) -> Tensor:
        """ONNX operator Div, since opset 14. Output: C."""

    @overload
    def Dropout(
        self,
        data: Operand,
        ratio: Operand | None = None,
        training_mode: Operand | None = None,
        *,
        outputs: Literal[1] = 1,
        seed: int | None = None,
    ) -> Tensor:
        """ONNX operator Dropout, since opset 22. Outputs: output, mask."""

    @overload
    def Dropout(
        self,
        data: Operand,
        ratio: Operand | None = None,
        training_mode: Operand | None = None,
        *,
        outputs: Literal[2],
        seed: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator Dropout, since opset 22. Outputs: output, mask."""

    @overload
    def Dropout(
        self,
        data: Operand,
        ratio: Operand | None = None,
        training_mode: Operand | None = None,
        *,
        outputs: int,
        seed: int | None = None,
    ) -> tuple[Tensor, ...]:
        """ONNX operator Dropout, since opset 22. Outputs: output, mask."""

    @overload
    def DynamicQuantizeLinear(self, x: Operand, *, outputs: Literal[1] = 1) -> Tensor:
        """ONNX operator DynamicQuantizeLinear, since opset 11.

        Outputs: y, y_scale, y_zero_point.
        """

    @overload
    def DynamicQuantizeLinear(self, x: Operand, *, outputs: Literal[2]) -> tuple[Tensor, Tensor]:
        """ONNX operator DynamicQuantizeLinear, since opset 11.

        Outputs: y, y_scale, y_zero_point.
        """

    @overload
    def DynamicQuantizeLinear(
        self, x: Operand, *, outputs: Literal[3]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ONNX operator DynamicQuantizeLinear, since opset 11.

        Outputs: y, y_scale, y_zero_point.
        """

    @overload
    def DynamicQuantizeLinear(self, x: Operand, *, outputs: int) -> tuple[Tensor, ...]:
        """ONNX operator DynamicQuantizeLinear, since opset 11.

        Outputs: y, y_scale, y_zero_point.
        """

    def Einsum(self, *Inputs: Operand, equation: str) -> Tensor:
        """ONNX operator Einsum, since opset 28. Output: Output."""

    def Elu(self, X: Operand, *, alpha: float = 1.0) -> Tensor:
        """ONNX operator Elu, since opset 22. Output: Y."""

    def Equal(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator Equal, since opset 19. Output: C."""

    def Erf(self, input: Operand) -> Tensor:
        """ONNX operator Erf, since opset 13. Output: output."""

    @overload
    def Exp(self, input: _Scalar) -> Host:
        """ONNX operator Exp, since opset 13. Output: output."""

    @overload
    def Exp(self, input: _Array) -> Tensor:
        """ONNX operator Exp, since opset 13. Output: output."""

    def Expand(self, input: Operand, shape: Operand) -> Tensor:
        """ONNX operator Expand, since opset 13. Output: output."""

    def EyeLike(self, input: Operand, *, dtype: int | None = None, k: int = 0) -> Tensor:
        """ONNX operator EyeLike, since opset 22. Output: output."""

    def Flatten(self, input: Operand, *, axis: int = 1) -> Tensor:
        """ONNX operator Flatten, since opset 25. Output: output."""

    @overload
    def Floor(self, X: _Scalar) -> Host:
        """ONNX operator Floor, since opset 13. Output: Y."""

    @overload
    def Floor(self, X: _Array) -> Tensor:
        """ONNX operator Floor, since opset 13. Output: Y."""

    @overload
    def GRU(
        self,
        X: Operand,
        W: Operand,
        R: Operand,
        B: Operand | None = None,
        sequence_lens: Operand | None = None,
        initial_h: Operand | None = None,
        *,
        outputs: Literal[1] = 1,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,
        layout: int = 0,
        linear_before_reset: int = 0,
    ) -> Tensor:
        """ONNX operator GRU, since opset 22. Outputs: Y, Y_h."""

    @overload
    def GRU(
        self,
        X: Operand,
        W: Operand,
        R: Operand,
        B: Operand | None = None,
        sequence_lens: Operand | None = None,
        initial_h: Operand | None = None,
        *,
        outputs: Literal[2],
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,
        layout: int = 0,
        linear_before_reset: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator GRU, since opset 22. Outputs: Y, Y_h."""

    @overload
    def GRU(
        self,
        X: Operand,
        W: Operand,
        R: Operand,
        B: Operand | None = None,
        sequence_lens: Operand | None = None,
        initial_h: Operand | None = None,
        *,
        outputs: int,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,
        layout: int = 0,
        linear_before_reset: int = 0,
    ) -> tuple[Tensor, ...]:
        """ONNX operator GRU, since opset 22. Outputs: Y, Y_h."""

    def Gather(self, data: Operand, indices: Operand, *, axis: int = 0) -> Tensor:
        """ONNX operator Gather, since opset 13. Output: output."""

    def GatherElements(self, data: Operand, indices: Operand, *, axis: int = 0) -> Tensor:
        """ONNX operator GatherElements, since opset 13. Output: output."""

    def GatherND(self, data: Operand, indices: Operand, *, batch_dims: int = 0) -> Tensor:
        """ONNX operator GatherND, since opset 13. Output: output."""

    def Gelu(self, X: Operand, *, approximate: str = "none") -> Tensor:
        """ONNX operator Gelu, since opset 20. Output: Y."""

    def Gemm(
        self,
        A: Operand,
        B: Operand,
        C: Operand | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        transA: int = 0,
        transB: int = 0,
    ) -> Tensor:
        """ONNX operator Gemm, since opset 13. Output: Y."""

    def GlobalAveragePool(self, X: Operand) -> Tensor:
        """ONNX operator GlobalAveragePool, since opset 22. Output: Y."""

    def GlobalLpPool(self, X: Operand, *, p: int = 2) -> Tensor:
        """ONNX operator GlobalLpPool, since opset 22. Output: Y."""

    def GlobalMaxPool(self, X: Operand) -> Tensor:
        """ONNX operator GlobalMaxPool, since opset 22. Output: Y."""

    def Greater(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator Greater, since opset 13. Output: C."""

    def GreaterOrEqual(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator GreaterOrEqual, since opset 16. Output: C."""

    def GridSample(
        self,
        X: Operand,
        grid: Operand,
        *,
        align_corners: int = 0,
        mode: str = "linear",
        padding_mode: str = "zeros",
    ) -> Tensor:
        """ONNX operator GridSample, since opset 22. Output: Y."""

    def GroupNormalization(
        self,
        X: Operand,
        scale: Operand,
        bias: Operand,
        *,
        num_groups: int,
        epsilon: float = 1e-05,
        stash_type: int = 1,
    ) -> Tensor:
        """ONNX operator GroupNormalization, since opset 21. Output: Y."""

    def HammingWindow(
        self, size: Operand, *, output_datatype: int = 1, periodic: int = 1
    ) -> Tensor:
        """ONNX operator HammingWindow, since opset 17. Output: output."""

    def HannWindow(self, size: Operand, *, output_datatype: int = 1, periodic: int = 1) -> Tensor:
        """ONNX operator HannWindow, since opset 17. Output: output."""

    def HardSigmoid(self, X: Operand, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
        """ONNX operator HardSigmoid, since opset 22. Output: Y."""

    def HardSwish(self, X: Operand) -> Tensor:
        """ONNX operator HardSwish, since opset 22. Output: Y."""

    def Hardmax(self, input: Operand, *, axis: int = -1) -> Tensor:
        """ONNX operator Hardmax, since opset 13. Output: output."""

    @overload
    def Identity(self, input: _Scalar) -> Host:
        """ONNX operator Identity, since opset 25. Output: output."""

    @overload
    def Identity(self, input: _Array) -> Tensor:
        """ONNX operator Identity, since opset 25. Output: output."""

    @overload
    def If(
        self,
        cond: Operand,
        *,
        outputs: Literal[1] = 1,
        else_branch: GraphProto,
        then_branch: GraphProto,
    ) -> Tensor:
        """ONNX operator If, since opset 25. Output: outputs."""

    @overload
    def If(
        self, cond: Operand, *, outputs: int, else_branch: GraphProto, then_branch: GraphProto
    ) -> tuple[Tensor, ...]:
        """ONNX operator If, since opset 25. Output: outputs."""

    def ImageDecoder(self, encoded_stream: Operand, *, pixel_format: str = "RGB") -> Tensor:
        """ONNX operator ImageDecoder, since opset 20. Output: image."""

    def InstanceNormalization(
        self, input: Operand, scale: Operand, B: Operand, *, epsilon: float = 1e-05
    ) -> Tensor:
        """ONNX operator InstanceNormalization, since opset 22. Output: output."""

    def IsInf(self, X: Operand, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
        """ONNX operator IsInf, since opset 20. Output: Y."""

    def IsNaN(self, X: Operand) -> Tensor:
        """ONNX operator IsNaN, since opset 20. Output: Y."""

    def LRN(
        self, X: Operand, *, size: int, alpha: float = 0.0001, beta: float = 0.75, bias: float = 1.0
    ) -> Tensor:
        """ONNX operator LRN, since opset 13. Output: Y."""

    @overload
    def LSTM(
        self,
        X: Operand,
        W: Operand,
        R: Operand,
        B: Operand | None = None,
        sequence_lens: Operand | None = None,
        initial_h: Operand | None = None,
        initial_c: Operand | None = None,
        P: Operand | None = None,
        *,
        outputs: Literal[1] = 1,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,
        input_forget: int = 0,
        layout: int = 0,
    ) -> Tensor:
        """ONNX operator LSTM, since opset 22. Outputs: Y, Y_h, Y_c."""

    @overload
    def LSTM(
        self,
        X: Operand,
        W: Operand,
        R: Operand,
        B: Operand | None = None,
        sequence_lens: Operand | None = None,
        initial_h: Operand | None = None,
        initial_c: Operand | None = None,
        P: Operand | None = None,
        *,
        outputs: Literal[2],
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,
        input_forget: int = 0,
        layout: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator LSTM, since opset 22. Outputs: Y, Y_h, Y_c."""

    @overload
    def LSTM(
        self,
        X: Operand,
        W: Operand,
        R: Operand,
        B: Operand | None = None,
        sequence_lens: Operand | None = None,
        initial_h: Operand | None = None,
        initial_c: Operand | None = None,
        P: Operand | None = None,
        *,
        outputs: Literal[3],
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,
        input_forget: int = 0,
        layout: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ONNX operator LSTM, since opset 22. Outputs: Y, Y_h, Y_c."""

    @overload
    def LSTM(
        self,
        X: Operand,
        W: Operand,
        R: Operand,
        B: Operand | None = None,
        sequence_lens: Operand | None = None,
        initial_h: Operand | None = None,
        initial_c: Operand | None = None,
        P: Operand | None = None,
        *,
        outputs: int,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,
        input_forget: int = 0,
        layout: int = 0,
    ) -> tuple[Tensor, ...]:
        """ONNX operator LSTM, since opset 22. Outputs: Y, Y_h, Y_c."""

    @overload
    def LayerNormalization(
        self,
        X: Operand,
        Scale: Operand,
        B: Operand | None = None,
        *,
        outputs: Literal[1] = 1,
        axis: int = -1,
        epsilon: float = 1e-05,
        stash_type: int = 1,
    ) -> Tensor:
        """ONNX operator LayerNormalization, since opset 17. Outputs: Y, Mean, InvStdDev."""

    @overload
    def LayerNormalization(
        self,
        X: Operand,
        Scale: Operand,
        B: Operand | None = None,
        *,
        outputs: Literal[2],
        axis: int = -1,
        epsilon: float = 1e-05,
        stash_type: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator LayerNormalization, since opset 17. Outputs: Y, Mean, InvStdDev."""

    @overload
    def LayerNormalization(
        self,
        X: Operand,
        Scale: Operand,
        B: Operand | None = None,
        *,
        outputs: Literal[3],
        axis: int = -1,
        epsilon: float = 1e-05,
        stash_type: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ONNX operator LayerNormalization, since opset 17. Outputs: Y, Mean, InvStdDev."""

    @overload
    def LayerNormalization(
        self,
        X: Operand,
        Scale: Operand,
        B: Operand | None = None,
        *,
        outputs: int,
        axis: int = -1,
        epsilon: float = 1e-05,
        stash_type: int = 1,
    ) -> tuple[Tensor, ...]:
        """ONNX operator LayerNormalization, since opset 17. Outputs: Y, Mean, InvStdDev."""

    def LeakyRelu(self, X: Operand, *, alpha: float = 0.01) -> Tensor:
        """ONNX operator LeakyRelu, since opset 16. Output: Y."""

    def Less(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator Less, since opset 13. Output: C."""

    def LessOrEqual(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator LessOrEqual, since opset 16. Output: C."""

    @overload
    def LinearAttention(
        self,
        query: Operand,
        key: Operand,
        value: Operand,
        past_state: Operand | None = None,
        decay: Operand | None = None,
        beta: Operand | None = None,
        *,
        outputs: Literal[1] = 1,
        kv_num_heads: int,
        q_num_heads: int,
        chunk_size: int = 64,
        scale: float = 0.0,
        update_rule: str = "gated_delta",
    ) -> Tensor:
        """ONNX operator LinearAttention, since opset 27. Outputs: output, present_state."""

    @overload
    def LinearAttention(
        self,
        query: Operand,
        key: Operand,
        value: Operand,
        past_state: Operand | None = None,
        decay: Operand | None = None,
        beta: Operand | None = None,
        *,
        outputs: Literal[2],
        kv_num_heads: int,
        q_num_heads: int,
        chunk_size: int = 64,
        scale: float = 0.0,
        update_rule: str = "gated_delta",
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator LinearAttention, since opset 27. Outputs: output, present_state."""

    @overload
    def LinearAttention(
        self,
        query: Operand,
        key: Operand,
        value: Operand,
        past_state: Operand | None = None,
        decay: Operand | None = None,
        beta: Operand | None = None,
        *,
        outputs: int,
        kv_num_heads: int,
        q_num_heads: int,
        chunk_size: int = 64,
        scale: float = 0.0,
        update_rule: str = "gated_delta",
    ) -> tuple[Tensor, ...]:
        """ONNX operator LinearAttention, since opset 27. Outputs: output, present_state."""

    @overload
    def Log(self, input: _Scalar) -> Host:
        """ONNX operator Log, since opset 13. Output: output."""

    @overload
    def Log(self, input: _Array) -> Tensor:
        """ONNX operator Log, since opset 13. Output: output."""

    def LogSoftmax(self, input: Operand, *, axis: int = -1) -> Tensor:
        """ONNX operator LogSoftmax, since opset 13. Output: output."""

    @overload
    def Loop(
        self,
        M: Operand | None,
        cond: Operand | None,
        *v_initial: Operand,
        outputs: Literal[1] = 1,
        body: GraphProto,
    ) -> Tensor:
        """ONNX operator Loop, since opset 25. Output: v_final_and_scan_outputs."""

    @overload
    def Loop(
        self,
        M: Operand | None,
        cond: Operand | None,
        *v_initial: Operand,
        outputs: int,
        body: GraphProto,
    ) -> tuple[Tensor, ...]:
        """ONNX operator Loop, since opset 25. Output: v_final_and_scan_outputs."""

    def LpNormalization(self, input: Operand, *, axis: int = -1, p: int = 2) -> Tensor:
        """ONNX operator LpNormalization, since opset 22. Output: output."""

    def LpPool(
        self,
        X: Operand,
        *,
        kernel_shape: Sequence[int],
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
        dilations: Sequence[int] | None = None,
        p: int = 2,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """ONNX operator LpPool, since opset 22. Output: Y."""

    def MatMul(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator MatMul, since opset 13. Output: Y."""

    def MatMulInteger(
        self,
        A: Operand,
        B: Operand,
        a_zero_point: Operand | None = None,
        b_zero_point: Operand | None = None,
    ) -> Tensor:
        """ONNX operator MatMulInteger, since opset 10. Output: Y."""

    @overload
    def Max(self, *data_0: _Scalar) -> Host:
        """ONNX operator Max, since opset 13. Output: max."""

    @overload
    def Max(self, first: _Array, /, *data_0: Operand) -> Tensor:
        """ONNX operator Max, since opset 13. Output: max."""

    @overload
    def Max(self, first: Operand, second: _Array, /, *data_0: Operand) -> Tensor:
        """ONNX operator Max, since opset 13. Output: max."""

    @overload
    def MaxPool(
        self,
        X: Operand,
        *,
        outputs: Literal[1] = 1,
        kernel_shape: Sequence[int],
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        storage_order: int = 0,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """ONNX operator MaxPool, since opset 22. Outputs: Y, Indices."""

    @overload
    def MaxPool(
        self,
        X: Operand,
        *,
        outputs: Literal[2],
        kernel_shape: Sequence[int],
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        storage_order: int = 0,
        strides: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator MaxPool, since opset 22. Outputs: Y, Indices."""

    @overload
    def MaxPool(
        self,
        X: Operand,
        *,
        outputs: int,
        kernel_shape: Sequence[int],
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        storage_order: int = 0,
        strides: Sequence[int] | None = None,
    ) -> tuple[Tensor, ...]:
        """ONNX operator MaxPool, since opset 22. Outputs: Y, Indices."""

    def MaxRoiPool(
        self, X: Operand, rois: Operand, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0
    ) -> Tensor:
        """ONNX operator MaxRoiPool, since opset 22. Output: Y."""

    def MaxUnpool(
        self,
        X: Operand,
        I: Operand,
        output_shape: Operand | None = None,
        *,
        kernel_shape: Sequence[int],
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """ONNX operator MaxUnpool, since opset 22. Output: output."""

    def Mean(self, *data_0: Operand) -> Tensor:
        """ONNX operator Mean, since opset 13. Output: mean."""

    def MeanVarianceNormalization(self, X: Operand, *, axes: Sequence[int] = [0, 2, 3]) -> Tensor:
        """ONNX operator MeanVarianceNormalization, since opset 13. Output: Y."""

    def MelWeightMatrix(
        self,
        num_mel_bins: Operand,
        dft_length: Operand,
        sample_rate: Operand,
        lower_edge_hertz: Operand,
        upper_edge_hertz: Operand,
        *,
        output_datatype: int = 1,
    ) -> Tensor:
        """ONNX operator MelWeightMatrix, since opset 17. Output: output."""

    @overload
    def Min(self, *data_0: _Scalar) -> Host:
        """ONNX operator Min, since opset 13. Output: min."""

    @overload
    def Min(self, first: _Array, /, *data_0: Operand) -> Tensor:
        """ONNX operator Min, since opset 13. Output: min."""

    @overload
    def Min(self, first: Operand, second: _Array, /, *data_0: Operand) -> Tensor:
        """ONNX operator Min, since opset 13. Output: min."""

    def Mish(self, X: Operand) -> Tensor:
        """ONNX operator Mish, since opset 22. Output: Y."""

    def Mod(self, A: Operand, B: Operand, *, fmod: int = 0) -> Tensor:
        """ONNX operator Mod, since opset 28. Output: C."""

    @overload
    def Mul(self, A: _Scalar, B: _Scalar) -> Host:
        """ONNX operator Mul, since opset 14. Output: C."""

    @overload
    def Mul(self, A: _Array, B: Operand) -> Tensor:
        """ONNX operator Mul, since opset 14. Output: C."""

    @overload
    def Mul(self, A: Operand, B: _Array) -> Tensor:
        """ONNX operator Mul, since opset 14. Output: C."""

    def Multinomial(
        self, input: Operand, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None
    ) -> Tensor:
        """ONNX operator Multinomial, since opset 22. Output: output."""

    @overload
    def Neg(self, X: _Scalar) -> Host:
        """ONNX operator Neg, since opset 13. Output: Y."""

    @overload
    def Neg(self, X: _Array) -> Tensor:
        """ONNX operator Neg, since opset 13. Output: Y."""

    def NegativeLogLikelihoodLoss(
        self,
        input: Operand,
        target: Operand,
        weight: Operand | None = None,
        *,
        ignore_index: int | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """ONNX operator NegativeLogLikelihoodLoss, since opset 22. Output: loss."""

    def NonMaxSuppression(
        self,
        boxes: Operand,
        scores: Operand,
        max_output_boxes_per_class: Operand | None = None,
        iou_threshold: Operand | None = None,
        score_threshold: Operand | None = None,
        *,
        center_point_box: int = 0,
    ) -> Tensor:
        """ONNX operator NonMaxSuppression, since opset 11. Output: selected_indices."""

    def NonZero(self, X: Operand) -> Tensor:
        """ONNX operator NonZero, since opset 13. Output: Y."""

    def Not(self, X: Operand) -> Tensor:
        """ONNX operator Not, since opset 1. Output: Y."""

    def OneHot(
        self, indices: Operand, depth: Operand, values: Operand, *, axis: int = -1
    ) -> Tensor:
        """ONNX operator OneHot, since opset 28. Output: output."""

    def Optional(self, input: Operand | None = None, *, type: TypeProto | None = None) -> Tensor:
        """ONNX operator Optional, since opset 28. Output: output."""

    def OptionalGetElement(self, input: Operand) -> Tensor:
        """ONNX operator OptionalGetElement, since opset 28. Output: output."""

    def OptionalHasElement(self, input: Operand | None = None) -> Tensor:
        """ONNX operator OptionalHasElement, since opset 28. Output: output."""

    def Or(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator Or, since opset 7. Output: C."""

    def PRelu(self, X: Operand, slope: Operand) -> Tensor:
        """ONNX operator PRelu, since opset 16. Output: Y."""

    def Pad(
        self,
        data: Operand,
        pads: Operand,
        constant_value: Operand | None = None,
        axes: Operand | None = None,
        *,
        mode: str = "constant",
    ) -> Tensor:
        """ONNX operator Pad, since opset 25. Output: output."""

    @overload
    def Pow(self, X: _Scalar, Y: _Scalar) -> Host:
        """ONNX operator Pow, since opset 15. Output: Z."""

    @overload
    def Pow(self, X: _Array, Y: Operand) -> Tensor:
        """ONNX operator Pow, since opset 15. Output: Z."""

    @overload
    def Pow(self, X: Operand, Y: _Array) -> Tensor:
        """ONNX operator Pow, since opset 15. Output: Z."""

    def QLinearConv(
        self,
        x: Operand,
        x_scale: Operand,
        x_zero_point: Operand,
        w: Operand,
        w_scale: Operand,
        w_zero_point: Operand,
        y_scale: Operand,
        y_zero_point: Operand,
        B: Operand | None = None,
        *,
        auto_pad: str = "NOTSET",
        dilations: Sequence[int] | None = None,
        group: int = 1,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """ONNX operator QLinearConv, since opset 10. Output: y."""

    def QLinearMatMul(
        self,
        a: Operand,
        a_scale: Operand,
        a_zero_point: Operand,
        b: Operand,
        b_scale: Operand,
        b_zero_point: Operand,
        y_scale: Operand,
        y_zero_point: Operand,
    ) -> Tensor:
        """ONNX operator QLinearMatMul, since opset 21. Output: y."""

    def QuantizeLinear(
        self,
        x: Operand,
        y_scale: Operand,
        y_zero_point: Operand | None = None,
        *,
        axis: int = 1,
        block_size: int = 0,
        output_dtype: int = 0,
        precision: int = 0,
        saturate: int = 1,
    ) -> Tensor:
        """ONNX operator QuantizeLinear, since opset 28. Output: y."""

    def RMSNormalization(
        self,
        X: Operand,
        scale: Operand,
        *,
        axis: int = -1,
        epsilon: float = 1e-05,
        stash_type: int = 1,
    ) -> Tensor:
        """ONNX operator RMSNormalization, since opset 23. Output: Y."""

    @overload
    def RNN(
        self,
        X: Operand,
        W: Operand,
        R: Operand,
        B: Operand | None = None,
        sequence_lens: Operand | None = None,
        initial_h: Operand | None = None,
        *,
        outputs: Literal[1] = 1,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] = ["Tanh", "Tanh"],
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,
        layout: int = 0,
    ) -> Tensor:
        """ONNX operator RNN, since opset 22. Outputs: Y, Y_h."""

    @overload
    def RNN(
        self,
        X: Operand,
        W: Operand,
        R: Operand,
        B: Operand | None = None,
        sequence_lens: Operand | None = None,
        initial_h: Operand | None = None,
        *,
        outputs: Literal[2],
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] = ["Tanh", "Tanh"],
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,
        layout: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator RNN, since opset 22. Outputs: Y, Y_h."""

    @overload
    def RNN(
        self,
        X: Operand,
        W: Operand,
        R: Operand,
        B: Operand | None = None,
        sequence_lens: Operand | None = None,
        initial_h: Operand | None = None,
        *,
        outputs: int,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] = ["Tanh", "Tanh"],
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,
        layout: int = 0,
    ) -> tuple[Tensor, ...]:
        """ONNX operator RNN, since opset 22. Outputs: Y, Y_h."""

    def RandomNormal(
        self,
        *,
        shape: Sequence[int],
        dtype: int = 1,
        mean: float = 0.0,
        scale: float = 1.0,
        seed: float | None = None,
    ) -> Tensor:
        """ONNX operator RandomNormal, since opset 22. Output: output."""

    def RandomNormalLike(
        self,
        input: Operand,
        *,
        dtype: int | None = None,
        mean: float = 0.0,
        scale: float = 1.0,
        seed: float | None = None,
    ) -> Tensor:
        """ONNX operator RandomNormalLike, since opset 22. Output: output."""

    def RandomUniform(
        self,
        *,
        shape: Sequence[int],
        dtype: int = 1,
        high: float = 1.0,
        low: float = 0.0,
        seed: float | None = None,
    ) -> Tensor:
        """ONNX operator RandomUniform, since opset 22. Output: output."""

    def RandomUniformLike(
        self,
        input: Operand,
        *,
        dtype: int | None = None,
        high: float = 1.0,
        low: float = 0.0,
        seed: float | None = None,
    ) -> Tensor:
        """ONNX operator RandomUniformLike, since opset 22. Output: output."""

    def Range(
        self, start: Operand, limit: Operand, delta: Operand, *, stash_type: int = 1
    ) -> Tensor:
        """ONNX operator Range, since opset 27. Output: output."""

    @overload
    def Reciprocal(self, X: _Scalar) -> Host:
        """ONNX operator Reciprocal, since opset 13. Output: Y."""

    @overload
    def Reciprocal(self, X: _Array) -> Tensor:
        """ONNX operator Reciprocal, since opset 13. Output: Y."""

    def ReduceL1(
        self,
        data: Operand,
        axes: Operand | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        """ONNX operator ReduceL1, since opset 18. Output: reduced."""

    def ReduceL2(
        self,
        data: Operand,
        axes: Operand | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        """ONNX operator ReduceL2, since opset 18. Output: reduced."""

    def ReduceLogSum(
        self,
        data: Operand,
        axes: Operand | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        """ONNX operator ReduceLogSum, since opset 28. Output: reduced."""

    def ReduceLogSumExp(
        self,
        data: Operand,
        axes: Operand | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        """ONNX operator ReduceLogSumExp, since opset 28. Output: reduced."""

    def ReduceMax(
        self,
        data: Operand,
        axes: Operand | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        """ONNX operator ReduceMax, since opset 20. Output: reduced."""

    def ReduceMean(
        self,
        data: Operand,
        axes: Operand | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        """ONNX operator ReduceMean, since opset 18. Output: reduced."""

    def ReduceMin(
        self,
        data: Operand,
        axes: Operand | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        """ONNX operator ReduceMin, since opset 20. Output: reduced."""

    def ReduceProd(
        self,
        data: Operand,
        axes: Operand | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        """ONNX operator ReduceProd, since opset 18. Output: reduced."""

    def ReduceSum(
        self,
        data: Operand,
        axes: Operand | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        """ONNX operator ReduceSum, since opset 13. Output: reduced."""

    def ReduceSumSquare(
        self,
        data: Operand,
        axes: Operand | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        """ONNX operator ReduceSumSquare, since opset 18. Output: reduced."""

    def RegexFullMatch(self, X: Operand, *, pattern: str | None = None) -> Tensor:
        """ONNX operator RegexFullMatch, since opset 20. Output: Y."""

    def Relu(self, X: Operand) -> Tensor:
        """ONNX operator Relu, since opset 14. Output: Y."""

    def Reshape(self, data: Operand, shape: Operand, *, allowzero: int = 0) -> Tensor:
        """ONNX operator Reshape, since opset 25. Output: reshaped."""

    def Resize(
        self,
        X: Operand,
        roi: Operand | None = None,
        scales: Operand | None = None,
        sizes: Operand | None = None,
        *,
        antialias: int = 0,
        axes: Sequence[int] | None = None,
        coordinate_transformation_mode: str = "half_pixel",
        cubic_coeff_a: float = -0.75,
        exclude_outside: int = 0,
        extrapolation_value: float = 0.0,
        keep_aspect_ratio_policy: str = "stretch",
        mode: str = "nearest",
        nearest_mode: str = "round_prefer_floor",
    ) -> Tensor:
        """ONNX operator Resize, since opset 19. Output: Y."""

    def ReverseSequence(
        self, input: Operand, sequence_lens: Operand, *, batch_axis: int = 1, time_axis: int = 0
    ) -> Tensor:
        """ONNX operator ReverseSequence, since opset 28. Output: Y."""

    def RoiAlign(
        self,
        X: Operand,
        rois: Operand,
        batch_indices: Operand,
        *,
        coordinate_transformation_mode: str = "half_pixel",
        mode: str = "avg",
        output_height: int = 1,
        output_width: int = 1,
        sampling_ratio: int = 0,
        spatial_scale: float = 1.0,
    ) -> Tensor:
        """ONNX operator RoiAlign, since opset 22. Output: Y."""

    def RotaryEmbedding(
        self,
        X: Operand,
        cos_cache: Operand,
        sin_cache: Operand,
        position_ids: Operand | None = None,
        *,
        interleaved: int = 0,
        num_heads: int | None = None,
        rotary_embedding_dim: int = 0,
    ) -> Tensor:
        """ONNX operator RotaryEmbedding, since opset 23. Output: Y."""

    def Round(self, X: Operand) -> Tensor:
        """ONNX operator Round, since opset 22. Output: Y."""

    def STFT(
        self,
        signal: Operand,
        frame_step: Operand,
        window: Operand | None = None,
        frame_length: Operand | None = None,
        *,
        onesided: int = 1,
    ) -> Tensor:
        """ONNX operator STFT, since opset 17. Output: output."""

    @overload
    def Scan(
        self,
        *initial_state_and_scan_inputs: Operand,
        outputs: Literal[1] = 1,
        body: GraphProto,
        num_scan_inputs: int,
        scan_input_axes: Sequence[int] | None = None,
        scan_input_directions: Sequence[int] | None = None,
        scan_output_axes: Sequence[int] | None = None,
        scan_output_directions: Sequence[int] | None = None,
    ) -> Tensor:
        """ONNX operator Scan, since opset 25. Output: final_state_and_scan_outputs."""

    @overload
    def Scan(
        self,
        *initial_state_and_scan_inputs: Operand,
        outputs: int,
        body: GraphProto,
        num_scan_inputs: int,
        scan_input_axes: Sequence[int] | None = None,
        scan_input_directions: Sequence[int] | None = None,
        scan_output_axes: Sequence[int] | None = None,
        scan_output_directions: Sequence[int] | None = None,
    ) -> tuple[Tensor, ...]:
        """ONNX operator Scan, since opset 25. Output: final_state_and_scan_outputs."""

    def ScatterElements(
        self,
        data: Operand,
        indices: Operand,
        updates: Operand,
        *,
        axis: int = 0,
        reduction: str = "none",
    ) -> Tensor:
        """ONNX operator ScatterElements, since opset 18. Output: output."""

    def ScatterND(
        self, data: Operand, indices: Operand, updates: Operand, *, reduction: str = "none"
    ) -> Tensor:
        """ONNX operator ScatterND, since opset 18. Output: output."""

    def Selu(self, X: Operand, *, alpha: float = 1.6732632, gamma: float = 1.050701) -> Tensor:
        """ONNX operator Selu, since opset 22. Output: Y."""

    def SequenceAt(self, input_sequence: Operand, position: Operand) -> Tensor:
        """ONNX operator SequenceAt, since opset 11. Output: tensor."""

    def SequenceConstruct(self, *inputs: Operand) -> Tensor:
        """ONNX operator SequenceConstruct, since opset 11. Output: output_sequence."""

    def SequenceEmpty(self, *, dtype: int | None = None) -> Tensor:
        """ONNX operator SequenceEmpty, since opset 11. Output: output."""

    def SequenceErase(self, input_sequence: Operand, position: Operand | None = None) -> Tensor:
        """ONNX operator SequenceErase, since opset 11. Output: output_sequence."""

    def SequenceInsert(
        self, input_sequence: Operand, tensor: Operand, position: Operand | None = None
    ) -> Tensor:
        """ONNX operator SequenceInsert, since opset 11. Output: output_sequence."""

    def SequenceLength(self, input_sequence: Operand) -> Tensor:
        """ONNX operator SequenceLength, since opset 11. Output: length."""

    @overload
    def SequenceMap(
        self,
        input_sequence: Operand,
        *additional_inputs: Operand,
        outputs: Literal[1] = 1,
        body: GraphProto,
    ) -> Tensor:
        """ONNX operator SequenceMap, since opset 17. Output: out_sequence."""

    @overload
    def SequenceMap(
        self, input_sequence: Operand, *additional_inputs: Operand, outputs: int, body: GraphProto
    ) -> tuple[Tensor, ...]:
        """ONNX operator SequenceMap, since opset 17. Output: out_sequence."""

    def Shape(self, data: Operand, *, end: int | None = None, start: int = 0) -> Tensor:
        """ONNX operator Shape, since opset 25. Output: shape."""

    def Shrink(self, input: Operand, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
        """ONNX operator Shrink, since opset 9. Output: output."""

    def Sigmoid(self, X: Operand) -> Tensor:
        """ONNX operator Sigmoid, since opset 13. Output: Y."""

    def Sign(self, input: Operand) -> Tensor:
        """ONNX operator Sign, since opset 13. Output: output."""

    def Sin(self, input: Operand) -> Tensor:
        """ONNX operator Sin, since opset 22. Output: output."""

    def Sinh(self, input: Operand) -> Tensor:
        """ONNX operator Sinh, since opset 22. Output: output."""

    def Size(self, data: Operand) -> Tensor:
        """ONNX operator Size, since opset 25. Output: size."""

    def Slice(
        self,
        data: Operand,
        starts: Operand,
        ends: Operand,
        axes: Operand | None = None,
        steps: Operand | None = None,
    ) -> Tensor:
        """ONNX operator Slice, since opset 13. Output: output."""

    def Softmax(self, input: Operand, *, axis: int = -1) -> Tensor:
        """ONNX operator Softmax, since opset 13. Output: output."""

    @overload
    def SoftmaxCrossEntropyLoss(
        self,
        scores: Operand,
        labels: Operand,
        weights: Operand | None = None,
        *,
        outputs: Literal[1] = 1,
        ignore_index: int | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """ONNX operator SoftmaxCrossEntropyLoss, since opset 13. Outputs: output, log_prob."""

    @overload
    def SoftmaxCrossEntropyLoss(
        self,
        scores: Operand,
        labels: Operand,
        weights: Operand | None = None,
        *,
        outputs: Literal[2],
        ignore_index: int | None = None,
        reduction: str = "mean",
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator SoftmaxCrossEntropyLoss, since opset 13. Outputs: output, log_prob."""

    @overload
    def SoftmaxCrossEntropyLoss(
        self,
        scores: Operand,
        labels: Operand,
        weights: Operand | None = None,
        *,
        outputs: int,
        ignore_index: int | None = None,
        reduction: str = "mean",
    ) -> tuple[Tensor, ...]:
        """ONNX operator SoftmaxCrossEntropyLoss, since opset 13. Outputs: output, log_prob."""

    def Softplus(self, X: Operand) -> Tensor:
        """ONNX operator Softplus, since opset 22. Output: Y."""

    def Softsign(self, input: Operand) -> Tensor:
        """ONNX operator Softsign, since opset 22. Output: output."""

    def SpaceToDepth(self, input: Operand, *, blocksize: int, mode: str = "DCR") -> Tensor:
        """ONNX operator SpaceToDepth, since opset 28. Output: output."""

    @overload
    def Split(
        self,
        input: Operand,
        split: Operand | None = None,
        *,
        outputs: Literal[1] = 1,
        axis: int = 0,
        num_outputs: int | None = None,
    ) -> Tensor:
        """ONNX operator Split, since opset 18. Output: outputs."""

    @overload
    def Split(
        self,
        input: Operand,
        split: Operand | None = None,
        *,
        outputs: int,
        axis: int = 0,
        num_outputs: int | None = None,
    ) -> tuple[Tensor, ...]:
        """ONNX operator Split, since opset 18. Output: outputs."""

    def SplitToSequence(
        self, input: Operand, split: Operand | None = None, *, axis: int = 0, keepdims: int = 1
    ) -> Tensor:
        """ONNX operator SplitToSequence, since opset 24. Output: output_sequence."""

    @overload
    def Sqrt(self, X: _Scalar) -> Host:
        """ONNX operator Sqrt, since opset 13. Output: Y."""

    @overload
    def Sqrt(self, X: _Array) -> Tensor:
        """ONNX operator Sqrt, since opset 13. Output: Y."""

    def Squeeze(self, data: Operand, axes: Operand | None = None) -> Tensor:
        """ONNX operator Squeeze, since opset 25. Output: squeezed."""

    def StringConcat(self, X: Operand, Y: Operand) -> Tensor:
        """ONNX operator StringConcat, since opset 20. Output: Z."""

    def StringNormalizer(
        self,
        X: Operand,
        *,
        case_change_action: str = "NONE",
        is_case_sensitive: int = 0,
        locale: str | None = None,
        stopwords: Sequence[str] | None = None,
    ) -> Tensor:
        """ONNX operator StringNormalizer, since opset 10. Output: Y."""

    @overload
    def StringSplit(
        self,
        X: Operand,
        *,
        outputs: Literal[1] = 1,
        delimiter: str | None = None,
        maxsplit: int | None = None,
    ) -> Tensor:
        """ONNX operator StringSplit, since opset 20. Outputs: Y, Z."""

    @overload
    def StringSplit(
        self,
        X: Operand,
        *,
        outputs: Literal[2],
        delimiter: str | None = None,
        maxsplit: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator StringSplit, since opset 20. Outputs: Y, Z."""

    @overload
    def StringSplit(
        self, X: Operand, *, outputs: int, delimiter: str | None = None, maxsplit: int | None = None
    ) -> tuple[Tensor, ...]:
        """ONNX operator StringSplit, since opset 20. Outputs: Y, Z."""

    @overload
    def Sub(self, A: _Scalar, B: _Scalar) -> Host:
        """ONNX operator Sub, since opset 14. Output: C."""

    @overload
    def Sub(self, A: _Array, B: Operand) -> Tensor:
        """ONNX operator Sub, since opset 14. Output: C."""

    @overload
    def Sub(self, A: Operand, B: _Array) -> Tensor:
        """ONNX operator Sub, since opset 14. Output: C."""

    def Sum(self, *data_0: Operand) -> Tensor:
        """ONNX operator Sum, since opset 13. Output: sum."""

    def SwiGLU(self, A: Operand, B: Operand, *, alpha: float = 1.0) -> Tensor:
        """ONNX operator SwiGLU, since opset 28. Output: Y."""

    def Swish(self, X: Operand, *, alpha: float = 1.0) -> Tensor:
        """ONNX operator Swish, since opset 24. Output: Y."""

    def Tan(self, input: Operand) -> Tensor:
        """ONNX operator Tan, since opset 22. Output: output."""

    def Tanh(self, input: Operand) -> Tensor:
        """ONNX operator Tanh, since opset 13. Output: output."""

    def TensorScatter(
        self,
        past_cache: Operand,
        update: Operand,
        write_indices: Operand | None = None,
        *,
        axis: int = -2,
        mode: str = "linear",
    ) -> Tensor:
        """ONNX operator TensorScatter, since opset 24. Output: present_cache."""

    def TfIdfVectorizer(
        self,
        X: Operand,
        *,
        max_gram_length: int,
        max_skip_count: int,
        min_gram_length: int,
        mode: str,
        ngram_counts: Sequence[int],
        ngram_indexes: Sequence[int],
        pool_int64s: Sequence[int] | None = None,
        pool_strings: Sequence[str] | None = None,
        weights: Sequence[float] | None = None,
    ) -> Tensor:
        """ONNX operator TfIdfVectorizer, since opset 9. Output: Y."""

    def ThresholdedRelu(self, X: Operand, *, alpha: float = 1.0) -> Tensor:
        """ONNX operator ThresholdedRelu, since opset 22. Output: Y."""

    def Tile(self, input: Operand, repeats: Operand) -> Tensor:
        """ONNX operator Tile, since opset 13. Output: output."""

    @overload
    def TopK(
        self,
        X: Operand,
        K: Operand,
        *,
        outputs: Literal[1] = 1,
        axis: int = -1,
        largest: int = 1,
        sorted: int = 1,
    ) -> Tensor:
        """ONNX operator TopK, since opset 24. Outputs: Values, Indices."""

    @overload
    def TopK(
        self,
        X: Operand,
        K: Operand,
        *,
        outputs: Literal[2],
        axis: int = -1,
        largest: int = 1,
        sorted: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator TopK, since opset 24. Outputs: Values, Indices."""

    @overload
    def TopK(
        self,
        X: Operand,
        K: Operand,
        *,
        outputs: int,
        axis: int = -1,
        largest: int = 1,
        sorted: int = 1,
    ) -> tuple[Tensor, ...]:
        """ONNX operator TopK, since opset 24. Outputs: Values, Indices."""

    def Transpose(self, data: Operand, *, perm: Sequence[int] | None = None) -> Tensor:
        """ONNX operator Transpose, since opset 25. Output: transposed."""

    def Trilu(self, input: Operand, k: Operand | None = None, *, upper: int = 1) -> Tensor:
        """ONNX operator Trilu, since opset 14. Output: output."""

    @overload
    def Unique(
        self, X: Operand, *, outputs: Literal[1] = 1, axis: int | None = None, sorted: int = 1
    ) -> Tensor:
        """ONNX operator Unique, since opset 28. Outputs: Y, indices, inverse_indices, counts."""

    @overload
    def Unique(
        self, X: Operand, *, outputs: Literal[2], axis: int | None = None, sorted: int = 1
    ) -> tuple[Tensor, Tensor]:
        """ONNX operator Unique, since opset 28. Outputs: Y, indices, inverse_indices, counts."""

    @overload
    def Unique(
        self, X: Operand, *, outputs: Literal[3], axis: int | None = None, sorted: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ONNX operator Unique, since opset 28. Outputs: Y, indices, inverse_indices, counts."""

    @overload
    def Unique(
        self, X: Operand, *, outputs: Literal[4], axis: int | None = None, sorted: int = 1
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ONNX operator Unique, since opset 28. Outputs: Y, indices, inverse_indices, counts."""

    @overload
    def Unique(
        self, X: Operand, *, outputs: int, axis: int | None = None, sorted: int = 1
    ) -> tuple[Tensor, ...]:
        """ONNX operator Unique, since opset 28. Outputs: Y, indices, inverse_indices, counts."""

    def Unsqueeze(self, data: Operand, axes: Operand) -> Tensor:
        """ONNX operator Unsqueeze, since opset 25. Output: expanded."""

    def Where(self, condition: Operand, X: Operand, Y: Operand) -> Tensor:
        """ONNX operator Where, since opset 16. Output: output."""

    def Xor(self, A: Operand, B: Operand) -> Tensor:
        """ONNX operator Xor, since opset 7. Output: C."""
