"""Connecting at register level: maps computed on the registers of their producer, or composed into their consumers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from tilewright.ir.forms.compute import Compute, Map, Reduce, expressions, reads
from tilewright.ir.forms.expr import Expr, Load, axes_of, is_op, loads, walk
from tilewright.ir.forms.tensor import Tensor
from tilewright.schedule.constants import (
    CHEAP,
    CHEAP_COMPOSED,
    CHEAP_ON_GPU,
    LARGEST_COMPOSED,
    LARGEST_VALUE,
    LONGEST_EPILOGUE,
    READ_ONCE,
    SEVERAL_SOURCES,
)
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import data_cost, is_identity_read, is_view
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.unswitch import composes, is_choice


@dataclass
class Fused:
    """Which maps ride on a reduction (`epilogues`, by its first output) and which vanish into their readers."""

    epilogues: dict[Tensor, list[Map]] = field(default_factory=dict)
    inlined: dict[Tensor, Map] = field(default_factory=dict)


def fuse_registers(
    computes: Sequence[Compute], kept: frozenset[Tensor], target: Target, staged: frozenset[Tensor] = frozenset()
) -> Fused:
    """`kept` tensors must exist in memory: outputs, and what other lists of computes read; `staged` ones are copies
    made on purpose, which stay nests of their own. No loop becomes longer than the instruction cache holds."""
    result = Fused()
    users: dict[Tensor, list[Compute]] = {}
    for compute in computes:
        for tensor in reads(compute):
            users.setdefault(tensor, []).append(compute)
    absorbed: set[Tensor] = set(staged)
    # a map that several reductions feed goes to the largest of them
    for compute in sorted((c for c in computes if isinstance(c, Reduce)), key=_domain, reverse=True):
        if len(compute.outputs) == 1:
            chain = _epilogue(compute, users, kept, absorbed, target.longest_loop // _accumulators(target))
            if chain:
                result.epilogues[compute.outputs[0]] = chain
                absorbed.update(m.output for m in chain)
    sizes: dict[Tensor, int] = {}  # expression nodes of a map with those of what is composed into it
    costs: dict[Tensor, int] = {}  # and its instructions
    summed = _behind_sums(computes)
    choosing: set[Tensor] = set()  # maps whose value, with what is composed into it, is a choice between formulas
    for compute in computes:
        if not isinstance(compute, Map) or compute.output in absorbed:
            continue
        if any(t in choosing and t in result.inlined for t in reads(compute)) or is_choice(compute):
            choosing.add(compute.output)
        sizes[compute.output] = _composed_size(
            compute.value, {t: sizes[t] for t in reads(compute) if t in result.inlined}
        )
        behind = [t for t in reads(compute) if t in result.inlined]
        costs[compute.output] = data_cost(compute.value) + sum(costs[t] for t in behind)
        if compute.output in kept or sizes[compute.output] > LARGEST_COMPOSED:
            continue
        if costs[compute.output] * target.calls_together > target.longest_loop:
            continue
        readers = users.get(compute.output, [])
        quick = target.warp > 1 and _reads_memory(compute, summed)
        if len(readers) > 1 and behind and costs[compute.output] > (CHEAP_ON_GPU if quick else CHEAP_COMPOSED):
            continue
        if _pads_bytes(compute, readers, staged):
            continue
        if _composes(compute, readers, compute.output in choosing, CHEAP_ON_GPU if quick else CHEAP):
            result.inlined[compute.output] = compute
    for compute in [c for c in result.inlined.values() if not is_view(c) or _sources(c) > 1]:
        for late in _repeated_behind(compute, users, result.inlined):
            result.inlined.pop(late, None)
    return result


def _composed_size(value: Expr, inlined: Mapping[Tensor, int]) -> int:
    """Nodes of an expression with those of maps that are composed into it, of these sizes: once for every place that a
    map is read at, and where data says which, as often as the map reads there: p[p[i]] of p[p[i]] of p[p[i]] doubles
    what is read with every link, and where it is read multiplies what is written."""
    written: dict[Expr, int] = {}  # nodes of all paths through an index

    def times(node: Load) -> int:
        return max(1, sum(written[i] for i in node.indices if i.reads))

    for node in walk(value):
        if isinstance(node, Load) and node.source in inlined:
            written[node] = inlined[node.source] * times(node)
        else:
            written[node] = 1 + sum(written[arg] for arg in node.args)
    return len(written) + sum(inlined[n.source] * times(n) for n in loads(value) if n.source in inlined)


def _behind_sums(computes: Sequence[Compute]) -> set[Tensor]:
    """What is computed from sums, however far before: it lies where they are, and is kept there as cheaply."""
    found: set[Tensor] = set()
    for compute in computes:
        if not isinstance(compute, Map) or any(t in found for t in reads(compute)):
            found.update(compute.outputs)
    return found


def _reads_memory(compute: Map, summed: set[Tensor]) -> bool:
    """Whether what a map has of its own size comes from memory: the sums of a row that it reads too are few."""
    axes = {a for a in compute.axes if extent_of(a.extent) > 1}
    return not any(n.source in summed for n in loads(compute.value) if axes.issubset(axes_of(*n.indices)))


def _accumulators(target: Target) -> int:
    """Vectors of a register tile, for each of which an epilogue is written out; threads take packet after packet."""
    return target.vector_bytes // 2 if target.warp > 1 else max(1, target.vector_registers * 3 // 4)


def _repeated_behind(compute: Map, users: dict[Tensor, list[Compute]], inlined: dict[Tensor, Map]) -> list[Tensor]:
    """What must exist in memory so that no sum computes an element of this map many times: maps that move data hide
    from the map how often it is read behind them. The last of these is kept, in the order that the sum reads."""
    found: list[Tensor] = []
    own = prod(extent_of(a.extent) for a in compute.axes)
    limit = SEVERAL_SOURCES if is_view(compute) else READ_ONCE
    stack = [compute]
    while stack:
        last = stack.pop()
        for reader in users.get(last.output, []):
            if isinstance(reader, Map) and reader.output in inlined:
                stack.append(reader)
            elif isinstance(reader, Reduce) and last is not compute and _times(last, reader) > limit:
                size = prod(extent_of(a.extent) for a in last.axes)
                found.append(last.output if size <= READ_ONCE * own else compute.output)
    return found


def _pads_bytes(compute: Map, readers: Sequence[Compute], staged: frozenset[Tensor]) -> bool:
    """Whether a copy that pads reads what costs more than moving it: composed, every lane would compute by itself."""
    if compute.output.dtype.bytes > 1 or data_cost(compute.value) <= CHEAP:
        return False
    return any(isinstance(r, Map) and r.output in staged and is_op(r.value, "select") for r in readers)


def _domain(compute: Reduce) -> int:
    return prod(extent_of(a.extent) for a in (*compute.axes, *compute.reduce_axes))


def _epilogue(
    reduce: Reduce, users: dict[Tensor, list[Compute]], kept: frozenset[Tensor], absorbed: set[Tensor], most: int
) -> list[Map]:
    """The maps that can run on the reduction's registers: read point for point, and only the last is read outside.
    They take so many instructions a vector at most."""
    start = reduce.outputs[0]
    shape = tuple(a.extent for a in reduce.axes)
    reached: dict[Tensor, Map] = {}
    frontier = [start]
    while frontier and len(reached) < LONGEST_EPILOGUE:
        for reader in users.get(frontier.pop(0), []):
            if not isinstance(reader, Map) or reader.output in reached or reader.output in absorbed:
                continue
            if tuple(a.extent for a in reader.axes) == shape:
                reached[reader.output] = reader
                frontier.append(reader.output)
    best: list[Map] = []
    for last in reached.values():
        chain = _between(start, last, reached)
        if chain is None or len(chain) <= len(best) or not _closed(start, chain, users, kept):
            continue
        if data_cost(*(m.value for m in chain)) <= most:
            best = chain
    return _narrowed(start, best, users, kept)


def _narrowed(
    start: Tensor, chain: list[Map], users: dict[Tensor, list[Compute]], kept: frozenset[Tensor]
) -> list[Map]:
    """The chain without maps at its end that only widen what is stored, where readers can do that themselves."""
    while len(chain) > 1 and chain[-1].output not in kept:
        last, before = chain[-1], chain[-2].output
        inside = {n.source for n in loads(last.value)}.intersection((start, *(m.output for m in chain)))
        if inside != {before} or before.dtype.bytes >= last.output.dtype.bytes:
            break
        if not _composes(last, users.get(last.output, []), False, CHEAP):
            break
        chain = chain[:-1]
    return chain


def _between(start: Tensor, last: Map, reached: dict[Tensor, Map]) -> list[Map] | None:
    """The reached maps that `last` depends on, in order, with `last`; None when a read is not point for point."""
    inside: dict[Tensor, None] = {}
    stack = [last]
    while stack:
        current = stack.pop()
        for node in loads(current.value):
            if node.source is start or node.source in reached:
                if not is_identity_read(node, current.axes):
                    return None
                if node.source is not start and node.source not in inside:
                    inside[node.source] = None
                    stack.append(reached[node.source])
    return [m for m in reached.values() if m.output in inside] + [last]


def _closed(start: Tensor, chain: Sequence[Map], users: dict[Tensor, list[Compute]], kept: frozenset[Tensor]) -> bool:
    """Nothing before the last map is wanted elsewhere, and the composed value stays readable."""
    members = set(chain)
    if sum(1 for m in chain for _ in walk(m.value)) > LARGEST_VALUE:
        return False
    return all(
        tensor not in kept and all(r in members for r in users.get(tensor, []))
        for tensor in (start, *(m.output for m in chain[:-1]))
    )


def _composes(compute: Map, readers: Sequence[Compute], choosing: bool, cheap: int) -> bool:
    """Whether every reader may compute the map's elements itself."""
    if not readers:
        return False
    if choosing:  # worth composing only where the reader writes its blocks out too: a reduction does not
        return len(readers) == 1 and isinstance(readers[0], Map) and composes(compute, readers[0])
    cost = data_cost(compute.value)
    size = sum(1 for _ in walk(compute.value))
    if size > LARGEST_VALUE:
        return False
    if cost > cheap and len(readers) > 1:
        return False
    return all(_reader_accepts(compute, r, cost) for r in readers)


def _reader_accepts(compute: Map, reader: Compute, cost: int) -> bool:
    if not isinstance(reader, Map | Reduce):
        return False
    times = _times(compute, reader)
    if is_view(compute):
        # moved data is free to address again, unless the reader would choose between several sources very often
        return _sources(compute) <= 1 or times <= SEVERAL_SOURCES
    if isinstance(reader, Reduce):
        return times <= READ_ONCE
    return times <= READ_ONCE or (cost <= CHEAP and times <= 4)


def _sources(compute: Map) -> int:
    return len({n.source for n in loads(compute.value)})


def _times(compute: Map, reader: Map | Reduce) -> float:
    """How often the reader takes an element of the map, on average."""
    own = [n for n in loads(*expressions(reader)) if n.source is compute.output]
    domain = prod(extent_of(a.extent) for a in reader.axes)
    if isinstance(reader, Reduce):
        domain *= prod(extent_of(a.extent) for a in reader.reduce_axes)
    return domain * len(own) / max(1, prod(extent_of(a.extent) for a in compute.axes))


def why_not_in_registers(
    core: Compute, tensor: Tensor, made: Compute, reader: Compute, readers: Sequence[Compute], kept: frozenset[Tensor]
) -> str:
    """Why a reader does not take a tensor from registers, by the rules above; for people. `made` computes it, by itself
    or on the registers of the reduction `core`."""
    if tensor in kept:
        return "it leaves these computes and is stored"
    if isinstance(core, Reduce):
        return _why_no_epilogue(core, tensor, reader, readers)
    if not isinstance(made, Map) or not isinstance(reader, Map | Reduce):
        return "one of them is no map and no reduction"
    cost, size = data_cost(made.value), sum(1 for _ in walk(made.value))
    if size > LARGEST_VALUE:
        return f"its expression has {size} nodes, more than {LARGEST_VALUE}"
    if cost > CHEAP and len(readers) > 1:
        return f"{len(readers)} readers would each compute its {cost} operations again"
    if not _reader_accepts(made, reader, cost):
        return f"its reader takes every element {_times(made, reader):.4g} times and would compute it as often"
    if is_view(made):
        return "its data are better moved once, in an order of their own"
    return "with all that is composed into it, it is too much to compute again"


def _why_no_epilogue(core: Reduce, tensor: Tensor, reader: Compute, readers: Sequence[Compute]) -> str:
    if not isinstance(reader, Map):
        return "a reduction is complete only after its last step, and its reader reduces again"
    if len(core.outputs) > 1:
        return "the reduction has several results"
    if len(readers) > 1:
        return f"it has {len(readers)} readers, and registers serve one"
    if tuple(a.extent for a in reader.axes) != tuple(a.extent for a in core.axes):
        return "its reader has another shape"
    own = [n for n in loads(reader.value) if n.source is tensor]
    if not all(is_identity_read(n, reader.axes) for n in own):
        return "it is not read element for element"
    return "its reader runs on the registers of another reduction, or the maps on these are enough"
