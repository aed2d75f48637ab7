"""Seeded random Programs planned for every stored machine: the verifier takes their Loops, a C compiler their kernels,
and machines of other vector widths than this one compute what the interpreter does.

A failure prints its seed; `pytest tests/fuzz/test_widths.py -k "[SEED-"` runs that one again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import Lowered
from tests.fuzz.programs import random_arrays, random_program
from tests.fuzz.seeds import seeds
from tests.fuzz.test_plans import MODELS
from tests.fuzz.test_programs import compare, told
from tests.fuzz.widths import in_passes, loops_of, refused, sources_of
from tilewright import ops
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.runtime import ToolchainError, find_compiler
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine, stored_machines
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.leaf_form import VectorForm
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.layout.staging import stage_operands

ALL = 120
MACHINES = stored_machines("cpu")


def drawn(seed: int, target: Target) -> Program:
    """A random Program, or one of the small operators."""
    if seed % 3 == 0:
        program = fold_constants(ops.lower(load(MODELS[sorted(MODELS)[seed // 3 % len(MODELS)]], {})))
        return choose_layouts(stage_operands(program, target, always=seed % 2 == 0), target)
    return choose_layouts(fold_constants(random_program(1000 + seed)), target)


def planned(seed: int, target: Target, passes: bool) -> Lowered:
    program = drawn(seed, target)
    with told(seed, program):
        plan = make_plan(program, target, "connected" if seed % 4 else "register")
        if passes:
            plan = in_passes(program, plan, np.random.default_rng([seed, 9]))
        check_plan(plan, program)
        return Lowered(program, plan, loops_of(program, plan, target))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("seed", seeds(ALL, 16, range(6)))
def test_every_machine_computes_the_same(seed: int, name: str) -> None:
    target = machine(name)
    for passes in (False, True):
        made = planned(seed, target, passes)
        with told(seed, made.program):
            inputs = random_arrays(made.program, seed)
            compare(made.program, inputs, made.on_loops(inputs))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in ("neoverse_n1", "avx2_desktop") else pytest.mark.slow) for name in MACHINES
])  # fmt: skip
@pytest.mark.parametrize("seed", seeds(ALL // 12, 4, range(1)))
def test_every_machine_has_a_compiler_that_takes_it(seed: int, name: str, tmp_path: Path) -> None:
    """Twelve programs at a time: a compiler's start takes longer than a kernel's types."""
    try:
        find_compiler("zig")
    except ToolchainError:
        pytest.skip("the ziglang package, which compiles for any machine, is not installed")
    target = machine(name)
    sources: dict[str, str] = {}
    for one in range(12 * seed, 12 * seed + 12):
        for passes in (False, True):
            kernels = sources_of(planned(one, target, passes).loops, target)
            sources |= {f"{k}_{one}_{passes}": text for k, text in kernels.items()}
    assert sources and not refused(sources, target, tmp_path)


@pytest.mark.slow
def test_passes_are_drawn() -> None:
    """Some of the plans above have sums in passes that end inside a vector."""
    target = replace(machine("emerald_rapids"))
    leaves = [n for s in range(ALL) for k in planned(s, target, True).plan.kernels for n in k.leaves]
    assert sum(bool(n.options(VectorForm).cut) for n in leaves) > 10
