"""The grammar of Tiles around kernels: memory beyond a device, copies to it and back; and of cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.forms.compute import Compute, Program, all_computes, all_tensors
from tilewright.ir.forms.expr import Symbol
from tilewright.ir.forms.spelling import name_text
from tilewright.ir.text.parse import parse_program
from tilewright.ir.text.text import program_text, symbols_of
from tilewright.target import Cluster
from tilewright.tile_graph.meaning.outside import (
    Axes,
    Held,
    Outside,
    Ranges,
    is_filled,
    parts_of,
    span_bytes,
    whole_span,
)
from tilewright.tile_graph.plan.form import COPIED, Hold, Plan, Tile

Around = Sequence[Tile]


def check_outside(tile: Tile) -> None:
    """What has a meaning between a cluster's memories alone, on one device."""
    for hold in tile.holds:
        if hold.fill == COPIED:
            raise ValueError(f"it brings '{hold.tensor}' by {COPIED} around kernels, where nothing is farther away")


class ClusterCheck:
    """One way through the Tiles around kernels of a plan for a device and its host."""

    def __init__(self, program: Program, cluster: Cluster) -> None:
        self.cluster = cluster
        self.computes: Mapping[str, Compute] = all_computes(program)
        self.tensors = {t.name: t for t in all_tensors(program)}
        self.outside = Outside(self.computes)
        self.main = cluster.device.main.name
        self.launched: set[str] = set()
        self.kernel = ""  # for messages
        self.here = {t.name for t in (*program.inputs, *program.constants, *program.outputs)}

    def run(self, body: Tile) -> None:
        if body.level != self.cluster.host.name or body.over != "order" or body.sizes:
            raise ValueError(f"the outermost tile is at {self.cluster.host.name}, where inputs and results are")
        self._tile(body, (), {}, {})
        held = Held(self.outside, self.tensors)
        most = held.of(body)
        given = sum(span_bytes(self.tensors[n], whole_span(self.tensors[n])) for n in self.here)
        most[body.level] = most.get(body.level, 0) + given
        for level in (self.cluster.device.main, self.cluster.host):
            if most.get(level.name, 0) > level.capacity:
                raise ValueError(f"Tiles around kernels hold {most[level.name]} bytes at {level.name}, which has "
                                 f"{level.capacity}")  # fmt: skip

    def _tile(self, tile: Tile, around: Around, ranges: Ranges, axes: Axes) -> None:
        known = {**axes, **{a.name: a for a in tile.axes}}
        if tile.is_kernel:
            self.kernel = tile.name
            self._kernel(tile, around, known, ranges)
            self.kernel = ""
            self.launched.add(tile.name)
            return
        for hold in tile.holds:
            self._hold(tile, hold, around)
        part = next(parts_of(tile, ranges, known))  # the others are alike
        for node in tile.body:
            if isinstance(node, Tile):
                self._tile(node, (*around, tile), part, known)

    def _hold(self, tile: Tile, hold: Hold, around: Around) -> None:
        name = hold.tensor
        if tile.level != self.main and is_filled(hold):
            raise ValueError(f"'{name}' is brought to {tile.level} around kernels: copies go to {self.main}")
        source = next((h for t in reversed(around) for h in t.holds if h.tensor == name), None)
        level = next((t.level for t in reversed(around) for h in t.holds if h.tensor == name), self.cluster.host.name)
        if source is None and is_filled(hold) and name not in self.here:
            raise ValueError(f"it brings '{name}', which nothing farther away holds")
        if is_filled(hold) and level == tile.level:
            raise ValueError(f"it brings '{name}' by {COPIED} to {level}, where it is already")
        if hold.issue is not None and (hold.issue not in self.launched or tile.sizes):
            raise ValueError(f"'{name}' is brought from '{hold.issue}' on, no kernel before this tile")

    def _kernel(self, tile: Tile, around: Around, axes: Axes, ranges: Ranges) -> None:
        """All that a kernel touches is in the device's memory."""
        cut = {(b.tensor, b.axis): n for n in ranges for b in axes[n].binds}
        for axis in tile.axes:
            for bind in axis.binds:
                if (bind.tensor, bind.axis) in cut:
                    other = cut[bind.tensor, bind.axis]
                    raise ValueError(f"axis {axis.name} runs along {bind.tensor}.{bind.axis}, as {other} around it")
        for name in self.outside.touched(tile, ranges, axes):
            where = next((t for t in reversed(around) for h in t.holds if h.tensor == name), None)
            if where is None or where.level != self.main:
                raise ValueError(f"it touches '{name}' at {self.cluster.host.name}: hold it at {self.main}")


# --- cases


def narrowed(program: Program, symbol: Symbol, low: int, high: int) -> Program:
    """The program with a smaller range of a symbolic extent."""
    text, name = program_text(program), name_text(symbol.name)
    before, after = (f"\nsymbol {name} {a} .. {b}\n" for a, b in ((symbol.low, symbol.high), (low, high)))
    return parse_program(text.replace(before, after, 1), {t.name: a for t, a in program.constants.items()})


def check_cases(plan: Plan, program: Program) -> Symbol:
    """Ranges of one symbol that cover it, and overlap nowhere; gives the symbol."""
    names = {case.symbol for case in plan.cases}
    if len(names) != 1:
        raise ValueError(f"cases are ranges of one extent, not of {', '.join(sorted(names))}")
    (name,) = names
    symbols = {s.name: s for s in symbols_of(program)}
    if name not in symbols:
        raise ValueError(f"cases of '{name}', which is no extent of the program")
    if plan.body.body:
        raise ValueError("a tree beside cases")
    symbol = symbols[name]
    reached = symbol.low - 1
    for case in sorted(plan.cases, key=lambda c: c.low):
        if case.low > case.high:
            raise ValueError(f"a case of {name} from {case.low} to {case.high}")
        if case.low <= reached:
            raise ValueError(f"two cases of {name} overlap at {case.low}")
        if case.low > reached + 1:
            raise ValueError(f"no case of {name} covers {reached + 1} to {case.low - 1}")
        reached = case.high
    if reached != symbol.high:
        raise ValueError(f"the cases of {name} end at {reached}, and it goes to {symbol.high}")
    return symbol
