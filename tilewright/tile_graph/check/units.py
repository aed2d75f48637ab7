"""The grammar of what units do beside each other: barriers, children that run together, copies and Holds in stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.forms.compute import Compute, Scan, reads
from tilewright.ir.meaning.instruct import WARP
from tilewright.target import Target
from tilewright.tile_graph.algebra.occurrences import is_copied, unique_names
from tilewright.tile_graph.algebra.own_state import own_axes
from tilewright.tile_graph.plan.form import COPIED, IN_REGISTERS, PADDED, RUNS, Hold, Leaf, Tile, UnitBarrier
from tilewright.tile_graph.plan.leaf_form import ThreadForm
from tilewright.tile_graph.traffic.held import held_bytes, plan_nests

Around = Sequence[Tile]


def stored_below(node: Tile | Leaf | UnitBarrier) -> set[str]:
    """What leaves compute, or copies bring."""
    if isinstance(node, Tile):
        return {n.tensor for n in node.walk() if isinstance(n, Leaf)}
    return {node.tensor} if isinstance(node, Leaf) else set()


def read_below(node: Tile | Leaf | UnitBarrier, computes: Mapping[str, Compute]) -> set[str]:
    """What leaves read; of what they store themselves, what others beside them leave there too."""
    if isinstance(node, Tile):
        return {name for inner in node.body for name in read_below(inner, computes)}
    if isinstance(node, UnitBarrier):
        return set()
    if node.part == "copy":
        return {node.tensor}
    own = {node.core, *node.epilogue, *node.composed}
    return {t.name for name in own if name in computes for t in reads(computes[name])} - own


# --- barriers


def check_barrier(barrier: UnitBarrier, around: Around) -> None:
    kernels = [i for i, t in enumerate(around) if t.is_kernel]
    if not kernels:
        raise ValueError("a barrier is part of no kernel")
    kernel = around[kernels[0]]
    if barrier.scope != kernel.over:
        raise ValueError(f"a barrier of all {barrier.scope} in a kernel over {kernel.over}")
    for tile in around[kernels[0] + 1 :]:
        if tile.over == "lanes" and tile is not around[kernels[0] + 1]:
            raise ValueError(f"some of the {kernel.over} wait at a barrier: it is inside children that run together")
        if tile.over == "warps":
            raise ValueError("a barrier inside a tile over warps")
        cut = [name for name, _ in tile.sizes if name in dict(kernel.sizes)]
        if tile.over == "order" and cut:
            raise ValueError(f"a barrier inside parts along {cut[0]}, of which {kernel.over} have different numbers")


def check_resident(kernel: Tile, target: Target, computes: Mapping[str, Compute]) -> None:
    """Blocks that wait for each other all run at a time: no more than fit."""
    if kernel.over != "blocks" or not any(_has_barrier(n) for n in kernel.walk()):
        return
    threads = max((n.count for n in kernel.walk() if isinstance(n, Tile)), default=1)
    apart = unique_names(kernel)
    room = target.level(kernel.level).capacity // max(1, held_bytes(apart, plan_nests(apart, computes)))
    resident = target.units * max(1, min(target.max_threads // threads, room))
    if kernel.tiles > resident:
        raise ValueError(f"{kernel.tiles} blocks wait for each other, and {resident} are there at a time")


def _has_barrier(node: Tile | Leaf) -> bool:
    return isinstance(node, Tile) and any(isinstance(n, UnitBarrier) for n in node.body)


def check_steps(tile: Tile, around: Around, computes: Mapping[str, Compute]) -> None:
    """Steps inside a kernel: units meet after each where the next one reads what others leave in this one."""
    kernel = next((t for t in around if t.is_kernel), None)
    if kernel is None:
        return
    if not (tile.body and isinstance(tile.body[-1], UnitBarrier)) and not _keeps_to_itself(kernel, tile, computes):
        raise ValueError(f"the steps of '{tile.scan}' end without a barrier, and the next reads what others leave")
    if any(t.over == "steps" for t in around) or [t.over for t in around if t.over == "order" and t.sizes]:
        raise ValueError(f"a kernel walks the steps of '{tile.scan}' as a whole")


def _keeps_to_itself(kernel: Tile, steps: Tile, computes: Mapping[str, Compute]) -> bool:
    """Whether the tiles of a kernel read no more of the state than they left themselves."""
    scan, nests = computes[steps.scan or ""], plan_nests(unique_names(kernel), computes)
    if kernel.tiles == 1:
        return True
    if not isinstance(scan, Scan):
        return False
    cut = {b.axis for a in kernel.axes if a.name in dict(kernel.sizes) for b in a.binds
           if b.tensor == nests[-1].tensor.name}  # fmt: skip
    return cut <= own_axes(nests, scan)


def check_across(kernel: Tile, computes: Mapping[str, Compute]) -> None:
    """What is read beyond a barrier is held around the kernel: what it holds itself is each unit's own."""
    number = 0
    written: dict[str, int] = {}

    def below(tile: Tile, held: frozenset[str]) -> None:
        nonlocal number
        held |= {h.tensor for h in tile.holds}
        for node in tile.body:
            if isinstance(node, Tile):
                below(node, held)
            elif isinstance(node, UnitBarrier):
                number += 1
            else:
                for name in sorted(read_below(node, computes) & held):
                    if written.get(name, number) != number:
                        what = f"leaf '{node.tensor}' reads '{name}' across a barrier"
                        raise ValueError(f"{what}: hold it around the kernel")
                written[node.tensor] = number

    below(kernel, frozenset())


# --- children together


def check_runs(tile: Tile, around: Around, target: Target | None, computes: Mapping[str, Compute]) -> None:
    if tile.runs not in RUNS:
        raise ValueError(f"children run in one of {', '.join(RUNS)}, not '{tile.runs}'")
    if tile.runs != "together":
        return
    children = [n for n in tile.body if isinstance(n, Tile)]
    if len(children) < 2 or len(children) != len(tile.body):
        raise ValueError("what runs together are several tiles")
    staged = {h.tensor for h in tile.holds if h.stages > 1}
    inside = any(t.is_kernel for t in (*around, tile))
    if inside:
        _check_shares(tile, children, around, target, computes)
    elif any(not any(isinstance(n, Tile) and n.is_kernel for n in child.walk()) for child in children):
        raise ValueError("what runs together outside of kernels are kernels")
    if tile.is_launch:
        _check_launch(tile, children, around, computes)
        return
    for number, child in enumerate(children):
        beside = {name for n, other in enumerate(children) if n != number for name in stored_below(other)}
        shared = sorted((beside & read_below(child, computes)) - staged)
        if shared:
            raise ValueError(f"children run together, and one reads '{shared[0]}' of another: hold it in stages")


def _check_launch(tile: Tile, kernels: Sequence[Tile], around: Around, computes: Mapping[str, Compute]) -> None:
    """Kernels of one launch: none waits for another, and all blocks have as many threads."""
    if tile.over != "order" or tile.sizes or tile.holds or any(t.over == "steps" for t in around):
        raise ValueError("kernels that share a launch stand in a tile that does nothing else")
    threads = {k.name: next((n.count for n in k.body if isinstance(n, Tile)), 1) for k in kernels}
    (first, count), *others = threads.items()
    for name, found in others:
        if found != count:
            raise ValueError(f"kernels that share a launch have as many threads a block: '{first}' has {count}, "
                             f"'{name}' {found}")  # fmt: skip
    stored = {k.name: stored_below(k) - k.held for k in kernels}
    for kernel in kernels:
        if any(_has_barrier(n) for n in kernel.walk()):
            raise ValueError(f"blocks of '{kernel.name}' wait for each other: it has a launch of its own")
        for other in kernels:
            met = sorted(stored[other.name] & (stored[kernel.name] | read_below(kernel, computes) - kernel.held))
            if other is not kernel and met:
                raise ValueError(f"'{kernel.name}' reads or writes '{met[0]}', which '{other.name}' of the same launch "
                                 "stores: put one after the other")  # fmt: skip


def _check_shares(
    tile: Tile, children: Sequence[Tile], around: Around, target: Target | None, computes: Mapping[str, Compute]
) -> None:
    lanes = [t.count for t in around if t.over == "lanes"]
    if not lanes or tile.over != "order" or not tile.sizes or not any(h.stages > 1 for h in tile.holds):
        raise ValueError("children run together on a block's threads, in parts of a walk, by way of a Hold in stages")
    warp = WARP if target is None else target.warp
    if any(c.over != "lanes" or c.count % warp or c.holds or c.sizes for c in children):
        raise ValueError(f"each child that runs together is handed out to whole warps of {warp} threads")
    if sum(c.count for c in children) > lanes[-1]:
        raise ValueError(f"children take {sum(c.count for c in children)} threads together of {lanes[-1]}")
    for child in children:
        leaves = [n for n in child.body if isinstance(n, Leaf)]
        if len(leaves) != len(child.body) or any(leaf.options(ThreadForm).step for leaf in leaves):
            raise ValueError("a child that runs together has leaves that need no barrier of the block")
        for leaf in leaves:
            before = {n.tensor for n in leaves if n is not leaf}
            met = sorted(read_below(leaf, computes) & before)
            if met:
                raise ValueError(f"leaf '{leaf.tensor}' reads '{met[0]}' of the same child, with no barrier between")


# --- copies and stages inside kernels


def leaves_of(tile: Tile, tensor: str) -> list[Leaf]:
    """The leaves that compute or copy what a Tile holds, those under a nearer Hold of it left out."""
    found: list[Leaf] = []
    for node in tile.body:
        if isinstance(node, Tile) and not any(h.tensor == tensor for h in node.holds):
            found += leaves_of(node, tensor)
        elif isinstance(node, Leaf) and node.tensor == tensor:
            found.append(node)
    return found


def _is_shared_sum(tile: Tile, hold: Hold) -> bool:
    found = [leaf for leaf in tile.leaves if leaf.tensor == hold.tensor]
    return bool(found) and all(leaf.options(ThreadForm).split > 1 for leaf in found)


def check_stages(
    tile: Tile, hold: Hold, computes: Mapping[str, Compute], in_kernel: bool, on_device: bool = False
) -> None:
    """A Hold filled some parts ahead: by one leaf, which reads nothing else of this Tile."""
    if hold.stages < 1:
        raise ValueError(f"'{hold.tensor}' in {hold.stages} stages")
    if hold.layout not in (None, PADDED, IN_REGISTERS):
        raise ValueError(f"'{hold.tensor}' lies {hold.layout}: only operands of warps do")
    if hold.layout is not None and (not on_device or hold.mode == "rolling" or hold.fill is not None):
        raise ValueError(f"'{hold.tensor}' lies {hold.layout}: only what a block's leaves store for each other does")
    is_kept = hold.mode == "store" and tile.over == "blocks" and _is_shared_sum(tile, hold)
    if hold.layout == IN_REGISTERS and not is_kept:
        raise ValueError(f"'{hold.tensor}' lies {IN_REGISTERS}: only a sum that threads of a block share does")
    if hold.within is not None and (on_device or not in_kernel):
        raise ValueError(f"'{hold.tensor}' lies within '{hold.within}': only what cores compute for themselves does")
    if hold.within is not None and hold.within not in {n.tensor for n in tile.body if isinstance(n, Leaf)}:
        raise ValueError(f"'{hold.tensor}' lies within '{hold.within}', which no leaf beside it stores")
    if hold.stages == 1:
        return
    if hold.mode != "store" or tile.over != "order" or len(tile.sizes) != 1:
        raise ValueError(f"'{hold.tensor}' in stages: a tile walks one axis, and holds it part by part")
    if len({h.stages for h in tile.holds if h.stages > 1}) > 1:
        raise ValueError("what one tile holds in stages has as many of them each")
    if not in_kernel and hold.fill == COPIED:
        return  # nothing runs but the copy
    fills = leaves_of(tile, hold.tensor)
    if len(fills) != 1:
        raise ValueError(f"'{hold.tensor}' in stages is filled by one leaf, not {len(fills)}")
    met = sorted((read_below(fills[0], computes) & {h.tensor for h in tile.holds}) - {hold.tensor})
    if met:
        raise ValueError(f"'{hold.tensor}' is filled ahead and reads '{met[0]}', which is not there yet")


def check_copied(tile: Tile, hold: Hold) -> None:
    """A copy inside a kernel has a leaf that says how it runs."""
    copies = leaves_of(tile, hold.tensor)
    if not any(n.part == "copy" for n in copies):
        raise ValueError(f"it holds '{hold.tensor}' by {COPIED}, and no leaf copies it")
    if any(n.part != "copy" for n in copies):
        raise ValueError(f"it holds '{hold.tensor}' by {COPIED}, and a leaf computes it there")


def fills_hold(leaf: Leaf, around: Around) -> bool:
    """Whether a copy has a Hold to fill."""
    return any(h.tensor == leaf.tensor and is_copied(t, h) for t in around for h in t.holds)
