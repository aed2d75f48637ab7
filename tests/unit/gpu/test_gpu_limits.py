"""What is planned for a GPU can be started there: shared memory, threads, blocks and registers of every kernel."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from onnx import ModelProto

from tests.gpu_kernels import loop, put, row_sums, shared, tensor, within
from tests.gpu_launch import source_of
from tests.gpu_stages import attention, convolution, gemm, graph, no_plan_fails, reduction, softmax_of_matmul
from tilewright.backend.gpu.backend import GpuBackend
from tilewright.backend.gpu.kernel.limits import check_limits, why_not_started
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.backend.gpu.matrix import cost
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import InternalError, UnsupportedError
from tilewright.frontend.onnx.model import load
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.expr import Axis, Expr
from tilewright.ir.forms.expr import load as read
from tilewright.ir.forms.loops import Barrier, For, ForKind, Kernel, LoopProgram, Scope, Stmt, statements
from tilewright.options import Options
from tilewright.runtime.cache import Cache
from tilewright.runtime.gpu_model import EmulatedModel, GpuCall, GpuModelImage, LaunchLimits, LoadedKernel
from tilewright.target import Target, machine

GPUS = ("a100", "h200", "l40s")
SYNC = Barrier(Scope.BLOCK)


def planned(model: ModelProto, target: Target, precision: str) -> Artifact:
    with no_plan_fails():
        made = build(load(model, {}), target, Options(target=target.name, precision=precision, stop_after="loops"))
    assert made.loops is not None
    return made


def with_shared(target: Target, size: int) -> Target:
    near = target.local
    return replace(target, levels=tuple(replace(x, capacity=size) if x is near else x for x in target.levels))


def rows_of_images(count: int, rows: int, summed: int, columns: int) -> ModelProto:
    nodes = [("MatMul", ["x", "w"], "s", {}), ("Add", ["s", "b"], "t", {}), ("Relu", ["t"], "y", {})]
    return graph(nodes, [("x", (count, rows, summed)), ("w", (summed, columns)), ("b", (columns,))],
                 [("y", (count, rows, columns))])  # fmt: skip


# --- plans


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", GPUS)
def test_a_product_whose_blocks_take_several_turns_fits(name: str) -> None:
    """Operands and sums on their way out were counted as one after the other, and lay side by side."""
    target = machine(name)
    loops = planned(rows_of_images(32, 196, 512, 1024), target, "float16").loops
    assert loops is not None
    assert max(place_shared(k).bytes for k in loops.kernels) <= target.local.capacity
    assert name != "h200" or any(_turns(k) for k in loops.kernels), "no block takes several turns any more"


def _turns(kernel: Kernel) -> bool:
    return any(isinstance(s, For) and s.axis.name == "row_turn" for s in statements(kernel.body))


def block_of_layers(m: int, k: int, n: int) -> ModelProto:
    """Two products and a normalisation: tiles of one kernel that hold much beside each other."""
    nodes = [("MatMul", ["a", "b"], "s", {}), ("Relu", ["s"], "r", {}), ("MatMul", ["r", "c"], "t", {}),
             ("ReduceMean", ["t"], "u", {"axes": [1], "keepdims": 1}), ("Sub", ["t", "u"], "v", {}),
             ("Mul", ["v", "v"], "w", {}), ("ReduceMean", ["w"], "z", {"axes": [1], "keepdims": 1}),
             ("Div", ["v", "z"], "o", {})]  # fmt: skip
    return graph(nodes, [("a", (m, k)), ("b", (k, n)), ("c", (n, k))], [("o", (m, k))])


def drawn(rng: random.Random) -> ModelProto:
    m, k, n = (rng.choice((7, 16, 24, 40, 48, 64, 77, 96, 100, 128, 196, 200, 256, 300, 384)) for _ in range(3))
    kind = rng.randrange(6)
    if kind == 0:
        return gemm(4 * m, k, 4 * n)
    if kind == 1:
        return softmax_of_matmul(m, k, n)
    if kind == 2:
        return attention(m, rng.choice((16, 24, 40, 64, 80, 128)), rng.choice((2, 12)))
    if kind == 3:
        return convolution((rng.choice((1, 8)), rng.choice((3, 16, 48)), 14, 14), rng.choice((16, 96)),
                           rng.choice((1, 3)), stride=rng.choice((1, 2)))  # fmt: skip
    if kind == 4:
        return block_of_layers(m, k, n)
    return reduction("ReduceMax", (m, k, 8 * n), (rng.choice((0, 1, 2)),))


def all_start(count: int, seed: int) -> None:
    """On GPUs with little shared memory, where what does not count something has no room to go wrong in."""
    rng = random.Random(seed)
    for _ in range(count):
        target = with_shared(machine(rng.choice(GPUS)), rng.choice((32, 40, 48, 64, 100)) << 10)
        made = planned(drawn(rng), target, rng.choice(("float32", "float16", "bfloat16", "tf32")))
        assert made.loops is not None
        assert [why_not_started(k, target) for k in made.loops.kernels] == [None] * len(made.loops.kernels)


def test_operands_in_steps_have_room_beside_what_is_held() -> None:
    """A softmax of a product by threads: 48 kB of operands were taken for granted."""
    target = with_shared(machine("a100"), 32 << 10)
    made = planned(softmax_of_matmul(256, 100, 256), target, "float32")
    assert made.loops is not None and max(place_shared(k).bytes for k in made.loops.kernels) <= 32 << 10


def test_what_is_planned_for_little_shared_memory_fits() -> None:
    all_start(6, seed=3)


@pytest.mark.slow
def test_more_that_is_planned_for_little_shared_memory_fits() -> None:
    all_start(300, seed=4)


# --- checks


def test_shared_memory_beyond_the_target_is_an_error_with_numbers() -> None:
    kernel = replace(row_sums().kernel, name="k3")
    loops = LoopProgram((kernel,), (), ())
    check_limits(loops, machine("h200"))
    with pytest.raises(InternalError, match="kernel k3 needs 128 bytes of shared memory, and a block may have 100"):
        check_limits(loops, with_shared(machine("h200"), 100))


def test_threads_and_blocks_beyond_the_target_are_errors() -> None:
    kernel = row_sums().kernel
    few = replace(machine("h200"), max_threads=64)
    assert why_not_started(kernel, few) == "needs 128 threads, and a block may have 64"
    (whole,) = kernel.body
    assert isinstance(whole, For) and whole.kind is ForKind.BLOCK
    many = replace(kernel, body=(For(Axis("row", 1 << 31), ForKind.BLOCK, whole.body),))
    assert why_not_started(many, machine("h200")) == "needs 2147483648 blocks in x, and a grid may have 2147483647"


def test_blocks_that_wait_for_each_other_must_all_run_at_once() -> None:
    kernel = row_sums(rows=4 * 132 * 16 + 1).kernel
    (whole,) = kernel.body
    assert isinstance(whole, For)
    meeting = replace(kernel, body=(For(whole.axis, whole.kind, (*whole.body, Barrier(Scope.GRID))),))
    told = why_not_started(meeting, machine("h200"))
    assert told == "has 8449 blocks that wait for each other, and 2112 run at a time"


def test_the_emulator_refuses_what_a_device_would(tmp_path: Path) -> None:
    kernel = row_sums().kernel
    made = LoadedKernel("row_sums", source_of(kernel), 128, place_shared(kernel).bytes)
    image = GpuModelImage((made,), (GpuCall("row_sums", (5, 70000, 1), ()),), (), ())
    for limits, told in (
        (LaunchLimits(232448), "kernel row_sums needs 70000 blocks in y, and a grid may have 65535"),
        (LaunchLimits(100), "kernel row_sums needs 128 bytes of shared memory, and a block may have 100"),
        (LaunchLimits(232448, threads=96), "kernel row_sums needs 128 threads, and a block may have 96"),
    ):
        with pytest.raises(InternalError, match=told):
            EmulatedModel(image, Cache(tmp_path), limits=limits)


# --- the arena


def turns(ends: list[Stmt], is_of_one_turn: bool) -> Kernel:
    """Two buffers, one written when all have read the other, turn after turn."""
    x, y, a, b = tensor("x", 32), tensor("y", 32), shared("a", 32), shared("b", 32)

    def thread(t: Expr) -> list[Stmt]:
        inner = [put(a, (t,), read(x, (t,))), SYNC, put(y, (t,), read(a, (31 - t,))), SYNC,
                 put(b, (t,), read(x, (t,))), SYNC, put(y, (t,), read(b, (31 - t,))), *ends]  # fmt: skip
        body = within([a, b], inner) if is_of_one_turn else inner
        return [For(Axis("turn", 3), ForKind.SERIAL, tuple(body))]

    threads = loop("t", 32, thread, ForKind.THREAD)
    return Kernel("k", (x, y), (threads,) if is_of_one_turn else tuple(within([a, b], [threads])))


def test_buffers_of_one_turn_share_bytes_if_a_barrier_ends_it() -> None:
    assert place_shared(turns([SYNC], is_of_one_turn=True)).bytes == 128
    assert place_shared(turns([], is_of_one_turn=True)).bytes == 256, "others may have begun the next turn"
    assert place_shared(turns([SYNC], is_of_one_turn=False)).bytes == 256, "the next turn may read what this one left"


# --- large tensors


def test_places_beyond_31_bits_are_computed_in_64() -> None:
    """Elements as many as there may be: what tells rows apart is narrow, where they lie is not."""
    rows, columns = 32768, 65536
    turned = graph([("Transpose", ["x"], "t", {}), ("Relu", ["t"], "y", {})], [("x", (rows, columns))],
                   [("y", (columns, rows))])  # fmt: skip
    plain = graph([("Relu", ["x"], "y", {})], [("x", (rows, columns))], [("y", (rows, columns))])
    for model in (turned, plain):
        made = planned(model, machine("h200"), "float32")
        assert made.loops is not None
        (kernel,) = made.loops.kernels
        text = source_of(kernel)
        views = re.findall(r"tw::Global<(?:const )?float, ([0-9, ]+)>", text)
        assert len(views) == 2
        assert all(prod(map(int, view.split(","))) > 0x7FFFFFFF for view in views)  # offsets of 64 bits, by its size
        assert ".apart(" not in text  # which adds in 32


def test_a_tensor_beyond_what_is_supported_is_refused_by_name() -> None:
    model = graph([("Relu", ["x"], "y", {})], [("x", (1 << 18, 1 << 19))], [("y", (1 << 18, 1 << 19))])
    with pytest.raises(UnsupportedError, match="input 'x' would have the shape .*, 137438953472 elements"):
        planned(model, machine("h200"), "float32")


# --- what is planned again


def test_a_kernel_that_would_not_start_is_planned_plainer_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """No plan should come to this; where one does, the model runs all the same."""
    target = machine("h200")
    options = Options(target="h200", stop_after="loops")
    model = softmax_of_matmul(256, 100, 256)
    alone = build(load(model, {}), target, replace(options, schedule="register")).loops
    joined = planned(model, target, "float32").loops
    assert alone is not None and joined is not None
    most = max(place_shared(k).bytes for k in alone.kernels)
    assert most < max(place_shared(k).bytes for k in joined.kernels)

    def check(loops: LoopProgram, _: Target) -> None:
        check_limits(loops, with_shared(target, most))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuBackend, "check_limits", lambda self, loops, target: check(loops, target))
        made = build(load(model, {}), target, options).loops
    assert made is not None and max(place_shared(k).bytes for k in made.kernels) <= most
    assert "bytes of shared memory, and a block may have" in caplog.text


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("warps", [1, 2, 4, 8, 16])
def test_what_the_warps_of_a_product_keep_fits_the_registers_of_so_many_threads(name: str, warps: int) -> None:
    target = machine(name)
    for rows, columns in ((16, 256), (256, 128), (128, 255), (256, 256)):
        for twice in (False, True):
            shapes = cost._shapes(FORMS["mma_float16"], rows, columns, warps, False, twice, target)
            kept = cost._kept(shapes[:, 2], shapes[:, 3], twice)
            assert (kept * 32 * warps <= target.register_file).all()
