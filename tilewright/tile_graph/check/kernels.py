"""The grammar of a Plan: every name is of the Program, every level of the target, every axis of its nest, every size
possible, every read served; what is held fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.errors import InternalError
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, all_computes, all_tensors, reads
from tilewright.ir.meaning.instruct import WARP
from tilewright.target import Cluster, Target
from tilewright.tile_graph.algebra.occurrences import unique_names
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.check.leaves import check_axis, check_leaf, check_loops, check_size, matrix_form, reductions
from tilewright.tile_graph.check.memory import ClusterCheck, check_cases, check_outside, narrowed
from tilewright.tile_graph.check.units import (
    check_across,
    check_barrier,
    check_copied,
    check_resident,
    check_runs,
    check_stages,
    check_steps,
    fills_hold,
)
from tilewright.tile_graph.check.windows import check_windows, has_windows
from tilewright.tile_graph.meaning.outside import is_filled
from tilewright.tile_graph.plan.form import (
    ASYNC,
    COPIED,
    COPIES,
    HANDED_OUT,
    LAYOUTS,
    MODES,
    PARTS,
    Hold,
    Leaf,
    Plan,
    Tile,
    TileAxis,
)
from tilewright.tile_graph.plan.leaf_form import FragmentForm
from tilewright.tile_graph.traffic.held import held_bytes, inner_bytes, leaf_nest, plan_nests
from tilewright.tile_graph.traffic.residence import reuse_distances

_FILLS = (None, "read", "prefetch", *COPIES)


def check_plan(plan: Plan, program: Program, target: Target | Cluster | None = None, measured: bool = True) -> None:
    """Raises InternalError that names the kernel and what is wrong with it; levels only where the target is known.
    What kernels hold need not be `measured` again for a plan that was just made: its tiles were chosen to fit."""
    computes = all_computes(program)
    if plan.cases:
        _check_cases(plan, program, target, measured)
        return
    walker = _Walker(program, computes, target, measured)
    try:
        walker.tile(plan.body, (), {})
    except ValueError as error:
        raise InternalError(f"plan{walker.place}: {error}") from error
    if isinstance(target, Cluster):
        around = ClusterCheck(program, target)
        try:
            around.run(plan.body)
        except ValueError as error:
            place = f" of kernel '{around.kernel}'" if around.kernel else ""
            raise InternalError(f"plan{place}: {error}") from error
    for output in program.outputs:
        compute = computes.get(output.name)
        if isinstance(compute, Map | Reduce) and not walker.stored & {output.name, compute.outputs[0].name}:
            raise InternalError(f"plan: no kernel stores output '{output.name}'")


def _check_cases(plan: Plan, program: Program, target: Target | Cluster | None, measured: bool) -> None:
    """Each tree with the program as it is in its range."""
    try:
        symbol = check_cases(plan, program)
    except ValueError as error:
        raise InternalError(f"plan: {error}") from error
    for case in plan.cases:
        try:
            check_plan(replace(plan, body=case.body, cases=()), narrowed(program, symbol, case.low, case.high), target,
                       measured)  # fmt: skip
        except InternalError as error:
            raise InternalError(f"case {case.symbol} from {case.low} to {case.high}: {error}") from error


class _Walker:
    """One way through the tree, knowing the Tiles around each node."""

    def __init__(
        self, program: Program, computes: Mapping[str, Compute], target: Target | Cluster | None, measured: bool
    ) -> None:
        self.program = program
        self.computes = computes
        self.target = target.device if isinstance(target, Cluster) else target
        self.is_cluster = isinstance(target, Cluster)
        self.measured = measured
        self.levels = None if target is None else [level.name for level in target.levels]
        self.constants = {t.name for t in program.constants}
        self.given = self.constants | {t.name for t in program.inputs}
        self.given |= {t.name for c in program.computes if isinstance(c, Scan) for t in (*c.outputs, *c.carry)}
        self.outputs = {t.name for t in program.outputs}
        self.tensors = {t.name: t for t in all_tensors(program)}
        self.kernel: Tile | None = None
        self.stored: set[str] = set()
        self.launched: set[str] = set()  # kernels so far
        self.served: dict[int, set[str]] = {}  # by Tile
        self.cores: dict[str, str] = {}  # of the leaves so far, by what they store

    @property
    def place(self) -> str:
        return "" if self.kernel is None else f" of kernel '{self.kernel.name}'"

    def tile(self, tile: Tile, around: tuple[Tile, ...], axes: Mapping[str, TileAxis]) -> None:
        if tile.is_kernel:
            self.kernel = tile
        self._level(tile, around)
        if tile.over not in HANDED_OUT:
            raise ValueError(f"a tile is handed out to one of {', '.join(HANDED_OUT)}, not '{tile.over}'")
        if tile.is_kernel and any(t.is_kernel for t in around):
            raise ValueError("a kernel inside a kernel")
        if tile.is_kernel and not tile.leaves:
            raise ValueError("it has no leaves")
        known = dict(axes)
        self.cores.update({leaf.tensor: leaf.core for leaf in tile.leaves} if tile.axes else {})
        for axis in tile.axes:
            self._axis(axis, tile.over == "warps")
            known[axis.name] = axis
        self._sizes(tile, around, known)
        if not any(t.is_kernel for t in (*around, tile)) and self.target is not None and not self.is_cluster:
            check_outside(tile)
        self._holds(tile, around)
        inside = (*around, tile)
        check_runs(tile, around, self.target, self.computes)
        for node in tile.body:
            if isinstance(node, Tile):
                self.tile(node, inside, known)
            elif isinstance(node, Leaf):
                self._leaf(node, inside)
            else:
                check_barrier(node, inside)
        if around and not any(t.is_kernel for t in inside) and tile.over == "order":
            self._residence(tile)
        if tile.is_kernel:
            check_across(tile, self.computes)
            if has_windows(tile):
                apart = unique_names(tile)
                check_windows(apart, plan_nests(apart, self.computes))
            self._capacity(tile)
            self.launched.update([tile.name] if not around or not around[-1].is_launch else [])
            self.kernel = None

    def _capacity(self, kernel: Tile) -> None:
        if self.target is None or not self.measured:
            return
        room = self.target.level(kernel.level).capacity
        apart = unique_names(kernel)
        nests = plan_nests(apart, self.computes)
        held = held_bytes(apart, nests)
        if held > room:
            raise ValueError(f"it holds {held} bytes at {kernel.level}, which has {room}")
        near = inner_bytes(apart, nests)
        for level in self.target.nearer(self.target.level(kernel.level)):
            if near.get(level.name, 0) > level.capacity:
                raise ValueError(f"it holds {near[level.name]} bytes at {level.name}, which has {level.capacity}")
        check_resident(kernel, self.target, self.computes)

    def _residence(self, tile: Tile) -> None:
        """What kernels leave to each other in a cache must still be there when it is read."""
        if self.target is None or not self.measured or tile.level not in (x.name for x in self.target.levels):
            return
        level = self.target.level(tile.level)
        room = level.capacity * max(1, level.shared_by)
        distances = reuse_distances([n for n in tile.body if isinstance(n, Tile)], self.computes)
        for hold in tile.holds:
            if distances.get(hold.tensor, 0) > room:
                raise ValueError(f"'{hold.tensor}' cannot stay at {tile.level}: {distances[hold.tensor]} bytes pass "
                                 f"before it is read for the last time, and there are {room}")  # fmt: skip

    def _level(self, tile: Tile, around: Sequence[Tile]) -> None:
        if self.levels is None:
            return
        if tile.level not in self.levels:
            raise ValueError(f"the target has no level '{tile.level}'; it has {', '.join(self.levels)}")
        if around and self.levels.index(tile.level) > self.levels.index(around[-1].level):
            raise ValueError(f"a tile at {tile.level} inside one at {around[-1].level}: levels go inwards")

    def _axis(self, axis: TileAxis, is_part: bool) -> None:
        if axis.extent < 0:
            raise ValueError(f"axis {axis.name} has {axis.extent} elements")
        for bind in axis.binds:
            compute = self.computes.get(self.cores.get(bind.tensor, ""))
            if compute is None:
                raise ValueError(f"axis {axis.name} runs along '{bind.tensor}', which no leaf below stores")
            rank = len(compute.axes) if isinstance(compute, Map | Reduce) else 0
            count = reductions(compute)
            check_axis(bind.axis, bind.axis[:1], count if bind.axis[:1] == "r" else rank, f"axis {axis.name}")
            assert isinstance(compute, Map | Reduce)
            own = compute.axes if bind.axis[0] == "o" or isinstance(compute, Map) else compute.reduce_axes
            extent = extent_of(own[int(bind.axis[1:])].extent)
            if not is_part and axis.extent * bind.scale + bind.offset < extent:
                raise ValueError(f"axis {axis.name} of {axis.extent} ends before {bind.tensor}.{bind.axis} of {extent}")

    def _sizes(self, tile: Tile, around: Sequence[Tile], axes: Mapping[str, TileAxis]) -> None:
        for name, size in tile.sizes:
            if name not in axes:
                raise ValueError(f"it cuts axis '{name}', which no tile around it brings in")
            if tile.is_kernel and all(a.name != name for a in tile.axes):
                raise ValueError(f"a kernel cuts axes of its own, and '{name}' is of a tile around it")
            check_size(name, size)
            outer = next((dict(t.sizes)[name] for t in reversed(around) if name in dict(t.sizes)), None)
            if outer is not None and outer < axes[name].extent and outer % size:
                raise ValueError(f"parts of {size} along {name} do not fill parts of {outer}")
        if tile.over == "warps":
            self._warps(tile, around)
        if tile.over == "order" and around and not tile.sizes and not tile.holds and tile.runs == "order":
            raise ValueError("a tile that neither cuts nor holds anything")
        if (tile.over == "lanes") != (tile.count > 1):
            raise ValueError("threads are counted where a tile is handed out to lanes, and only there")
        if tile.over == "lanes" and self.target is not None and tile.warp != self.target.warp:
            raise ValueError(f"threads run in warps of {tile.warp}, the target's are of {self.target.warp}")
        if (tile.over == "steps") != (tile.scan is not None):
            raise ValueError("steps are those of a Scan, and a Scan has steps")
        if tile.scan is not None and not isinstance(self.computes.get(tile.scan), Scan):
            raise ValueError(f"'{tile.scan}' is no Scan")
        if tile.over == "steps":
            check_steps(tile, around, self.computes)

    def _holds(self, tile: Tile, around: Sequence[Tile]) -> None:
        in_steps = any(t.over == "steps" for t in around)
        for hold in tile.holds:
            if hold.mode not in MODES:
                raise ValueError(f"'{hold.tensor}' is held by '{hold.mode}'; it is one of {', '.join(MODES)}")
            if hold.fill not in _FILLS:
                raise ValueError(f"'{hold.tensor}' is brought by '{hold.fill}', which there is not")
            if (hold.mode == "store") != (hold.axis is None):
                raise ValueError(f"'{hold.tensor}' is carried along an axis, or stored along none")
            if hold.axis is not None and hold.axis not in dict(tile.sizes):
                raise ValueError(f"'{hold.tensor}' is carried along '{hold.axis}', which this tile does not walk")
            if any(isinstance(n, Tile) and n.over == "warps" for n in (*around, tile, *tile.body)):
                if hold.fill in COPIES or hold.stages != 1 or hold.layout is not None:
                    self._ring(tile, hold, around)
            else:
                self._stages(tile, hold, around)
            if hold.fill is None and hold.tensor not in self.computes:
                raise ValueError(f"it holds unknown tensor '{hold.tensor}'")
            if hold.fill == "prefetch" and hold.issue is None and not in_steps:
                raise ValueError("only the steps of a Scan prefetch what they read")
            if is_filled(hold):
                continue
            if (hold.issue is not None or hold.fill == "read") and hold.tensor not in self.constants:
                raise ValueError(f"it brings near or keeps '{hold.tensor}', which is no weight")
            if (hold.issue is not None or hold.fill == "read") and tile.over != "steps":
                raise ValueError("only the steps of a Scan keep weights near")
            if hold.issue is not None and hold.issue not in self.launched:
                raise ValueError(f"'{hold.tensor}' is brought near in '{hold.issue}', no kernel before the steps")

    def _stages(self, tile: Tile, hold: Hold, around: Sequence[Tile]) -> None:
        in_kernel = any(t.is_kernel for t in (*around, tile))
        check_stages(tile, hold, self.computes, in_kernel, any(t.over == "blocks" for t in (*around, tile)))
        if hold.fill == ASYNC:
            raise ValueError(f"it brings '{hold.tensor}' by {ASYNC}, which only operands of warps come by")
        if in_kernel and hold.fill == COPIED:
            check_copied(tile, hold)

    def _ring(self, tile: Tile, hold: Hold, around: Sequence[Tile]) -> None:
        if hold.fill not in COPIES:
            raise ValueError(f"'{hold.tensor}' has stages or a layout: only what is brought by {COPIED} has")
        if hold.stages < 1 or hold.layout not in LAYOUTS:
            raise ValueError(f"'{hold.tensor}' in {hold.stages} stages, {hold.layout}; a layout is one of {LAYOUTS}")
        if len({h.stages for h in tile.holds if h.fill in COPIES}) > 1:
            raise ValueError("the operands of one leaf walk through as many stages each")
        if hold.fill == ASYNC and self.target is not None and not self.target.copies_tiles:
            raise ValueError(f"it brings '{hold.tensor}' by {ASYNC}, which {self.target.name} does not have")
        if _in_registers((*around, tile)):
            read = {t.name for leaf in tile.leaves for name in (leaf.core, *leaf.composed)
                    for t in reads(self.computes[name])}  # fmt: skip
            if hold.tensor not in read:
                raise ValueError(f"it brings '{hold.tensor}', which no leaf of the stream reads")
            return
        inner = [n for n in tile.body if isinstance(n, Tile)]
        if len(inner) != len(tile.body) or len(inner) != 1 or inner[0].over != "warps" or len(tile.holds) != 2:
            raise ValueError(f"'{hold.tensor}' is brought by {COPIED}: a tile holds both operands of the warps in it")
        (leaf,) = inner[0].leaves
        read = {t.name for name in (leaf.core, *leaf.composed) for t in reads(self.computes[name])}
        if hold.tensor not in read:
            raise ValueError(f"it brings '{hold.tensor}', which leaf '{leaf.tensor}' does not read")

    def _warps(self, tile: Tile, around: Sequence[Tile]) -> None:
        """A tile over warps: which part of a product's rows and columns each of them takes."""
        lanes = [t.count for t in around if t.over == "lanes"]
        if tile.stream is not None:
            self._streaming_warps(tile, lanes)
            return
        if not lanes or not around[-1].holds or any(h.fill not in COPIES for h in around[-1].holds):
            raise ValueError("warps stand in a tile that brings their operands, among a block's threads")
        leaves = [n for n in tile.body if isinstance(n, Leaf)]
        options = leaves[0].form if len(leaves) == len(tile.body) == 1 else None
        cut = tuple(n for n, _ in tile.sizes)
        if not isinstance(options, FragmentForm) or len(tile.axes) != 2 or tuple(a.name for a in tile.axes) != cut:
            raise ValueError("a tile over warps cuts the rows and the columns of one leaf on matrices")
        leaf, form = leaves[0], matrix_form(leaves[0], options)
        step, split = options.step, options.split
        if split < 1 or step % (form.depth * split) or (split > 1 and leaf.lanes == 1):
            raise ValueError(f"leaf '{leaf.tensor}': {split} groups of warps do not share steps of {step}")
        for (name, size), axis, unit in zip(tile.sizes, tile.axes, (form.c.rows, 2 * form.c.columns), strict=True):
            if size % unit or axis.extent % size:
                raise ValueError(f"parts of {size} of {axis.extent} along {name} are not whole fragments of {unit}")
        warp = WARP if self.target is None else self.target.warp
        if tile.tiles * split * warp != lanes[-1]:
            raise ValueError(f"{tile.tiles * split} warps of {warp} are not {lanes[-1]} threads")

    def _streaming_warps(self, tile: Tile, lanes: Sequence[int]) -> None:
        """Warps that keep a stream in registers: each has some of the rows, and all columns."""
        forms = {matrix_form(x, x.form) for x in tile.leaves if isinstance(x.form, FragmentForm)}
        if not lanes or len(forms) != 1 or len(tile.axes) != 2 or len(tile.sizes) != 2:
            raise ValueError("warps that keep a stream share the rows of its products, of one instruction, in a block")
        (form,) = forms
        (_, rows), (_, columns) = tile.sizes
        if rows % form.c.rows or tile.axes[0].extent % rows or columns % 16 or columns != tile.axes[1].extent:
            raise ValueError(f"{rows} rows and {columns} columns of a warp are not whole fragments")
        until = None if tile.stream is None else tile.stream.until
        if until is not None and (until < 0 or form.warps == 1):
            raise ValueError(f"rows that see up to {until} behind: groups of warps leave out what 0 or more closes")
        if form.warps > 1 and (rows != form.c.rows or tile.tiles % form.warps):
            raise ValueError(f"{form.name} takes {form.c.rows} rows of each of {form.warps} warps, not {rows}")
        splits = {x.form.split for x in tile.leaves if isinstance(x.form, FragmentForm) and x.part == "step"}
        steps = [x.form.step for x in tile.leaves if isinstance(x.form, FragmentForm) and x.part == "step"]
        (split,) = splits if len(splits) == 1 else (0,)
        if split < 1 or (split > 1 and form.warps > 1) or any(step % (16 * split) for step in steps):
            raise ValueError(f"{split} warps with the same rows do not share blocks of {steps[0] if steps else 0}")
        warp = WARP if self.target is None else self.target.warp
        if tile.tiles * split * warp != lanes[-1]:
            raise ValueError(f"{tile.tiles * split} warps of {warp} are not {lanes[-1]} threads")

    def _leaf(self, leaf: Leaf, around: Sequence[Tile]) -> None:
        if self.kernel is None:
            raise ValueError(f"leaf '{leaf.tensor}' is part of no kernel")
        if leaf.part not in PARTS:
            raise ValueError(f"leaf '{leaf.tensor}' is a '{leaf.part}'; it is one of {', '.join(PARTS)}")
        streams = _in_registers(around)
        # but for the tiles of its operands and warps
        walked = around[-1] if streams or around[-1].over != "warps" else around[-3]
        if len(around) > 1 and around[-2].runs == "together":
            walked = around[-2]
        carried = any(h.tensor == leaf.tensor and h.mode == "carry" for h in walked.holds)
        runs = isinstance(leaf.form, FragmentForm) and leaf.part in ("whole", "step")
        if not streams and runs != (around[-1].over == "warps"):
            raise ValueError(f"leaf '{leaf.tensor}' is shared out to warps where it runs on matrices, and only there")
        if (leaf.part == "step") != carried:
            raise ValueError(f"leaf '{leaf.tensor}' is a step where a tile carries it along, and only there")
        if not any(t.over == "steps" for t in around) and (leaf.alternate or leaf.idle is not None):
            raise ValueError("only the steps of a Scan walk to and fro and rest")
        if leaf.part == "copy":
            self._copy(leaf, around)
            return
        check_leaf(leaf, self.computes)
        held = [self._served(t) for t in around]
        if not any(leaf.tensor in names for names in (*held, self.outputs)) and not self._escapes(leaf):
            raise ValueError(f"nothing holds '{leaf.tensor}'")
        kernel = next(i for i, t in enumerate(around) if t.is_kernel)
        inner = {h.tensor for t in around[kernel:] for h in t.holds}
        if leaf.tensor not in inner:
            self.stored.add(leaf.tensor)
        own = {leaf.tensor, leaf.core, *leaf.epilogue, *leaf.composed}
        read = {"start": (), "finish": leaf.epilogue}.get(leaf.part, (leaf.core, *leaf.epilogue, *leaf.composed))
        there = (*held, self.given, self.outputs, own)
        missing = [t for name in read for t in reads(self.computes[name])
                   if not any(t.name in names for names in there) and not self._escapes_name(t.name)]  # fmt: skip
        if missing and leaf.composed:  # of what composed maps join, the leaf may read a part alone
            really = leaf_nest(leaf, self.computes).reads()
            missing = [t for t in missing if t in really]
        if missing:
            raise ValueError(f"leaf '{leaf.tensor}' reads '{missing[0].name}', and nothing holds it")

    def _served(self, tile: Tile) -> set[str]:
        """What leaves inside a tile find in its Holds; of the outermost there are as many as kernels."""
        if id(tile) not in self.served:
            self.served[id(tile)] = {o.name for h in tile.holds if h.mode != "carry" and h.fill is None
                                     for o in self.computes[h.tensor].outputs}  # fmt: skip
        return self.served[id(tile)]

    def _copy(self, leaf: Leaf, around: Sequence[Tile]) -> None:
        if not fills_hold(leaf, around):
            raise ValueError(f"it copies '{leaf.tensor}', and no tile around holds it by {COPIED}")
        tensor = self.tensors.get(leaf.tensor)
        if tensor is None:
            raise ValueError(f"it copies unknown tensor '{leaf.tensor}'")
        check_loops(leaf, tensor.rank, 0)

    def _escapes(self, leaf: Leaf) -> bool:
        return any(self._escapes_name(t.name) for t in self.computes[leaf.tensor].outputs)

    def _escapes_name(self, name: str) -> bool:
        """What a Scan takes along or stacks up has a place that the Scan gives it."""
        scans = (c for c in self.program.computes if isinstance(c, Scan))
        return any(name in {t.name for t in (*s.following, *(b for b, _ in s.stacked))} for s in scans)


def _in_registers(around: Sequence[Tile]) -> bool:
    """Whether warps keep a stream in registers."""
    return any(t.over == "warps" and t.stream is not None for t in around)
