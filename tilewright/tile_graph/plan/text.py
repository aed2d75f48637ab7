"""A Plan as text for people: levels as nested blocks, what each holds, how each leaf runs."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.ir.forms.tensor import Layout
from tilewright.ir.meaning.instruct import WARP
from tilewright.tile_graph.plan.form import Hold, Leaf, Plan, Tile

_OVER = {"order": "in order", "cores": "over cores", "blocks": "over blocks", "lanes": "over {} threads",
         "warps": "over warps"}  # fmt: skip


def plan_text(plan: Plan) -> str:
    count = f"{len(plan.kernels)} kernel{'' if len(plan.kernels) == 1 else 's'}"
    lines = [f"plan for {plan.target}, schedule {plan.schedule}, {count}"]
    for name, layout in plan.layouts:
        lines.append(f"  layout {name}: {layout_text(layout)}")
    if not plan.cases:
        lines.extend(_tile(plan.body, ""))
    for case in plan.cases:
        lines.append(f"case {case.symbol} from {case.low} to {case.high}")
        lines.extend(_tile(case.body, "  "))
    return "\n".join(lines) + "\n"


def layout_text(layout: Layout) -> str:
    parts = []
    for part in layout.order:
        size = "" if part.size is None else f"%{part.size}"
        parts.append(f"{part.axis}{'' if part.step == 1 else f'/{part.step}'}{size}")
    return "(" + ", ".join(parts) + ")" + (f" gap {layout.gap}" if layout.gap else "")


def _tile(tile: Tile, indent: str) -> Iterator[str]:
    extents = {a.name: a.extent for a in tile.axes}
    sizes = ", ".join(f"{a} by {n}" + (f" of {extents[a]}" if a in extents else "") for a, n in tile.sizes)
    over = f"every step of {tile.scan}" if tile.over == "steps" else _OVER[tile.over].format(tile.count)
    over += f" in warps of {tile.warp}" if tile.warp != WARP else ""
    name = f"kernel {tile.name}: " if tile.is_kernel else ""
    cut = f" tile [{sizes}] x {tile.tiles}" if sizes and extents else f" tile [{sizes}]" if sizes else ""
    together = ", together" if tile.runs == "together" else ""
    until = "" if tile.until is None else f", up to {tile.until} behind each row"
    yield f"{indent}{name}{tile.level}{cut} {over}{together}{until}"
    inside = indent + "  "
    for axis in tile.axes:
        along = ", ".join(
            f"{b.tensor}.{b.axis}{f' * {b.scale}' if b.scale != 1 else ''}{f' + {b.offset}' if b.offset else ''}"
            for b in axis.binds
        )
        yield f"{inside}axis {axis.name}: {along}"
    if tile.holds:
        yield f"{inside}holds {', '.join(_hold(h) for h in tile.holds)}"
    for node in tile.body:
        if isinstance(node, Tile):
            yield from _tile(node, inside)
        elif isinstance(node, Leaf):
            yield inside + _leaf(node)
        else:
            yield f"{inside}barrier of all {node.scope}"
    about = tile.estimate
    if about.seconds:
        known = (("corrected", about.corrected), ("measured", about.measured))
        more = "".join(f", {word} {1e6 * seconds:.1f} us" for word, seconds in known if seconds)
        yield f"{inside}predicted {1e6 * about.seconds:.1f} us{more}, footprint {about.footprint} B"
    if about.reason:
        yield f"{inside}because {about.reason}"


def _hold(hold: Hold) -> str:
    words = {"store": hold.tensor, "carry": f"{hold.tensor} carried along {hold.axis}",
             "rolling": f"{hold.tensor} rolling along {hold.axis}"}  # fmt: skip
    filled = f" by {hold.fill}" if hold.fill else ""
    filled += f" in {hold.stages} stages" if hold.stages > 1 else ""
    filled += f" {hold.layout}" if hold.layout else ""
    filled += f" within {hold.within}" if hold.within else ""
    return words[hold.mode] + filled + (f" in {hold.issue}" if hold.issue else "")


def _leaf(leaf: Leaf) -> str:
    if leaf.part in ("start", "finish"):
        return f"{leaf.part} {leaf.tensor}"
    register = " ".join(f"{a}:{n}" for a, n in leaf.register)
    if leaf.part == "copy":
        return (f"copy {leaf.tensor}: vector {leaf.vector} x {leaf.lanes}; register [{register}];"
                f" order {' '.join(leaf.order)}")  # fmt: skip
    return (f"{'leaf' if leaf.part == 'whole' else leaf.part} {leaf.tensor}: core {leaf.core}"
            f"{''.join(f' + {name}' for name in leaf.epilogue)}"
            f"{''.join(f' with {name}' for name in leaf.composed)}; vector {leaf.vector} x {leaf.lanes}"
            f"; register [{register}]; order {' '.join(leaf.order)}{' to and fro' if leaf.alternate else ''}"
            f"{f' but at step {leaf.idle}' if leaf.idle is not None else ''}"
            f"{leaf.form.text()}")  # fmt: skip
