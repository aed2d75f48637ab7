"""Trees written by hand: programs from text, the leaves a machine would run, and whether all agree on the answer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.cpu_stages import lowered, random_inputs
from tilewright.backend.seconds import Priced, price
from tilewright.intrinsics.cpu import MEANINGS as CPU_MEANINGS
from tilewright.intrinsics.gpu import MEANINGS as GPU_MEANINGS
from tilewright.ir.forms.compute import Program, all_computes, all_tensors
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import Layout
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.interpret_loops import run_loops
from tilewright.ir.text.parse import parse_program
from tilewright.schedule.planner import make_plan
from tilewright.target import Cluster, Target
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.meaning.interpret_tree import Counted, interpret_tree
from tilewright.tile_graph.meaning.outside import Held, Outside
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile
from tilewright.tile_graph.plan.text import plan_text

Arrays = Mapping[str, np.ndarray]


def program_of(text: str) -> Program:
    """Lines of a Program, float32: `x[4, 8]` is an input; what nobody reads is an output."""
    given, made, left = [], [], []
    for line in text.strip().splitlines():
        name, _, rest = line.strip().partition("[")
        if "=" in rest:
            made.append(f"{name}: float32[{rest}")
            left.append(name)
        else:
            given.append(f'input {name}: float32[{rest} = "{name}"')
    reads = " ".join(line.partition("=")[2] for line in made)
    outputs = [f'output {n} = "{n}"' for n in left if f"{n}[" not in reads]
    return parse_program("\n".join(["program", *given, *made, *outputs, "end", ""]), {})


def planned(program: Program, target: Target) -> dict[str, Leaf]:
    """How a machine would run each compute as a kernel of its own."""
    return {leaf.tensor: leaf for k in make_plan(program, target, "none").kernels for leaf in k.leaves}


def kernels(program: Program, target: Target) -> dict[str, Tile]:
    """The same, whole kernels in one part, named after what they store."""
    found = {}
    for kernel in make_plan(program, target, "none").kernels:
        name = kernel.leaves[-1].tensor
        found[name] = Tile(kernel.level, (), kernel.over, kernel.body, kernel.holds, (), f"k_{name}")
    return found


def by_hand(body: Tile, target: Target | Cluster) -> Plan:
    plan = Plan(target.device.name if isinstance(target, Cluster) else target.name, "by hand", body)
    again = Plan.from_json(plan.to_json())
    assert again == plan and plan_text(again) == plan_text(plan)
    return plan


def close(found: Arrays, wanted: Arrays) -> None:
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name].reshape(value.shape), value, rtol=1e-4, atol=1e-5, err_msg=name)


def tree_agrees(program: Program, plan: Plan, system: Target | Cluster, seed: int = 0) -> tuple[Counted, Priced]:
    """The tree is checked, and interpreted it gives the Program's answer; what copies moved is what was predicted."""
    check_plan(plan, program, system)
    inputs = random_inputs(program, seed)
    found, counted = interpret_tree(program, plan, inputs)
    close(found, evaluate(program, inputs))
    priced = price(program, plan, system)
    assert priced.copied == counted.moved
    if isinstance(system, Cluster):
        tensors = {t.name: t for t in all_tensors(program)}
        assert Held(Outside(all_computes(program)), tensors).of(plan.body) == counted.most
    assert priced.seconds > 0
    return counted, priced


def loops_agree(program: Program, plan: Plan, target: Target, seed: int = 0) -> LoopProgram:
    """So do its Loops."""
    loops = lowered(program, plan=plan, target=target).loops
    inputs = random_inputs(program, seed)
    layouts = dict(plan.layouts)
    tensors = {t.name: (layouts.get(t.name) or Layout.natural(t.rank)).pack(np.asarray(a))
               for t, a in program.constants.items()}  # fmt: skip
    tensors.update({name: array.copy() for name, array in inputs.items()})
    run_loops(loops, tensors, instructions={**CPU_MEANINGS, **GPU_MEANINGS})
    close(tensors, evaluate(program, inputs))
    return loops
