"""Levels are real: names mean nothing, capacities everything, and a Plan that does not fit its machine is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tilewright import ops
from tilewright.backend import backend_for
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, all_computes
from tilewright.ir.text.text import loops_text
from tilewright.lower.program import lower_program
from tilewright.schedule.planner import make_plan
from tilewright.target import MemoryLevel, Target, machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tile_graph.plan.text import plan_text
from tilewright.tile_graph.traffic.held import held_bytes, plan_nests
from tilewright.transform.clean.fold import fold_constants

MACHINES = ("neoverse_n1", "emerald_rapids", "avx2_desktop", "h200")


def attention(rows: int = 300, depth: int = 48) -> ModelProto:
    steps = [
        ("Transpose", ["k"], "t", {"perm": [1, 0]}), ("MatMul", ["q", "t"], "s", {}),
        ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "y", {}),
    ]  # fmt: skip
    shape = (rows, depth)
    return model_of(steps, {"q": shape, "k": shape, "v": shape}, {"y": shape})


def normalised(rows: int = 4096, columns: int = 64) -> ModelProto:
    steps, x = [], "x"
    for number in range(9):
        steps += [("LayerNormalization", [x, "scale"], f"n{number}", {}), ("Relu", [f"n{number}"], f"r{number}", {})]
        x = f"r{number}"
    return model_of(steps, {"x": (rows, columns)}, {x: (rows, columns)}, {"scale": np.ones(columns, np.float32)})


def program_of(model: ModelProto) -> Program:
    return fold_constants(ops.lower(load(model, {})))


def renamed(target: Target) -> Target:
    return replace(target, levels=tuple(replace(level, name=f"memory {i}") for i, level in enumerate(target.levels)))


def with_level(target: Target, position: int, change: Callable[[MemoryLevel], MemoryLevel]) -> Target:
    return replace(target, levels=tuple(change(x) if i == position else x for i, x in enumerate(target.levels)))


def text_of(program: Program, plan: Plan, target: Target) -> str:
    return loops_text(lower_program(program, plan, backend_for(target).lower_kernel))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MACHINES)
def test_names_of_levels_mean_nothing(name: str) -> None:
    target = machine(name)
    other = renamed(target)
    for model in (attention(), normalised(512)):
        program = program_of(model)
        plan, again = make_plan(program, target), make_plan(program, other)
        assert text_of(program, plan, target) == text_of(program, again, other)
        words = plan_text(plan)
        for before, after in zip(target.levels, other.levels, strict=True):
            words = words.replace(before.name, after.name)
        assert words == plan_text(again)


def edited(target: Target) -> list[Target]:
    """The machine with its tile level halved, with less of everything, with a level more, with one less."""
    position = target.levels.index(target.local)
    halved = with_level(target, position, lambda x: replace(x, capacity=x.capacity // 2))
    small = with_level(target, position, lambda x: replace(x, capacity=24 << 10))
    outer = target.shared_cache or target.local
    more = MemoryLevel("L9", outer.capacity * 2, outer.transaction, outer.bandwidth * 0.9, outer.shared_by,
                       latency=outer.latency)  # fmt: skip
    found = [halved, small, replace(target, levels=(*target.levels[:-1], more, target.main))]
    if target.kind == "cpu" and target.shared_cache is not None:
        found.append(replace(target, levels=tuple(x for x in target.levels if x is not target.shared_cache)))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MACHINES)
def test_what_is_held_fits_whatever_the_machine(name: str) -> None:
    programs = [program_of(attention()), program_of(normalised(700))]
    for target in (machine(name), *edited(machine(name))):
        for program in programs:
            plan = make_plan(program, target)
            check_plan(plan, program, target)
            for kernel in plan.kernels:
                nests = plan_nests(kernel, all_computes(program))
                assert held_bytes(kernel, nests) <= target.level(kernel.level).capacity


@pytest.mark.parametrize("name", ["neoverse_n1", "h200"])
def test_a_smaller_level_changes_a_plan_that_needs_it(name: str) -> None:
    target = machine(name)
    small = edited(target)[1]
    program = program_of(attention(1024, 64))
    assert make_plan(program, target).body != make_plan(program, small).body


def test_the_grammar_refuses_levels_that_cannot_be() -> None:
    target = machine("neoverse_n1")
    program = program_of(normalised(512))
    plan = make_plan(program, target)
    kernel = plan.kernels[-1]
    assert kernel.holds

    def refused(changed: Tile, message: str) -> None:
        with pytest.raises(InternalError, match=message):
            check_plan(plan.with_kernels({kernel.name: changed}), program, target)

    refused(replace(kernel, level="banana"), "the target has no level 'banana'")
    inner = Tile("DRAM", kernel.sizes, "order", kernel.body, kernel.holds)
    refused(replace(kernel, body=(inner,)), "a tile at DRAM inside one at L2")
    tiny = with_level(target, 2, lambda x: replace(x, capacity=1 << 10))
    with pytest.raises(InternalError, match="holds .* bytes at L2, which has 1024"):
        check_plan(plan, program, tiny)
    unheld = replace(kernel, holds=kernel.holds[1:])
    refused(unheld, "nothing holds")
