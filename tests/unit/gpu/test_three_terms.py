"""float32 products in three terms on tensor cores: digits, special values, sums begun anew, and when they are taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.gpu_launch import grid_of, source_of
from tests.gpu_stages import convolution, graph, on_loops
from tests.plans import map_leaves, map_tiles
from tests.unit.gpu.test_tensor_cores import product
from tilewright.backend import backend_for
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.terms import TERMS, part, part_of_first, part_of_second
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Program
from tilewright.ir.forms.expr import Axis, var
from tilewright.ir.forms.expr import load as read
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.values import evaluate_exprs
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.render.cuda import launch_shape, written_params
from tilewright.runtime import nvrtc
from tilewright.runtime.cache import Cache
from tilewright.runtime.emulator import Contract, EmulatedModule
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import COPIES, Leaf, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm
from tilewright.tile_graph.plan.text import plan_text
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.precision.three_terms import use_three_terms

FLOAT = TensorProto.FLOAT


def always(program: Program) -> float:
    """A prediction that prefers terms, whatever they cost."""
    return 0.0 if any(t.dtype is dtypes.tf32 for t in program.tensors()) else 1.0


def in_terms(model: ModelProto, target: str = "h200") -> Artifact:
    """A model whose products are all in terms, down to Loops."""
    options = Options(target=target, contraction="direct", stop_after="fold")
    artifact = build(load(model, {}), machine(target), options)
    assert artifact.program is not None
    made = use_three_terms(artifact.program, machine(target), always)
    program = choose_layouts(made, machine(target))
    return planned(replace(artifact, program=program), target)


def planned(artifact: Artifact, target: str) -> Artifact:
    assert artifact.program is not None
    plan = artifact.plan or make_plan(artifact.program, machine(target), "connected")
    check_plan(plan, artifact.program, machine(target))
    loops = lower_program(artifact.program, plan, backend_for(machine(target)).lower_kernel)
    return replace(artifact, plan=plan, loops=loops)


def arrays(artifact: Artifact, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {p.name: rng.standard_normal(p.shape).astype(np.float32) for p in artifact.inputs}


def meaning(artifact: Artifact, given: dict[str, np.ndarray]) -> np.ndarray:
    assert artifact.program is not None
    (output,) = artifact.program.outputs
    return np.asarray(evaluate(artifact.program, given)[output.name])


def error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


# --- the Program


def test_parts_add_up_to_the_number() -> None:
    """To 22 bits at least; infinities are in the second part, and what is no number in the first."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(5000) * 10.0 ** rng.integers(-30, 30, 5000)).astype(np.float32)
    values = np.concatenate([values, np.array([0, -0.0, 1, 3.4028235e38, -3.4028235e38], np.float32)])
    x, number = Tensor("x", (len(values),), dtypes.float32), Axis("n", 2)
    value = part(read(x, [var(Axis("i", len(values)))]), var(number))

    def parts(given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first, second = (evaluate_exprs([value], lambda node, n=n: np.asarray(n if node is var(number) else 0),
                                        lambda *_: given)[0] for n in (0, 1))  # type: ignore[misc]  # fmt: skip
        return first, second

    first, second = parts(values)
    np.testing.assert_array_equal(first, dtypes.as_tf32(first))
    np.testing.assert_array_equal(second, dtypes.as_tf32(second))
    whole = values.astype(np.float64)
    assert (np.abs(first.astype(np.float64) + second - whole) <= 2.0**-22 * np.abs(whole)).all()
    first, second = parts(np.array([np.inf, -np.inf, np.nan], np.float32))
    assert first[:2].tolist() == [1, -1] and second[:2].tolist() == [np.inf, -np.inf] and np.isnan(first[2])


def test_terms_read_a_small_part_once() -> None:
    term = Axis("t", TERMS)
    pairs = [tuple(int(evaluate_exprs([p], lambda _, n=n: np.asarray(n), None)[0])  # type: ignore[misc, arg-type]
                   for p in (part_of_first(term), part_of_second(term))) for n in range(TERMS)]  # fmt: skip
    assert pairs == [(1, 0), (0, 1), (0, 0)]


def test_a_product_has_the_digits_of_float32() -> None:
    artifact = in_terms(product(64, 700, 64, "", FLOAT))
    given = arrays(artifact)
    exact = given["a"].astype(np.float64) @ given["b"].astype(np.float64)
    assert error(meaning(artifact, given), exact) < 2 * error(given["a"] @ given["b"], exact) + 1e-7


def test_rows_keep_to_themselves_and_special_values_stay() -> None:
    """Beside rows that are infinite, no number or a million times as large; of exact numbers, whose second part is
    zero, too."""
    artifact = in_terms(product(64, 144, 64, "", FLOAT))
    given = arrays(artifact)
    given["b"][:, ::2] = np.sign(given["b"][:, ::2])
    plain = meaning(artifact, given)
    a = given["a"]
    a[3, 5], a[4, 6], a[5, 7], a[6] = np.inf, -np.inf, np.nan, a[6] * 1e30
    found = meaning(artifact, given)
    np.testing.assert_array_equal(np.delete(found, (3, 4, 5, 6), 0), np.delete(plain, (3, 4, 5, 6), 0))
    np.testing.assert_array_equal(found[3], np.copysign(np.inf, given["b"][5]))
    np.testing.assert_array_equal(found[4], np.copysign(np.inf, -given["b"][6]))
    assert np.isnan(found[5]).all() and np.isfinite(found[6]).all()
    given["b"][5, 9], given["b"][5, 10] = np.inf, 0
    found = meaning(artifact, given)
    assert found[3, 9] == np.inf and np.isnan(found[3, 10])


def test_parts_of_weights_are_constants_and_those_of_a_tensor_are_made_once() -> None:
    nodes = [("MatMul", ["a", "b"], "s", {}), ("MatMul", ["a", "c"], "t", {}), ("Add", ["s", "t"], "o", {})]
    model = graph(nodes, [("a", (64, 144)), ("b", (144, 64)), ("c", (144, 64))], [("o", (64, 64))])  # type: ignore[arg-type]
    artifact = in_terms(model)
    assert artifact.program is not None
    made = [c.output.name for c in artifact.program.computes if isinstance(c, Map) and c.output.dtype is dtypes.tf32]
    assert sorted(made) == ["a_parts", "b_parts", "c_parts"]


# --- tensor cores


CASES = {
    "whole": product(64, 160, 64, "", FLOAT),
    "turned_b": product(64, 144, 64, "b", FLOAT),
    "odd": product(67, 149, 45, "", FLOAT),
    "window": convolution((1, 16, 6, 6), 32, 3),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_loops_mean_the_product(name: str) -> None:
    artifact = in_terms(CASES[name])
    assert artifact.plan is not None and "tf32" in plan_text(artifact.plan)
    given = arrays(artifact)
    (found,) = on_loops(artifact, given).values()
    assert error(found, meaning(artifact, given).astype(np.float64)) < 3e-7


def grouped(anew: int, stages: int = 3) -> Artifact:
    """A product in groups of four warps, its sums begun anew."""
    artifact = in_terms(product(64, 160, 64, "b", FLOAT))
    assert artifact.plan is not None

    def tiles(tile: Tile) -> Tile:
        if tile.over == "lanes" and any(isinstance(n, Tile) for n in tile.body):
            return replace(tile, count=128)
        if tile.over == "warps":
            return replace(tile, sizes=(("m", 16), ("n", 64)), axes=tuple(replace(a, extent=64) for a in tile.axes))
        holds = tuple(replace(h, stages=stages, layout="swizzled") for h in tile.holds if h.fill in COPIES)
        return replace(tile, holds=holds) if holds else tile

    def leaves(leaf: Leaf) -> Leaf:
        if leaf.instruction is None:
            return leaf
        return replace(leaf, lanes=1, form=FragmentForm("wgmma_tf32", step=32, anew=anew))

    return planned(replace(artifact, plan=map_leaves(map_tiles(artifact.plan, tiles), leaves)), "h200")


@pytest.mark.slow
@pytest.mark.parametrize("anew", (0, 64, 96))
def test_groups_begin_their_sums_anew(anew: int) -> None:
    artifact = grouped(anew)
    assert artifact.plan is not None and (f"anew {anew}" in plan_text(artifact.plan)) == (anew > 0)
    given = arrays(artifact)
    (found,) = on_loops(artifact, given).values()
    assert error(found, meaning(artifact, given).astype(np.float64)) < 3e-7


def test_sums_begin_anew_after_whole_steps() -> None:
    with pytest.raises((ValueError, InternalError), match="begin anew after whole steps"):
        grouped(100)


def emulated(artifact: Artifact, cache_dir: Path) -> None:
    """Kernel after kernel."""
    assert artifact.loops is not None and artifact.program is not None
    given = arrays(artifact)
    known = {t.name: given[p.name] for t, p in zip(artifact.program.inputs, artifact.inputs, strict=True)}
    module = EmulatedModule({k.name: source_of(k) for k in artifact.loops.kernels}, Cache(cache_dir), optimise=0)
    by_name = {k.name: k for k in artifact.loops.kernels}
    for call in artifact.loops.calls:
        kernel = by_name[call.kernel]
        for name, param in zip(call.arguments, kernel.params, strict=True):
            known.setdefault(name, np.full([int(e) for e in param.shape], np.nan, param.dtype.numpy))
        contract = Contract(writes_all=tuple(p.name for p in written_params(kernel)))
        module.launch(kernel.name, grid_of(kernel, ()), launch_shape(kernel).threads, place_shared(kernel).bytes,
                      [known[name] for name in call.arguments], contract)  # fmt: skip
    (output,) = artifact.program.outputs
    assert error(known[output.name], meaning(artifact, given).astype(np.float64)) < 3e-7


@pytest.mark.slow
def test_emulated_kernels_compute_the_product(tmp_path: Path) -> None:
    emulated(in_terms(CASES["whole"]), tmp_path)
    emulated(grouped(96), tmp_path)


def test_kernels_compile_without_spills() -> None:
    for artifact, architecture in ((grouped(96), "sm_90a"), (in_terms(CASES["whole"], "a100"), "sm_80")):
        assert artifact.loops is not None
        for kernel in artifact.loops.kernels:
            (resources,) = nvrtc.compile_to_cubin(source_of(kernel), architecture).resources.values()
            assert resources.spill_bytes == resources.stack_bytes == 0


# --- when


def chosen(model: ModelProto, target: str, **options: str) -> bool:
    made = build(load(model, {}), machine(target), Options(target=target, stop_after="algorithm", **options)).program  # type: ignore[arg-type]
    assert made is not None
    return any(t.dtype is dtypes.tf32 for t in made.tensors())


def test_terms_are_taken_where_they_pay() -> None:
    large, small = product(1024, 1024, 1024, "", FLOAT), product(32, 64, 32, "", FLOAT)
    assert chosen(large, "h200") and chosen(large, "a100") and chosen(large, "h200", precision="float32")
    assert not chosen(small, "h200")
    assert not chosen(large, "h200", contraction="direct")
    assert not chosen(large, "neoverse_n1")


@pytest.mark.slow
def test_large_products_begin_anew_in_groups() -> None:
    options = Options(target="h200", stop_after="plan")
    plan = build(load(product(4096, 4096, 4096, "b", FLOAT), {}), machine("h200"), options).plan
    assert plan is not None
    (leaf,) = [x for k in plan.kernels for x in k.leaves if x.instruction is not None]
    assert (leaf.instruction, leaf.options(FragmentForm).anew) == ("wgmma_tf32", 256)
    narrow = build(load(product(4096, 4096, 4096, "b", FLOAT), {}), machine("h200"), replace(options, precision="tf32"))
    assert narrow.plan is not None
    assert all(x.form.anew == 0 for k in narrow.plan.kernels for x in k.leaves if isinstance(x.form, FragmentForm))


def test_wide_sums_that_begin_anew_soon_leave_registers_for_addresses() -> None:
    model = product(4096, 256, 768, "", FLOAT)
    artifact = build(load(model, {}), machine("h200"), Options(target="h200", stop_after="loops"))
    assert artifact.loops is not None and any("wgmma_tf32" in source_of(k) for k in artifact.loops.kernels)
    for kernel in artifact.loops.kernels:
        (resources,) = nvrtc.compile_to_cubin(source_of(kernel), "sm_90a").resources.values()
        assert resources.spill_bytes == resources.stack_bytes == 0
