"""What became of a model, and why: facts gathered from a compilation's forms as one JSON object, and as text.

Kernels are listed once each, with the calls that share them: twelve equal layers are one row.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tilewright.compiler import Artifact
from tilewright.ir.compute import Compute, Program, Reduce, Scan
from tilewright.ir.loops import LoopProgram
from tilewright.ir.tensor import Tensor, elements
from tilewright.lower.memory import arena
from tilewright.schedule.traffic import KernelTraffic, traffic_of
from tilewright.target import Target
from tilewright.tile_graph.held import plan_nests
from tilewright.tile_graph.nest import is_view
from tilewright.tile_graph.plan import Plan, Tile

WIDTH = 100
_LABEL = 10
_COLUMNS = ("kernel", "computes", "calls", "nests", "tile", "footprint", "streamed", "each", "all", "traffic")


def explain_json(artifact: Artifact) -> dict[str, Any]:
    """The facts; a stage that was not reached leaves its part empty."""
    target = artifact.target
    facts: dict[str, Any] = {
        "model": artifact.graph.name,
        "target": {
            "name": target.name, "architecture": target.architecture, "units": target.units,
            "vector_bytes": target.vector_bytes, "tile_level": target.tile_level.name, "main_level": target.main.name,
            "levels": [{"name": x.name, "bytes": x.capacity} for x in target.levels],
        },
        "schedule": artifact.plan.schedule if artifact.plan else None,
        "operators": len(artifact.graph.nodes),
        "computes": 0, "kernels_planned": 0, "kernels_distinct": 0, "calls": 0,
        "compile_seconds": {
            "total": round(sum(artifact.stage_seconds.values()), 4),
            "stages": {name: round(s, 4) for name, s in artifact.stage_seconds.items()},
        },
        "totals": {}, "kernels": [], "decided": [],
    }  # fmt: skip
    if artifact.program is None or artifact.plan is None:
        return facts
    model = _Model(artifact.program, artifact.plan)
    rows = _rows(model, artifact.loops)
    facts["computes"] = sum(1 for _ in _computes(artifact.program))
    facts["kernels_planned"] = len(artifact.plan.kernels)
    facts["kernels_distinct"] = len(rows)
    facts["calls"] = sum(row.calls for row in rows)
    moved = traffic_of(artifact.program, artifact.plan, target)
    near = target.tile_level.name
    facts["kernels"] = [_kernel_facts(model, row, near) for row in rows]
    for kernel, row in zip(facts["kernels"], rows, strict=True):
        kernel["levels"] = _levels([moved[p.name] for p in row.plans], target)
    facts["totals"] = {**_totals(model, artifact), "levels": _levels(list(moved.values()), target)}
    facts["decided"] = list(artifact.program.remarks)
    return facts


def _levels(kernels: Sequence[KernelTraffic], target: Target) -> list[dict[str, Any]]:
    """Bytes read from and written to every level but the registers in all calls, and the most that stays there."""
    return [
        {"level": level.name, "read_bytes": round(sum(k.levels[place].read for k in kernels)),
         "written_bytes": round(sum(k.levels[place].written for k in kernels)),
         "footprint_bytes": round(max((k.levels[place].footprint for k in kernels), default=0.0))}
        for place, level in enumerate(target.levels) if place
    ]  # fmt: skip


class _Model:
    """A Program and its Plan with the lookups that the facts need."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program = program
        self.plan = plan
        self.by_name = {t.name: c for c in _computes(program) for t in c.outputs}
        self.tensors = {t.name: t for c in _computes(program) for t in c.outputs}
        self.steps = {t.name: _steps(c) for c in program.computes if isinstance(c, Scan) for t in c.outputs[:1]}
        self.scans = {k.name: around.scan for k, around in plan.launches() if around is not None and around.scan}
        self.kept = frozenset(t.name for t in program.outputs)
        self.stored = frozenset(
            t.name
            for kernel in plan.kernels
            for made in plan_nests(kernel, self.by_name)
            if made.tensor.name not in kernel.held
            for t in made.stores
        )

    def repeats(self, kernel: Tile) -> int:
        return self.steps.get(self.scans.get(kernel.name, ""), 1)

    def parts(self, kernel: Tile) -> list[Compute]:
        """The computes inside a kernel, in the program's order."""
        names = {n for leaf in kernel.leaves for n in (leaf.core, *leaf.epilogue, *leaf.composed)}
        inside = [c for c in _computes(self.program) if any(t.name in names for t in c.outputs)]
        return list(dict.fromkeys(inside))

    def intermediates(self) -> Iterator[tuple[Tensor, int]]:
        """Every tensor between the model's inputs and outputs, and how often it is computed."""
        for compute in self.program.computes:
            steps = _steps(compute) if isinstance(compute, Scan) else 1
            for inner in compute.body if isinstance(compute, Scan) else (compute,):
                yield from ((t, steps) for t in inner.outputs if t.name not in self.kept)


@dataclass(frozen=True)
class _Row:
    """A distinct kernel: its name, the plans that share it, and how often it is called."""

    name: str
    plans: tuple[Tile, ...]
    calls: int


def _rows(model: _Model, loops: LoopProgram | None) -> list[_Row]:
    names = _code_names(model, loops)
    grouped: dict[str, list[Tile]] = {}
    for kernel, name in zip(model.plan.kernels, names, strict=True):
        grouped.setdefault(name, []).append(kernel)
    return [_Row(n, tuple(plans), sum(model.repeats(p) for p in plans)) for n, plans in grouped.items()]


def _code_names(model: _Model, loops: LoopProgram | None) -> list[str]:
    """The kernel of the Loops that each planned kernel became. Loops edited by hand may not follow the Plan."""
    kernels = model.plan.kernels
    own = [k.name for k in kernels]
    if loops is None or len(loops.calls) != sum(model.repeats(k) for k in kernels):
        return own
    names: list[str] = []
    call = 0
    position = 0
    while position < len(kernels):
        scan = model.scans.get(kernels[position].name)
        together = 1 if scan is None else sum(1 for k in kernels[position:] if model.scans.get(k.name) == scan)
        names.extend(loops.calls[call + i].kernel for i in range(together))
        call += sum(model.repeats(k) for k in kernels[position : position + together])
        position += together
    return names


def _kernel_facts(model: _Model, row: _Row, level: str) -> dict[str, Any]:
    plan = row.plans[0]
    nests = plan_nests(plan, model.by_name)
    stream = plan.stream
    lanes = next((n for n in plan.walk() if isinstance(n, Tile) and n.over == "lanes"), None)
    return {
        "name": row.name,
        "root": plan.leaves[-1].tensor,
        "nodes": _origins(model.parts(plan)),
        "summary": _summary(model.parts(plan)),
        "calls": row.calls,
        "instances": [
            {"plan": p.name, "root": p.leaves[-1].tensor, "nodes": _origins(model.parts(p)),
             "steps": model.repeats(p), "reason": p.estimate.reason}
            for p in row.plans
        ],
        "scan": model.scans.get(plan.name),
        "tile": dict(plan.cut),
        "tiles": plan.tiles,
        "root_shape": [int(e) for e in nests[-1].tensor.shape],  # type: ignore[arg-type]
        "block_threads": lanes.count if lanes is not None else 1,
        "footprint_bytes": plan.estimate.footprint,
        "footprint_level": level,
        "stream": None if stream is None else
        {"tensors": [b.tensor for b in stream.axes[0].binds], "extent": stream.axes[0].extent,
         "block": stream.sizes[0][1]},
        "predicted_us": round(1e6 * plan.estimate.seconds, 3),
        "predicted_us_all_calls": round(sum(1e6 * p.estimate.seconds * model.repeats(p) for p in row.plans), 3),
        "traffic_bytes": sum(n for _, n in plan.estimate.traffic),
        "traffic_bytes_all_calls": sum(n * model.repeats(p) for p in row.plans for _, n in p.estimate.traffic),
        "nests": [
            {"tensor": n.tensor, "shape": [int(e) for e in made.tensor.shape],  # type: ignore[arg-type]
             "nodes": _origins([model.by_name[name] for name in (n.core, *n.epilogue)]),
             "core": n.core, "epilogue": list(n.epilogue), "level": _level_of(plan, n.tensor, model),
             "part": n.part, "vector": n.vector, "lanes": n.lanes, "register": dict(n.register)}
            for n, made in zip(plan.leaves, nests, strict=True)
        ],
        "edges": [
            {"tensor": name, "level": where, "mode": mode, "bytes": _bytes(model.tensors[name]),
             "nodes": _origins([model.by_name[name]])}
            for name, where, mode in _edges(plan)
        ],
        "reason": plan.estimate.reason,
    }  # fmt: skip


def _level_of(kernel: Tile, tensor: str, model: _Model) -> str:
    """Where a result is: the nearest Tile that holds it, or main memory."""
    tiles = [n for n in kernel.walk() if isinstance(n, Tile)]
    around = [n for n in model.plan.body.walk() if isinstance(n, Tile) and kernel in n.body]
    found = (t.level for t in (*reversed(tiles), *around)
             if any(h.tensor == tensor and h.mode == "store" for h in t.holds))  # fmt: skip
    return next(found, model.plan.body.level)


def _edges(kernel: Tile) -> Iterator[tuple[str, str, str]]:
    """Intermediates of a kernel: where each is, and whether it is stored, walked in blocks or computed again."""
    for tile in (n for n in kernel.walk() if isinstance(n, Tile)):
        walked = tile is not kernel
        for hold in tile.holds:
            if hold.mode == "store" and hold.fill is None:
                yield hold.tensor, tile.level, "stream" if walked else "store"
    for name in dict.fromkeys(n for leaf in kernel.leaves for n in leaf.composed):
        yield name, "registers", "recompute"


def _totals(model: _Model, artifact: Artifact) -> dict[str, Any]:
    all_bytes = sum(_bytes(t) * n for t, n in model.intermediates())
    far_bytes = sum(_bytes(t) * n for t, n in model.intermediates() if t.name in model.stored)
    kernels = model.plan.kernels
    loops = artifact.loops
    rows = loops.tensors if loops is not None else ()
    sizes = {role: sum(elements(t.shape) * t.dtype.bytes for t in rows if t.role == role)
             for role in ("input", "output", "constant")}  # fmt: skip
    return {
        "predicted_us": round(sum(1e6 * k.estimate.seconds * model.repeats(k) for k in kernels), 3),
        "traffic_bytes": sum(n * model.repeats(k) for k in kernels for _, n in k.estimate.traffic),
        "intermediate_bytes": all_bytes,
        "intermediate_bytes_on_chip": all_bytes - far_bytes,
        "intermediate_bytes_stored": far_bytes,
        "arena_bytes": arena(loops)[1] if loops is not None else None,
        "weight_bytes": sizes["constant"],
        "input_bytes": sizes["input"],
        "output_bytes": sizes["output"],
    }


def _computes(program: Program) -> Iterator[Compute]:
    """Every compute that a kernel holds: a Scan stands for its body."""
    for compute in program.computes:
        if isinstance(compute, Scan):
            yield from compute.body
        else:
            yield compute


def _steps(scan: Scan) -> int:
    return scan.axis.extent if isinstance(scan.axis.extent, int) else 1


def _bytes(tensor: Tensor) -> int:
    return prod(e for e in tensor.shape if isinstance(e, int)) * tensor.dtype.bytes


def _origins(computes: Sequence[Compute]) -> list[str]:
    """The model's nodes behind computes, each once."""
    return list(dict.fromkeys(c.origin or c.outputs[0].name for c in computes))


def _summary(computes: Sequence[Compute]) -> str:
    """Kinds of the nodes behind a kernel: reductions first; what only moves data, only where there is nothing else."""
    ranks: dict[str, int] = {}
    for compute in computes:
        rank = 0 if isinstance(compute, Reduce) else 2 if is_view(compute) else 1
        origin = compute.origin or compute.outputs[0].name
        ranks[origin] = min(rank, ranks.get(origin, 2))
    shown = [o for o, rank in sorted(ranks.items(), key=lambda item: item[1]) if rank < 2] or list(ranks)
    counts: dict[str, int] = {}
    for origin in shown:
        counts[kind_of(origin)] = counts.get(kind_of(origin), 0) + 1
    return ", ".join(kind if n == 1 else f"{kind} x{n}" for kind, n in counts.items())


def kind_of(origin: str) -> str:
    """`Conv` of `Conv node '/features/0'`."""
    return origin.partition(" node ")[0]


# Text


def explain_text(artifact: Artifact, width: int | None = None) -> str:
    """The facts for a person; as wide as the terminal, 100 columns at most."""
    facts = explain_json(artifact)
    columns = width or min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    lines = [*_header(facts, columns)]
    if not facts["kernels"]:
        lines.append("  no plan was made: compilation stopped before it")
        return "\n".join(lines) + "\n"
    lines += ["", *_totals_lines(facts, columns)]
    for remark in facts["decided"]:
        lines += _wrapped("decided", remark, columns)
    lines += ["", *_table(facts, columns)]
    for kernel in facts["kernels"]:
        lines += ["", *_detail(kernel, facts, columns)]
    return "\n".join(lines) + "\n"


def _header(facts: dict[str, Any], width: int) -> list[str]:
    target = facts["target"]
    schedule = f", schedule {facts['schedule']}" if facts["schedule"] else ""
    levels = ", ".join(f"{x['name']} {size_text(x['bytes'])}" for x in target["levels"][:-1])
    machine = f"{target['architecture']}, {_count(target['units'], 'unit')}, {target['vector_bytes']}-byte vectors"
    lines = [f"{facts['model']} for {target['name']}{schedule}", *_wrapped("machine", f"{machine}, {levels}", width)]
    if facts["kernels"]:
        shared = "" if facts["calls"] == facts["kernels_distinct"] else f", run in {facts['calls']} calls"
        before = f"{_count(facts['operators'], 'operator')} ({_count(facts['computes'], 'tensor expression')})"
        lines += _wrapped("kernels", f"{before} became {_count(facts['kernels_distinct'], 'kernel')}{shared}", width)
    stages = ", ".join(f"{n} {s:.2f}" for n, s in facts["compile_seconds"]["stages"].items())
    return [*lines, *_wrapped("compiled", f"in {facts['compile_seconds']['total']:.2f} s: {stages}", width)]


def _totals_lines(facts: dict[str, Any], width: int) -> list[str]:
    totals, main = facts["totals"], facts["target"]["main_level"]
    between = totals["intermediate_bytes"]
    share = f" ({100 * totals['intermediate_bytes_on_chip'] / between:.0f}%)" if between else ""
    sizes = {name: size_text(size) for name, size in totals.items() if name.endswith("_bytes") and size is not None}
    near, far = size_text(totals["intermediate_bytes_on_chip"]), size_text(totals["intermediate_bytes_stored"])
    moved = f"{time_text(totals['predicted_us'])} in all, {sizes['traffic_bytes']} from and to {main}"
    stays = f"{near}{share} stay on chip, {far} are stored (schedule none stores all)"
    lines = _wrapped("predicted", moved, width)
    lines += _wrapped("traffic", _level_text(totals["levels"]), width)
    lines += _wrapped("between", f"{size_text(between)} of intermediate tensors: {stays}", width)
    if totals["arena_bytes"] is not None:
        held = f"weights {sizes['weight_bytes']}, arena {sizes['arena_bytes']}"
        lines += _wrapped("memory", f"{held}, inputs {sizes['input_bytes']}, outputs {sizes['output_bytes']}", width)
    return lines


def _table(facts: dict[str, Any], width: int) -> list[str]:
    head: tuple[str, ...] = _COLUMNS
    rows: list[tuple[str, ...]] = []
    for k in facts["kernels"]:
        stream = f"by {k['stream']['block']}" if k["stream"] else "-"
        near = f"{size_text(k['footprint_bytes'])} {k['footprint_level']}" if k["footprint_bytes"] else "-"
        rows.append((k["name"], k["summary"], str(k["calls"]), str(len(k["nests"])), _tile_text(k),
                     near, stream, time_text(k["predicted_us"]), time_text(k["predicted_us_all_calls"]),
                     size_text(k["traffic_bytes"])))  # fmt: skip
    if not any(k["stream"] for k in facts["kernels"]):
        head, rows = (*head[:6], *head[7:]), [(*r[:6], *r[7:]) for r in rows]
    columns = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    others = sum(columns) - columns[1] + 2 * (len(head) - 1)
    columns[1] = max(12, min(columns[1], width - others))
    right = {2, 3, len(head) - 3, len(head) - 2, len(head) - 1}

    def line(cells: Sequence[str]) -> str:
        padded = [_short(c, columns[i], keep="start") if i == 1 else c for i, c in enumerate(cells)]
        text = "  ".join(c.rjust(columns[i]) if i in right else c.ljust(columns[i]) for i, c in enumerate(padded))
        return text.rstrip()

    return [line(head), *(line(r) for r in rows)]


def _detail(kernel: dict[str, Any], facts: dict[str, Any], width: int) -> list[str]:
    main = facts["target"]["main_level"]
    times = f", {kernel['calls']} calls" if kernel["calls"] > 1 else ""
    lines = [f"{kernel['name']}: {_short(kernel['root'], width - 40)} {_shape(kernel['root_shape'])}{times}"]
    if kernel["scan"]:
        lines += _wrapped("scan", f"in every step of {kernel['scan']}", width)
    lines += _wrapped("nodes", ", ".join(_node(n) for n in kernel["nodes"]), width)
    others = [i["root"] for i in kernel["instances"][1:]]
    if others:
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        lines += _wrapped("also", shown, width)
    tile = f"{_tile_text(kernel)}, {_count(kernel['tiles'], 'tile')}"
    if kernel["block_threads"] > 1:
        tile += f" of {kernel['block_threads']} threads"
    if kernel["footprint_bytes"]:
        tile += f", {size_text(kernel['footprint_bytes'])} of intermediates at {kernel['footprint_level']}"
    lines += _wrapped("tile", tile, width)
    if kernel["stream"]:
        s = kernel["stream"]
        more = f" and {len(s['tensors']) - 1} more" if len(s["tensors"]) > 1 else ""
        lines += _wrapped("stream", f"{s['tensors'][0]}{more} in blocks of {s['block']} of {s['extent']}", width)
    for number, nest in enumerate(kernel["nests"]):
        lines += _wrapped("nests" if number == 0 else "", _nest_text(nest, main), width)
    lines += _edge_lines(kernel, width)
    lines += _wrapped("traffic", _level_text(kernel["levels"]), width)
    if kernel["reason"]:
        lines += _wrapped("why", kernel["reason"], width)
    return lines


def _level_text(levels: Sequence[dict[str, Any]]) -> str:
    """What is read from each level and written to it."""
    parts = [f"{x['level']} {size_text(x['read_bytes'])} read, {size_text(x['written_bytes'])} written" for x in levels]
    return "; ".join(parts)


def _nest_text(nest: dict[str, Any], main: str) -> str:
    where = f"to {main}" if nest["level"] == main else f"stays at {nest['level']}"
    part = "" if nest["part"] == "whole" else " carried"
    parts = [f"{nest['tensor']}{part} {where}"]
    if nest["epilogue"]:
        parts.append(f"{nest['core']} with {_count(len(nest['epilogue']), 'map')} on its registers")
    if nest["vector"]:
        parts.append(f"vector {nest['vector']} x{nest['lanes']}")
    if nest["register"]:
        parts.append("register tile " + " ".join(f"{a}:{n}" for a, n in nest["register"].items()))
    return ", ".join(parts)


def _edge_lines(kernel: dict[str, Any], width: int) -> list[str]:
    words = {"store": "kept at {}", "stream": "streamed at {}", "recompute": "recomputed in {}"}
    groups: dict[str, list[str]] = {}
    for edge in kernel["edges"]:
        label = words.get(edge["mode"], edge["mode"] + " at {}").format(edge["level"])
        size = "" if edge["mode"] == "recompute" else f" ({size_text(edge['bytes'])} whole)"
        groups.setdefault(label, []).append(edge["tensor"] + size)
    lines: list[str] = []
    for label, tensors in groups.items():
        lines += _wrapped("edges" if not lines else "", f"{label}: {', '.join(tensors)}", width)
    return lines


def _wrapped(label: str, text: str, width: int) -> list[str]:
    indent = " " * (_LABEL + 3)
    return textwrap.wrap(text, width, initial_indent=f"  {label:<{_LABEL}} ", subsequent_indent=indent + "  ",
                         break_long_words=True, break_on_hyphens=False)  # fmt: skip


def _node(origin: str) -> str:
    kind, _, name = origin.partition(" node ")
    return f"{kind} {name}" if name else kind


def _tile_text(kernel: dict[str, Any]) -> str:
    """The tile with its whole axes spelled out, as a shape: `1x8x64`."""
    tile = kernel["tile"]
    return "x".join(str(tile.get(f"o{i}", n)) for i, n in enumerate(kernel["root_shape"])) or "1"


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _short(text: str, width: int, keep: str = "end") -> str:
    """Cut to a width: names differ at their end, lists matter from their start."""
    if len(text) <= width:
        return text
    return ".." + text[len(text) - width + 2 :] if keep == "end" else text[: width - 2] + ".."


def size_text(size: float) -> str:
    """Bytes with three digits: `4.19 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 999.5 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} B"


def time_text(microseconds: float) -> str:
    if microseconds >= 1e4:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds:.0f} us"
