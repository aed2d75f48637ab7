"""Seeded random trees: kernels cut twice, leaves at either level or at both, copies and leaves in stages, windows that
move; all give the interpreter's answer, on Loops and as trees.

A failure prints its seed; `pytest tests/fuzz/test_trees.py -k "[SEED]"` runs that one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.cpu_stages import CPU, lowered, output_names
from tests.fuzz.programs import random_arrays
from tests.fuzz.seeds import seeds
from tests.fuzz.test_programs import compare, prepared, told
from tests.unit.tile_graph.test_rolling import chain, convolutions
from tilewright.ir.forms.compute import Program, all_computes
from tilewright.schedule.planner import make_plan
from tilewright.tile_graph.algebra.nest import Nest, roots_of
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.rolling import find_overlaps
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.check.units import read_below
from tilewright.tile_graph.meaning.interpret_tree import interpret_tree
from tilewright.tile_graph.plan.form import Bind, Hold, Leaf, Plan, Tile, TileAxis
from tilewright.tile_graph.traffic.held import leaf_nest, plan_nests
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.layout.staging import stage_operands

QUICK = (*range(60), 1057)  # the last reads an axis backwards in a product


def nested(kernel: Tile, nests: Sequence[Nest], rng: np.random.Generator) -> Tile:
    """The kernel cut into random parts, each walked in random parts of its own, some leaves outside that walk."""
    root = nests[-1]
    whole = [n.tensor.name for n in nests[:-1] if n.tensor.name not in kernel.held]
    if whole or kernel.stream is not None or len(roots_of(nests)) > 1 or not root.axes:
        return kernel  # what is stored beside the root would be stored more than once
    if any(n.unswitched for n in nests) or any(extent_of(a.extent) < 1 for a in root.axes):
        return kernel
    chosen = rng.permutation(len(root.axes))[: int(rng.integers(1, 3))]
    axes, outer, inner = [], [], []
    for number in sorted(int(n) for n in chosen):
        extent = extent_of(root.axes[number].extent)
        step = int(rng.integers(1, extent + 1))
        part = step * int(rng.integers(1, -(-extent // step) + 1))
        axes.append(TileAxis(f"a{number}", extent, (Bind(root.tensor.name, f"o{number}"),)))
        outer.append((f"a{number}", part))
        inner.append((f"a{number}", step))
    leaves = kernel.leaves
    outside = int(rng.integers(0, len(leaves)))
    early = {leaf.tensor for leaf in leaves[:outside]}
    holds = tuple(Hold(leaf.tensor) for leaf in leaves[:-1] if leaf.tensor not in early)
    walked = Tile(kernel.level, tuple(inner), "order", leaves[outside:], holds)
    return replace(kernel, axes=tuple(axes), sizes=tuple(outer), body=(*leaves[:outside], walked),
                   holds=tuple(Hold(name) for name in sorted(early)))  # fmt: skip


def richer(kernel: Tile, program: Program, rng: np.random.Generator) -> Tile:
    """Of a kernel that was cut twice: some leaves once more inside, inputs copied there, some of it in stages, at any
    level."""
    walked = kernel.body[-1]
    if not isinstance(walked, Tile) or walked.over != "order":
        return kernel
    computes = all_computes(program)
    leaves = [n for n in walked.body if isinstance(n, Leaf)]
    again = [n for n in kernel.body if isinstance(n, Leaf) and rng.random() < 0.5]
    leaves = again + leaves
    holds = [*(Hold(n.tensor) for n in again), *walked.holds]
    given = {t.name: t for t in program.inputs if t.rank and t not in program.layouts}
    for name in sorted({t.name for n in leaves for t in leaf_nest(n, computes).reads()} & set(given)):
        if rng.random() < 0.5:
            last = f"o{given[name].rank - 1}"
            order = (*(f"o{i}" for i in rng.permutation(given[name].rank - 1)), last)
            leaves.insert(0, Leaf(name, name, part="copy", vector=last, lanes=4, register=((last, 4),), order=order))
            holds.append(Hold(name, fill="copy"))
    held = {h.tensor for h in holds}
    free = {n.tensor for n in leaves if n.part == "copy" or not read_below(n, computes) & held}
    stages = int(rng.integers(1, 4)) if len(walked.sizes) == 1 else 1
    levels = [x.name for x in CPU.levels]
    level = str(rng.choice(levels[1 : levels.index(kernel.level) + 1]))
    staged = tuple(replace(h, stages=stages) if h.tensor in free and rng.random() < 0.7 else h for h in holds)
    return replace(kernel, body=(*kernel.body[:-1], replace(walked, level=level, body=tuple(leaves), holds=staged)))


def rolling(kernel: Tile, nests: Sequence[Nest], rng: np.random.Generator) -> Tile | None:
    """The kernel with windows that move over what it would compute again; None where nothing overlaps."""
    overlaps = find_overlaps(nests)
    if not overlaps:
        return None
    root, number = nests[-1], overlaps[0].axis
    extent = extent_of(root.axes[number].extent)
    steps = [n for n in range(1, extent // 2 + 1) if all(n * o.scale >= o.rows for o in overlaps)]
    if not steps:
        return None
    step = int(rng.choice(steps))
    part = step * int(rng.integers(2, max(3, extent // step + 1)))
    axis = TileAxis("rows", extent, (Bind(root.tensor.name, f"o{number}"),))
    moving = {o.nest.tensor.name for o in overlaps}
    holds = tuple(
        Hold(leaf.tensor, "rolling", "rows") if leaf.tensor in moving else Hold(leaf.tensor)
        for leaf in kernel.leaves[:-1]
    )
    walked = Tile(kernel.level, (("rows", step),), "order", kernel.leaves, holds)
    return replace(kernel, axes=(axis,), sizes=(("rows", part),), body=(walked,), holds=())


def random_tree(program: Program, seed: int, is_rich: bool = False) -> Plan:
    rng = np.random.default_rng([seed, 10 if is_rich else 9])
    plan = make_plan(program, CPU, "connected", streaming="never")
    computes = all_computes(program)
    changed = {}
    for kernel, steps in plan.launches():
        if steps is None:
            changed[kernel.name] = nested(kernel, plan_nests(kernel, computes), rng)
            if is_rich:
                changed[kernel.name] = richer(changed[kernel.name], program, rng)
    return plan.with_kernels(changed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", seeds(2000, 300, QUICK))
def test_random_trees(seed: int) -> None:
    program = prepared(seed)
    with told(seed, program):
        plan = random_tree(program, seed)
        check_plan(plan, program)
        inputs = random_arrays(program, seed)
        compare(program, inputs, lowered(program, plan=plan).on_loops(inputs))


@pytest.mark.parametrize("seed", seeds(1000, 80, (*range(16), 389)))
def test_random_trees_with_copies_stages_and_leaves_again(seed: int) -> None:
    program = prepared(seed)
    with told(seed, program):
        plan = random_tree(program, seed, is_rich=True)
        check_plan(plan, program, CPU)
        assert Plan.from_json(plan.to_json()) == plan
        inputs = random_arrays(program, seed)
        compare(program, inputs, lowered(program, plan=plan).on_loops(inputs))


@pytest.mark.parametrize("seed", seeds(200, 24, range(8)))
def test_random_trees_have_a_meaning_of_their_own(seed: int) -> None:
    program = prepared(seed)
    with told(seed, program):
        plan = random_tree(program, seed, is_rich=seed % 2 == 0)
        inputs = random_arrays(program, seed)
        found, _ = interpret_tree(program, plan, inputs)
        compare(program, inputs, dict(zip(output_names(program), found.values(), strict=True)))


@pytest.mark.parametrize("seed", seeds(100, 16, range(6)))
def test_random_windows(seed: int) -> None:
    rng = np.random.default_rng([seed, 4])
    kernel, stride = int(rng.choice([2, 3, 5])), int(rng.integers(1, 3))
    sizes = [int(n) for n in rng.integers(kernel + 4, 16, 2)]
    pad = int(rng.integers(0, kernel // 2 + 1))
    if seed % 2:
        program = chain(int(rng.integers(1, 6)), *sizes, kernel, stride, pad)
    else:  # several windows, of which some move over copies made for padding
        others = [(3, int(rng.integers(1, 3)), int(rng.integers(0, 2))) for _ in range(int(rng.integers(1, 3)))]
        program = convolutions(3, int(rng.integers(2, 9)), *(s + 8 for s in sizes), [(kernel, 1, pad), *others])
        program = stage_operands(program, CPU, always=True) if rng.random() < 0.5 else program
    program = choose_layouts(program, CPU)
    with told(seed, program):
        plan = make_plan(program, CPU, "register")
        kernels = plan.kernels
        leaves = tuple(leaf for k in kernels for leaf in k.leaves)
        one = replace(kernels[0], axes=(), sizes=(), body=leaves, holds=tuple(Hold(x.tensor) for x in leaves[:-1]))
        made = rolling(one, [n for k in kernels for n in plan_nests(k, all_computes(program))], rng)
        if made is None:
            pytest.skip("nothing overlaps by whole steps")
        plan = replace(plan, body=replace(plan.body, body=(made,), holds=()))
        check_plan(plan, program)
        inputs = random_arrays(program, seed)
        compare(program, inputs, lowered(program, plan=plan).on_loops(inputs))
