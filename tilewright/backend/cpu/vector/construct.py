"""Roller's construction for one contraction: register tiles that fit the registers, both orders of the block loops,
passes over long reductions; all of them with some cuts of the output compared in one batch by the micro-performance
model, nothing measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from tilewright.backend.cpu.constants import (
    EVERY_OTHER,
    LONG_OPERANDS,
    MOST_GATHERED,
    OUTPUT_CUTS,
    PASSES,
    PASSES_WORTH,
    REST_WORTH,
    TILE_DOTS,
    TILE_ROWS,
    TILE_VECTORS,
    TILE_WIDE,
    VECTORS_AT_ONCE,
)
from tilewright.backend.cpu.vector.contraction_facts import ContractionFacts, LoopForm, ReadFacts, overlap
from tilewright.backend.cpu.vector.micro import blocks_along, core_seconds, dot_seconds, moving_seconds
from tilewright.ir.forms.expr import Axis, axes_of
from tilewright.tile_graph.algebra.nest import period
from tilewright.tile_graph.algebra.propagate import Size, extent_of
from tilewright.tile_graph.algebra.runs import reach


@dataclass(frozen=True)
class BuiltLeaf:
    """A register tile and the order of the loops around it, with the time predicted for the whole nest."""

    rows: int
    vectors: int
    row_inside: bool
    cut: int | None
    seconds: float


def build_tiles(facts: ContractionFacts, shape: Mapping[Axis, int] | None = None) -> list[BuiltLeaf]:
    """Every form the machine has room for, the best first: over some cuts of the output, or for parts of one shape."""
    forms = _forms(facts)
    along = _output_cuts(facts) if shape is None else [[shape[a]] for a in facts.nest.axes]
    cuts = np.meshgrid(*along, indexing="ij")
    # every form with every cut of the output: one flat batch, the cuts of a form side by side
    columns = {a: np.tile(sizes.ravel(), len(forms)) for a, sizes in zip(facts.nest.axes, cuts, strict=True)}
    form = LoopForm(*(np.repeat(np.array(part), cuts[0].size) for part in zip(*forms, strict=True)))
    seconds = predicted(facts, form, columns).reshape(len(forms), -1).min(axis=1)
    height = 0  # a run has one rest alone
    if facts.row not in facts.runs:
        height = _reach(facts, facts.row) if shape is None else int(blocks_along(facts, facts.row, shape)[0])
    seconds = seconds * np.array([REST_WORTH if height % rows else 1.0 for rows, *_ in forms])
    whole = _whole(facts)
    found = [
        BuiltLeaf(rows, vectors, inside, None if cut >= whole else cut, time)
        for (rows, vectors, inside, cut), time in zip(forms, seconds.tolist(), strict=True)
    ]
    # where rows have nothing in common the tile that follows each stream farthest; else passes must earn their
    # complication, and among equals the squarer tile has the fewer reads
    is_wide = _is_wide(facts)
    return sorted(found, key=lambda b: (
        -b.vectors if is_wide else 0, round(b.seconds * (PASSES_WORTH if b.cut else 1.0) * 1e10),
        b.rows + b.vectors, b.row_inside,
    ))  # fmt: skip


def predicted(facts: ContractionFacts, form: LoopForm, tile: Mapping[Axis, Size]) -> np.ndarray:
    """Seconds of the whole nest in tiles of that size, epilogue and first reads left out: they are the same for all."""
    core = core_seconds(facts, form, tile)
    busy = moving_seconds(facts, form, tile, core)
    tiles: Size = 1
    for axis in facts.nest.axes:
        tiles = tiles * -(-max(1, extent_of(axis.extent)) // tile[axis])
    return np.asarray(-(-tiles // facts.target.units) * busy)


def _forms(facts: ContractionFacts) -> list[tuple[int, int, bool, int]]:
    registers = facts.target.vector_registers
    # without an operand that all lanes share, every multiply-add holds vectors of both
    broadcast = any(not o.by_vector for o in facts.operands)
    budget = registers * 3 // 4 if broadcast else registers * 3 // 8
    width = _reach(facts, facts.vector)
    height = _reach(facts, facts.row)
    is_wide = _is_wide(facts)
    most_vectors = TILE_VECTORS
    if is_wide:
        most_vectors, height = MOST_GATHERED if any(o.gathered > EVERY_OTHER for o in facts.operands) else TILE_WIDE, 1
    orders = (True, False) if facts.row is not None and height > 1 else (True,)
    shared = _shares_taps(facts)
    kept = _shares_vectors(facts)
    result: list[tuple[int, int, bool, int]] = []
    for vectors in range(1, most_vectors + 1):
        if vectors > 1 and (vectors - 1) * facts.lanes >= width:
            break
        if facts.panel and vectors % facts.panel and facts.panel % vectors:
            continue  # a register tile lies in one panel, or has whole ones: where a vector begins is one number then
        for rows in range(1, min(height, TILE_ROWS) + 1):
            # a vector is multiplied into all rows before the next is needed: where rows wait in registers, two will do,
            # and so they do where there is one row
            waiting = min(vectors, VECTORS_AT_ONCE) if facts.by_lane or is_wide else vectors
            used = rows * vectors + waiting + (rows if facts.by_lane or shared else 1)
            used += rows * vectors if kept else 0
            if rows * vectors > budget or used > registers - (4 if facts.by_lane else 1):
                break
            for inside in orders:
                result.extend((rows, vectors, inside, cut) for cut in _passes(facts, rows, vectors))
    return result


def _is_wide(facts: ContractionFacts) -> bool:
    """Whether one row is enough: more would be as many more streams to follow, with nothing read less often. What is
    packed is one stream, however many rows a panel has."""
    streams = any(o.by_vector and not o.is_run for o in facts.operands)
    wide = _reach(facts, facts.vector) >= TILE_WIDE * facts.lanes
    return facts.row is not None and streams and wide and not _rows_share(facts)


def _rows_share(facts: ContractionFacts) -> bool:
    """Whether vectors that one row reads are another row's too: of an operand the rows have in common, or of windows
    that overlap."""

    def overlaps(operand: ReadFacts) -> bool:
        axes = [axes_of(i) for i in operand.node.indices]
        return any(facts.row in met and any(a in facts.nest.reduce_axes for a in met) for met in axes)

    return any(o.by_vector and (not o.by_row or overlaps(o)) for o in facts.operands)


def _shares_taps(facts: ContractionFacts) -> bool:
    """Whether a value broadcast for one row is another row's at a later tap: it then waits in a register."""
    if facts.window is None:
        return False
    taps = extent_of(facts.window.extent)
    broadcast = [o for o in facts.operands if o.by_row and not o.by_vector]
    return any(o.row_step < taps and facts.window in axes_of(*o.node.indices) for o in broadcast)


def _shares_vectors(facts: ContractionFacts) -> bool:
    """Whether a vector that one row reads is another row's at a later tap, and waits in a register, too."""
    if facts.window is None or any(o.by_vector and not o.by_row for o in facts.operands):
        return False
    taps = extent_of(facts.window.extent)
    return any(
        o.by_row and o.by_vector and o.row_step < taps and overlap(o, facts.row, facts.window) for o in facts.operands
    )


def _reach(facts: ContractionFacts, axis: Axis | None) -> int:
    """How far a block along an axis may go: it ends with a group."""
    if axis is None:
        return 1
    return period(facts.nest, axis) or reach(axis, facts.runs.get(axis, ()))


def _whole(facts: ContractionFacts) -> int:
    return extent_of(facts.cut_axis.extent) if facts.cut_axis is not None else 1


def _passes(facts: ContractionFacts, rows: int, vectors: int) -> Sequence[int]:
    """What one pass may cover: all of the reduction, or less where a block's operands outgrow the first cache."""
    whole = _whole(facts)
    held = 4 * facts.reduction * (rows + vectors * facts.lanes)
    if facts.cut_axis is None or held <= facts.target.nearest.capacity * LONG_OPERANDS:
        return (whole,)
    a_step = facts.reduction // whole
    sizes = {whole}
    for wanted in PASSES:
        if wanted < facts.reduction:
            size = max(1, wanted // a_step)
            # whole vectors, and passes of equal length
            even = -(-whole // -(-whole // size))
            sizes.add(min(whole, -(-even // facts.lanes) * facts.lanes if a_step == 1 else even))
    return sorted(sizes)


def _output_cuts(facts: ContractionFacts) -> list[list[int]]:
    """Sizes of tiles worth a look along each output axis."""
    plain = max(facts.plain, key=lambda a: extent_of(a.extent), default=None)
    # a run is cut along its outermost axis
    ends = [(a, (a, *facts.runs.get(a, ()))[-1]) for a in (facts.row, facts.vector) if a is not None]
    cut_along = {end: OUTPUT_CUTS[0] if axis is facts.row else OUTPUT_CUTS[1] for axis, end in ends}
    cut_along |= {plain: OUTPUT_CUTS[2]} if plain is not None else {}
    choices: list[list[int]] = []
    for axis in facts.nest.axes:
        extent = max(1, extent_of(axis.extent))
        if axis not in cut_along:
            choices.append([extent])
            continue
        sizes = {-(-extent // n) for n in cut_along[axis]}
        if axis is facts.vector:  # as much of the vector operand as the tile level keeps
            room = facts.target.local.capacity // (8 * facts.reduction)
            sizes.add(min(extent, max(1, room // (4 * facts.lanes)) * 4 * facts.lanes))
        choices.append(sorted(sizes))
    return choices


def dot_tiles(
    facts: ContractionFacts, rows: Sequence[Axis], shape: Mapping[Axis, int] | None = None
) -> list[tuple[float, dict[Axis, int]]]:
    """Register tiles for dot products along the vector, of the whole output or of parts of one shape: outputs along up
    to two axes, or several chains of one."""
    assert facts.vector is not None
    names = facts.nest.axis_names()
    ranked = sorted(rows, key=lambda a: -extent_of(a.extent))[:2]
    tile = shape or {a: max(1, extent_of(a.extent)) for a in facts.nest.axes}
    found = []
    for sizes in product(*(range(1, min(TILE_DOTS, extent_of(a.extent)) + 1) for a in ranked)):
        outputs = prod(sizes)
        if outputs + sum(sizes) > facts.target.vector_registers - 2:
            continue
        for chains in (1, 2, 4):
            if chains > 1 and (outputs > 2 or chains * facts.lanes > extent_of(facts.vector.extent)):
                continue
            register = {a: n for a, n in zip(ranked, sizes, strict=True) if n > 1}
            named = {names[a]: n for a, n in register.items()} | {names[facts.vector]: chains * facts.lanes}
            seconds = float(dot_seconds(facts, named, tile)) / facts.target.units
            found.append((seconds, {**register, facts.vector: chains * facts.lanes}))
    return sorted(found, key=lambda pair: pair[0])
