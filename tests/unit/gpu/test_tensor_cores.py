"""Contractions on tensor cores: lane maps, what plans say of them, and kernels that mean what the Program means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.faults import inject, sites
from tests.gpu_launch import grid_of, source_of
from tests.gpu_stages import convolution, graph, no_plan_fails, on_loops, random_inputs
from tests.plans import map_leaves, map_tiles
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.backend.gpu.matrix.cost import layout_for
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.intrinsics.gpu import MEANINGS
from tilewright.intrinsics.gpu_matrix import FORMS, LaneMap, MatrixForm
from tilewright.ir.forms.dtypes import as_tf32
from tilewright.ir.forms.loops import Instruction, Kernel, statements
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.interpret_loops import LoopFault, run_kernel, run_loops
from tilewright.options import Options
from tilewright.render.cuda import launch_shape, written_params
from tilewright.runtime import nvrtc
from tilewright.runtime.cache import Cache
from tilewright.runtime.emulator import Contract, EmulatedModule
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import ASYNC, COPIED, COPIES, Hold, Leaf, Plan, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm, ThreadForm
from tilewright.tile_graph.plan.text import plan_text

HALF, BFLOAT16 = TensorProto.FLOAT16, TensorProto.BFLOAT16


def typed(nodes: list, inputs: dict, outputs: dict, kind: int = HALF) -> ModelProto:
    names = [*inputs, *outputs, *(n[2] for n in nodes)]
    return graph(nodes, list(inputs.items()), list(outputs.items()), dict.fromkeys(names, kind))


def product(m: int, k: int, n: int, turned: str = "", kind: int = HALF) -> ModelProto:
    """`turned`: which of a and b lie transposed in memory."""
    attributes = {"transA": int("a" in turned), "transB": int("b" in turned)}
    shapes = {"a": (k, m) if "a" in turned else (m, k), "b": (n, k) if "b" in turned else (k, n)}
    return typed([("Gemm", ["a", "b"], "o", attributes)], shapes, {"o": (m, n)}, kind)


def with_epilogue(m: int, k: int, n: int) -> ModelProto:
    """A bias, an activation and a residual."""
    nodes = [("MatMul", ["a", "b"], "s", {}), ("Add", ["s", "c"], "t", {}), ("Tanh", ["t"], "u", {}),
             ("Add", ["u", "d"], "o", {})]  # fmt: skip
    return typed(nodes, {"a": (m, k), "b": (k, n), "c": (n,), "d": (m, n)}, {"o": (m, n)})


def batched(count: int, m: int, k: int, n: int) -> ModelProto:
    return typed([("MatMul", ["a", "b"], "o", {})], {"a": (count, m, k), "b": (count, k, n)}, {"o": (count, m, n)})


def rows_of_batches(count: int, m: int, k: int, n: int) -> ModelProto:
    """Two axes of rows, one operand for all."""
    return typed([("MatMul", ["a", "b"], "o", {})], {"a": (count, m, k), "b": (k, n)}, {"o": (count, m, n)})


# what is asked of the kernels: whole packets, ends of rows and sums, elements one by one, every way operands can lie
CASES: Mapping[str, tuple[ModelProto, str | None]] = {
    "whole": (product(32, 64, 64), None),
    "cut": (product(40, 72, 24), None),
    "odd": (product(19, 37, 21), None),
    "turned_a": (product(32, 48, 48, "a"), None),
    "turned_b": (product(32, 48, 40, "b"), None),
    "turned_both": (product(17, 40, 24, "ab"), None),
    "bfloat16": (product(24, 48, 32, "", BFLOAT16), None),
    "epilogue": (with_epilogue(24, 32, 40), None),
    "groups": (with_epilogue(24, 232, 40), None),
    "odd_epilogue": (with_epilogue(13, 32, 11), None),
    "batched": (batched(3, 16, 32, 24), None),
    "rows_of_batches": (rows_of_batches(3, 7, 32, 24), None),
    "tf32": (product(24, 40, 32, "", TensorProto.FLOAT), "tf32"),
    "tf32_turned_b": (product(24, 40, 32, "b", TensorProto.FLOAT), "tf32"),
    "tf32_turned_a": (product(32, 24, 16, "a", TensorProto.FLOAT), "tf32"),
    "converted": (product(24, 40, 32, "", TensorProto.FLOAT), "float16"),
    "converted_cut": (product(20, 24, 40, "b", TensorProto.FLOAT), "bfloat16"),
    "window": (convolution((1, 8, 7, 6), 16, 3), "float16"),
    "pointwise": (convolution((2, 16, 5, 4), 24, 1), "bfloat16"),
    "strided": (convolution((1, 8, 9, 9), 8, 3, stride=2), "tf32"),
}


@cache
def compiled(name: str) -> Artifact:
    model, precision = CASES[name]
    target = machine("cuda-emulated")
    options = Options(target="cuda-emulated", stop_after="loops", precision=precision)
    return build(load(model, {}), target, options)


def kernel_of(name: str) -> Kernel:
    """The one kernel with a product, under a name of its own."""
    loops = compiled(name).loops
    assert loops is not None
    (kernel,) = [k for k in loops.kernels if instructions(k) & set(FORMS)]
    return replace(kernel, name=name)


def instructions(kernel: Kernel) -> set[str]:
    return {s.name for s in statements(kernel.body) if isinstance(s, Instruction)}


@dataclass(frozen=True)
class Run:
    """Arrays for a kernel's parameters, and what its result should be."""

    arrays: tuple[np.ndarray, ...]
    expected: np.ndarray

    @property
    def result(self) -> np.ndarray:
        return self.arrays[-1]


def run_of(name: str, kernel: Kernel) -> Run:
    return run_of_artifact(compiled(name), kernel)


def run_of_artifact(artifact: Artifact, kernel: Kernel) -> Run:
    assert artifact.program is not None and artifact.loops is not None
    inputs = random_inputs(artifact)
    means = evaluate(artifact.program, inputs)
    (call,) = artifact.loops.calls
    (output,) = artifact.program.outputs
    known = {t.name: inputs[p.name] for t, p in zip(artifact.program.inputs, artifact.inputs, strict=True)}
    arrays = []
    for argument, param in zip(call.arguments, kernel.params, strict=True):
        empty = np.full([int(e) for e in param.shape], np.nan, param.dtype.numpy)
        arrays.append(np.ascontiguousarray(known[argument]) if argument in known else empty)
    assert call.arguments[-1] == output.name
    return Run(tuple(arrays), np.asarray(means[output.name]))


def tolerance(expected: np.ndarray) -> float:
    """Sums are rounded in an order of the hardware's; where results have 16 bits, that may turn their last one."""
    steps = {2: 2e-3, 4: 2e-5}[expected.dtype.itemsize]
    return steps * float(np.abs(expected.astype(np.float64)).max()) * (8 if expected.dtype.name == "bfloat16" else 1)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    wide = expected.astype(np.float64)
    np.testing.assert_allclose(found.reshape(wide.shape).astype(np.float64), wide, rtol=0, atol=tolerance(expected))


# --- lane maps


@pytest.mark.parametrize("lanes", {m for f in FORMS.values() for m in (f.a, f.b, f.c)}, ids=str)
def test_every_element_has_one_owner(lanes: LaneMap) -> None:
    rows, columns = lanes.places()
    owners = Counter(zip(rows.ravel().tolist(), columns.ravel().tolist(), strict=True))
    assert owners == Counter((r, c) for r in range(lanes.rows) for c in range(lanes.columns))


def test_fragments_agree_on_the_product() -> None:
    for form in FORMS.values():
        assert form.a.rows == form.c.rows and form.b.columns == form.c.columns and form.a.columns == form.b.rows
        assert form.depth * form.operand.bytes == 32  # two packets of 16 bytes


def test_tf32_rounds_halves_away_from_zero() -> None:
    given = np.array([1 + 2**-11, -1 - 2**-11, 1 + 2**-12, 3.0], np.float32)
    np.testing.assert_array_equal(as_tf32(given), np.array([1 + 2**-10, -1 - 2**-10, 1, 3], np.float32))


# --- meaning


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_loops_mean_the_product(name: str) -> None:
    artifact = compiled(name)
    assert artifact.program is not None and kernel_of(name)
    inputs = random_inputs(artifact)
    (expected,) = (evaluate(artifact.program, inputs)[t.name] for t in artifact.program.outputs)
    (found,) = on_loops(artifact, inputs).values()
    assert_close(found, np.asarray(expected))


EMULATED = ("whole", "turned_both", "odd_epilogue")


def emulated(names: tuple[str, ...], cache_dir: Path) -> None:
    kernels = {name: kernel_of(name) for name in names}
    module = EmulatedModule({n: source_of(k) for n, k in kernels.items()}, Cache(cache_dir), optimise=0)
    for name, kernel in kernels.items():
        run = run_of(name, kernel)
        contract = Contract(writes_all=tuple(p.name for p in written_params(kernel)))
        module.launch(name, grid_of(kernel, ()), launch_shape(kernel).threads, place_shared(kernel).bytes,
                      list(run.arrays), contract)  # fmt: skip
        assert_close(run.result, run.expected)
        assert module.bank_conflicts == 0, name


def test_emulated_kernels_compute_the_product_without_bank_conflicts(tmp_path: Path) -> None:
    emulated(EMULATED, tmp_path)


@pytest.mark.slow
def test_emulated_kernels_of_all_kinds(tmp_path: Path) -> None:
    emulated(tuple(n for n in CASES if n not in EMULATED), tmp_path)


def test_copies_land_at_their_wait() -> None:
    """A wait that lets one group more stay in the air is a fault of the interpreter too."""
    kernel = kernel_of("cut")
    run = run_of("cut", kernel)
    run_kernel(kernel, dict(zip(kernel.params, run.arrays, strict=True)), instructions=MEANINGS)
    for site in (s for s in sites(kernel) if s.kind == "wait"):
        broken = inject(kernel, site, "broken")
        with pytest.raises(LoopFault, match="ring.* is read where nothing was written"):
            run_kernel(broken, dict(zip(kernel.params, run.arrays, strict=True)), instructions=MEANINGS)


# --- plans


def plan_of(name: str) -> Plan:
    plan = compiled(name).plan
    assert plan is not None
    return plan


def test_a_plan_says_how_warps_share_a_product() -> None:
    plan = plan_of("whole")
    (kernel,) = plan.kernels
    (warps,) = [t for t in kernel.walk() if isinstance(t, Tile) and t.over == "warps"]
    (around,) = [t for t in kernel.walk() if isinstance(t, Tile) and warps in t.body]
    assert warps.level == "registers" and warps.leaves[0].instruction == "mma_float16"
    assert [h.fill for h in around.holds] == [ASYNC, ASYNC] and [h.tensor for h in around.holds] == ["a", "b"]
    assert Plan.from_json(plan.to_json()) == plan
    text = plan_text(plan)
    assert "holds a by async copy swizzled, b by async copy swizzled" in text
    assert "over warps" in text and "by mma_float16 step" in text


def refused(change: Callable[[Plan], Plan]) -> str:
    artifact = compiled("whole")
    assert artifact.program is not None
    check_plan(plan_of("whole"), artifact.program, machine("cuda-emulated"))
    with pytest.raises(InternalError) as caught:
        check_plan(change(plan_of("whole")), artifact.program, machine("cuda-emulated"))
    return str(caught.value)


def holds(change: Callable[[Hold], Hold]) -> Callable[[Plan], Plan]:
    def changed(tile: Tile) -> Tile:
        return replace(tile, holds=tuple(change(h) if h.fill in COPIES else h for h in tile.holds))

    return lambda plan: map_tiles(plan, changed)


def warps(change: Callable[[Tile], Tile]) -> Callable[[Plan], Plan]:
    return lambda plan: map_tiles(plan, lambda t: change(t) if t.over == "warps" else t)


def threads(change: Callable[[int], int]) -> Callable[[Plan], Plan]:
    return lambda plan: map_tiles(plan, lambda t: replace(t, count=change(t.count)) if t.over == "lanes" else t)


def leaves(change: Callable[[Leaf], Leaf]) -> Callable[[Plan], Plan]:
    return lambda plan: map_leaves(plan, change)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (holds(lambda h: replace(h, stages=0)), "'a' in 0 stages, swizzled"),
        (holds(lambda h: replace(h, layout="turned")), "a layout is one of"),
        (holds(lambda h: replace(h, fill="read")), "has stages or a layout: only what is brought by copy has"),
        (holds(lambda h: replace(h, fill="bulk")), "'a' is brought by 'bulk', which there is not"),
        (holds(lambda h: replace(h, stages=3 if h.tensor == "a" else 2)), "walk through as many stages each"),
        (holds(lambda h: replace(h, tensor="o")), "it brings 'o', which leaf 'o' does not read"),
        (holds(lambda h: replace(h, stages=400)), "bytes at shared, which has"),
        (warps(lambda t: replace(t, sizes=(("m", 8), t.sizes[1]))), "along m are not whole fragments of 16"),
        (threads(lambda n: 2 * n), "warps of 32 are not"),
        (warps(lambda t: replace(t, level="shared", over="order")), "lies swizzled: only operands of warps do"),
        (leaves(lambda x: x.with_options(FragmentForm, step=24)), "mma_float16 takes steps of 16, not 24"),
        (leaves(lambda x: x.with_options(FragmentForm, split=3)), "3 groups of warps do not share steps of"),
        (leaves(lambda x: replace(x, form=ThreadForm())), "cuts the rows and the columns of one leaf on matrices"),
        (leaves(lambda x: replace(x, form=FragmentForm("mma_int3"))), "no instruction 'mma_int3'"),
    ],
    ids=range(14),
)
def test_what_the_grammar_refuses(change: Callable[[Plan], Plan], expected: str) -> None:
    message = refused(change)
    assert message.startswith("plan of kernel 'k0': ") and expected in message and "\n" not in message


def test_stages_and_layouts_change_the_kernel() -> None:
    """No field without effect."""
    from tilewright.backend import backend_for
    from tilewright.ir.text.text import loops_text
    from tilewright.lower.program import lower_program

    artifact = compiled("cut")
    assert artifact.program is not None
    lower = backend_for(machine("cuda-emulated")).lower_kernel
    texts = set()
    for change in (lambda h: h, lambda h: replace(h, stages=2), lambda h: replace(h, layout=None),
                   lambda h: replace(h, layout="padded"), lambda h: replace(h, fill=COPIED)):  # fmt: skip
        texts.add(loops_text(lower_program(artifact.program, holds(change)(plan_of("cut")), lower)))
    assert len(texts) == 5


def test_operands_come_as_their_holds_say() -> None:
    """By copies that are waited for, or by what threads read and store: older plans say `copy` of all."""
    from tilewright.backend import backend_for
    from tilewright.lower.program import lower_program

    artifact = compiled("cut")
    assert artifact.program is not None and ASYNC in plan_of("cut").to_json()
    older = Plan.from_json(plan_of("cut").to_json().replace(f'"{ASYNC}"', f'"{COPIED}"'))
    check_plan(older, artifact.program, machine("cuda-emulated"))
    (kernel,) = lower_program(artifact.program, older, backend_for(machine("cuda-emulated")).lower_kernel).kernels
    assert not any(name.startswith("copy_async") for name in instructions(kernel))
    run = run_of("cut", kernel)
    run_kernel(kernel, dict(zip(kernel.params, run.arrays, strict=True)), instructions=MEANINGS)
    assert_close(run.result, run.expected)


@pytest.mark.parametrize("name", ["odd", "converted"])
def test_what_does_not_lie_in_packets_is_not_copied_so(name: str) -> None:
    """Rows of an odd length, and values that are converted on their way."""
    from tilewright.backend import backend_for
    from tilewright.lower.program import lower_program

    artifact = compiled(name)
    assert artifact.program is not None
    asked = holds(lambda h: replace(h, fill=ASYNC))(plan_of(name))
    assert asked != plan_of(name)
    with pytest.raises(InternalError, match="does not lie in packets that an async copy could bring for 'o"):
        lower_program(artifact.program, asked, backend_for(machine("cuda-emulated")).lower_kernel)


def rotated(words: int, heads: int, size: int) -> ModelProto:
    """The halves of every head of a product change places, one of them negated: a block of the result reads columns of
    the product that begin half a head beside its own."""
    wide, half = heads * size, size // 2
    bounds = {"zero": 0, "half": half, "end": size, "axis": 2}
    nodes = [*(("Constant", [], name, {"value_ints": [at]}) for name, at in bounds.items()),
             ("Constant", [], "shape", {"value_ints": [words, heads, size]}),
             ("MatMul", ["x", "w"], "y", {}), ("Reshape", ["y", "shape"], "q", {}),
             ("Slice", ["q", "zero", "half", "axis"], "a", {}), ("Slice", ["q", "half", "end", "axis"], "b", {}),
             ("Neg", ["b"], "n", {}), ("Concat", ["n", "a"], "r", {"axis": 2}), ("Mul", ["q", "c"], "u", {}),
             ("Mul", ["r", "s"], "v", {}), ("Add", ["u", "v"], "o", {})]  # fmt: skip
    kinds = dict.fromkeys("xwyqabnrcsuvo", HALF)
    inputs = [("x", (words, wide)), ("w", (wide, wide)), ("c", (words, 1, size)), ("s", (words, 1, size))]
    return graph(nodes, inputs, [("o", (words, heads, size))], kinds)


@pytest.mark.parametrize("size", [18, 32, 34])
@pytest.mark.parametrize("target", ["cuda-emulated", "h200"])
def test_boxes_that_cut_packets_are_not_copied_in_packets(target: str, size: int) -> None:
    """Where half a head is no whole number of packets, none of the weights begins where such a block does."""
    with no_plan_fails():
        artifact = build(load(rotated(19, 4, size)), machine(target), Options(target=target, stop_after="loops"))
    assert artifact.plan is not None and artifact.program is not None
    tiles = [t for k in artifact.plan.kernels for t in k.walk() if isinstance(t, Tile)]
    fills = {h.fill for t in tiles for h in t.holds if h.tensor == "w"}
    assert fills == {ASYNC} or size % 16
    inputs = random_inputs(artifact)
    (expected,) = (evaluate(artifact.program, inputs)[t.name] for t in artifact.program.outputs)
    (found,) = on_loops(artifact, inputs).values()
    assert_close(found, np.asarray(expected))


def in_groups(plan: Plan, count: int) -> Plan:
    """So many groups of warps share the steps of every part, however many did."""
    (leaf,) = plan.kernels[0].leaves
    before = leaf.options(FragmentForm).split
    shared = leaves(lambda x: x.with_options(FragmentForm, split=count, step=128))(plan)
    return threads(lambda n: n // before * count)(shared)


def in_turns(plan: Plan) -> Plan:
    """More parts than two turns around the ring, and a rest."""
    short = leaves(lambda x: x.with_options(FragmentForm, step=32))(in_groups(plan, 1))
    return holds(lambda h: replace(h, stages=3))(short)


def rolled(plan: Plan) -> Plan:
    """Part after part in a loop."""
    return leaves(lambda x: x.with_options(FragmentForm, rolled=True))(in_turns(plan))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "change", (lambda plan: in_groups(plan, 2), in_turns, rolled), ids=("groups", "turns", "rolled")
)
def test_sums_walked_otherwise(change: Callable[[Plan], Plan], tmp_path: Path) -> None:
    """Sums of groups of warps meet in shared memory; a loop of whole turns around the ring ends before the last."""
    from tilewright.backend import backend_for
    from tilewright.lower.program import lower_program

    artifact = compiled("groups")
    assert artifact.program is not None
    plan = change(plan_of("groups"))
    check_plan(plan, artifact.program, machine("cuda-emulated"))
    loops = lower_program(artifact.program, plan, backend_for(machine("cuda-emulated")).lower_kernel)
    (kernel,) = loops.kernels
    run = run_of("groups", kernel)
    arrays = dict(zip(kernel.params, run.arrays, strict=True))
    run_kernel(kernel, arrays, instructions=MEANINGS)
    assert_close(run.result, run.expected)
    module = EmulatedModule({kernel.name: source_of(kernel)}, Cache(tmp_path), optimise=0)
    run = run_of("groups", kernel)
    module.launch(kernel.name, grid_of(kernel, ()), launch_shape(kernel).threads, place_shared(kernel).bytes,
                  list(run.arrays), Contract(writes_all=tuple(p.name for p in written_params(kernel))))  # fmt: skip
    assert_close(run.result, run.expected)
    assert module.bank_conflicts == 0


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_layouts_leave_no_packet_out(form: MatrixForm) -> None:
    for size in range(16, 272, 16):
        for step in (16, 32, 64):
            assert layout_for(size, step, form) in ("swizzled", "padded")


# --- faults


def faulty(name: str, count: int) -> list[tuple[str, Kernel]]:
    """The kernel with a fault each: barriers and waits first, then shifted indices, of all kinds in turn."""
    kernel = kernel_of(name)
    found = [s for s in sites(kernel) if not (s.kind == "bound" and s.shift == 0)]
    first = [s for s in found if s.kind in ("barrier", "wait")]
    rest = [s for s in found if s not in first and s.kind != "bound"]
    chosen = [*first, *rest[:: max(1, len(rest) // max(1, count - len(first)))]]
    return [(s.describe(), inject(kernel, s, f"{name}_{i}")) for i, s in enumerate(chosen)]


def unseen_faults(name: str, count: int, cache_dir: Path) -> tuple[int, list[str]]:
    """How many faults did harm, and those of them that the emulator did not report."""
    kernel = kernel_of(name)
    mutants = faulty(name, count)
    module = EmulatedModule({k.name: source_of(k) for _, k in mutants}, Cache(cache_dir), optimise=0)
    contract = Contract(writes_all=tuple(p.name for p in written_params(kernel)),
                        reads_all=tuple(p.name for p in kernel.params if p not in written_params(kernel)),
                        uses_all=True)  # fmt: skip
    harmful, unseen = 0, []
    for what, mutant in mutants:
        run = run_of(name, kernel)
        faults = module.inspect(mutant.name, grid_of(mutant, ()), launch_shape(mutant).threads,
                                place_shared(mutant).bytes, list(run.arrays), contract)  # fmt: skip
        result = run.result.reshape(run.expected.shape).astype(np.float64)
        changed = not np.allclose(result, run.expected.astype(np.float64), rtol=0, atol=tolerance(run.expected))
        if faults:
            harmful += 1
        elif changed:
            harmful += 1
            unseen.append(what)
    return harmful, unseen


def test_seeded_faults_are_reported(tmp_path: Path) -> None:
    harmful, unseen = unseen_faults("cut", 11, tmp_path)
    assert harmful >= 8 and len(unseen) <= 0.05 * harmful, unseen


@pytest.mark.slow
@pytest.mark.parametrize("name", ("whole", "cut", "odd", "turned_both", "tf32", "epilogue"))
def test_more_seeded_faults_are_reported(name: str, tmp_path: Path) -> None:
    harmful, unseen = unseen_faults(name, 60, tmp_path)
    assert harmful >= 30 and len(unseen) <= 0.05 * harmful, unseen


# --- the device's compiler


@pytest.mark.parametrize("architecture", ("sm_80", "sm_90a"))
def test_kernels_compile_without_spills(architecture: str) -> None:
    for name in ("turned_both", "tf32"):
        made = nvrtc.compile_to_cubin(source_of(kernel_of(name)), architecture)
        (resources,) = made.resources.values()
        assert resources.spill_bytes == resources.stack_bytes == 0 and resources.registers <= 255


def test_plans_for_the_h200_take_tensor_cores_and_keep_them_fed() -> None:
    """Large tiles for large products, many blocks for small ones; several stages, or all of a short sum at once."""
    found = {}
    for size in (4096, 128):
        options = Options(target="h200", stop_after="plan")
        plan = build(load(product(size, size, size), {}), machine("h200"), options).plan
        assert plan is not None
        (kernel,) = plan.kernels
        stages = next(h.stages for t in kernel.walk() if isinstance(t, Tile) for h in t.holds)
        found[size] = kernel.cut, stages, stages * kernel.leaves[0].options(FragmentForm).step
    assert dict(found[4096][0]) in ({"o0": 128, "o1": 256}, {"o0": 256, "o1": 128}) and found[4096][1] >= 3
    assert max(size for _, size in found[128][0]) <= 32 and found[128][2] >= 128


def test_too_little_for_fragments_stays_as_it_was() -> None:
    options = Options(target="h200", stop_after="plan")
    for shape in ((4, 64, 64), (64, 8, 64), (64, 64, 1)):
        plan = build(load(product(*shape), {}), machine("h200"), options).plan
        assert plan is not None and all(leaf.instruction is None for k in plan.kernels for leaf in k.leaves)


def test_float32_asks_for_no_tensor_cores() -> None:
    options = Options(target="h200", stop_after="plan")
    plan = build(load(product(64, 64, 64, kind=TensorProto.FLOAT), {}), machine("h200"), options).plan
    assert plan is not None and all(leaf.instruction is None for k in plan.kernels for leaf in k.leaves)


def test_sums_of_products_with_few_tiles_are_cut_into_parts() -> None:
    """Parts lie one behind the other, and what reads the result combines them."""
    options = Options(target="h200", stop_after="plan")
    artifact = build(load(product(384, 3072, 768), {}), machine("h200"), options)
    assert artifact.plan is not None and artifact.program is not None
    first, second = artifact.plan.kernels
    assert [leaf.instruction in FORMS for k in (first, second) for leaf in k.leaves] == [True, False]
    (partial,) = artifact.program.computes[0].outputs
    assert partial.shape[1:] == (384, 768) and 2 <= int(partial.shape[0]) <= 8
    for shape in ((4096, 4096, 4096), (384, 64, 768)):
        whole = build(load(product(*shape), {}), machine("h200"), options).plan
        assert whole is not None and len(whole.kernels) == 1


@pytest.mark.slow
def test_products_inside_a_stream(tmp_path: Path) -> None:
    """Both products of an attention on tensor cores, between them a softmax whose state is carried along the keys."""
    from tests.gpu_stages import attention
    from tilewright.backend import backend_for
    from tilewright.lower.program import lower_program
    from tilewright.ops import lower
    from tilewright.schedule.planner import make_plan
    from tilewright.transform.clean.fold import fold_constants
    from tilewright.transform.precision.choose import set_precision

    target = machine("cuda-emulated")
    program = fold_constants(set_precision(lower(load(attention(160, 32, 1), {})), target, "bfloat16"))
    plan = make_plan(program, target, "connected", streaming="always")
    check_plan(plan, program, target)
    (kernel,) = [k for k in plan.kernels if k.stream is not None]
    assert [leaf.part for leaf in kernel.leaves if leaf.instruction] == ["whole", "step"]
    rng = np.random.default_rng(0)
    inputs = {t.name: rng.standard_normal([int(e) for e in t.shape]).astype(np.float32) for t in program.inputs}
    loops = lower_program(program, plan, backend_for(target).lower_kernel)
    found = run_loops(loops, dict(inputs), instructions=MEANINGS)
    for tensor in program.outputs:
        expected = evaluate(program, inputs)[tensor.name]
        np.testing.assert_allclose(found[tensor.name].reshape(expected.shape), expected, rtol=0, atol=2e-2)


def test_what_trips_of_an_epilogue_read_is_under_way_together() -> None:
    """Rows that end inside a tile are behind conditions: reads of the next trip would wait for the stores of this."""
    options = Options(target="h200", stop_after="source")
    artifact = build(load(with_epilogue(5000, 64, 768)), machine("h200"), options)
    (text,) = [t for t in artifact.sources.values() if "mma" in t]
    _, reading, storing = text.split("for (int next")
    assert "copy<" in reading and "out(" not in reading and "out(" in storing
