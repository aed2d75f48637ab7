"""Trees of units, copies, memories and cases that cannot be meant: each is refused, with the place named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.plans import map_leaves, map_tiles
from tests.ten_trees import (
    CLUSTER,
    EXPONENTS,
    H200,
    HOST,
    N1,
    PRODUCT,
    TWO_READERS,
    case,
    columns_by_parts,
    persistent,
    recomputed,
    rows_of,
    staged_twice,
    streamed_model,
    warps,
    with_cases,
)
from tests.trees import by_hand, kernels, program_of
from tests.unit.transform.test_wavefront import folded, rewritten, stacked
from tilewright.backend import backend_for
from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Program
from tilewright.lower.program import lower_program
from tilewright.schedule.planner import make_plan
from tilewright.target import Cluster, Target
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Bind, Hold, Leaf, Plan, Tile, TileAxis, UnitBarrier
from tilewright.tile_graph.plan.leaf_form import ThreadForm
from tilewright.transform.layout.choose import choose_layouts

Change = Callable[[Tile], Tile]
MAIN, SHARED = H200.main.name, H200.nearest.name


def refused(plan: Plan, program: Program, system: Target | Cluster, message: str) -> None:
    with pytest.raises(InternalError) as caught:
        check_plan(plan, program, system)
    assert str(caught.value) == message


def holding(name: str, **changed: object) -> Change:
    """Holds of a tensor changed, wherever they are."""
    return lambda t: replace(
        t,
        holds=tuple(replace(h, **changed) if h.tensor == name else h for h in t.holds),  # type: ignore[arg-type]
    )


# --- barriers


def two_bodies(barrier: UnitBarrier, holds: tuple[Hold, ...] = ()) -> tuple[Program, Plan]:
    """Sums of rows, a barrier, and what reads those of other units."""
    program = program_of("x[24, 40]\na[i0:24] = sum[r0:40] x[i0, r0]\ny[i0:24, i1:40] = x[i0, i1] - a[23 - i0]")
    first, second = kernels(program, N1).values()
    rows = TileAxis("rows", 24, (Bind("a", "o0"), Bind("y", "o0")))
    kernel = replace(first, name="k0", axes=(rows,), sizes=(("rows", 5),), holds=holds,
                     body=(*first.body, barrier, *second.body))  # fmt: skip
    return program, Plan(N1.name, "by hand", Tile("DRAM", body=(kernel,), holds=(Hold("a"),)))


def test_a_barrier_is_of_the_units_of_its_kernel() -> None:
    program, plan = two_bodies(UnitBarrier("blocks"))
    refused(plan, program, N1, "plan of kernel 'k0': a barrier of all blocks in a kernel over cores")


def test_a_barrier_outside_of_kernels() -> None:
    program, plan = two_bodies(UnitBarrier("cores"))
    check_plan(plan, program, N1)
    plan = replace(plan, body=replace(plan.body, body=(*plan.body.body, UnitBarrier("cores"))))
    refused(plan, program, N1, "plan: a barrier is part of no kernel")


def test_a_barrier_that_units_reach_a_different_number_of_times() -> None:
    program, plan = two_bodies(UnitBarrier("cores"))

    def walked(tile: Tile) -> Tile:
        return replace(tile, body=(Tile(tile.level, (("rows", 1),), body=tile.body),)) if tile.is_kernel else tile

    message = "a barrier inside parts along rows, of which cores have different numbers"
    refused(map_tiles(plan, walked), program, N1, f"plan of kernel 'k0': {message}")


def test_what_is_read_across_a_barrier_lies_in_memory() -> None:
    program, plan = two_bodies(UnitBarrier("cores"), (Hold("a"),))
    refused(plan, program, N1, "plan of kernel 'k0': leaf 'y' reads 'a' across a barrier: hold it around the kernel")


def lstm(target: Target) -> tuple[Program, Plan]:
    program = choose_layouts(rewritten(folded(stacked("LSTM", 2, hidden=8, steps=3, inputs=5))), target)
    return program, map_tiles(make_plan(program, target), persistent)


def test_steps_inside_a_kernel_end_in_a_barrier() -> None:
    program, plan = lstm(H200)
    check_plan(plan, program, H200)
    name = next(t.scan for t in plan.body.walk() if isinstance(t, Tile) and t.over == "steps")

    def without(tile: Tile) -> Tile:
        return replace(tile, body=tile.body[:-1]) if tile.over == "steps" else tile

    refused(map_tiles(plan, without), program, H200, "plan of kernel 'k1': the steps of "
            f"'{name}' end without a barrier, and the next reads what others leave")  # fmt: skip


def test_blocks_that_wait_for_each_other_are_all_there() -> None:
    """Co-residency: eight blocks on a device of three multiprocessors, each with all the threads one takes."""
    program, plan = lstm(H200)
    small = replace(H200, units=3)
    check_plan(plan, program, small)
    full = map_tiles(plan, lambda t: replace(t, count=1024) if t.over == "lanes" else t)
    refused(full, program, small, "plan of kernel 'k1': 8 blocks wait for each other, and 3 are there at a time")


# --- children together


def unlike(change: Change, threads: tuple[int, int] = (32, 96)) -> Plan:
    return map_tiles(warps(program_of(EXPONENTS), threads), change)


def both_in_one(tile: Tile) -> Tile:
    """One child with the leaves of two."""
    if tile.runs != "together":
        return tile
    first, second = (n for n in tile.body if isinstance(n, Tile))
    return replace(tile, body=(replace(first, body=(*first.body, *second.body)),))


TOGETHER: dict[str, tuple[Callable[[], Plan], str]] = {
    "without a Hold in stages": (
        lambda: unlike(holding("p", stages=1)),
        "children run together on a block's threads, in parts of a walk, by way of a Hold in stages",
    ),
    "half a warp": (
        lambda: warps(program_of(EXPONENTS), (16, 96)),
        "each child that runs together is handed out to whole warps of 32 threads",
    ),
    "more threads than there are": (
        lambda: warps(program_of(EXPONENTS), (64, 96)),
        "children take 160 threads together of 128",
    ),
    "one child": (lambda: unlike(both_in_one), "what runs together are several tiles"),
    "some other way": (
        lambda: unlike(lambda t: replace(t, runs="at random") if t.runs == "together" else t),
        "children run in one of order, together, not 'at random'",
    ),
    "a leaf that waits for its block": (
        lambda: map_leaves(
            warps(program_of(EXPONENTS)), lambda x: x.with_options(ThreadForm, step=16) if x.tensor == "y" else x
        ),
        "a child that runs together has leaves that need no barrier of the block",
    ),
    "a barrier inside a child": (
        lambda: unlike(lambda t: replace(t, body=(*t.body, UnitBarrier("blocks"))) if t.count == 96 else t),
        "a child that runs together has leaves that need no barrier of the block",
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_children_that_cannot_run_together(name: str) -> None:
    make, message = TOGETHER[name]
    refused(make(), program_of(EXPONENTS), H200, f"plan of kernel 'k0': {message}")


def side_by_side(text: str) -> tuple[Program, Plan]:
    """All kernels of a program in one stage."""
    program = program_of(text)
    stage = Tile("DRAM", body=tuple(kernels(program, N1).values()), runs="together", holds=(Hold("a"),))
    return program, by_hand(Tile("DRAM", body=(stage,)), N1)


def test_kernels_that_run_together_do_not_read_each_other() -> None:
    program, plan = side_by_side("x[8, 4]\na[i0:8] = sum[r0:4] x[i0, r0]\nb[i0:8] = a[i0] + a[7 - i0]")
    refused(plan, program, N1,
            "plan: children run together, and one reads 'a' of another: hold it in stages")  # fmt: skip


# --- copies and stages


def staged(change: Change) -> Plan:
    return map_tiles(staged_twice(program_of(PRODUCT), N1, 2), change)


def without_copies(tile: Tile) -> Tile:
    return replace(tile, body=tuple(n for n in tile.body if not isinstance(n, Leaf) or n.tensor != "w"))


COPIES: dict[str, tuple[Callable[[], Plan], str]] = {
    "no leaf copies it": (lambda: staged(without_copies), "'w' in stages is filled by one leaf, not 0"),
    "no leaf copies what is not in stages": (
        lambda: map_tiles(staged(without_copies), holding("w", stages=1)),
        "it holds 'w' by copy, and no leaf copies it",
    ),
    "no Hold for a copy": (
        lambda: staged(lambda t: replace(t, holds=tuple(h for h in t.holds if h.tensor != "w"))),
        "it copies 'w', and no tile around holds it by copy",
    ),
    "a copy along axes that are not there": (
        lambda: map_leaves(staged(lambda t: t), lambda x: replace(x, order=("o0",)) if x.part == "copy" else x),
        "leaf 'x': order ['o0'] is not its axes ['o0', 'o1'] once each",
    ),
    "no stages": (lambda: staged(holding("w", stages=0)), "'w' in 0 stages"),
    "a layout without warps": (
        lambda: staged(holding("w", layout="swizzled")),
        "'w' lies swizzled: only operands of warps do",
    ),
    "padded rows of what no block computes": (
        lambda: staged(holding("w", layout="padded")),
        "'w' lies padded: only what a block's leaves store for each other does",
    ),
    "copies under way without warps": (
        lambda: staged(holding("w", fill="async copy")),
        "it brings 'w' by async copy, which only operands of warps come by",
    ),
    "stages of another number": (
        lambda: staged(holding("w", stages=3)),
        "what one tile holds in stages has as many of them each",
    ),
    "stages where nothing is walked": (
        lambda: staged(
            lambda t: replace(t, holds=(Hold("x", fill="copy", stages=2),), body=t.body) if t.is_kernel else t
        ),
        "'x' in stages: a tile walks one axis, and holds it part by part",
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_and_stages_that_cannot_be(name: str) -> None:
    make, message = COPIES[name]
    refused(make(), program_of(PRODUCT), N1, f"plan of kernel 'k0': {message}")


def test_what_is_filled_ahead_reads_nothing_of_its_own_part() -> None:
    program = program_of("""
        x[40, 24]
        q[i0:40, i1:24] = x[i0, i1] * 2.0
        p[i0:40, i1:24] = exp(q[i0, i1])
        a[i0:40] = sum[r0:24] p[i0, r0]
    """)
    leaves = tuple(n for k in kernels(program, N1).values() for n in k.leaves)
    rows = TileAxis("rows", 40, (Bind("a", "o0"),))
    walked = Tile("L1", (("rows", 4),), "order", leaves, (Hold("q"), Hold("p", stages=2)))
    plan = by_hand(Tile("DRAM", body=(Tile("L2", (("rows", 20),), "cores", (walked,), (), (rows,), "k0"),)), N1)
    refused(plan, program, N1, "plan of kernel 'k0': 'p' is filled ahead and reads 'q', which is not there yet")


def test_an_axis_that_ends_too_early() -> None:
    program = program_of(TWO_READERS)
    short = TileAxis("rows", 32, (Bind("a", "o0"), Bind("b", "o0")))
    plan = map_tiles(recomputed(program, N1), lambda t: replace(t, axes=(short,)) if t.is_kernel else t)
    refused(plan, program, N1, "plan of kernel 'k0': axis rows of 32 ends before a.o0 of 40")


def test_what_is_held_nearer_fits_there() -> None:
    """A level inside a kernel has its own room: four rows of 24, and rings of two stages."""
    for text, make, size in ((TWO_READERS, recomputed, 4 * 4 * 24),
                             (PRODUCT, lambda p, t: staged_twice(p, t, 2), 2 * 4 * (8 * 16 + 16 * 8))):  # fmt: skip
        program = program_of(text)
        plan = make(program, N1)
        for room in (size, size - 1):
            small = replace(N1, levels=tuple(replace(x, capacity=room) if x.name == "L1" else x for x in N1.levels))
            if room == size:
                check_plan(plan, program, small)
            else:
                refused(plan, program, small, f"plan of kernel 'k0': it holds {size} bytes at L1, which has {room}")


# --- memories


def test_a_host_that_is_not_described() -> None:
    program, plan = columns_by_parts()
    levels = ", ".join(x.name for x in H200.levels)
    refused(plan, program, H200, f"plan: the target has no level 'host'; it has {levels}")
    on_device = replace(plan, body=map_tiles(plan, lambda t: replace(t, level=MAIN) if t.level == "host" else t).body)
    refused(on_device, program, H200, "plan: it brings 'x' by copy around kernels, where nothing is farther away")


def test_more_is_held_than_the_memories_have() -> None:
    program, plan, cluster = streamed_model(3, True)
    check_plan(plan, program, cluster)
    size = cluster.device.main.capacity
    main = replace(cluster.device.main, capacity=size - 1)
    small = replace(cluster, device=replace(cluster.device, levels=(*cluster.device.levels[:-1], main)))
    refused(plan, program, small, f"plan: Tiles around kernels hold {size} bytes at {MAIN}, which has {size - 1}")
    given = 4 * (10 * 16 + 3 * 16 * 16 + 10 * 16)  # inputs, weights and the result
    poor = replace(cluster, host=replace(HOST, capacity=given - 1))
    refused(plan, program, poor, f"plan: Tiles around kernels hold {given} bytes at host, which has {given - 1}")
    more = replace(plan, body=replace(plan.body, holds=(Hold("x1"),)))
    poor = replace(cluster, host=replace(HOST, capacity=given))
    refused(more, program, poor, f"plan: Tiles around kernels hold {given + 640} bytes at host, which has {given}")


def without(name: str) -> Change:
    return lambda t: replace(t, holds=tuple(h for h in t.holds if h.tensor != name))


COLUMNS = TileAxis("n", 8, (Bind("y", "o1"),))
MEMORIES: dict[str, tuple[Change, str]] = {
    "read at the host": (without("x"), "plan of kernel 'k_y': it touches 'x' at host: hold it at DRAM"),
    "written at the host": (without("y"), "plan of kernel 'k_y': it touches 'y' at host: hold it at DRAM"),
    "copied to where it is": (
        lambda t: replace(t, holds=(*t.holds, Hold("x", fill="copy"))) if t.sizes and not t.is_kernel else t,
        "plan: it brings 'x' by copy to DRAM, where it is already",
    ),
    "kernels cut what tiles around them do": (
        lambda t: replace(t, axes=(COLUMNS,), sizes=(("n", 4),)) if t.name == "k_y" else t,
        "plan of kernel 'k_y': axis n runs along y.o1, as columns around it",
    ),
    "a kernel that cuts another's axis": (
        lambda t: replace(t, sizes=(("columns", 4),)) if t.name == "k_y" else t,
        "plan of kernel 'k_y': a kernel cuts axes of its own, and 'columns' is of a tile around it",
    ),
    "outermost on a device": (
        lambda t: replace(t, level=MAIN) if t.level == "host" else t,
        "plan: the outermost tile is at host, where inputs and results are",
    ),
    "copied farther than the device": (
        lambda t: replace(t, holds=(Hold("x", fill="copy"),)) if t.level == "host" else t,
        "plan: 'x' is brought to host around kernels: copies go to DRAM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORIES)
def test_memories_that_cannot_be(name: str) -> None:
    change, message = MEMORIES[name]
    program, plan = columns_by_parts()
    refused(map_tiles(plan, change), program, CLUSTER, message)


def test_a_copy_starts_with_a_kernel_before_it() -> None:
    program, plan, cluster = streamed_model(3, True)
    for issue in ("k_x3", "nothing"):
        refused(map_tiles(plan, holding("w1", issue=issue)), program, cluster,
                f"plan: 'w1' is brought from '{issue}' on, no kernel before this tile")  # fmt: skip
    twice = map_tiles(plan, lambda t: replace(t, holds=(*t.holds, Hold("x0", fill="copy"))) if any(
        h.tensor == "w1" for h in t.holds) else t)  # fmt: skip
    refused(twice, program, cluster, f"plan: it brings 'x0' by copy to {MAIN}, where it is already")


def test_what_has_no_runtime_is_not_lowered() -> None:
    program, plan = columns_by_parts()
    with pytest.raises(InternalError, match="`interpret_tree` runs such a plan"):
        lower_program(program, plan, backend_for(H200).lower_kernel)
    with pytest.raises(InternalError, match="`Plan.at` gives that of an extent"):
        lower_program(rows_of(1, 8), with_cases(case(1, 8, 8)), backend_for(N1).lower_kernel)


# --- cases

CASES: dict[str, tuple[Plan, str]] = {
    "a gap": (with_cases(case(1, 16, 8), case(20, 64, 8)), "no case of n covers 17 to 19"),
    "no beginning": (with_cases(case(2, 64, 8)), "no case of n covers 1 to 1"),
    "no end": (with_cases(case(1, 63, 8)), "the cases of n end at 63, and it goes to 64"),
    "an overlap": (with_cases(case(1, 16, 8), case(16, 64, 8)), "two cases of n overlap at 16"),
    "backwards": (with_cases(case(1, 0, 8), case(1, 64, 8)), "a case of n from 1 to 0"),
    "another extent": (
        with_cases(replace(case(1, 64, 8), symbol="m")), "cases of 'm', which is no extent of the program",
    ),
    "two extents": (
        with_cases(case(1, 16, 8), replace(case(17, 64, 8), symbol="m")),
        "cases are ranges of one extent, not of m, n",
    ),
    "a tree beside them": (
        replace(with_cases(case(1, 64, 8)), body=case(1, 64, 8).body), "a tree beside cases",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases_that_cannot_be(name: str) -> None:
    plan, message = CASES[name]
    refused(plan, rows_of(1, 64), N1, f"plan: {message}")


def test_an_extent_that_no_case_has() -> None:
    with pytest.raises(InternalError, match="no case for n = 65"):
        with_cases(case(1, 64, 8)).at({"n": 65})
