"""Products on tensor cores that four warps feed as one from shared memory: every way operands can lie, and faults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.gpu_launch import grid_of, source_of
from tests.gpu_stages import on_loops, random_inputs
from tests.plans import map_leaves, map_tiles, resized, with_kernels
from tests.unit.gpu.test_tensor_cores import assert_close, product, run_of_artifact, with_epilogue
from tilewright.backend import backend_for
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import Kernel
from tilewright.ir.meaning.interpret import evaluate
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.render.cuda import launch_shape, written_params
from tilewright.runtime import nvrtc
from tilewright.runtime.cache import Cache
from tilewright.runtime.cuda_device import CudaDevice
from tilewright.runtime.emulator import Contract, EmulatedModule
from tilewright.target import Target, machine
from tilewright.target.gpu import described
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Leaf, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm
from tilewright.tile_graph.plan.text import plan_text

BFLOAT16 = TensorProto.BFLOAT16
# the model, rows and columns of a block, the step of a part, stages
CASES: Mapping[str, tuple[ModelProto, tuple[int, int], int, int]] = {
    "whole": (product(64, 256, 64), (64, 64), 64, 3),
    "cut": (product(56, 200, 72), (64, 64), 64, 4),
    "turned_a": (product(64, 128, 64, "a"), (64, 64), 64, 3),
    "turned_b": (product(64, 72, 96, "b"), (64, 96), 64, 3),
    "two_groups": (product(128, 64, 128, "a"), (128, 128), 64, 3),
    "long_parts": (product(64, 256, 64, "b"), (64, 64), 128, 3),
    "bfloat16": (product(64, 64, 64, "", BFLOAT16), (64, 64), 64, 3),
    "epilogue": (with_epilogue(70, 136, 80), (64, 64), 64, 4),
    "turns": (with_epilogue(140, 136, 80), (64, 64), 64, 4),
}
TILES = {"turns": (128, 64)}  # of a kernel, where it is more than warps take at a time


@cache
def compiled(name: str) -> Artifact:
    """The case with its product shared out to groups of four warps."""
    model, block, step, stages = CASES[name]
    target = machine("h200")
    artifact = build(load(model, {}), target, Options(target="h200", stop_after="plan"))
    assert artifact.plan is not None and artifact.program is not None
    (kernel,) = artifact.plan.kernels
    sizes = dict(zip(("o0", "o1"), TILES.get(name, block), strict=True))
    plan = with_kernels(artifact.plan, [resized(kernel, artifact.program, sizes)])

    def tiles(tile: Tile) -> Tile:
        if tile.over == "lanes":
            return replace(tile, count=2 * block[0])
        if tile.over == "warps":
            axes = tuple(replace(a, extent=n) for a, n in zip(tile.axes, block, strict=True))
            return replace(tile, sizes=(("m", 16), ("n", block[1])), axes=axes)
        return replace(tile, holds=tuple(replace(h, stages=stages, layout="swizzled") for h in tile.holds))

    def leaves(leaf: Leaf) -> Leaf:
        kind = (leaf.instruction or "").removeprefix("wg").removeprefix("mma_")
        return replace(leaf, lanes=8, form=FragmentForm(f"wgmma_{kind}", step=step))

    plan = map_leaves(map_tiles(plan, tiles), leaves)
    check_plan(plan, artifact.program, target)
    loops = lower_program(artifact.program, plan, backend_for(target).lower_kernel)
    return replace(artifact, plan=plan, loops=loops)


def kernel_of(name: str) -> Kernel:
    loops = compiled(name).loops
    assert loops is not None
    (kernel,) = loops.kernels
    return replace(kernel, name=name)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_loops_mean_the_product(name: str) -> None:
    artifact = compiled(name)
    assert artifact.program is not None
    inputs = random_inputs(artifact)
    (expected,) = (evaluate(artifact.program, inputs)[t.name] for t in artifact.program.outputs)
    (found,) = on_loops(artifact, inputs).values()
    assert_close(found, np.asarray(expected))


def emulated(names: tuple[str, ...], cache_dir: Path) -> None:
    kernels = {name: kernel_of(name) for name in names}
    module = EmulatedModule({n: source_of(k) for n, k in kernels.items()}, Cache(cache_dir), optimise=0)
    for name, kernel in kernels.items():
        run = run_of_artifact(compiled(name), kernel)
        contract = Contract(writes_all=tuple(p.name for p in written_params(kernel)))
        module.launch(name, grid_of(kernel, ()), launch_shape(kernel).threads, place_shared(kernel).bytes,
                      list(run.arrays), contract)  # fmt: skip
        assert_close(run.result, run.expected)


EMULATED = ("cut", "two_groups", "turns")


def test_sums_of_a_turn_lie_where_its_operands_were() -> None:
    """However many turns a block takes: operands of the next come when all have read these sums."""
    one, several = (place_shared(kernel_of(name)) for name in ("epilogue", "turns"))
    assert one.offsets["sums"] == several.offsets["sums"] == 0
    assert several.bytes == one.bytes


def test_emulated_kernels_compute_the_product(tmp_path: Path) -> None:
    emulated(EMULATED, tmp_path)


@pytest.mark.slow
def test_emulated_kernels_of_all_kinds(tmp_path: Path) -> None:
    emulated(tuple(n for n in CASES if n not in EMULATED), tmp_path)


# a fault in the text of a kernel: what is written, what is written instead
FAULTS: Mapping[str, tuple[str, str]] = {
    "no fence": (r"tw::async_fence\(\);", ""),
    "no wait for sums": (r"tw::wgmma_wait<0, (\d+)>\(.*\);", ""),
    "a wait one group short": (r"tw::wgmma_wait<1, ", "tw::wgmma_wait<2, "),
    "no wait for copies": (r"tw::wait<\d>\(\);", ""),
    "no barrier": (r"tw::barrier\(\);", ""),
    "another line": (r"(tw::wgmma_float16<.*), ring\.at\((\d), 0,", r"\1, ring.at(\2, 8,"),
}


def test_faults_of_what_is_under_way_are_reported(tmp_path: Path) -> None:
    """Sums touched before they are there, parts read before they have come or overwritten while they are read."""
    kernel = kernel_of("whole")
    texts = {"none": source_of(kernel).replace("whole(", "none(")}
    for number, (fault, (what, instead)) in enumerate(FAULTS.items()):
        changed, found = re.subn(what, instead, source_of(kernel))
        assert found, fault
        texts[f"fault{number}"] = changed.replace("whole(", f"fault{number}(")
    module = EmulatedModule(texts, Cache(tmp_path), optimise=0)
    contract = Contract(writes_all=tuple(p.name for p in written_params(kernel)))
    for name, fault in zip(texts, ("none", *FAULTS), strict=True):
        run = run_of_artifact(compiled("whole"), kernel)
        faults = module.inspect(name, grid_of(kernel, ()), launch_shape(kernel).threads, place_shared(kernel).bytes,
                                list(run.arrays), contract)  # fmt: skip
        assert bool(faults) == (fault != "none"), fault


def test_kernels_compile_for_hopper_without_spills() -> None:
    for name in ("turned_a", "two_groups"):
        made = nvrtc.compile_to_cubin(source_of(kernel_of(name)), "sm_90a")
        (resources,) = made.resources.values()
        assert resources.spill_bytes == resources.stack_bytes == 0


def test_parts_in_a_loop_mean_the_same() -> None:
    """A machine whose assembler runs out of registers walks the ring part after part."""
    artifact = compiled("whole")
    assert artifact.plan is not None and artifact.program is not None
    plan = map_leaves(artifact.plan, lambda leaf: leaf.with_options(FragmentForm, rolled=True))
    loops = lower_program(artifact.program, plan, backend_for(machine("h200")).lower_kernel)
    made = replace(artifact, plan=plan, loops=loops)
    inputs = random_inputs(made)
    (expected,) = (evaluate(artifact.program, inputs)[t.name] for t in artifact.program.outputs)
    (found,) = on_loops(made, inputs).values()
    assert_close(found, np.asarray(expected))
    assert "% 3" in source_of(loops.kernels[0]) and "rolled" in plan_text(plan)
    few = replace(machine("h200"), written_copies=8)
    rolls = build(load(product(1024, 1024, 1024), {}), few, Options(target="h200", stop_after="plan")).plan
    assert rolls is not None and "by wgmma_float16 rolled" in plan_text(rolls)


def instruction(target: Target, size: int) -> str | None:
    plan = build(load(product(size, size, size), {}), target, Options(target=target.name, stop_after="plan")).plan
    assert plan is not None
    return plan.kernels[0].leaves[0].instruction


def test_groups_are_chosen_where_the_machine_has_them_and_they_pay() -> None:
    hopper = machine("h200")
    without = replace(hopper, rates=tuple(r for r in hopper.rates if not r[0].startswith("wgmma")))
    assert instruction(hopper, 1024) == "wgmma_float16"
    assert instruction(without, 1024) == instruction(machine("a100"), 1024) == "mma_float16"
    assert instruction(hopper, 32) == "mma_float16"  # of 64 rows half would be empty


def test_few_rows_run_on_tensor_cores_where_the_other_operand_comes_from_memory() -> None:
    def leaf(rows: int, columns: int) -> str | None:
        target = machine("h200")
        model = load(product(rows, 4096, columns), {})
        plan = build(model, target, Options(target=target.name, stop_after="plan")).plan
        assert plan is not None
        return plan.kernels[0].leaves[0].instruction

    assert leaf(4, 11008) == "mma_float16" and leaf(4, 1024) is None


def test_another_device_than_the_one_described_has_none() -> None:
    device = CudaDevice(0, "another", "sm_100a", 148, 232448, 126 << 20, 180 << 30)
    assert described(machine("h200"), device).rate("wgmma_float16") is None
