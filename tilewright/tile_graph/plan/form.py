"""The Plan: a tree of tiles over memory levels, pure data; prints as text, round-trips through JSON.

    Plan  = Tile, or a Case for every range of a symbolic extent
    Tile  = level, sizes of parts, over whom, in order or together: Holds, then Tiles, Leaves and Barriers
    Hold  = tensor: stored, carried or rolling; by what copy it comes, in how many stages
    Leaf  = nest: how it runs
    Barrier = the units that wait for each other

A Tile cuts axes into parts and hands them out: one after the other, to cores, the blocks, warps and threads of a GPU,
or to the steps of a Scan; data may repeat one around kernels, or choose one of its children. What a Tile holds stays
at its memory level while its body runs. A Leaf says how one nest runs on the part of it that the Tiles around it
leave; a Leaf that occurs again is computed again. A read is served by the nearest Hold around it. Kernels are the
Tiles handed out to cores or blocks; the outermost Tile is main memory (or the host's, beyond it), with every
intermediate that crosses kernels. Steps of a Scan inside a kernel make it persistent: its units meet at Barriers.

A Tile runs its body in order, or together: each child on units of its own, meeting only through Holds in stages. Of a
Hold in n stages there are n parts: what fills it runs n - 1 parts ahead of what reads it. Kernels over blocks that run
together are one launch: each block is of one of them.

Axes of a nest are named by position: o0, o1... are those of its result, r0, r1... those it reduces over. An axis of
the tree has a name of its own and says which axes of which nests it runs along.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from tilewright.errors import InternalError
from tilewright.ir.forms.tensor import Layout, StorageAxis
from tilewright.ir.meaning.instruct import WARP
from tilewright.tile_graph.plan.leaf_form import LEAF_FORMS, PLAIN, InstructionForm, LeafForm, Sizes, form_of_older

AnyForm = TypeVar("AnyForm", bound=LeafForm)

# one part after the other, or to whom; again while data say so, or one of its children as they choose
HANDED_OUT = ("order", "cores", "blocks", "lanes", "warps", "steps", "while", "branch")
LAUNCHED = ("cores", "blocks")  # a Tile handed out so is a kernel
RUNS = ("order", "together")  # the children of a Tile: one after the other, or side by side
# of a nest: all of it, or a carried state begun, updated, ended; or the copy that fills a Hold
PARTS = ("whole", "start", "step", "finish", "copy")
MODES = ("store", "carry", "rolling")
# how a Hold is filled from the nearest Hold of the same tensor farther away, or written back to it: by whoever runs
# what is below, which loads, may compute, and stores; or by copies that are under way until they are waited for
COPIED, ASYNC = "copy", "async copy"
COPIES = (COPIED, ASYNC)
# how lines lie in the banks of shared memory: packets as they come, exchanged (of operands that warps share), or an odd
# number of them a line; or not there at all: every thread that reads it has it in a register of its own
SWIZZLED, PADDED, IN_REGISTERS = "swizzled", "padded", "in registers"
LAYOUTS = (None, SWIZZLED, PADDED, IN_REGISTERS)


@dataclass(frozen=True)
class Leaf:
    """How one nest runs on its part of the tile."""

    tensor: str  # what the nest stores (its first output)
    core: str  # the reduction at its heart, or the map itself
    epilogue: tuple[str, ...] = ()  # maps applied on registers before the store, in order
    composed: tuple[str, ...] = ()  # maps computed again wherever they are read, in registers
    part: str = "whole"
    vector: str | None = None  # axis whose elements share a vector register, or that neighbouring threads walk
    lanes: int = 1
    register: Sizes = ()  # register tile along output axes
    order: tuple[str, ...] = ()  # loops over blocks, outermost first, then reduction loops
    alternate: bool = False  # blocks are walked backwards in every second step of a Scan
    idle: int | None = None  # the first step of a Scan that begins with zeros: there is nothing to sum up in it
    form: LeafForm = PLAIN  # by which it runs, with options that this form alone has

    @property
    def instruction(self) -> str | None:
        """That of the intrinsics table which runs its core."""
        return self.form.instruction if isinstance(self.form, InstructionForm) else None

    def options(self, form: type[AnyForm]) -> AnyForm:
        """Those of a form; the usual ones where the leaf has another."""
        return form.of(self.form)

    def with_options(self, form: type[LeafForm], **changed: Any) -> Leaf:
        """The leaf in a form, some of its options other than they are."""
        return replace(self, form=replace(self.options(form), **changed))

    @cached_property
    def unnamed(self) -> Leaf:
        """The same without names: equal for nests that are planned alike."""
        return replace(self, tensor="", core="", epilogue=(), composed=())

    def renamed(self, tensor: str, core: str, epilogue: tuple[str, ...]) -> Leaf:
        """The same for a nest of other names."""
        made = replace(self, tensor=tensor, core=core, epilogue=epilogue)
        made.__dict__["unnamed"] = self.unnamed  # one object: it is compared often
        return made

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept: what is known of a nest is found by its leaf, again and again."""
        return hash((self.tensor, self.vector, self.lanes, self.register, self.order, self.form))


@dataclass(frozen=True)
class Bind:
    """Axis `axis` of a nest runs along an axis of the tree: it is `scale` times the tree's, plus `offset`."""

    tensor: str
    axis: str
    scale: int = 1
    offset: int = 0


@dataclass(frozen=True)
class TileAxis:
    """An axis that Tiles cut: its extent, and the axes of nests that run along it. Of a Tile over warps it numbers a
    block's part of the axes of one nest that it binds, the last fastest."""

    name: str
    extent: int
    binds: tuple[Bind, ...]


@dataclass(frozen=True)
class Hold:
    """A tensor kept at a Tile's level while the Tile's body runs.

    `store`: the part of it that the Tile covers. `carry`: the state of a reduction along `axis`, from part to part of
    the Tile that walks it. `rolling`: a window that moves along `axis`; what overlaps is kept.
    With `fill` it is brought here from farther away, in `issue` (a kernel's name) where that starts earlier; what a
    leaf below stores is written back instead. Around warps it is an operand of the leaf below in parts of the leaf's
    step, the sum's rows before its columns: by `async copy` in packets as they lie in memory, by `copy` as threads read
    or compute it. Of several `stages` later parts are brought while one is used. `layout` says how a line lies in the
    banks, or that threads keep it. What is computed `within` a result of the kernel has no memory of its own: it lies
    where that will.
    """

    tensor: str
    mode: str = "store"
    axis: str | None = None
    fill: str | None = None
    issue: str | None = None
    stages: int = 1
    layout: str | None = None
    within: str | None = None


@dataclass(frozen=True)
class UnitBarrier:
    """All units of a kernel wait for each other: what one wrote before, the others read after."""

    scope: str  # as the kernel is handed out: cores, blocks


@dataclass(frozen=True)
class Estimate:
    """What a kernel is predicted to cost, and why it is as it is; for people and for comparisons alone."""

    seconds: float = 0.0
    footprint: int = 0  # bytes at the Tile's level
    reason: str = ""
    busy: float = 0.0  # of the seconds, those that are left if nothing waits: others may run meanwhile; 0: not known
    corrected: float = 0.0  # the seconds, as records of other kernels correct them; 0: there are none
    measured: float = 0.0  # seconds that records have of it; 0: they have none


@dataclass(frozen=True)
class Tile:
    """Parts of axes, one after the other or handed out, with what each holds while its body runs."""

    level: str
    sizes: Sizes = ()  # of the parts, by axis; an axis that is not named is not cut
    over: str = "order"
    body: tuple[Tile | Leaf | UnitBarrier, ...] = ()
    holds: tuple[Hold, ...] = ()
    axes: tuple[TileAxis, ...] = ()  # that this Tile and those inside it cut
    name: str = ""  # of a kernel
    count: int = 1  # threads, where it is handed out to lanes
    warp: int = WARP  # of these, that run in lock-step and exchange values without a barrier
    scan: str | None = None  # first output of the Scan whose steps these are
    runs: str = "order"  # its children, or together
    # Of a stream in registers: row i of its warps sees places of the streamed axis up to i plus this, and no part
    # behind the last row's is walked; blocks with most to walk begin first.
    until: int | None = None
    estimate: Estimate = Estimate()

    @property
    def is_kernel(self) -> bool:
        return self.over in LAUNCHED

    @property
    def is_launch(self) -> bool:
        """Whether the kernels in it share a launch."""
        return self.runs == "together" and all(isinstance(n, Tile) and n.over == "blocks" for n in self.body)

    def walk(self) -> Iterator[Tile | Leaf]:
        """This Tile and all below, in the order they run."""
        yield self
        for node in self.body:
            if isinstance(node, Tile):
                yield from node.walk()
            elif isinstance(node, Leaf):
                yield node

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """How each nest runs, once a nest: of one that is carried, what is done in every part."""
        return tuple(n for n in self.walk() if isinstance(n, Leaf) and n.part in ("whole", "step", "copy"))

    @property
    def tiles(self) -> int:
        """Parts that are handed out."""
        extents = {a.name: a.extent for a in self.axes}
        count = 1
        for axis, size in self.sizes:
            count *= -(-max(1, extents[axis]) // size)
        return count

    @property
    def stream(self) -> Tile | None:
        """The Tile inside that walks a reduction in parts, states carried along."""
        return next((n for n in self.walk() if isinstance(n, Tile) and any(h.mode == "carry" for h in n.holds)), None)

    @property
    def held(self) -> frozenset[str]:
        """Tensors that live and die inside this Tile."""
        here = (n for n in self.walk() if isinstance(n, Tile))
        return frozenset(h.tensor for tile in here for h in tile.holds if h.fill is None and h.mode != "carry")

    @property
    def prefetched(self) -> tuple[str, ...]:
        return tuple(h.tensor for h in self.holds if h.fill == "prefetch")

    @property
    def cut(self) -> Sizes:
        """Sizes of the parts by the axes of the result they belong to."""
        last = self.leaves[-1].tensor
        by_name = {a.name: a for a in self.axes}
        found = [(b.axis, size) for name, size in self.sizes for b in by_name[name].binds if b.tensor == last]
        return tuple(found)

    def map_leaves(self, change: Callable[[Leaf], Leaf]) -> Tile:
        """The Tile with every Leaf below changed."""
        body = tuple(
            n.map_leaves(change) if isinstance(n, Tile) else change(n) if isinstance(n, Leaf) else n for n in self.body
        )
        return replace(self, body=body)

    def with_leaves(self, leaves: Mapping[str, Leaf]) -> Tile:
        """The Tile with nests run another way, each by the name of what it stores."""

        def change(leaf: Leaf) -> Leaf:
            chosen = leaves.get(leaf.tensor)
            return leaf if chosen is None else replace(chosen, part=leaf.part)

        return self.map_leaves(change)


@dataclass(frozen=True)
class Case:
    """The tree for a range of a symbolic extent, both ends included; what it holds is counted at the upper end."""

    symbol: str
    low: int
    high: int
    body: Tile


@dataclass(frozen=True)
class Plan:
    target: str
    schedule: str
    body: Tile  # empty where there are cases
    layouts: tuple[tuple[str, Layout], ...] = field(default_factory=tuple)
    cases: tuple[Case, ...] = ()

    def at(self, symbols: Mapping[str, int]) -> Plan:
        """The plan for these extents: that of the case they fall in."""
        if not self.cases:
            return self
        for case in self.cases:
            if case.symbol in symbols and case.low <= symbols[case.symbol] <= case.high:
                return replace(self, body=case.body, cases=())
        raise InternalError(f"plan: no case for {', '.join(f'{n} = {v}' for n, v in symbols.items()) or 'no extents'}")

    @property
    def kernels(self) -> tuple[Tile, ...]:
        return tuple(kernel for kernel, _ in self.launches())

    def launches(self) -> Iterator[tuple[Tile, Tile | None]]:
        """Every kernel in order, with the Tile of the steps it is part of."""
        for node, steps in self.calls():
            if node.is_kernel:
                yield node, steps
            else:
                yield from ((kernel, steps) for kernel in node.body if isinstance(kernel, Tile))

    def calls(self) -> Iterator[tuple[Tile, Tile | None]]:
        """The same, kernels that share a launch as the Tile around them."""

        def below(tile: Tile, steps: Tile | None) -> Iterator[tuple[Tile, Tile | None]]:
            for node in tile.body:
                if not isinstance(node, Tile):
                    continue
                if node.is_kernel or node.is_launch:
                    yield node, steps
                else:
                    yield from below(node, node if node.over == "steps" else steps)

        yield from below(self.body, None)

    def scan_of(self, kernel: Tile) -> str | None:
        """The Scan whose step a kernel is part of."""
        return next((steps.scan for other, steps in self.launches() if other is kernel and steps is not None), None)

    def issued_in(self, kernel: str) -> tuple[str, ...]:
        """What later steps hold and this kernel brings near while it computes."""
        return self._issued.get(kernel, ())

    @cached_property
    def _issued(self) -> Mapping[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for hold in (h for n in self.body.walk() if isinstance(n, Tile) for h in n.holds):
            if hold.issue is not None:
                found[hold.issue] = (*found.get(hold.issue, ()), hold.tensor)
        return found

    def with_kernels(self, kernels: Mapping[str, Tile]) -> Plan:
        """The plan with other kernels in the place of those of these names."""

        def changed(tile: Tile) -> Tile:
            body = tuple(
                (kernels.get(n.name, n) if n.is_kernel else changed(n)) if isinstance(n, Tile) else n for n in tile.body
            )
            return replace(tile, body=body)

        return replace(self, body=changed(self.body))

    def to_json(self) -> str:
        return json.dumps(_encoded(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        try:
            return _plan(json.loads(text))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InternalError(f"not a plan: {error}") from error


def cut_axes(tensor: str, extents: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[tuple[TileAxis, ...], Sizes]:
    """Axes for the Tiles of one result, and the sizes of their parts, from sizes by the result's own axes."""
    axes = tuple(TileAxis(f"t{name[1:]}", extents[name], (Bind(tensor, name),)) for name in sizes)
    return axes, tuple((f"t{name[1:]}", size) for name, size in sizes.items())


_FORMS = (Plan, Case, Tile, Leaf, LeafForm, UnitBarrier, Hold, TileAxis, Bind, Estimate, Layout, StorageAxis)
_KINDS = {Tile: "tile", Leaf: "leaf", UnitBarrier: "barrier", **{form: name for name, form in LEAF_FORMS.items()}}


def _encoded(value: Any) -> Any:
    """Dataclasses as dictionaries without the fields that have their usual value; nodes say what they are."""
    if isinstance(value, tuple):
        return [_encoded(v) for v in value]
    if not isinstance(value, _FORMS):
        return value
    shown = {}
    for part in fields(value):
        item = getattr(value, part.name)
        usual = part.default if part.default is not MISSING else None
        if item != usual or part.default is MISSING:
            shown[part.name] = _encoded(item)
    kind = _KINDS.get(type(value))
    return shown if kind is None else {kind: shown}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _of(kind: Callable[..., Any], value: Mapping[str, Any], **made: Any) -> Any:
    return kind(**{**{k: _tuples(v) for k, v in value.items()}, **made})


def _node(value: Mapping[str, Any]) -> Tile | Leaf | UnitBarrier:
    ((kind, inside),) = value.items()
    if kind == "leaf":
        return leaf_of(inside)
    if kind == "barrier":
        return UnitBarrier(**inside)
    if kind != "tile":
        raise ValueError(f"a plan is made of tiles and leaves, not '{kind}'")
    tile: Tile = _of(
        Tile, inside, body=tuple(_node(n) for n in inside.get("body", ())),
        holds=tuple(_of(Hold, h) for h in inside.get("holds", ())),
        axes=tuple(_of(TileAxis, a, binds=tuple(_of(Bind, b) for b in a["binds"])) for a in inside.get("axes", ())),
        estimate=_of(Estimate, inside.get("estimate", {})),
    )  # fmt: skip
    return tile


def leaf_values(leaf: Leaf) -> dict[str, Any]:
    """A Leaf as JSON has it."""
    found: dict[str, Any] = _encoded(leaf)["leaf"]
    return found


def leaf_of(value: Mapping[str, Any]) -> Leaf:
    own = {part.name for part in fields(Leaf)}
    options = {name: _tuples(item) for name, item in value.items() if name not in own}
    form = form_of_older(options) if "form" not in value else PLAIN
    if "form" in value:
        ((kind, given),) = value["form"].items()
        form = _of(LEAF_FORMS[kind], {**given, **options})
    made: Leaf = _of(Leaf, {name: item for name, item in value.items() if name in own}, form=form)
    return made


def _layout(value: Mapping[str, Any]) -> Layout:
    made: Layout = _of(Layout, value, order=tuple(_of(StorageAxis, part) for part in value["order"]))
    return made


def layouts_to_json(layouts: tuple[tuple[str, Layout], ...]) -> str:
    return json.dumps(_encoded(layouts))


def layouts_from_json(text: str) -> tuple[tuple[str, Layout], ...]:
    return _named_layouts(json.loads(text))


def _named_layouts(rows: Any) -> tuple[tuple[str, Layout], ...]:
    return tuple((name, _layout(layout)) for name, layout in rows)


def _tile(value: Mapping[str, Any]) -> Tile:
    body = _node(value)
    if not isinstance(body, Tile):
        raise ValueError("its body is a tile")
    return body


def _plan(value: Mapping[str, Any]) -> Plan:
    return Plan(value["target"], value["schedule"], _tile(value["body"]),
                _named_layouts(value.get("layouts", ())),
                tuple(_of(Case, case, body=_tile(case["body"])) for case in value.get("cases", ())))  # fmt: skip
