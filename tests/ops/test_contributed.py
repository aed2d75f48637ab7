"""Contributed operators (com.microsoft), and one of ai.onnx.ml, against the runtime that defines them, at odd sizes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.ops.test_sizes import normal, run_model  # noqa: F401  (a fixture)

runtime = pytest.importorskip("onnxruntime")
DOMAIN = "com.microsoft"


def check(
    run_model,  # noqa: F811
    op, inputs, constants=None, outputs=("y",), rtol=2e-4, atol=2e-5, step=None, domain=DOMAIN, **attributes,
) -> None:  # fmt: skip
    """One node of the domain; None among the inputs is one left out. Integers may differ by `step`."""
    constants = constants or {}
    order = attributes.pop("order", [*inputs, *constants])
    node = helper.make_node(op, [n or "" for n in order], list(outputs), domain=domain, **attributes)
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()
    ]
    graph = helper.make_graph(
        [node],
        "g",
        values,
        [onnx.ValueInfoProto(name=o) for o in outputs if o],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = [o for o in outputs if o]
    expected = session.run(wanted, inputs)
    found = run_model(model, inputs)
    for name, want in zip(wanted, expected, strict=True):
        got = found[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        if step is not None and want.dtype.kind in "iu":
            assert np.abs(got.astype(np.int64) - want.astype(np.int64)).max() <= step, name
        else:
            np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=name)


def bytes_of(*shape: int, dtype=np.uint8, seed: int = 0) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed + sum(shape)).integers(info.min, info.max + 1, shape).astype(dtype)


def number(value, dtype=np.float32) -> np.ndarray:
    return np.asarray(value, dtype)


@pytest.mark.parametrize("op", ["QuickGelu", "Gelu", "FastGelu"])
def test_activations(run_model, op) -> None:  # noqa: F811
    check(run_model, op, {"x": normal(3, 7)})


def test_gelu_of_a_sum(run_model) -> None:  # noqa: F811
    check(run_model, "BiasGelu", {"x": normal(3, 5, 7)}, {"b": normal(7, seed=1)})
    check(run_model, "FastGelu", {"x": normal(3, 5, 7)}, {"b": normal(7, seed=1)})


@pytest.mark.parametrize(("flip_a", "flip_b"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_fused_matmul(run_model, flip_a, flip_b) -> None:  # noqa: F811
    a, b = normal(2, 3, 5), normal(2, 5, 7, seed=1)
    inputs = {"a": a.swapaxes(1, 2).copy() if flip_a else a, "b": b.swapaxes(1, 2).copy() if flip_b else b}
    check(run_model, "FusedMatMul", inputs, transA=flip_a, transB=flip_b, alpha=0.3)


@pytest.mark.parametrize("activation", ["Relu", "Tanh", "Sigmoid", "LeakyRelu"])
def test_fused_gemm(run_model, activation) -> None:  # noqa: F811
    more = {"activation_alpha": 0.2} if activation == "LeakyRelu" else {}
    constants = {"b": normal(7, 5, seed=1), "c": normal(7, seed=2)}
    check(run_model, "FusedGemm", {"a": normal(3, 5)}, constants, transB=1, activation=activation, **more)


@pytest.mark.parametrize(("activation", "parameters"), [("Relu", None), ("Clip", [0.0, 0.7]), ("LeakyRelu", [0.2])])
def test_fused_conv(run_model, activation, parameters) -> None:  # noqa: F811
    more = {} if parameters is None else {"activation_params": parameters}
    inputs, constants = {"x": normal(1, 3, 9, 7)}, {"w": normal(5, 3, 3, 3, seed=1), "b": normal(5, seed=2)}
    check(run_model, "FusedConv", inputs, constants, activation=activation, pads=[1, 1, 1, 1], **more)


def test_fused_conv_of_a_sum(run_model) -> None:  # noqa: F811
    inputs = {"x": normal(1, 3, 9, 7), "z": normal(1, 5, 7, 5, seed=3)}
    constants = {"w": normal(5, 3, 3, 3, seed=1), "b": normal(5, seed=2)}
    check(run_model, "FusedConv", inputs, constants, activation="Relu", order=["x", "w", "b", "z"])


def test_nhwc_max_pool(run_model) -> None:  # noqa: F811
    check(run_model, "NhwcMaxPool", {"x": bytes_of(1, 9, 7, 3)}, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])


@pytest.mark.parametrize("kind", ["none", "packed", "float"])
@pytest.mark.parametrize(("bits", "depth", "block"), [(4, 40, 16), (4, 64, 32), (8, 33, 16), (2, 64, 16)])
def test_matmul_n_bits(run_model, kind, bits, depth, block) -> None:  # noqa: F811
    if bits == 8 and kind == "float":
        pytest.skip("which the runtime does not have")
    columns, blocks = 7, -(-depth // block)
    constants = {
        "w": bytes_of(columns, blocks, block * bits // 8),
        "s": np.abs(normal(columns, blocks, seed=1)) + 0.1,
    }
    if kind == "packed":
        constants["z"] = bytes_of(columns, -(-blocks * bits // 8))
    elif kind == "float":
        constants["z"] = np.full((columns, blocks), 3.5, np.float32)
    check(run_model, "MatMulNBits", {"x": normal(2, 3, depth)}, constants, rtol=1e-3, atol=2e-3,
          N=columns, K=depth, bits=bits, block_size=block)  # fmt: skip


@pytest.mark.parametrize("parts", [("g",), ("g", "b"), ("g", "b", "c")])
def test_skip_layer_normalization(run_model, parts) -> None:  # noqa: F811
    constants = {n: normal(7, seed=k) for k, n in enumerate(parts, 1)}
    inputs = {"x": normal(2, 3, 7), "s": normal(2, 3, 7, seed=9)}
    check(run_model, "SkipLayerNormalization", inputs, constants, outputs=("y", "", "", "sum"), epsilon=1e-5)


def test_skip_simplified_layer_normalization(run_model) -> None:  # noqa: F811
    inputs = {"x": normal(2, 3, 7), "s": normal(2, 3, 7, seed=9)}
    constants = {"g": normal(7, seed=1), "c": normal(7, seed=2)}
    check(run_model, "SkipSimplifiedLayerNormalization", inputs, constants, outputs=("y", "", "", "sum"))


@pytest.mark.parametrize("masked", [False, True])
def test_embed_layer_normalization(run_model, masked) -> None:  # noqa: F811
    inputs = {"words": bytes_of(2, 5).astype(np.int32) % 11, "segments": np.array([[0, 0, 1, 1, 1]] * 2, np.int32)}
    constants = {"w": normal(11, 7, seed=1), "p": normal(8, 7, seed=2), "t": normal(2, 7, seed=3),
                 "g": normal(7, seed=4), "b": normal(7, seed=5)}  # fmt: skip
    order = ["words", "segments", *constants]
    if masked:
        inputs["mask"] = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
        order.append("mask")
    check(run_model, "EmbedLayerNormalization", inputs, constants, ("y", "index"), order=order, epsilon=1e-5)


# attention


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", ["none", "ends", "matrix", "cube"])
def test_attention(run_model, causal, mask) -> None:  # noqa: F811
    inputs = {"x": normal(2, 5, 6)}
    constants = {"w": normal(6, 24, seed=1), "b": normal(24, seed=2)}
    order = ["x", "w", "b"]
    masks = {
        "ends": np.array([3, 5], np.int32),
        "matrix": np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32),
        "cube": np.tril(np.ones((2, 5, 5), np.int32)),
    }
    if mask != "none":
        inputs["m"] = masks[mask]
        order.append("m")
    check(run_model, "Attention", inputs, constants, order=order, num_heads=2, unidirectional=causal)


def test_attention_with_a_past(run_model) -> None:  # noqa: F811
    inputs = {"x": normal(2, 3, 6), "past": normal(2, 2, 2, 4, 4, seed=5)}
    constants = {"w": normal(6, 24, seed=1), "b": normal(24, seed=2)}
    check(run_model, "Attention", inputs, constants, ("y", "present"), order=["x", "w", "b", None, "past"], num_heads=2,
          unidirectional=1)  # fmt: skip


@pytest.mark.parametrize("mask", ["none", "ends", "matrix"])
def test_multi_head_attention(run_model, mask) -> None:  # noqa: F811
    inputs = {"q": normal(2, 3, 8), "k": normal(2, 5, 8, seed=1), "v": normal(2, 5, 12, seed=2)}
    constants = {"b": normal(28, seed=3)}
    order = ["q", "k", "v", "b"]
    if mask != "none":
        inputs["m"] = {"ends": np.array([4, 5], np.int32), "matrix": np.array([[1, 1, 1, 0, 1]] * 2, np.int32)}[mask]
        order.append("m")
    check(run_model, "MultiHeadAttention", inputs, constants, order=order, num_heads=2)


def test_multi_head_attention_with_bias_and_past(run_model) -> None:  # noqa: F811
    inputs = {
        "q": normal(2, 3, 8), "k": normal(2, 3, 8, seed=1), "v": normal(2, 3, 8, seed=2),
        "added": normal(1, 2, 3, 7, seed=4), "pk": normal(2, 2, 4, 4, seed=5), "pv": normal(2, 2, 4, 4, seed=6),
    }  # fmt: skip
    order = ["q", "k", "v", None, None, "added", "pk", "pv"]
    outputs = ("y", "k1", "v1")
    check(run_model, "MultiHeadAttention", inputs, outputs=outputs, order=order, num_heads=2, unidirectional=1)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("offset", [True, False])
def test_rotary_embedding(run_model, interleaved, offset) -> None:  # noqa: F811
    angles = np.arange(9)[:, None] * np.array([1.0, 0.1, 0.01])
    constants = {"c": np.cos(angles).astype(np.float32), "s": np.sin(angles).astype(np.float32)}
    inputs = {"x": normal(2, 4, 12), "p": np.array([3]) if offset else np.array([[0, 1, 2, 3], [4, 5, 6, 7]])}
    check(run_model, "RotaryEmbedding", inputs, constants, interleaved=interleaved)


@pytest.mark.parametrize(
    "attributes",
    [{}, {"do_rotary": 1}, {"do_rotary": 1, "rotary_interleaved": 1}, {"softcap": 2.0}, {"local_window_size": 2}],
)
def test_group_query_attention_of_a_prompt(run_model, attributes) -> None:  # noqa: F811
    angles = np.arange(9)[:, None] * 10.0 ** -np.arange(8)
    inputs = {"q": normal(2, 5, 64), "k": normal(2, 5, 32, seed=1), "v": normal(2, 5, 32, seed=2),
              "n": np.array([4, 4], np.int32)}  # fmt: skip
    constants = {"t": np.array(5, np.int32), "c": np.cos(angles).astype(np.float32),
                 "s": np.sin(angles).astype(np.float32)}  # fmt: skip
    order = ["q", "k", "v", None, None, "n", "t", *(("c", "s") if attributes.get("do_rotary") else ())]
    check(run_model, "GroupQueryAttention", inputs, constants, ("y", "pk", "pv"), order=order, num_heads=4,
          kv_num_heads=2, **attributes)  # fmt: skip


def test_group_query_attention_of_one_more_word(run_model) -> None:  # noqa: F811
    angles = np.arange(9)[:, None] * 10.0 ** -np.arange(8)
    inputs = {"q": normal(2, 1, 64), "k": normal(2, 1, 32, seed=1), "v": normal(2, 1, 32, seed=2),
              "pk": normal(2, 2, 5, 16, seed=3), "pv": normal(2, 2, 5, 16, seed=4),
              "n": np.array([5, 5], np.int32)}  # fmt: skip
    constants = {"t": np.array(6, np.int32), "c": np.cos(angles).astype(np.float32),
                 "s": np.sin(angles).astype(np.float32)}  # fmt: skip
    order = ["q", "k", "v", "pk", "pv", "n", "t", "c", "s"]
    check(run_model, "GroupQueryAttention", inputs, constants, ("y", "k1", "v1"), order=order, num_heads=4,
          kv_num_heads=2, do_rotary=1)  # fmt: skip


# quantised


@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_qlinear_arithmetic(run_model, op, dtype) -> None:  # noqa: F811
    inputs = {"x": bytes_of(3, 7, dtype=dtype), "y": bytes_of(7, dtype=dtype, seed=1)}
    constants = {"xs": number(0.03), "xz": number(3, dtype), "ys": number(0.05), "yz": number(5, dtype),
                 "os": number(0.07), "oz": number(9, dtype)}  # fmt: skip
    order = ["x", "xs", "xz", "y", "ys", "yz", "os", "oz"]
    check(run_model, op, inputs, constants, order=order, outputs=("o",), step=1)


@pytest.mark.parametrize(("op", "attributes"), [("QLinearLeakyRelu", {"alpha": 0.1}), ("QLinearSigmoid", {})])
def test_qlinear_activations(run_model, op, attributes) -> None:  # noqa: F811
    constants = {"s": number(0.05), "z": number(120, np.uint8), "os": number(0.01), "oz": number(3, np.uint8)}
    check(run_model, op, {"x": bytes_of(5, 7)}, constants, step=1, **attributes)


def test_qlinear_softmax(run_model) -> None:  # noqa: F811
    constants = {"s": number(0.05), "z": number(120, np.uint8), "os": number(1 / 256), "oz": number(0, np.uint8)}
    check(run_model, "QLinearSoftmax", {"x": bytes_of(5, 7)}, constants, step=1, opset=13, axis=-1)


def test_qlinear_pools(run_model) -> None:  # noqa: F811
    constants = {"s": number(0.05), "z": number(120, np.uint8), "os": number(0.04), "oz": number(100, np.uint8)}
    check(run_model, "QLinearGlobalAveragePool", {"x": bytes_of(1, 3, 5, 7)}, constants, step=1)
    check(run_model, "QLinearAveragePool", {"x": bytes_of(1, 3, 9, 7)}, constants, step=1, kernel_shape=[3, 2],
          pads=[1, 0, 1, 1])  # fmt: skip


def test_qlinear_concat(run_model) -> None:  # noqa: F811
    inputs = {"x": bytes_of(2, 3), "y": bytes_of(2, 5)}
    constants = {"os": number(0.05), "oz": number(7, np.uint8), "xs": number(0.03), "xz": number(3, np.uint8),
                 "ys": number(0.04), "yz": number(200, np.uint8)}  # fmt: skip
    order = ["os", "oz", "x", "xs", "xz", "y", "ys", "yz"]
    check(run_model, "QLinearConcat", inputs, constants, order=order, outputs=("o",), step=1, axis=1)


@pytest.mark.parametrize("columns", [False, True])
def test_matmul_integer_to_float(run_model, columns) -> None:  # noqa: F811
    constants = {"b": bytes_of(5, 7, dtype=np.int8), "as": number(0.02),
                 "bs": np.linspace(0.01, 0.03, 7, dtype=np.float32) if columns else number(0.01),
                 "az": number(120, np.uint8), "bz": np.zeros(7, np.int8) if columns else number(0, np.int8),
                 "bias": normal(7, seed=1)}  # fmt: skip
    check(run_model, "MatMulIntegerToFloat", {"a": bytes_of(3, 5)}, constants, order=["a", *constants])


def test_dynamic_quantize_matmul(run_model) -> None:  # noqa: F811
    constants = {"b": bytes_of(5, 7, dtype=np.int8), "bs": number(0.01), "bz": number(3, np.int8),
                 "bias": normal(7, seed=1)}  # fmt: skip
    check(run_model, "DynamicQuantizeMatMul", {"a": normal(3, 5)}, constants, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantised", [False, True])
def test_qgemm(run_model, quantised) -> None:  # noqa: F811
    constants = {"as": number(0.02), "az": number(120, np.uint8), "b": bytes_of(7, 5, dtype=np.uint8),
                 "bs": number(0.01), "bz": number(100, np.uint8), "c": np.arange(7, dtype=np.int32)}  # fmt: skip
    if quantised:
        constants |= {"ys": number(0.1), "yz": number(128, np.uint8)}
    check(run_model, "QGemm", {"a": bytes_of(3, 5)}, constants, order=["a", *constants], step=1, transB=1)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_dynamic_quantize_lstm(run_model, direction) -> None:  # noqa: F811
    """Input and state are rounded to 8 bits, as the operator says; left as they are, results would be percents away.

    Weights are of 7 bits: with 8 and without VNNI, the runtime's sums of two products overflow 16 bits and saturate.
    The batch is one: of more, each of the runtime's threads rounds its own by itself.
    """
    ways = 2 if direction == "bidirectional" else 1
    constants = {
        "w": bytes_of(ways, 5, 16, dtype=np.int8) // 2, "r": bytes_of(ways, 4, 16, dtype=np.int8) // 2,
        "b": normal(ways, 32, seed=1) * 0.1,
        "ws": np.full(ways, 0.01, np.float32), "wz": np.zeros(ways, np.int8),
        "rs": np.full(ways, 0.008, np.float32), "rz": np.zeros(ways, np.int8),
    }  # fmt: skip
    order = ["x", "w", "r", "b", None, None, None, None, "ws", "wz", "rs", "rz"]
    check(run_model, "DynamicQuantizeLSTM", {"x": normal(6, 1, 5)}, constants, ("y", "h", "c"), order=order,
          rtol=1e-4, atol=1e-5, hidden_size=4, direction=direction)  # fmt: skip


def test_qlinear_where(run_model) -> None:  # noqa: F811
    inputs = {"c": bytes_of(3, 1) > 100, "x": bytes_of(3, 7), "y": bytes_of(7, seed=1)}
    constants = {"xs": number(0.03), "xz": number(3, np.uint8), "ys": number(0.05), "yz": number(5, np.uint8),
                 "os": number(0.07), "oz": number(9, np.uint8)}  # fmt: skip
    order = ["c", "x", "xs", "xz", "y", "ys", "yz", "os", "oz"]
    check(run_model, "QLinearWhere", inputs, constants, order=order, outputs=("o",), step=1)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_gather_block_quantized(run_model, bits, zeros) -> None:  # noqa: F811
    constants = {"w": bytes_of(11, 48 * bits // 8), "s": np.abs(normal(11, 3, seed=1))}
    if zeros:
        constants["z"] = bytes_of(11, 2 if bits == 4 else 3)
    inputs = {"i": np.array([[3, 0, 10], [7, 7, 1]])}
    order = ["w", "i", "s", *(["z"] if zeros else [])]
    check(run_model, "GatherBlockQuantized", inputs, constants, order=order, bits=bits, block_size=16)


def test_gather_block_quantized_of_small_integers(run_model) -> None:  # noqa: F811
    table = np.random.default_rng(0).integers(-8, 8, (11, 48)).astype(onnx.helper.tensor_dtype_to_np_dtype(22))
    constants = {"w": table, "s": np.abs(normal(11, 3, seed=1))}
    check(run_model, "GatherBlockQuantized", {"i": np.array([[3, 0], [7, 1]])}, constants, order=["w", "i", "s"],
          block_size=16)  # fmt: skip


def test_operators_that_onnx_took_over(run_model) -> None:  # noqa: F811
    check(run_model, "Trilu", {"x": normal(3, 5, 4)}, {"k": np.array(1)}, upper=0)
    check(run_model, "GridSample", {"x": normal(1, 2, 5, 4), "g": normal(1, 3, 3, 2, seed=1)}, mode="bilinear")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("columns", [1, 5])
def test_scaler(run_model, dtype, columns) -> None:  # noqa: F811
    offset, scale = np.linspace(-2, 3, columns).tolist(), np.linspace(0.3, 4, columns).tolist()
    x = (normal(3, 5) * 9).astype(dtype)
    check(run_model, "Scaler", {"x": x}, domain="ai.onnx.ml", offset=offset, scale=scale)
