"""Plans of a Program that differ in more than how kernels run: what is joined or apart, walked as a stream or under
windows, and kept where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright.backend import backend_for
from tilewright.backend.cpu.kernel.variants import in_one_tile
from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Program
from tilewright.schedule.planner import make_plan
from tilewright.schedule.tree import in_tree
from tilewright.target import Target
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tune.parts import TunedPart, bare

_FACTOR = 8.0  # by which a machine that leans another way is faster or slower in one thing


def structures(program: Program, own: Plan, target: Target) -> Iterator[Plan]:
    """Each made when it is asked for; plans may come again, and those of the planner's own among them."""
    memo = Memo()
    yield from _planned(program, target, memo, "register")
    yield from _planned(program, target, memo, streaming="never")
    for kernel in own.kernels:
        if len(kernel.leaves) > 1:
            yield from _planned(program, target, memo, plain=frozenset({kernel.leaves[-1].tensor}))
        one = in_one_tile(kernel) if kernel.over == "cores" else kernel
        if one is not kernel:
            yield own.with_kernels({kernel.name: one})
    for leaning in leanings(target):
        yield from _planned(program, leaning, Memo())
    yield from _planned(program, target, memo, streaming="always")
    yield from _planned(program, target, memo, "none")


def joins(program: Program, target: Target) -> Iterator[Plan]:
    """Without copies that are made to be read from, and plans for machines on which it pays more to keep what kernels
    pass to each other."""
    if program.staged:
        layouts = {t: layout for t, layout in program.layouts.items() if t not in program.staged}
        yield from _planned(replace(program, staged=(), layouts=layouts), target, Memo())
    for leaning in (_with_kernel_cost(target, _FACTOR**2), _with_memory(target, 1 / _FACTOR)):
        yield from _planned(program, leaning, Memo())


def apart(program: Program, target: Target) -> Iterator[Plan]:
    """The plan in which every kernel is started by itself."""
    yield from _planned(program, target, Memo(), whole=False)


def together(part: TunedPart, whole: Plan, target: Target) -> Iterator[Plan]:
    """The part's kernels in one launch, those first that take longest, as `whole` predicts them."""
    by_name = {kernel.name: kernel for kernel in whole.kernels}
    longest_first = sorted((by_name[name] for name in part.kernels), key=lambda k: -k.estimate.seconds)
    kernels = backend_for(target).share_launch(longest_first, target)
    if kernels is not None:
        launch = Tile(target.main.name, body=kernels, runs="together")
        yield bare(replace(part.own, body=in_tree([launch], part.program, target)))


def _planned(program: Program, target: Target, memo: Memo, schedule: str = "connected", streaming: str = "auto",
             plain: frozenset[str] = frozenset(), whole: bool = True) -> Iterator[Plan]:  # fmt: skip
    """Nothing where no plan is found, by a mistake of the planner's, which others find."""
    try:
        yield make_plan(program, target, schedule, streaming, memo=memo, whole=whole, plain=plain)
    except InternalError:
        return


def leanings(target: Target) -> list[Target]:
    """Machines like this one but for what joins, cuts and walks pay: launches, memory, room for tiles."""
    return [
        _with_memory(target, 1 / _FACTOR), _with_memory(target, _FACTOR), _with_kernel_cost(target, _FACTOR**2),
        _with_room(target, 0.25), _with_room(target, 4.0),
    ]  # fmt: skip


def _with_room(target: Target, factor: float) -> Target:
    return target.with_level(target.local, capacity=int(target.local.capacity * factor))


def _with_memory(target: Target, factor: float) -> Target:
    main = target.main
    return target.with_level(
        main, bandwidth=main.bandwidth * factor, alone=main.alone * factor, write=main.write * factor
    )


def _with_kernel_cost(target: Target, factor: float) -> Target:
    return replace(target, kernel_cost=target.kernel_cost * factor)
