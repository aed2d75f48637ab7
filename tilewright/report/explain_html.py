"""The explanation as one HTML page: kernels drawn over the model's operators, memory levels, bars of traffic and time.

Nothing is loaded from elsewhere: style and pictures are inside, so the file can be kept and sent.
"""

from __future__ import annotations

from html import escape
from typing import Any

from tilewright.compiler import Artifact
from tilewright.report.explain import explain_json, kind_of, size_text, time_text

_WIDTH = 1120
_BOX_LEFT, _BOX_WIDTH = 150, 640  # of a kernel's picture; the rail of main memory is on its left, bars on its right
_TIME_LEFT, _TRAFFIC_LEFT = _BOX_LEFT + _BOX_WIDTH + 16, _BOX_LEFT + _BOX_WIDTH + 176
_NEST_WIDTH, _NEST_HEIGHT, _GAP = 145, 46, 10
_A_ROW = (_BOX_WIDTH - _GAP) // (_NEST_WIDTH + _GAP)
_FAR, _NEAR, _REGISTERS, _STREAMED = "#c2543d", "#2f7f5f", "#4067a8", "#8a5fb0"

_STYLE = f"""
body {{ font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fbfaf8 }}
body {{ max-width: {_WIDTH}px; margin: 2em auto; padding: 0 1em }}
h1 {{ font-size: 1.5em; margin-bottom: .1em }} h2 {{ font-size: 1.15em; margin-top: 2em }}
.quiet {{ color: #666 }} svg {{ max-width: 100%; height: auto; display: block }}
svg text {{ font: 12px system-ui, sans-serif; fill: #222 }} svg .small {{ font-size: 10.5px; fill: #666 }}
svg .on {{ fill: #fff }} svg .name {{ font-weight: 600; font-size: 14px }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .2em 1.2em; margin: .5em 0 }}
dt {{ color: #666 }} dd {{ margin: 0 }}
details {{ margin: .3em 0; border-top: 1px solid #e4e0d8; padding: .4em 0 }} summary {{ cursor: pointer }}
table {{ border-collapse: collapse; margin: .5em 0 }}
td, th {{ text-align: left; padding: .15em .9em .15em 0; vertical-align: top; font-weight: normal }}
th {{ color: #666 }} code {{ font-size: .92em; word-break: break-all }}
.key {{ display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .35em 0 0 }}
"""


def explain_html(artifact: Artifact) -> str:
    facts = explain_json(artifact)
    title = f"{facts['model']} for {facts['target']['name']}"
    body = [f"<h1>{escape(title)}</h1>", _lead(facts)]
    if facts["kernels"]:
        body += [_between(facts), _levels(facts), _legend(facts), _kernels(facts), "<h2>Every kernel</h2>"]
        body += [_details(kernel, facts) for kernel in facts["kernels"]]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _lead(facts: dict[str, Any]) -> str:
    target, seconds = facts["target"], facts["compile_seconds"]
    stages = ", ".join(f"{name} {s:.2f}" for name, s in seconds["stages"].items())
    rows = [("machine", f"{target['architecture']}, {target['units']} units, {target['vector_bytes']}-byte vectors")]
    if facts["kernels"]:
        totals = facts["totals"]
        kernels = f"{facts['kernels_distinct']} kernels in {facts['calls']} calls"
        moved = f"{size_text(totals['traffic_bytes'])} from and to {target['main_level']}"
        rows += [
            ("schedule", str(facts["schedule"])),
            ("kernels", f"{facts['operators']} operators became {kernels}"),
            ("predicted", f"{time_text(totals['predicted_us'])}, {moved}"),
            ("memory", f"weights {size_text(totals['weight_bytes'])}, arena {size_text(totals['arena_bytes'] or 0)}"),
        ]
        rows += [("decided", remark) for remark in facts["decided"]]
    else:
        rows.append(("plan", "none was made: compilation stopped before it"))
    rows.append(("compiled", f"in {seconds['total']:.2f} s ({stages})"))
    return "<dl>" + "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in rows) + "</dl>"


def _between(facts: dict[str, Any]) -> str:
    """One bar: intermediate bytes that stay on chip, and those that do not."""
    totals, main = facts["totals"], facts["target"]["main_level"]
    whole = max(1, totals["intermediate_bytes"])
    near = _WIDTH * totals["intermediate_bytes_on_chip"] / whole
    near_text = f"{size_text(totals['intermediate_bytes_on_chip'])} stay on chip"
    far_text = f"{size_text(totals['intermediate_bytes_stored'])} go to {main}"
    parts = [_rect(0, 0, near, 26, _NEAR), _rect(near, 0, _WIDTH - near, 26, _FAR)]
    labels = ((8, near, near_text), (near + 8, _WIDTH - near, far_text))
    parts += [_text(x, 17, text, "on") for x, room, text in labels if room > 8 * len(text)]
    return (
        f"<h2>Between the operators: {size_text(totals['intermediate_bytes'])} of tensors</h2>"
        f'<p class="quiet">Schedule none stores and loads all of it; here {near_text}, {far_text}.</p>'
        + _svg(26, parts, f"{near_text}, {far_text}")
    )


def _levels(facts: dict[str, Any]) -> str:
    """The memory levels with the most that a kernel's intermediates take of them."""
    target = facts["target"]
    level, main = target["tile_level"], target["main_level"]
    most = max(k["footprint_bytes"] for k in facts["kernels"])
    parts = []
    for number, item in enumerate(target["levels"]):
        y = 30 * number
        colour = _REGISTERS if number == 0 else _FAR if item["name"] == main else _NEAR
        room = 260 + 200 * number
        parts.append(_rect(0, y, min(room, _WIDTH), 24, colour, 0.18))
        used = f"the largest tile's intermediates take {size_text(most)}" if item["name"] == level else ""
        if used:
            parts.append(_rect(0, y, max(2.0, min(room, _WIDTH) * min(1.0, most / item["bytes"])), 24, colour, 0.75))
        size = "" if item["name"] == main else size_text(item["bytes"])
        parts.append(_text(8, y + 16, f"{item['name']}  {size}"))
        if used:
            parts.append(_text(min(room, _WIDTH) + 10, y + 16, used, "small"))
    picture = _svg(30 * len(target["levels"]), parts, "memory levels")
    return f"<h2>Memory of one of {target['units']} units</h2>{picture}"


def _legend(facts: dict[str, Any]) -> str:
    main, near = facts["target"]["main_level"], facts["target"]["tile_level"]
    keys = ((_FAR, f"result goes to {main}"), (_NEAR, f"stays at {near}"), (_STREAMED, f"streamed through {near}"),
            (_REGISTERS, "in registers"))  # fmt: skip
    marks = [f'<span class="key" style="background:{colour}"></span>{escape(text)}' for colour, text in keys]
    lead = "A frame is a kernel; a box inside is a loop nest with the model's operators."
    return f'<h2>Kernels</h2><p class="quiet">{lead}<br>{" &nbsp; ".join(marks)}</p>'


def _kernels(facts: dict[str, Any]) -> str:
    slowest = max(1e-9, *(k["predicted_us_all_calls"] for k in facts["kernels"]))
    busiest = max(1, *(k["traffic_bytes_all_calls"] for k in facts["kernels"]))
    heads = ((0, facts["target"]["main_level"]), (_TIME_LEFT, "predicted time"), (_TRAFFIC_LEFT, "traffic"))
    parts = [_text(x, 12, text, "small") for x, text in heads]
    y = 22.0
    for kernel in facts["kernels"]:
        height = _kernel_height(kernel)
        parts += _kernel_picture(kernel, y, height)
        spent, moved = kernel["predicted_us_all_calls"], kernel["traffic_bytes_all_calls"]
        bars = ((_TIME_LEFT, spent / slowest, _REGISTERS, time_text(spent)),
                (_TRAFFIC_LEFT, moved / busiest, _FAR, size_text(moved)))  # fmt: skip
        for x, part, colour, label in bars:
            parts += [_rect(x, y + 4, max(1.0, 140 * part), 16, colour), _text(x, y + 34, label, "small")]
        thickness = 1.0 + 7.0 * moved / busiest
        parts.append(_rect(24, y + 20 - thickness / 2, _BOX_LEFT - 24, thickness, _FAR, 0.6))
        y += height + 12
    parts.insert(0, _rect(10, 22, 14, y - 34, _FAR))
    return _svg(y, parts, "kernels, their nests and their traffic")


def _kernel_height(kernel: dict[str, Any]) -> float:
    rows = -(-len(kernel["nests"]) // _A_ROW)
    return 30 + rows * (_NEST_HEIGHT + _GAP) + (16 if _recomputed(kernel) else 0)


def _kernel_picture(kernel: dict[str, Any], y: float, height: float) -> list[str]:
    calls = f"{kernel['calls']} calls" if kernel["calls"] > 1 else "1 call"
    parts = [
        _rect(_BOX_LEFT, y, _BOX_WIDTH, height, "#fff", rounded=6, border="#999"),
        _text(_BOX_LEFT + _GAP, y + 19, kernel["name"], "name"),
        _text(_BOX_LEFT + 52, y + 19, _cut(f"{calls}, {kernel['tiles']} tiles: {kernel['summary']}", 84), "small"),
    ]
    for number, nest in enumerate(kernel["nests"]):
        x = _BOX_LEFT + _GAP + (number % _A_ROW) * (_NEST_WIDTH + _GAP)
        top = y + 28 + (number // _A_ROW) * (_NEST_HEIGHT + _GAP)
        kinds = " + ".join(dict.fromkeys(kind_of(n) for n in nest["nodes"]))
        hint = f"{nest['tensor']} {nest['shape']} at {nest['level']}"
        parts += [
            f"<g><title>{escape(hint)}</title>",
            _rect(x, top, _NEST_WIDTH, _NEST_HEIGHT, _colour(nest, kernel), rounded=4),
            _text(x + 8, top + 19, _cut(kinds, 21), "on"),
            _text(x + 8, top + 36, _cut("x".join(str(n) for n in nest["shape"]) or "scalar", 22), "on small"), "</g>",
        ]  # fmt: skip
    recomputed = _recomputed(kernel)
    if recomputed:
        parts.append(_rect(_BOX_LEFT + _GAP, y + height - 20, 9, 9, _REGISTERS))
        listed = _cut("recomputed in registers: " + ", ".join(recomputed), 104)
        parts.append(_text(_BOX_LEFT + 26, y + height - 11, listed, "small"))
    return parts


def _recomputed(kernel: dict[str, Any]) -> list[str]:
    nodes = [n for e in kernel["edges"] if e["mode"] == "recompute" for n in e["nodes"]]
    return list(dict.fromkeys(kind_of(n) for n in nodes))


def _colour(nest: dict[str, Any], kernel: dict[str, Any]) -> str:
    modes = {e["tensor"]: e["mode"] for e in kernel["edges"]}
    if nest["tensor"] not in modes:
        return _FAR
    return _STREAMED if modes[nest["tensor"]] == "stream" else _NEAR


def _details(kernel: dict[str, Any], facts: dict[str, Any]) -> str:
    main = facts["target"]["main_level"]
    nests = "".join(
        f"<tr><td><code>{escape(n['tensor'])}</code></td><td>{escape(n['level'])}</td><td>{escape(_vector(n))}</td>"
        f"<td>{escape(' '.join(f'{a}:{s}' for a, s in n['register'].items()))}</td></tr>"
        for n in kernel["nests"]
    )
    edges = "".join(
        f"<tr><td><code>{escape(e['tensor'])}</code></td><td>{escape(e['mode'])}</td><td>{escape(e['level'])}</td>"
        f"<td>{size_text(e['bytes'])}</td></tr>"
        for e in kernel["edges"]
    )
    stream = kernel["stream"]
    streamed = f"axis {stream['axis']} of {stream['tensor']} in blocks of {stream['block']}" if stream else "nothing"
    rows = [
        ("nodes", ", ".join(kernel["nodes"])),
        ("tile", " ".join(f"{a}:{n}" for a, n in kernel["tile"].items()) or "whole"),
        ("intermediates", f"{size_text(kernel['footprint_bytes'])} at {kernel['footprint_level']}"),
        ("streamed", streamed),
        ("a call", f"{time_text(kernel['predicted_us'])}, {size_text(kernel['traffic_bytes'])} from and to {main}"),
        ("why", kernel["reason"] or "one nest, and nothing to join"),
    ]
    listed = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in rows)
    table = f"<table><tr><th>nest</th><th>result at</th><th>vector</th><th>register tile</th></tr>{nests}</table>"
    if edges:
        table += f"<table><tr><th>edge</th><th>mode</th><th>level</th><th>whole tensor</th></tr>{edges}</table>"
    head = f"<summary><b>{escape(kernel['name'])}</b> {escape(kernel['summary'])}</summary>"
    return f"<details>{head}<dl>{listed}</dl>{table}</details>"


def _vector(nest: dict[str, Any]) -> str:
    return f"{nest['vector']} x{nest['lanes']}" if nest["vector"] else "-"


def _svg(height: float, parts: list[str], label: str) -> str:
    size = f'viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _rect(
    x: float, y: float, width: float, height: float, colour: str, opacity: float = 1, rounded: int = 2, border: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{rounded}"'
    line = f' stroke="{border}"' if border else ""
    return f'<rect {place} fill="{colour}" opacity="{opacity}"{line}/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "\u2026"
