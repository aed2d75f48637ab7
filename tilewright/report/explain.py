"""What became of a model, and why, as text for a terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from tilewright.calls.profiles import Profile
from tilewright.compiler.pipeline import Artifact
from tilewright.report.facts import explain_json
from tilewright.report.partition import parts_text

WIDTH = 100
_LABEL = 10
_OF_RECORDS = ("corrected", "measured")  # a call
_COLUMNS = ("kernel", "computes", "calls", "nests", "tile", "footprint", "streamed", "each", "all", *_OF_RECORDS,
            "traffic")  # fmt: skip


def explain_text(artifact: Artifact, width: int | None = None, measured: Profile | None = None) -> str:
    """The facts for a person; as wide as the terminal, 100 columns at most."""
    facts = explain_json(artifact, measured)
    columns = width or min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    lines = [*_header(facts, columns)]
    if not facts["kernels"]:
        lines.append("  no plan was made: compilation stopped before it")
        return "\n".join(lines) + "\n"
    lines += ["", *_totals_lines(facts, columns)]
    for remark, times in _alike(facts["decided"]):
        lines += _wrapped("decided", remark + (f" (and {times - 1} times more alike)" if times > 1 else ""), columns)
    lines += ["", *_table(facts, columns)]
    for kernel in facts["kernels"]:
        lines += ["", *_detail(kernel, facts, columns)]
    return "\n".join(lines) + "\n"


def _header(facts: dict[str, Any], width: int) -> list[str]:
    target = facts["target"]
    chosen = f", schedule {facts['schedule']}" if facts["schedule"] else ""
    chosen += "" if facts["effort"] == "full" else f", effort {facts['effort']}"
    levels = ", ".join(f"{x['name']} {size_text(x['bytes'])}" for x in target["levels"][:-1])
    machine = f"{target['architecture']}, {_count(target['units'], 'unit')}, {target['vector_bytes']}-byte vectors"
    lines = [f"{facts['model']} for {target['name']}{chosen}", *_wrapped("machine", f"{machine}, {levels}", width)]
    if facts["kernels"]:
        shared = "" if facts["calls"] == facts["kernels_distinct"] else f", run in {facts['calls']} calls"
        before = f"{_count(facts['operators'], 'operator')} ({_count(facts['computes'], 'tensor expression')})"
        lines += _wrapped("kernels", f"{before} became {_count(facts['kernels_distinct'], 'kernel')}{shared}", width)
    if facts["batches"] > 1:
        parts = f"goes through in {facts['batches']} parts, one after the other, to keep to its memory: figures of one"
        lines += _wrapped("batch", parts, width)
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
    if totals["measured_us"] is not None:
        lines += _wrapped("measured", f"{time_text(totals['measured_us'])} in all", width)
    lines += _wrapped("traffic", _level_text(totals["levels"]), width)
    lines += _wrapped("copies", _copies_text(facts["kernels"]), width)
    lines += _wrapped("between", f"{size_text(between)} of intermediate tensors: {stays}", width)
    if totals["edges"]:
        met = ", ".join(f"{count} at {level}" for level, count in totals["edges"].items())
        lines += _wrapped("edges", f"connected {met}", width)
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
                     near, stream, *_times(k), *map(_recorded, (k["corrected_us"], k["recorded_us"])),
                     size_text(k["traffic_bytes"])))  # fmt: skip
    told = {"streamed": any(k["stream"] for k in facts["kernels"]), **dict.fromkeys(_OF_RECORDS, _has_records(facts))}
    shown = [place for place, name in enumerate(head) if told.get(name, True)]
    head, rows = tuple(head[i] for i in shown), [tuple(r[i] for i in shown) for r in rows]
    columns = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    others = sum(columns) - columns[1] + 2 * (len(head) - 1)
    columns[1] = max(12, min(columns[1], width - others))
    right = {2, 3, *range(head.index("each"), len(head))}

    def line(cells: Sequence[str]) -> str:
        padded = [_short(c, columns[i], keep="start") if i == 1 else c for i, c in enumerate(cells)]
        text = "  ".join(c.rjust(columns[i]) if i in right else c.ljust(columns[i]) for i, c in enumerate(padded))
        return text.rstrip()

    return [line(head), *(line(r) for r in rows)]


def _times(kernel: dict[str, Any]) -> tuple[str, str]:
    """Of a call, and of all of them; what shares a launch takes no more than that."""
    if kernel["launch"]:
        return f"in {kernel['launch']}", "-"
    return time_text(kernel["predicted_us"]), time_text(kernel["predicted_us_all_calls"])


def _has_records(facts: dict[str, Any]) -> bool:
    return any(k["corrected_us"] or k["recorded_us"] for k in facts["kernels"])


def _recorded(microseconds: float | None) -> str:
    return "-" if microseconds is None else time_text(microseconds)


def _detail(kernel: dict[str, Any], facts: dict[str, Any], width: int) -> list[str]:
    main = facts["target"]["main_level"]
    times = f", {kernel['calls']} calls" if kernel["calls"] > 1 else ""
    lines = [f"{kernel['name']}: {_short(kernel['root'], width - 40)} {_shape(kernel['root_shape'])}{times}"]
    if kernel["scan"]:
        lines += _wrapped("scan", f"in every step of {kernel['scan']}", width)
    if kernel["place"]:
        lines += _wrapped("runs", kernel["place"], width)
    lines += _wrapped("nodes", ", ".join(_node(n) for n in kernel["nodes"]), width)
    if kernel["launch"]:
        lines += _wrapped("launch", f"that of {kernel['launch']}, beside its blocks", width)
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
    told = {"corrected": kernel["corrected_us"], "measured": kernel["recorded_us"]}
    known = [f"{word} {time_text(us)}" for word, us in told.items() if us is not None]
    if known:
        said = f"predicted {time_text(kernel['predicted_us'])}, {', '.join(known)} a call"
        lines += _wrapped("records", said, width)
    if kernel["measured_us"] is not None:
        part = kernel["measured_us"] / max(kernel["predicted_us"], 1e-9)
        lines += _wrapped("measured", f"{time_text(kernel['measured_us'])} a call, {part:.2f} of predicted", width)
    if kernel["stream"]:
        s = kernel["stream"]
        more = f" and {len(s['tensors']) - 1} more" if len(s["tensors"]) > 1 else ""
        lines += _wrapped("stream", f"{s['tensors'][0]}{more} in blocks of {s['block']} of {s['extent']}", width)
    for number, nest in enumerate(kernel["nests"]):
        lines += _wrapped("nests" if number == 0 else "", _nest_text(nest, main), width)
    lines += _edge_lines(kernel, width)
    lines += _wrapped("parts", parts_text(kernel["partition"]), width)
    lines += _wrapped("traffic", _level_text(kernel["levels"]), width)
    lines += _wrapped("terms", _term_text(kernel["terms"]), width)
    for number, pair in enumerate(kernel["instances"][0]["neighbours"]):
        lines += _wrapped("next" if number == 0 else "", _pair_text(pair, kernel), width)
    if kernel["reason"]:
        lines += _wrapped("why", kernel["reason"], width)
    return lines


def _alike(remarks: Sequence[str]) -> list[tuple[str, int]]:
    """Remarks that differ in the names of nodes alone, the first of them with their number."""
    found: dict[str, list[str]] = {}
    for remark in remarks:
        found.setdefault(re.sub(r"'[^']*'", "''", remark), []).append(remark)
    return [(group[0], len(group)) for group in found.values()]


def _pair_text(pair: dict[str, Any], kernel: dict[str, Any]) -> str:
    """A result and who reads it: the level where the two meet, and what was found out about the others."""
    other = f" of {pair['reader_kernel']}" if pair["reader_plan"] != kernel["instances"][0]["plan"] else ""
    parts = []
    for tried in sorted(pair["tried"], key=lambda t: not t["chosen"]):
        if tried["chosen"] or tried["predicted_us"] or tried["reason"]:
            cost = f" {time_text(tried['predicted_us'])}" if tried["predicted_us"] else ""
            why = f": {tried['reason']}" if tried["reason"] else ""
            parts.append(f"{'at' if tried['chosen'] else 'not at'} {tried['level']}{cost}{why}")
    return f"{pair['tensor']} to {pair['reader']}{other}: {'; '.join(parts)}"


def _copies_text(kernels: Sequence[dict[str, Any]]) -> str:
    """Kernels that compute nothing; what their neighbours would take with them stands beside each."""
    found = [f"{k['name']} {time_text(k['predicted_us_all_calls'])}" for k in kernels if not k["operations"]]
    if not found:
        return "no kernel only moves data"
    return f"{_count(len(found), 'kernel')} to move data alone: {', '.join(found)}"


def _level_text(levels: Sequence[dict[str, Any]]) -> str:
    """What is read from each level and written to it."""
    parts = [f"{x['level']} {size_text(x['read_bytes'])} read, {size_text(x['written_bytes'])} written" for x in levels]
    return "; ".join(parts)


def _term_text(terms: dict[str, Any]) -> str:
    """What all calls take by themselves: arithmetic, bytes at every level where some are found, starts."""
    found = [f"{x['level']} {time_text(x['us'])}" for x in terms["levels"] if x["us"]]
    parts = [f"arithmetic {time_text(terms['compute_us'])}", *found, f"starts {time_text(terms['waits_us'])}"]
    return f"{', '.join(parts)}; {time_text(terms['seconds_us'])} together"


def _nest_text(nest: dict[str, Any], main: str) -> str:
    where = f"to {main}" if nest["level"] == main else f"stays at {nest['level']}"
    where += f" in the memory of {nest['within']}" if nest["within"] else ""
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
    words = {"store": "kept at {}", "stream": "streamed at {}", "window": "a window of it at {}",
             "recompute": "recomputed in {}"}  # fmt: skip
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
