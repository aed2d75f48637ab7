"""What became of a model, and why: facts gathered from a compilation's forms as one JSON object.

Kernels are listed once each, with the calls that share them: twelve equal layers are one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.backend.seconds import price_of_runs
from tilewright.backend.terms import Terms
from tilewright.backend.traffic import KernelTraffic, Known, runs_of, traffic_of_runs
from tilewright.calls.profiles import Profile
from tilewright.compiler.pipeline import Artifact
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import elements
from tilewright.lower.memory import arena
from tilewright.lower.persistent import in_stages
from tilewright.report.model_view import ModelView, bytes_of, computes_of, origins, summary
from tilewright.report.neighbours import Neighbours
from tilewright.report.partition import Edges, level_of, parts_of
from tilewright.report.tree_facts import tree_facts
from tilewright.report.work import distinct_bytes, kernel_operations, memory_over_time
from tilewright.schedule.planner import plan_seconds
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.plan.form import IN_REGISTERS, Tile
from tilewright.tile_graph.traffic.held import plan_nests


def explain_json(artifact: Artifact, measured: Profile | None = None) -> dict[str, Any]:
    """The facts, with the times of a profile where there is one; a stage that was not reached leaves its part empty."""
    target = artifact.target
    facts: dict[str, Any] = {
        "model": artifact.graph.name,
        "target": {
            "name": target.name, "architecture": target.architecture, "units": target.units,
            "vector_bytes": target.vector_bytes, "local_level": target.local.name, "main_level": target.main.name,
            "levels": [{"name": x.name, "bytes": x.capacity, "bytes_a_second": x.bandwidth * target.units}
                       for x in target.levels],
            "operations_a_second": 2 * target.fma_rate * target.units,
        },
        "schedule": artifact.plan.schedule if artifact.plan else None,
        "effort": artifact.effort,
        "batches": artifact.batches,
        "operators": len(artifact.graph.nodes),
        "computes": 0, "kernels_planned": 0, "kernels_distinct": 0, "calls": 0,
        "compile_seconds": {
            "total": round(sum(artifact.stage_seconds.values()), 4),
            "stages": {name: round(s, 4) for name, s in artifact.stage_seconds.items()},
        },
        "totals": {}, "kernels": [], "order": [], "memory": None, "decided": [],
    }  # fmt: skip
    if artifact.parts:
        _join_parts(facts, artifact, measured)
        return facts
    if artifact.program is None or artifact.plan is None:
        return facts
    model = ModelView(artifact.program, in_stages(artifact.plan))
    rows = _rows(model, artifact.loops)
    facts["computes"] = sum(1 for _ in computes_of(artifact.program))
    facts["kernels_planned"] = len(artifact.plan.kernels)
    facts["kernels_distinct"] = len(rows)
    facts["calls"] = sum(row.calls for row in rows if row.launch is None)
    neighbours = Neighbours(model, target, {p.name: row.name for row in rows for p in row.plans})
    times = _measured(measured, rows)
    edges = Edges(model, target.registers.name)
    facts["kernels"] = [
        _kernel_facts(model, row, target, neighbours, edges, times.get(row.name), artifact.loops) for row in rows
    ]
    facts["totals"] = _totals(model, artifact)
    meeting = Counter(edge.level for kernel in model.plan.kernels for edge in edges.into(kernel))
    facts["totals"]["edges"] = {x.name: meeting[x.name] for x in target.levels if meeting[x.name]}
    runs = runs_of(artifact.program, artifact.plan, target, timed=True)
    alone: Known = {}
    moved = traffic_of_runs(runs, target, alone)
    terms = price_of_runs(runs, artifact.program, artifact.plan, target, alone).kernels
    facts["totals"].update(_traffic_facts(list(moved.values()), target))
    for kernel, row in zip(facts["kernels"], rows, strict=True):
        kernel.update(_traffic_facts([moved[p.name] for p in row.plans], target))
        kernel["terms"] = _term_facts([terms[p.name] for p in row.plans], target)
    facts["totals"]["measured_us"] = round(sum(times.values()), 3) if times else None
    if artifact.loops is not None:
        facts["order"] = [call.kernel for call in artifact.loops.calls]
        facts["memory"] = memory_over_time(artifact.loops)
    facts["decided"] = list(artifact.program.remarks)
    return facts


def _join_parts(facts: dict[str, Any], artifact: Artifact, measured: Profile | None) -> None:
    """Of a model with loops or branches that data decide, or in sweeps: what each part of it takes once, and all of
    them together."""
    told: list[dict[str, Any]] = []
    for part in artifact.parts:
        found = explain_json(part.artifact, _of_part(measured, part.artifact.loops))
        for kernel in found["kernels"]:
            kernel["place"] = part.place
        told.append(found)
    for name in ("computes", "kernels_planned", "kernels_distinct"):
        facts[name] = sum(found[name] for found in told)
    facts["kernels"] = [kernel for found in told for kernel in found["kernels"]]
    whole = artifact.program.remarks if artifact.visits and artifact.program is not None else ()
    facts["decided"] = list(dict.fromkeys((*whole, *(remark for found in told for remark in found["decided"]))))
    # of a model in sweeps memory is that of its largest part, and a part's figures count as often as there are such
    largest = [part.artifact.loops for part in artifact.parts if artifact.visits and part.artifact.loops is not None]
    loops = max(largest, key=lambda each: arena(each)[1]) if largest else artifact.loops
    if loops is None:
        return
    runs = Counter(artifact.visits)
    times = [runs[number] if runs else 1 for number in range(len(told))]
    facts["order"] = [call.kernel for call in (artifact.calls if runs else loops.calls)]
    facts["calls"] = len(facts["order"])
    facts["memory"] = memory_over_time(loops)
    totals = [(n, found["totals"]) for n, found in zip(times, told, strict=True) if found["totals"]]
    names = ("predicted_us", "intermediate_bytes", "intermediate_bytes_on_chip", "intermediate_bytes_stored",
             "traffic_bytes")  # fmt: skip
    facts["totals"] = {name: round(sum(n * t[name] for n, t in totals), 3) for name in names}
    facts["totals"] |= _memory_sizes(loops)
    meeting: Counter[str] = Counter()
    for n, each in totals:
        meeting.update({level: n * count for level, count in each["edges"].items()})
    facts["totals"]["edges"] = {x.name: meeting[x.name] for x in artifact.target.levels if meeting[x.name]}
    timed = [t["measured_us"] for _, t in totals]
    facts["totals"]["measured_us"] = round(sum(timed), 3) if timed and None not in timed else None
    facts["totals"]["levels"] = [
        {"level": rows[0][1]["level"], "read_bytes": sum(n * r["read_bytes"] for n, r in rows),
         "written_bytes": sum(n * r["written_bytes"] for n, r in rows),
         "footprint_bytes": max(r["footprint_bytes"] for _, r in rows)}
        for rows in zip(*([(n, row) for row in t["levels"]] for n, t in totals), strict=True)
    ]  # fmt: skip


def _of_part(measured: Profile | None, loops: LoopProgram | None) -> Profile | None:
    """The times of the kernels of one part."""
    if measured is None or loops is None:
        return None
    own = {kernel.name for kernel in loops.kernels}
    return Profile(tuple(call for call in measured.calls if call.kernel in own), measured.repeat)


def _memory_sizes(loops: LoopProgram | None) -> dict[str, Any]:
    rows = loops.tensors if loops is not None else ()
    sizes = {role: sum(elements(t.shape) * t.dtype.bytes for t in rows if t.role == role)
             for role in ("input", "output", "constant")}  # fmt: skip
    return {
        "arena_bytes": arena(loops)[1] if loops is not None else None,
        "weight_bytes": sizes["constant"],
        "input_bytes": sizes["input"],
        "output_bytes": sizes["output"],
    }


def _traffic_facts(kernels: Sequence[KernelTraffic], target: Target) -> dict[str, Any]:
    """Bytes read from and written to every level but the registers in all calls, and the most that stays there; and
    those of main memory once more."""
    levels: list[dict[str, Any]] = [
        {"level": level.name, "read_bytes": round(sum(k.by_level[place].read for k in kernels)),
         "written_bytes": round(sum(k.by_level[place].written for k in kernels)),
         "footprint_bytes": round(max((k.by_level[place].footprint for k in kernels), default=0.0))}
        for place, level in enumerate(target.levels) if place
    ]  # fmt: skip
    *_, main = levels
    return {"levels": levels, "traffic_bytes": main["read_bytes"] + main["written_bytes"]}


def _term_facts(kernels: Sequence[Terms], target: Target) -> dict[str, Any]:
    """What all calls take by the fold over the tree (backend/seconds.py), term by term: each hides others in part."""
    levels = [
        {"level": level.name, "us": round(1e6 * sum(float(k.by_level[place].seconds) for k in kernels), 3)}
        for place, level in enumerate(target.levels) if place > 1
    ]  # fmt: skip
    compute, waits, seconds = (
        round(1e6 * sum(float(x) for x in found), 3)
        for found in zip(*((k.compute, k.waits, k.seconds) for k in kernels), strict=True)
    )
    return {"compute_us": compute, "levels": levels, "waits_us": waits, "seconds_us": seconds}


@dataclass(frozen=True)
class _Row:
    """A distinct kernel: its name, the plans that share it, and how often it is called."""

    name: str
    plans: tuple[Tile, ...]
    calls: int
    launch: str | None = None  # the kernel whose launch it shares


def _rows(model: ModelView, loops: LoopProgram | None) -> list[_Row]:
    names = _code_names(model, loops)
    grouped: dict[tuple[str, str | None], list[Tile]] = {}
    for kernel, name in zip(model.plan.kernels, names, strict=True):
        grouped.setdefault(name, []).append(kernel)
    return [_Row(n, tuple(plans), sum(model.repeats(p) for p in plans), lead)
            for (n, lead), plans in grouped.items()]  # fmt: skip


def _code_names(model: ModelView, loops: LoopProgram | None) -> list[tuple[str, str | None]]:
    """The kernel of the Loops that each planned kernel became, and whose launch it shares where it is not the first.
    Loops edited by hand may not follow the Plan."""
    kernels = [_first(launch) for launch, _ in model.plan.calls()]
    own = {k.name: k.name for k in kernels}
    if loops is not None and len(loops.calls) == sum(model.repeats(k) for k in kernels):
        call = 0
        position = 0
        while position < len(kernels):
            scan = model.scans.get(kernels[position].name)
            together = 1 if scan is None else sum(1 for k in kernels[position:] if model.scans.get(k.name) == scan)
            part = kernels[position : position + together]
            own.update({k.name: loops.calls[call + i].kernel for i, k in enumerate(part)})
            call += sum(model.repeats(k) for k in part)
            position += together
    names: list[tuple[str, str | None]] = []
    for launch, _ in model.plan.calls():
        lead = own[_first(launch).name]
        others = len(launch.body) - 1 if launch.is_launch else 0
        names += [(lead, None), *((f"{lead}.{i + 1}", lead) for i in range(others))]
    return names


def _first(launch: Tile) -> Tile:
    return next(n for n in launch.walk() if isinstance(n, Tile) and n.is_kernel)


def _measured(profile: Profile | None, rows: Sequence[_Row]) -> dict[str, float]:
    """Microseconds of all calls of each kernel; none where a profile is of other kernels."""
    times: dict[str, float] = {}
    for call in profile.calls if profile is not None else ():
        times[call.kernel] = times.get(call.kernel, 0.0) + call.nanoseconds / 1e3
    return times if times.keys() == {row.name for row in rows if row.launch is None} else {}


def _kernel_facts(
    model: ModelView,
    row: _Row,
    target: Target,
    neighbours: Neighbours,
    edges: Edges,
    measured: float | None,
    loops: LoopProgram | None,
) -> dict[str, Any]:
    plan, main = row.plans[0], target.main.name
    counted = None if loops is None or row.launch is not None else distinct_bytes(loops, row.name)
    seconds = {p.name: model.launched.get(p.name, p.estimate.seconds) for p in row.plans}
    nests = plan_nests(plan, model.by_name)
    stream = plan.stream
    lanes = next((n for n in plan.walk() if isinstance(n, Tile) and n.over == "lanes"), None)
    tree = tree_facts(plan, model)
    within = {h.tensor: h.within for h in plan.holds}
    return {
        "name": row.name,
        "root": plan.leaves[-1].tensor,
        "nodes": origins(model.parts(plan)),
        "summary": summary(model.parts(plan)),
        "calls": row.calls,
        "instances": [
            {"plan": p.name, "root": p.leaves[-1].tensor, "nodes": origins(model.parts(p)),
             "steps": model.repeats(p), "reason": p.estimate.reason, "neighbours": neighbours.of(p)}
            for p in row.plans
        ],
        "scan": model.scans.get(plan.name),
        "place": "",
        "tile": dict(plan.cut),
        "tiles": plan.tiles,
        "root_shape": [int(e) for e in nests[-1].tensor.shape],  # type: ignore[arg-type]
        "block_threads": lanes.count if lanes is not None else 1,
        "footprint_bytes": plan.estimate.footprint,
        "footprint_level": plan.level,
        "stream": None if stream is None else
        {"tensors": [b.tensor for b in stream.axes[0].binds], "extent": stream.axes[0].extent,
         "block": stream.sizes[0][1]},
        "launch": row.launch,
        "predicted_us": round(1e6 * seconds[plan.name], 3),
        "predicted_us_all_calls": round(sum(1e6 * seconds[p.name] * model.repeats(p) for p in row.plans), 3),
        "corrected_us": _known_us(plan.estimate.corrected),
        "recorded_us": _known_us(plan.estimate.measured),
        "measured_us": None if measured is None else round(measured / row.calls, 3),
        "measured_us_all_calls": None if measured is None else round(measured, 3),
        "operations": kernel_operations(plan, nests, model.by_name),
        "counted_bytes": counted,
        "reads": _read_facts(nests, model),
        "writes": [{"tensor": t.name, "bytes": bytes_of(t), "level": model.between.get(t.name, main)}
                   for n in nests for t in n.stores if t.name in model.stored],
        "tree": tree,
        "partition": parts_of(tree),
        "meets": [{"tensor": e.tensor, "maker": e.maker, "reader": e.reader, "level": e.level}
                  for e in edges.into(plan)],
        "nests": [
            {"tensor": n.tensor, "shape": [int(e) for e in made.tensor.shape],  # type: ignore[arg-type]
             "nodes": origins([model.by_name[name] for name in (n.core, *n.epilogue)]),
             "core": n.core, "epilogue": list(n.epilogue),
             "level": level_of(plan, n.tensor, model, target.registers.name), "within": within.get(n.tensor),
             "part": n.part, "vector": n.vector, "lanes": n.lanes, "register": dict(n.register)}
            for n, made in zip(plan.leaves, nests, strict=True)
        ],
        "edges": [
            {"tensor": name, "level": where, "mode": mode, "bytes": bytes_of(model.tensors[name]),
             "nodes": origins([model.by_name[name]])}
            for name, where, mode in _edges(plan, target.registers.name)
        ],
        "reason": plan.estimate.reason,
    }  # fmt: skip


def _known_us(seconds: float) -> float | None:
    """A time of a call where records have one."""
    return round(1e6 * seconds, 3) if seconds else None


def _read_facts(nests: Sequence[Nest], model: ModelView) -> list[dict[str, Any]]:
    """What a kernel takes from outside, the largest first."""
    inside = {t for n in nests for t in n.stores}
    outside = dict.fromkeys(t for n in nests for t in n.reads() if t not in inside)
    roles = {**dict.fromkeys(model.program.inputs, "input"), **dict.fromkeys(model.program.constants, "weight")}
    found = [{"tensor": t.name, "bytes": bytes_of(t), "role": roles.get(t, "intermediate"),
              "level": model.between.get(t.name, model.plan.body.level)} for t in outside]  # fmt: skip
    return sorted(found, key=lambda r: -int(r["bytes"]))


def _edges(kernel: Tile, registers: str) -> Iterator[tuple[str, str, str]]:
    """Intermediates of a kernel: where each is, and whether it is stored, kept as a window that moves, walked in blocks
    or computed again."""
    for tile in (n for n in kernel.walk() if isinstance(n, Tile)):
        stored = "stream" if tile is kernel.stream else "store"
        for hold in tile.holds:
            if hold.mode in ("store", "rolling") and hold.fill is None:
                level = registers if hold.layout == IN_REGISTERS else tile.level
                yield hold.tensor, level, "window" if hold.mode == "rolling" else stored
    for name in dict.fromkeys(n for leaf in kernel.leaves for n in leaf.composed):
        yield name, registers, "recompute"


def _totals(model: ModelView, artifact: Artifact) -> dict[str, Any]:
    all_bytes = sum(bytes_of(t) * n for t, n in model.intermediates())
    far_bytes = sum(bytes_of(t) * n for t, n in model.intermediates() if t.name in model.stored)
    return {
        "predicted_us": round(1e6 * plan_seconds(model.plan, model.program), 3),
        "intermediate_bytes": all_bytes,
        "intermediate_bytes_on_chip": all_bytes - far_bytes,
        "intermediate_bytes_stored": far_bytes,
        **_memory_sizes(artifact.loops),
    }
