"""The registry: what is supported is listed, versions are told apart, and lowering refuses the rest in one line."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tilewright import ops
from tilewright.errors import UnsupportedError
from tilewright.frontend.onnx import model as frontend

EXPECTED = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Bernoulli BitCast
BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Col2Im Compress Concat
ConcatFromSequence Constant ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh CumProd CumSum DFT DeformConv
DepthToSpace DequantizeLinear Det Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather
GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample
GroupNormalization HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN LSTM
LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpNormalization LpPool MatMul MatMulInteger Max
MaxPool MaxUnpool Mean MeanVarianceNormalization MelWeightMatrix Min Mish Mod Mul Multinomial Neg NonMaxSuppression
NonZero Not OneHot Optional OptionalGetElement OptionalHasElement Or PRelu Pad Pow QLinearConv QLinearMatMul
QuantizeLinear RMSNormalization RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal
ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu
Reshape Resize ReverseSequence RoiAlign Round STFT Scatter ScatterElements ScatterND Selu SequenceAt
SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength Shape Shrink Sigmoid Sign
SimplifiedLayerNormalization Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split SplitToSequence Sqrt
Squeeze Sub Sum Swish Tan Tanh TensorScatter TfIdfVectorizer ThresholdedRelu Tile TopK Transpose Trilu Unique Unsqueeze
Upsample Where Xor ai.onnx.ml.Scaler com.microsoft.Attention
com.microsoft.BiasAdd com.microsoft.BiasGelu com.microsoft.BiasSoftmax
com.microsoft.BiasSplitGelu com.microsoft.DequantizeLinear com.microsoft.DynamicQuantizeLSTM
com.microsoft.DynamicQuantizeMatMul com.microsoft.EmbedLayerNormalization com.microsoft.FastGelu
com.microsoft.FusedConv com.microsoft.FusedGemm com.microsoft.FusedMatMul com.microsoft.GatherBlockQuantized
com.microsoft.Gelu com.microsoft.GridSample com.microsoft.GroupQueryAttention com.microsoft.MatMulIntegerToFloat
com.microsoft.MatMulNBits com.microsoft.MultiHeadAttention com.microsoft.NhwcMaxPool com.microsoft.QGemm
com.microsoft.QLinearAdd com.microsoft.QLinearAveragePool com.microsoft.QLinearConcat
com.microsoft.QLinearGlobalAveragePool com.microsoft.QLinearLeakyRelu com.microsoft.QLinearMul
com.microsoft.QLinearSigmoid com.microsoft.QLinearSoftmax com.microsoft.QLinearWhere com.microsoft.QuantizeLinear
com.microsoft.QuickGelu com.microsoft.RotaryEmbedding com.microsoft.SkipLayerNormalization
com.microsoft.SkipSimplifiedLayerNormalization com.microsoft.TransposeMatMul com.microsoft.Trilu
tilewright.Atan2 tilewright.Expm1 tilewright.Log1p
"""


def test_supported_operators_are_exactly_these() -> None:
    assert ops.supported() == sorted(EXPECTED.split())


def test_an_entry_is_found_by_version() -> None:
    assert ops.find("Clip", "", 6).since == 1
    assert ops.find("Clip", "", 11).since == 11
    assert ops.find("Clip", "", 0).since == 11
    assert ops.find("Clip", "ai.onnx", 13).since == 11
    assert ops.find("Trilu", "", 13) is None
    assert ops.find("NoSuchOperator") is None


def _model(op: str, inputs: list[tuple[str, list[int]]], version: int = 20, **attributes: object) -> onnx.ModelProto:
    node = helper.make_node(op, [n for n, _ in inputs], ["y"], name="culprit", **attributes)
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs]
    graph = helper.make_graph([node], "g", values, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "words"),
    [
        ("Unheard", [("x", [3, 3])], {}, ("Unheard node 'culprit'", "not supported", "replace it")),
        ("Pad", [("x", [3, 3]), ("p", [4])], {"mode": "strange"}, ("Pad node 'culprit'", "'pads'", "initializer")),
        (
            "LSTM",
            [("x", [2, 1, 3]), ("w", [1, 16, 3]), ("r", [1, 16, 4])],
            {"hidden_size": 4, "activations": ["Sigmoid", "Strange", "Tanh"]},
            ("LSTM node 'culprit'", "activation 'Strange'"),
        ),
    ],
)
def test_unsupported_is_one_line_that_names_the_node(op, inputs, attributes, words) -> None:
    graph = frontend.load(_model(op, inputs, **attributes))
    with pytest.raises(UnsupportedError) as error:
        ops.lower(graph)
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_tensor_names_are_unique_identifiers() -> None:
    nodes = [
        helper.make_node("Relu", ["/a/b:0"], ["/a.b_0"]),
        helper.make_node("Softmax", ["/a.b_0"], ["0/out"]),
    ]
    value = helper.make_tensor_value_info("/a/b:0", TensorProto.FLOAT, [2, 3])
    out = helper.make_tensor_value_info("0/out", TensorProto.FLOAT, [2, 3])
    model = helper.make_model(
        helper.make_graph(nodes, "g", [value], [out]), opset_imports=[helper.make_opsetid("", 17)]
    )
    program = ops.lower(frontend.load(model))
    names = [t.name for t in program.tensors()]
    assert len(set(names)) == len(names)
    assert all(n.isidentifier() for n in names)
    assert (program.input_names, program.output_names) == (("/a/b:0",), ("0/out",))


def test_shape_arithmetic_vanishes() -> None:
    """x.reshape(x.shape[0], -1) as exporters write it leaves one Map."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Unsqueeze", ["n", "axis"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    constants = {"zero": np.asarray(0), "axis": np.asarray([0]), "rest": np.asarray([-1])}
    initializers = [onnx.numpy_helper.from_array(a.astype(np.int64), n) for n, a in constants.items()]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 5, 7])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph(nodes, "g", [value], [out], initializers), opset_imports=[helper.make_opsetid("", 17)]
    )
    program = ops.lower(frontend.load(model))
    assert len(program.computes) == 1 and not program.constants
    assert program.outputs[0].shape == (3, 35)
