"""Plans what a block of a GPU computes: the form of every leaf, and the leaves of a kernel as its tile wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.backend.gpu.boxes import block_of
from tilewright.backend.gpu.kernel.room import unordered
from tilewright.backend.gpu.maps.plan import fitted
from tilewright.backend.gpu.matrix.plan import (
    anew_after,
    choose_fragments,
    instruction_of,
    is_rolled,
    with_warps,
)
from tilewright.backend.gpu.stream.plan import finished_stream, in_registers, planned
from tilewright.backend.gpu.threads.in_step import in_step, known_sums, with_known_sums
from tilewright.backend.gpu.threads.plan import (
    MOST_THREADS,
    finished,
    of_part,
    of_rows,
    plan_threads,
    reduction_order,
    shares_sum,
    thread_order,
    threads_for,
    widened,
)
from tilewright.backend.gpu.threads.rows import with_padded_rows
from tilewright.backend.protocol import Choice
from tilewright.ir.meaning.instruct import WARP
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.plan.form import Leaf, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm, ThreadForm


def plan_gpu_nest(nest: Nest, context: NestContext) -> Leaf:
    """The part of a nest's plan that depends on its shape alone: order of threads, register tile, shared reductions."""
    free = frozenset(n.source for n in nest.element_loads if n.source in context.constants
                     and context.packable(n.source))  # fmt: skip
    context = replace(context, constants=frozenset())  # constants stay as they are: nothing is packed into panels here
    names = nest.axis_names()
    instruction = instruction_of(nest, context.target)
    if instruction is not None:
        walked = tuple(names[a] for a in (*thread_order(nest, context), *reduction_order(nest, context, free)))
        return Leaf(tensor=nest.tensor.name, core=nest.core, epilogue=nest.epilogue, order=walked,
                    vector=walked[len(nest.axes) - 1], form=FragmentForm(instruction))  # fmt: skip
    return plan_threads(nest, free, context)


def finished_leaves(
    nests: Sequence[Nest], leaves: Sequence[Leaf], choice: Choice, stream: Stream | None, context: NestContext
) -> tuple[tuple[Leaf, ...], int]:
    """The leaves with what depends on the tile, register tiles and staging, and the threads of the block."""
    kept = planned(nests, leaves, stream, choice.tile, choice.block, choice.tiles, context.target)
    if kept is not None and stream is not None:
        return finished_stream(leaves, *kept, stream), WARP * kept[1].warps
    part = block_of(nests, dict(choice.tile), stream, choice.block)
    fragments = choose_fragments(nests, leaves, part, choice.footprint, context)
    held = {t for n in nests[:-1] for t in n.stores}
    done: list[Leaf] = []
    for nest, leaf in zip(nests, leaves, strict=True):
        if leaf.tensor in fragments:
            made = fragments[leaf.tensor]
            rolled = is_rolled(nest, leaf, nests, made, part, context)
            form = FragmentForm(made.instruction, rolled, made.groups, made.step, anew_after(nest))
            done.append(replace(leaf, lanes=made.stored, form=form))
            continue
        box = part.boxes[nest]
        limits = part.limits.get(nest, {})
        if limits and stream is not None:
            leaf = of_part(leaf, nest, limits, context.target.warp)
            leaf = of_rows(leaf, nest, box, held) if nest in stream.reducers else leaf
        plain = fitted(finished(leaf, nest, box, limits), nest, box, limits, part.steps, MOST_THREADS)
        done.append(plain)
    if fragments:
        return tuple(done), WARP * next(iter(fragments.values())).warps
    warp = context.target.warp
    if stream is None and not choice.resident:
        done = in_step(nests, done, part.boxes, warp)
    room = context.target.max_threads if choice.resident else MOST_THREADS  # alone on its multiprocessor
    unit = max([warp, *(leaf.options(ThreadForm).split for leaf in done)])
    together = [] if stream is not None else [
        [i for i in run if shares_sum(done[i], nests[i], warp)] for run in unordered(nests)
    ]  # fmt: skip

    def taken(*numbers: int) -> int:
        return sum(threads_for(done[i], nests[i], part.boxes[nests[i]]) for i in numbers)

    for run in together:
        # so many outputs a warp that sums which do not wait for each other have warps of their own
        while taken(*run) > room:
            found = ((i, widened(done[i], nests[i], part.boxes[nests[i]], warp)) for i in run)
            wider = {i: leaf for i, leaf in found if leaf is not None}
            if not wider:
                break
            most = max(wider, key=taken)
            done[most] = wider[most]
    wanted = max(1, *(taken(i) for i in range(len(done))), *(taken(*run) for run in together))
    return tuple(done), min(room // unit, -(-wanted // unit)) * unit


def shared_out(
    kernel: Tile, nests: Sequence[Nest], leaves: Sequence[Leaf], choice: Choice, stream: Stream | None,
    context: NestContext,
) -> Tile:  # fmt: skip
    """The kernel with its products handed out to warps, or all of it where it is streamed in registers; its threads in
    the machine's warps."""
    body = tuple(replace(n, warp=context.target.warp) if isinstance(n, Tile) and n.over == "lanes" else n
                 for n in kernel.body)  # fmt: skip
    kernel = replace(kernel, body=body)
    registers = context.target.registers.name
    kept = planned(nests, leaves, stream, choice.tile, choice.block, choice.tiles, context.target)
    if kept is not None:
        return in_registers(kernel, nests, *kept, registers, context)
    part = block_of(nests, dict(choice.tile), stream, choice.block)
    fragments = choose_fragments(nests, leaves, part, choice.footprint, context)
    kernel = with_warps(kernel, nests, fragments, registers, part, context)
    if stream is None and not choice.resident and not fragments:
        (threads,) = (n.count for n in kernel.body if isinstance(n, Tile) and n.over == "lanes")
        stored = frozenset(t for n in nests if n.tensor.name not in kernel.held for t in n.stores)
        known = known_sums(nests, leaves, part.boxes, threads, context.target.warp, stored)
        kernel = with_known_sums(kernel, known)
    return with_padded_rows(kernel, nests, leaves, part.boxes, stream, context)
