"""Calls of ATen at odd shapes, one or more for every row of the front end's tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

F, H, D = torch.float32, torch.float16, torch.float64
I32, L, B = torch.int32, torch.int64, torch.bool


@dataclass(frozen=True)
class Case:
    name: str  # of the overload, without "aten."
    args: tuple[Any, ...]
    named: dict[str, Any]
    tolerance: float = 1e-5

    @property
    def id(self) -> str:
        shapes = "-".join("x".join(map(str, a.shape)) or "0d" for a in self.args if isinstance(a, torch.Tensor))
        return f"{self.name}-{shapes}"


def t(*shape: int, dtype: torch.dtype = F, low: float = -2.0, high: float = 2.0, seed: int = 0) -> torch.Tensor:
    """Values spread over a range; of integers whole ones."""
    generator = torch.Generator().manual_seed(seed + 7 * len(shape) + sum(shape))
    values = torch.rand(shape, generator=generator, dtype=D) * (high - low) + low
    return values > 0 if dtype is B else values.to(dtype)


def ints(*shape: int, low: int = 0, high: int = 5, dtype: torch.dtype = L, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def case(name: str, *args: Any, tolerance: float = 1e-5, **named: Any) -> Case:
    return Case(name, args, named, tolerance)


X, Y, Z = t(3, 5), t(5, seed=1), t(2, 3, 5)
POSITIVE, SMALL = t(3, 5, low=0.1, high=3), t(3, 5, low=-0.9, high=0.9)
WHOLE, OTHER = ints(3, 5, low=-6, high=7, dtype=I32), ints(3, 5, low=1, high=4, dtype=I32, seed=3)
FLAGS = t(3, 5, dtype=B)
IMAGE, ODD = t(2, 4, 7, 9), t(2, 3, 5, 11)

ELEMENTWISE = [
    case("add.Tensor", X, Y), case("add.Tensor", X, Y, alpha=2.5), case("add.Tensor", WHOLE, X),
    case("add.Scalar", X, 3), case("add.Tensor", FLAGS, FLAGS), case("sub.Tensor", X, Y, alpha=2),
    case("mul.Tensor", X, WHOLE), case("mul.Tensor", WHOLE, 2.5), case("rsub.Scalar", X, 1.5, 2),
    case("rsub.Tensor", X, Y), case("div.Tensor", X, POSITIVE), case("div.Tensor", WHOLE, OTHER),
    case("div.Tensor_mode", WHOLE, OTHER, rounding_mode="floor"),
    case("div.Tensor_mode", WHOLE, OTHER, rounding_mode="trunc"),
    case("div.Tensor_mode", X, POSITIVE, rounding_mode="floor"),
    case("div.Tensor_mode", X, POSITIVE, rounding_mode="trunc"), case("remainder.Tensor", X, Y),
    case("remainder.Scalar", WHOLE, 4), case("fmod.Tensor", X, Y), case("fmod.Scalar", WHOLE, 4),
    case("pow.Tensor_Scalar", X, 3), case("pow.Tensor_Scalar", POSITIVE, 1.7), case("pow.Tensor_Tensor", POSITIVE, X),
    case("pow.Scalar", 2.5, X), case("pow.Tensor_Scalar", WHOLE, 2), case("atan2.default", X, t(3, 5, seed=4)),
    case("clamp.default", X, -0.5, 0.7), case("clamp.default", X, None, 0.7), case("clamp.default", WHOLE, -2),
    case("clamp.Tensor", X, SMALL, None), case("clamp_min.default", X, 0.3), case("clamp_max.default", X, 0.3),
    case("hardtanh.default", X), case("hardtanh.default", X, 0.0, 6.0), case("maximum.default", X, Y),
    case("minimum.default", X, Y),
    *(case(f"{n}.Tensor", X, t(3, 1, seed=2)) for n in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(case(f"{n}.Scalar", WHOLE, 1.5) for n in ("eq", "ne", "lt", "le", "gt", "ge")),
    case("logical_and.default", WHOLE, FLAGS), case("logical_or.default", X, FLAGS),
    case("logical_xor.default", WHOLE, FLAGS), case("logical_not.default", WHOLE),
    case("bitwise_and.Tensor", FLAGS, FLAGS), case("bitwise_or.Tensor", FLAGS, FLAGS),
    case("bitwise_left_shift.Tensor", WHOLE, WHOLE), case("bitwise_right_shift.Tensor_Scalar", WHOLE, 1),
    case("__lshift__.Scalar", WHOLE, 62), case("__rshift__.Tensor", WHOLE, WHOLE),
    case("bitwise_xor.Tensor", FLAGS, FLAGS), case("bitwise_not.default", FLAGS), case("where.self", FLAGS, X, Y),
    case("where.self", FLAGS, WHOLE, X), case("masked_fill.Scalar", X, FLAGS, -1e9),
    case("masked_fill.Tensor", X, FLAGS, torch.tensor(2.0)),
    *(case(f"{n}.default", X) for n in ("abs", "atan", "ceil", "cos", "cosh", "erf", "exp", "floor", "mish",
         "neg", "relu", "round", "sigmoid", "sign", "silu", "sin", "sinh", "tan", "tanh", "trunc", "hardswish",
         "hardsigmoid", "selu", "asinh", "exp2", "expm1", "erfc", "isnan", "isinf", "gelu", "leaky_relu", "elu",
         "softplus", "log_sigmoid_forward")),
    *(case(f"{n}.default", POSITIVE) for n in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal")),
    *(case(f"{n}.default", SMALL) for n in ("acos", "asin", "atanh")), case("acosh.default", t(3, 5, low=1.1, high=4)),
    case("abs.default", WHOLE), case("exp.default", WHOLE), case("isnan.default", WHOLE), case("isinf.default", WHOLE),
    case("sqrt.default", OTHER), case("expm1.default", t(9, low=-1e-4, high=1e-4)),
    case("log1p.default", t(9, low=-1e-4, high=1e-4)), case("gelu.default", X, approximate="tanh"),
    case("leaky_relu.default", X, 0.3), case("elu.default", X, 0.7, 1.3),
    case("softplus.default", t(3, 5, low=-30, high=30), 2.0, 10.0), case("log_sigmoid.default", X),
    case("trunc.default", WHOLE), case("prelu.default", IMAGE, t(4)), case("prelu.default", X, t(1)),
    case("_prelu_kernel.default", X, t(5)), case("_to_copy.default", X, dtype=I32),
    case("_to_copy.default", WHOLE, dtype=H), case("to.dtype", X, D), case("clone.default", X),
    case("_to_copy.default", X, dtype=B), case("copy.default", X, WHOLE[0]),
    case("native_dropout.default", X, 0.5, False), case("dropout.default", X, 0.5, False), case("alias.default", X),
    case("detach.default", X), case("contiguous.default", X), case("lift_fresh_copy.default", X),
    case("positive.default", X), case("conj_physical.default", X),
]  # fmt: skip

MAKERS = [
    case("full.default", [3, 5], 2.5), case("full.default", [90], 1, dtype=L), case("new_full.default", X, [2, 3], 4),
    case("full_like.default", X, 7), case("fill.Scalar", X, 3), case("fill.Tensor", X, torch.tensor(2.0)),
    case("zeros.default", [3, 5]), case("zeros_like.default", WHOLE), case("new_zeros.default", X, [9, 9]),
    case("ones.default", [100], dtype=B), case("ones_like.default", X), case("new_ones.default", X, [2]),
    case("scalar_tensor.default", 2.5), case("arange.start_step", 3, 20, 4), case("arange.default", 7),
    case("arange.start", 2, 9), case("arange.start_step", 0.5, 3.0, 0.25), case("eye.default", 4), case("eye.m", 3, 5),
]  # fmt: skip

SHAPES = [
    case("view.default", Z, [3, 10]), case("reshape.default", Z, [-1, 2]), case("_unsafe_view.default", Z, [30]),
    case("unsqueeze.default", X, -1), case("squeeze.dim", t(3, 1, 5), 1), case("squeeze.dims", t(1, 3, 1), [0, 2]),
    case("squeeze.default", t(1, 3, 1)), case("flatten.using_ints", Z, 1, 2),
    case("unflatten.int", t(3, 10), 1, [2, 5]), case("permute.default", Z, [2, 0, 1]),
    case("permute.default", Z, [-1, 0, 1]), case("transpose.int", Z, -1, 0), case("t.default", X),
    case("expand.default", t(3, 1), [2, -1, 5]), case("broadcast_to.default", t(3, 1), [2, 3, 5]),
    case("repeat.default", X, [2, 1, 3]), case("slice.Tensor", Z, 2, 1, 4), case("slice.Tensor", Z, -1, -3, 2**63 - 1),
    case("slice.Tensor", t(11), 0, 1, 10, 3), case("slice.Tensor", X, 1, 4, 2), case("select.int", Z, 1, -1),
    case("split_with_sizes.default", t(7, 3), [2, 4, 1]), case("split.Tensor", t(3, 7), 3, 1),
    case("split.Tensor", t(3, 7), 7, 1), case("chunk.default", t(7, 3), 3), case("unbind.int", Z, 1),
    case("unsafe_split.Tensor", t(3, 7), 3, 1), case("unsafe_split_with_sizes.default", t(7, 3), [2, 4, 1]),
    case("unsafe_chunk.default", t(7, 3), 3), case("tensor_split.sections", t(7, 3), 3),
    case("diagonal.default", t(4, 6), 1), case("diagonal.default", t(2, 5, 4), -2, 1, 2),
    case("unfold.default", t(3, 11), 1, 4, 3), case("unfold.default", t(11, 3), 0, 4, 2),
    case("cat.default", [t(2, 3), t(4, 3), t(0)]), case("cat.default", [X, WHOLE], -1),
    case("stack.default", [X, X + 1], -1), case("stack.default", [X, X + 1], 1), case("flip.default", Z, [0, -1]),
    case("roll.default", Z, [1, -2], [1, 2]), case("roll.default", X, [4]),
    case("constant_pad_nd.default", Z, [1, 2, 0, 3], 1.5), case("constant_pad_nd.default", X, [-1, 2]),
    case("reflection_pad1d.default", Z, [2, 1]), case("reflection_pad2d.default", IMAGE, [2, 1, 3, 0]),
    case("reflection_pad3d.default", t(2, 3, 4, 5), [1, 1, 2, 0, 1, 2]), case("replication_pad1d.default", Z, [2, 4]),
    case("replication_pad2d.default", IMAGE, [2, 1, 3, 0]),
    case("replication_pad3d.default", t(2, 3, 4, 5), [1, 1, 2, 0, 1, 2]),
    case("_pad_circular.default", IMAGE, [2, 1, 3, 0]), case("triu.default", Z, 1), case("tril.default", X, -1),
    case("slice_scatter.default", Z, t(2, 2, 5), 1, 1, 3), case("slice_scatter.default", t(9, 3), t(3, 3), 0, 1, 8, 3),
    case("diagonal_scatter.default", t(4, 5), t(4), 1), case("diagonal_scatter.default", t(2, 3, 4), t(2, 2), -1, 1, 2),
    case("slice_scatter.default", Z, t(2, 3, 5)), case("embedding.default", t(7, 3), ints(2, 4)),
    case("index_select.default", Z, 1, torch.tensor([2, 0, 0])), case("gather.default", t(5, 3), 0, ints(4, 3)),
    case("index.Tensor", t(7, 3), [ints(2, 4)]), case("index.Tensor", t(3, 7, 2), [None, ints(4, low=-7, high=7)]),
    case("index.Tensor", t(6, 7, 2), [ints(4), ints(3, 4)]),
    case("index.Tensor", t(2, 6, 7, 3), [None, ints(4), ints(3, 1)]),
    case("index.Tensor", t(6, 2, 7), [ints(4), None, ints(4)]), case("_unsafe_index.Tensor", t(7, 3), [ints(2, 4)]),
    case("index_put.default", t(3, 7, 2), [None, torch.tensor([2, 5])], t(3, 2, 2)),
    case("index_put.default", t(9, 4), [torch.tensor([-1])], t(1, 4)),
    case("index_put.default", t(9, 4), [torch.tensor(3)], t(4)),
    case("index_put.default", X, [FLAGS], torch.tensor(0.5)),
    case("index_put.default", X, [t(3, dtype=B)], torch.tensor(0.5)),
    case("index_put.default", t(3, 7, 2), [None, t(7, dtype=B)], t(3, 1, 2)),
    case("index_put.default", t(3, 7, 2), [None, t(7, 2, dtype=B)], t(3, 1)),
    case("index_put.default", t(3, 7, 2), [None, None, t(2, dtype=B)], torch.tensor(0.5)),
    case("masked_scatter.default", t(3, 7), t(3, 7, dtype=B), t(5, 6)),
    case("masked_scatter.default", t(3, 7), t(3, 1, dtype=B), t(21)),
    case("index_put.default", t(6, 7, 2), [torch.tensor([0, 3, 2]), torch.tensor([1, 1, 6])], t(3, 2)),
    case("index_put.default", t(6, 7), [ints(9)], t(9, 7), True),
    case("index_put.default", t(2, 6, 7), [None, torch.tensor([[0], [3]]), torch.tensor([1, 6])], t(2, 2, 2)),
    case("index_put.default", t(6, 2, 7), [torch.tensor([0, 3]), None, torch.tensor([1, 6])], t(2, 2)),
    case("_unsafe_index_put.default", t(6, 7), [torch.tensor([1, 4])], t(2, 7)),
    case("scatter.src", X, 1, torch.tensor([[0, 4, 2], [1, 0, 3]]), t(2, 3)),
    case("scatter.value", X, 0, torch.tensor([[2, 0]]), 9.0),
    case("scatter_add.default", X, 1, ints(3, 5), t(3, 5, seed=9)),
    case("scatter.reduce", X, 1, ints(3, 5), t(3, 5, seed=9), reduce="multiply"),
]  # fmt: skip

REDUCTIONS = [
    case("sum.default", Z), case("sum.dim_IntList", Z, [0, 2]), case("sum.dim_IntList", Z, [-1], True),
    case("sum.dim_IntList", WHOLE, [1]), case("sum.dim_IntList", FLAGS, [0]), case("sum.dim_IntList", Z, None),
    case("sum.default", torch.tensor(3.0)), case("mean.default", Z), case("mean.dim", Z, [1], True),
    case("mean.dim", Z, [0, 2], dtype=D), case("amax.default", Z, [2]), case("amin.default", Z, [0, 1], True),
    case("histc.default", t(41, low=-3, high=5), 4, 0, 3),
    case("histc.default", ints(3, 7, low=-1, high=6).float(), 4, 0, 3),
    case("prod.default", X), case("prod.dim_int", X, 1), case("logsumexp.default", Z, [1]), case("any.default", FLAGS),
    case("any.dim", FLAGS, 1), case("any.dims", t(2, 3, 4, dtype=B), [0, 2], True), case("all.default", WHOLE),
    case("all.dim", X, 0, True), case("max.default", Z), case("min.default", WHOLE), case("max.dim", Z, 1),
    case("min.dim", Z, -1, True), case("argmax.default", Z), case("argmax.default", Z, 1, True),
    case("argmin.default", Z, -1), case("argmin.default", X), case("var.correction", Z, [1]),
    case("var.correction", Z, [0, 2], correction=0, keepdim=True), case("var.correction", Z),
    case("var_mean.correction", Z, [-1], correction=1), case("linalg_vector_norm.default", Z),
    *(case("linalg_vector_norm.default", Z, p, [1], True) for p in (0, 1, 2, 3.5, float("inf"), -float("inf"))),
    case("cumsum.default", Z, 1), case("cumsum.default", WHOLE, 0), case("cumprod.default", X, -1),
    case("_softmax.default", Z, 1, False), case("softmax.int", Z, -1), case("_log_softmax.default", Z, -1, False),
    case("log_softmax.int", Z, 0), case("softmax.int", torch.tensor(2.0), 0), case("topk.default", t(3, 9), 4),
    case("topk.default", t(9, 3), 2, 0, False), case("sort.default", t(3, 9), -1, True),
    case("sort.stable", t(9, 3), stable=True, dim=0),
]  # fmt: skip


def attention(name: str, *args: Any, **named: Any) -> Case:
    return case(name, *args, tolerance=2e-5, **named)


Q, K, V = t(2, 4, 7, 6), t(2, 4, 9, 6, seed=1), t(2, 4, 9, 5, seed=2)
MASK = t(2, 1, 7, 9, dtype=B, seed=5)
CLOSED = MASK.clone()
CLOSED[0, 0, 3] = False
LAYERS = [
    case("_weight_int8pack_mm.default", t(3, 32), torch.arange(-64, 64, dtype=torch.int8).reshape(4, 32), t(4)),
    case("_grouped_mm.default", t(9, 8), t(3, 8, 4), torch.tensor([2, 2, 9], dtype=I32)),
    case("_grouped_mm.default", t(2, 8), t(3, 8, 4), torch.tensor([0, 1, 2], dtype=I32)),
    case("mm.default", t(3, 7), t(7, 5)), case("bmm.default", t(2, 3, 7), t(2, 7, 5)),
    case("matmul.default", t(2, 1, 3, 7), t(4, 7, 5)), case("matmul.default", t(7), t(7, 5)),
    case("addmm.default", t(5), t(3, 7), t(7, 5)), case("addmm.default", t(3, 5), t(3, 7), t(7, 5), beta=0.5, alpha=2),
    case("linear.default", t(3, 7), t(5, 7), t(5)), case("linear.default", t(2, 3, 7), t(5, 7), t(5)),
    case("linear.default", t(2, 3, 7), t(5, 7)), case("linear.default", t(7), t(5, 7), t(5)),
    case("convolution.default", t(2, 3, 11), t(5, 3, 3), t(5), [2], [1], [1], False, [0], 1),
    case("convolution.default", ODD, t(6, 1, 3, 2), None, [1, 2], [1, 0], [1, 3], False, [0, 0], 3),
    case("convolution.default", t(1, 2, 4, 5, 6), t(3, 2, 2, 3, 1), t(3), [1], [0], [1], False, [0], 1),
    case("convolution.default", ODD, t(3, 4, 3, 3), t(4), [2, 2], [1, 1], [1, 1], True, [1, 0], 1),
    case("convolution.default", t(1, 4, 6), t(4, 2, 3), None, [3], [0], [2], True, [0], 2),
    case("_convolution.default", ODD, t(2, 3, 3, 3), t(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False,
         False, False),
    case("_native_batch_norm_legit_no_training.default", IMAGE, t(4), t(4), t(4), t(4, low=0.5), 0.1, 1e-5),
    case("_native_batch_norm_legit_no_training.default", X, None, None, t(5), t(5, low=0.5), 0.1, 1e-3),
    case("_native_batch_norm_legit.default", X, None, None, t(5), t(5, low=0.5), False, 0.1, 1e-3),
    case("_native_batch_norm_legit.no_stats", IMAGE, t(4), t(4), True, 0.1, 1e-5),
    case("_native_batch_norm_legit.no_stats", IMAGE[:1], None, None, True, 0.1, 1e-5),
    case("_native_batch_norm_legit_functional.default", X, None, None, t(5), t(5, low=0.5), False, 0.1, 1e-3),
    case("native_batch_norm.default", X, t(5), t(5), t(5), t(5, low=0.5), False, 0.1, 1e-3),
    case("native_layer_norm.default", Z, [5], t(5), t(5), 1e-5),
    case("native_layer_norm.default", Z, [3, 5], None, None, 1e-5),
    case("native_group_norm.default", IMAGE, t(4), t(4), 2, 4, 63, 2, 1e-5),
    case("native_group_norm.default", IMAGE, None, None, 2, 4, 63, 4, 1e-5),
    case("rms_norm.default", Z, [5], t(5), 1e-6), case("rms_norm.default", Z, [3, 5]),
    case("_fused_rms_norm.default", Z, [5], t(5), 1e-6), case("max_pool1d.default", t(2, 3, 11), [3], [2], [1]),
    case("max_pool2d.default", IMAGE, [3, 2], [2, 2], [1, 0], [1, 2], True),
    case("max_pool2d_with_indices.default", IMAGE[0], [3, 3], [2, 2], [1, 1]),
    case("max_pool3d.default", t(1, 2, 5, 6, 7), [2]), case("max_pool3d_with_indices.default", t(1, 2, 5, 6, 7), [2]),
    case("avg_pool1d.default", t(2, 3, 11), [3], [2], [1]),
    case("avg_pool2d.default", IMAGE, [3, 2], [2, 2], [1, 1], True),
    case("avg_pool2d.default", IMAGE, [3, 3], [1, 1], [1, 1], False, False),
    case("avg_pool2d.default", IMAGE, [3, 3], [2, 2], [1, 1], False, True, 7),
    case("avg_pool3d.default", t(1, 2, 5, 6, 7), [2, 3, 2]), case("adaptive_avg_pool1d.default", t(2, 3, 11), [4]),
    case("adaptive_avg_pool2d.default", IMAGE, [1, 1]), case("_adaptive_avg_pool2d.default", IMAGE, [7, 3]),
    case("_adaptive_avg_pool2d.default", IMAGE, [3, 4]),
    case("_adaptive_avg_pool3d.default", t(1, 2, 5, 6, 7), [2, 3, 4]),
    case("adaptive_avg_pool3d.default", t(2, 4, 6, 8), [2, 3, 4]),
    case("adaptive_max_pool2d.default", t(2, 3, 6, 8), [3, 2]), case("adaptive_max_pool1d.default", t(2, 3, 9), [3]),
    case("adaptive_max_pool3d.default", t(1, 2, 4, 6, 8), [2, 3, 4]),
    case("upsample_nearest1d.default", t(2, 3, 5), [8]), case("upsample_nearest2d.default", IMAGE, [14, 27]),
    case("upsample_nearest2d.vec", IMAGE, None, [1.5, 2.0]),
    case("upsample_nearest3d.default", t(1, 2, 3, 4, 5), [6, 5, 5]),
    case("_upsample_nearest_exact1d.default", t(2, 3, 5), [8]),
    case("_upsample_nearest_exact2d.default", IMAGE, [10, 12]),
    case("_upsample_nearest_exact3d.default", t(1, 2, 3, 4, 5), [6, 5, 5]),
    case("upsample_linear1d.default", t(2, 3, 5), [9], False),
    case("upsample_bilinear2d.default", IMAGE, [10, 13], False),
    case("upsample_bilinear2d.vec", IMAGE, None, False, [1.7, 2.0]),
    case("upsample_bilinear2d.default", IMAGE, [10, 13], True),
    case("upsample_trilinear3d.default", t(1, 2, 3, 4, 5), [6, 5, 7], False),
    case("upsample_bicubic2d.default", IMAGE, [10, 13], False),
    case("upsample_bicubic2d.vec", IMAGE, [5, 13], True, None),
    case("_upsample_bilinear2d_aa.default", IMAGE, [4, 13], False),
    case("_upsample_bicubic2d_aa.default", IMAGE, [4, 13], False),
    case("grid_sampler_2d.default", IMAGE, t(2, 3, 5, 2, low=-1.2, high=1.2), 0, 0, False),
    case("grid_sampler_2d.default", IMAGE, t(2, 3, 5, 2, low=-1.2, high=1.2), 0, 2, True),
    case("grid_sampler.default", IMAGE, t(2, 3, 5, 2, low=-1.2, high=1.2), 1, 1, False),
    case("grid_sampler_3d.default", t(1, 2, 3, 4, 5), t(1, 2, 3, 2, 3, low=-1, high=1), 0, 1, False),
    attention("scaled_dot_product_attention.default", Q, K, V),
    attention("scaled_dot_product_attention.default", Q, K, V, MASK),
    attention("scaled_dot_product_attention.default", Q, K, V, CLOSED),
    attention("scaled_dot_product_attention.default", Q, K, V, None, 0.0, True, scale=0.3),
    attention("scaled_dot_product_attention.default", Q, K, V, t(7, 9)),
    attention("scaled_dot_product_attention.default", Q, K[:, :2], V[:, :2], MASK, enable_gqa=True),
    attention("scaled_dot_product_attention.default", Q, K[:, :1], V[:, :1], enable_gqa=True),
    attention("scaled_dot_product_attention.default", Q[0, 0], K[0, 0], V[0, 0]),
    attention("_scaled_dot_product_flash_attention_for_cpu.default", Q, K, t(2, 4, 9, 6), 0.0, True),
    attention("_scaled_dot_product_flash_attention_for_cpu.default", Q, K, t(2, 4, 9, 6), attn_mask=t(2, 1, 7, 9),
         scale=0.2),
]  # fmt: skip


def _cells(gates: int, layers: int, both: bool, biases: bool, size: int = 3, hidden: int = 4) -> list[torch.Tensor]:
    found = []
    for layer in range(layers):
        for _ in range(2 if both else 1):
            inner = size if layer == 0 else hidden * (2 if both else 1)
            found += [t(gates * hidden, inner, seed=layer), t(gates * hidden, hidden, seed=layer + 1)]
            found += [t(gates * hidden, seed=layer), t(gates * hidden, seed=2)] if biases else []
    return found


RECURRENT = [
    case("lstm.input", t(6, 2, 3), [t(1, 2, 4), t(1, 2, 4, seed=1)], _cells(4, 1, False, True), True, 1, 0.0,
         False, False, False),
    case("lstm.input", t(2, 5, 3), [t(4, 2, 4), t(4, 2, 4, seed=1)], _cells(4, 2, True, True), True, 2, 0.0,
         False, True, True),
    case("mkldnn_rnn_layer.default", t(6, 2, 3), t(16, 3), t(16, 4), t(16), t(16, seed=1), t(1, 2, 4),
         t(1, 2, 4, seed=1), True, [], 2, 4, 1, True, False, False, False),
    case("gru.input", t(6, 2, 3), t(2, 2, 4), _cells(3, 2, False, True), True, 2, 0.0, False, False, False),
    case("gru.input", t(2, 5, 3), t(2, 2, 4), _cells(3, 1, True, False), False, 1, 0.0, False, True, True),
    case("rnn_tanh.input", t(6, 2, 3), t(1, 2, 4), _cells(1, 1, False, True), True, 1, 0.0, False, False, False),
]  # fmt: skip

CASES = [
    *ELEMENTWISE, *MAKERS, *SHAPES, *REDUCTIONS, *LAYERS, *RECURRENT,
]  # fmt: skip
