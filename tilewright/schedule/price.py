"""What the kernels of a Plan take as they stand, by the same cost that the search compares: a plan that was written or
edited by hand is told what the search would say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.backend import backend_for
from tilewright.backend.protocol import Choice
from tilewright.backend.seconds import price, whole_name
from tilewright.ir.forms.compute import Program, Scan, all_computes
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.schedule.inner_tiles import inner_of
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.idle import read_by_steps
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.rolling import find_overlaps
from tilewright.tile_graph.algebra.streams import stream_of
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile
from tilewright.tile_graph.traffic.held import plan_nests


def priced(program: Program, plan: Plan, target: Target) -> Plan:
    """The Plan with what each of its kernels is predicted to take. Kernels of forms that the search never compares
    (steps, several levels of Tiles, what runs together) keep what they say, and so do cases of an extent."""
    if plan.cases:
        return plan
    made = plan.with_kernels(_compared(program, plan, target))
    return replace(made, body=_launches_priced(made.body, target))


def wholly_priced(program: Program, plan: Plan, target: Target) -> Plan:
    """The same, kernels that the search never compares by the fold over their trees."""
    if plan.cases:
        return plan
    found = _compared(program, plan, target)
    if any(kernel.name not in found for kernel in plan.kernels):
        found = {**_folded(program, plan, target), **found}
    made = plan.with_kernels(found)
    return replace(made, body=_launches_priced(made.body, target))


def _folded(program: Program, plan: Plan, target: Target) -> dict[str, Tile]:
    """Every kernel with what one run of it takes by the fold: in a step of a Scan, of each step."""
    computes, terms = all_computes(program), price(program, plan, target).kernels
    found = {}
    for kernel, steps in plan.launches():
        scan = computes.get(steps.scan or "") if steps is not None else None
        times = extent_of(scan.axis.extent) if isinstance(scan, Scan) else 1
        seconds = sum(float(t.seconds) for name, t in terms.items() if whole_name(name) == kernel.name) / times
        found[kernel.name] = replace(kernel, estimate=replace(kernel.estimate, seconds=round(seconds, 9), busy=0.0))
    return found


def _compared(program: Program, plan: Plan, target: Target) -> dict[str, Tile]:
    """By name, kernels of forms that the search compares, with what it would say of them."""
    context = plan_context(program, plan, target)
    computes = all_computes(program)
    found: dict[str, Tile] = {}
    for kernel, steps in plan.launches():
        nests = plan_nests(kernel, computes)
        choice = kernel_choice(kernel, nests, context) if steps is None and is_comparable(kernel) else None
        if choice is not None:
            about = replace(kernel.estimate, seconds=round(choice.seconds, 9), busy=round(choice.busy, 9))
            found[kernel.name] = replace(kernel, estimate=about)
    return found


def _launches_priced(tile: Tile, target: Target) -> Tile:
    """Kernels that share a launch with what they take together."""
    body = tuple(_launches_priced(n, target) if isinstance(n, Tile) and not n.is_kernel else n for n in tile.body)
    if not tile.is_launch:
        return replace(tile, body=body)
    kernels = [n for n in tile.body if isinstance(n, Tile)]
    seconds = backend_for(target).launch_seconds(kernels, target) if all(k.estimate.seconds for k in kernels) else 0.0
    return replace(tile, estimate=replace(tile.estimate, seconds=round(seconds, 9)))


def plan_context(program: Program, plan: Plan, target: Target) -> NestContext:
    """What planning knew around the nests of a Plan."""
    by_name = {t.name: t for t in (*program.tensors(), *program.constants)}
    named: Mapping[Tensor, Layout] = {by_name[name]: layout for name, layout in plan.layouts if name in by_name}
    layouts = {**program.layouts, **named}
    return NestContext(target, lambda t: layouts.get(t) or Layout.natural(t.rank), program.constants,
                       frozenset(program.staged), Memo(), stepped=read_by_steps(program))  # fmt: skip


def is_comparable(kernel: Tile) -> bool:
    """Whether a kernel has a form that the search compares: tiles of one result handed out, all leaves inside them,
    in order, some of them tiled again, streamed, or under windows that move over rows."""
    inner = [n for n in kernel.walk() if isinstance(n, Tile) and n is not kernel]
    cutting = [t for t in inner if t.sizes and t.over == "order"]
    leaves = [n for n in kernel.walk() if isinstance(n, Leaf)]
    return (
        len(cutting) <= 1
        and all(t.over in ("order", "lanes", "warps") and t.runs == "order" for t in inner)
        and len({leaf.tensor for leaf in leaves}) == len(kernel.leaves)
    )


def kernel_choice(kernel: Tile, nests: Sequence[Nest], context: NestContext, with_inner: bool = True) -> Choice | None:
    """A kernel as the search would have chosen it, also without the tile inside its own; None where the cost knows no
    such tile."""
    backend, root = backend_for(context.target), nests[-1]
    leaves = [replace(leaf, composed=()) for leaf in kernel.leaves]  # without names, so that equal layers share costs
    stored = frozenset(t for n in nests if n.tensor.name not in kernel.held for t in n.stores)
    cut = dict(kernel.cut)
    sizes = {f"o{i}": cut.get(f"o{i}", max(1, extent_of(a.extent))) for i, a in enumerate(root.axes)}
    window = next((n for n in kernel.walk() if isinstance(n, Tile) and any(h.mode == "rolling" for h in n.holds)), None)
    if window is not None:
        overlaps = find_overlaps(nests)
        if not overlaps:
            return None
        ((_, step),) = window.sizes
        return backend.choose_window(nests, leaves, context, stored, overlaps, sizes, step)
    stream = stream_of(kernel, nests)
    blocks = () if kernel.stream is None else [size for _, size in kernel.stream.sizes]
    choice = backend.choose_tile(nests, leaves, context, stored, sizes, stream, blocks)
    inner = inner_of(kernel) if with_inner else None
    return choice if inner is None or choice is None else backend.tile_again(
        nests, leaves, context, stored, choice, inner
    )  # fmt: skip
