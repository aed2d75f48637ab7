"""The grammar of Tiles around kernels: memory beyond a device, several devices, copies between them; and of cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.forms.compute import Compute, Program, Reduce, all_computes, all_tensors
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
    Span,
    collective,
    is_filled,
    parts_of,
    shard,
    span_bytes,
    span_of,
    whole_span,
)
from tilewright.tile_graph.plan.form import COLLECTIVES, COPIED, PARTIAL, REPLICATED, Hold, Plan, Tile

Around = Sequence[Tile]


def check_outside(tile: Tile) -> None:
    """What has a meaning between a cluster's memories alone, on one device."""
    if tile.over == "devices":
        raise ValueError("a tile over devices, and one device is described")
    for hold in tile.holds:
        if hold.distribution is not None:
            raise ValueError(f"'{hold.tensor}' is spread over devices, and one is described")
        if hold.fill in COLLECTIVES:
            raise ValueError(f"'{hold.tensor}' is brought by {hold.fill}, and one device is described")
        if hold.fill == COPIED:
            raise ValueError(f"it brings '{hold.tensor}' by {COPIED} around kernels, where nothing is farther away")


class ClusterCheck:
    """One way through the Tiles around kernels of a plan for several devices and their host."""

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
        held = Held(self.outside, self.tensors, self.cluster.devices)
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
        if tile.over == "devices":
            self._devices(tile, around, known)
        below = [n for n in tile.walk() if isinstance(n, Tile) and n.over == "devices" and n is not tile]
        for hold in tile.holds:
            self._hold(tile, hold, around, bool(below))
        for number, part in enumerate(parts_of(tile, ranges, known)):
            if number and tile.over != "devices":
                break  # the others are alike
            for node in tile.body:
                if isinstance(node, Tile):
                    self._tile(node, (*around, tile), part, known)

    def _devices(self, tile: Tile, around: Around, axes: Axes) -> None:
        if tile.level != self.main or any(t.over == "devices" for t in around):
            raise ValueError(f"a tile over devices is at {self.main}, the memory of each of them, and inside no other")
        count = len(list(parts_of(tile, {}, axes)))
        if count > self.cluster.devices:
            raise ValueError(f"{count} parts over devices, and {self.cluster.devices} are described")

    def _hold(self, tile: Tile, hold: Hold, around: Around, is_around: bool) -> None:
        name, spread = hold.tensor, hold.distribution
        if tile.level != self.main and (spread is not None or is_filled(hold)):
            raise ValueError(f"'{name}' is brought to {tile.level} around kernels: copies go to {self.main}")
        if (spread is not None) != (is_around and tile.level == self.main):
            where = "around devices: say which of them has what" if is_around else "where there are none around"
            raise ValueError(f"'{name}' is held {where}")
        if spread is not None:
            self._distribution(name, spread)
        source = next((h for t in reversed(around) for h in t.holds if h.tensor == name), None)
        level = next((t.level for t in reversed(around) for h in t.holds if h.tensor == name), self.cluster.host.name)
        if source is None and is_filled(hold) and name not in self.here:
            raise ValueError(f"it brings '{name}', which nothing farther away holds")
        before = None if source is None else source.distribution
        if before is not None and is_filled(hold):
            wanted = collective(before, spread) if spread is not None else None
            if wanted is None or hold.fill != wanted:
                way = f"it is {wanted}" if wanted else "there is no such exchange"
                raise ValueError(f"'{name}' from {before} to {spread or 'one device'}: {way}, not {hold.fill}")
        elif hold.fill in COLLECTIVES:
            raise ValueError(f"'{name}' comes by {hold.fill}, and no devices around have parts of it")
        elif hold.fill == COPIED and level == tile.level:
            raise ValueError(f"it brings '{name}' by {COPIED} to {level}, where it is already")
        if hold.issue is not None and (hold.issue not in self.launched or tile.sizes or spread is not None):
            raise ValueError(f"'{name}' is brought from '{hold.issue}' on, no kernel before this tile")

    def _distribution(self, name: str, spread: str) -> None:
        rank = self.tensors[name].rank
        if spread not in (REPLICATED, PARTIAL) and spread not in {f"o{i}" for i in range(rank)}:
            raise ValueError(f"'{name}' is spread by '{spread}'; it is {REPLICATED}, {PARTIAL}, or one of {rank} axes")
        core = self.computes.get(name)
        if spread == PARTIAL and not (isinstance(core, Reduce) and core.monoid.operator is not None):
            raise ValueError(f"'{name}' is {PARTIAL}, and no reduction with one operator")

    def _kernel(self, tile: Tile, around: Around, axes: Axes, ranges: Ranges) -> None:
        """All that a kernel touches is in its device's memory, and what its device has of it."""
        cut = {(b.tensor, b.axis): n for n in ranges for b in axes[n].binds}
        for axis in tile.axes:
            for bind in axis.binds:
                if (bind.tensor, bind.axis) in cut:
                    other = cut[bind.tensor, bind.axis]
                    raise ValueError(f"axis {axis.name} runs along {bind.tensor}.{bind.axis}, as {other} around it")
        device = next((i for i, t in enumerate(around) if t.over == "devices"), None)
        parts = self.outside.kernel(tile)
        _, limits = self.outside.boxes(parts, ranges, axes)
        terms = {t.name for n in limits for t in n.stores}
        stored = self.outside.stored(tile)
        for name, (tensor, box) in self.outside.touched(tile, ranges, axes).items():
            where = next(((t, h) for t in reversed(around) for h in t.holds if h.tensor == name), None)
            if where is None or where[0].level != self.main:
                raise ValueError(f"it touches '{name}' at {self.cluster.host.name}: hold it at {self.main}")
            spread = where[1].distribution
            number = 0 if device is None else self._number(around[device], ranges, axes)
            self._terms(name, spread, name in stored, name in terms)
            if spread is not None and device is None:
                raise ValueError(f"it touches '{name}', which is spread over devices, on none of them")
            if spread is not None and not _inside(span_of(box), shard(tensor, spread, number, self.cluster.devices)):
                raise ValueError(f"device {number} touches '{name}' beyond what it has of it: gather it")

    def _terms(self, name: str, spread: str | None, is_stored: bool, is_cut: bool) -> None:
        if is_stored and is_cut != (spread == PARTIAL):
            what = "all of it" if spread == PARTIAL else "a term of the sum"
            raise ValueError(f"'{name}' is held {spread or 'whole'}, and each device has {what}")
        if spread == PARTIAL and not is_stored:
            raise ValueError(f"it reads '{name}', of which each device has a term: reduce it")

    def _number(self, tile: Tile, ranges: Ranges, axes: Axes) -> int:
        """Which of the devices has a part."""
        known = {**axes, **{a.name: a for a in tile.axes}}
        own = [ranges[name].low for name, _ in tile.sizes]
        every = [[part[name].low for name, _ in tile.sizes] for part in parts_of(tile, {}, known)]
        return every.index(own)


def _inside(part: Span, room: Span) -> bool:
    return all(a >= b and a + n <= b + m for (a, n), (b, m) in zip(part, room, strict=True))


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
