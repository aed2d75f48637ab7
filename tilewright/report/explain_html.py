"""The explanation as one HTML page: kernels drawn over the model's operators, memory levels, bars of traffic and time.

Nothing is loaded from elsewhere: style and pictures are inside, so the file can be kept and sent.
"""

from __future__ import annotations

from html import escape
from typing import Any

from tilewright.compiler import Artifact
from tilewright.report.explain import size_text, time_text
from tilewright.report.facts import explain_json
from tilewright.report.model_view import kind_of

_FAR, _NEAR, _REGISTERS, _STREAMED = "#c2543d", "#2f7f5f", "#4067a8", "#8a5fb0"

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fbfaf8 }
body { max-width: 1200px; margin: 2em auto; padding: 0 1em; overflow-wrap: anywhere }
h1 { font-size: 1.5em; margin-bottom: .1em } h2 { font-size: 1.15em; margin-top: 2em }
.quiet { color: #666 } .small { font-size: 12px; color: #666 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2em 1.2em; margin: .5em 0 }
dt { color: #666 } dd { margin: 0 }
details { margin: .3em 0; border-top: 1px solid #e4e0d8; padding: .4em 0 } summary { cursor: pointer }
table { border-collapse: collapse; margin: .5em 0 } .wide { overflow-x: auto }
td, th { text-align: left; padding: .15em .9em .15em 0; vertical-align: top; font-weight: normal }
th { color: #666 } code { font-size: .92em }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .35em 0 0 }
.mark { display: inline-block }
.bar { display: flex; height: 1.6em; border-radius: 2px; overflow: hidden } .bar span { min-width: 2px }
.level { position: relative; margin: .3em 0; border-radius: 2px; padding: .15em .5em }
.level i { position: absolute; left: 0; top: 0; bottom: 0; border-radius: 2px; opacity: .45 }
.level b { position: relative; font-weight: normal }
.kernel { display: grid; grid-template-columns: 1fr 16em; gap: .3em 1.2em; align-items: start; margin: .7em 0 }
.frame { border: 1px solid #999 }
.frame { border-left: 8px solid #c2543d; border-radius: 6px; background: #fff; padding: .5em .7em }
.nests { display: flex; flex-wrap: wrap; gap: .5em; margin: .4em 0 0 }
.nest { color: #fff; border-radius: 4px; padding: .3em .6em; min-width: 8em; max-width: 100%; font-size: 13px }
.nest div { font-size: 12px; opacity: .9 }
.amounts div.amount { height: 1em; border-radius: 2px; min-width: 2px }
@media (max-width: 700px) {
  .kernel { grid-template-columns: 1fr } dl { grid-template-columns: 1fr } dd { margin: 0 0 .4em }
}
"""


def explain_html(artifact: Artifact, name: str = "") -> str:
    """The page, titled by `name`, the model's file, or else by its graph."""
    facts = explain_json(artifact)
    title = f"{name or facts['model']} for {facts['target']['name']}"
    body = [f"<h1>{escape(title)}</h1>", _lead(facts)]
    if facts["kernels"]:
        body += [_between(facts), _levels(facts), _legend(facts), _kernels(facts), "<h2>Every kernel</h2>"]
        body += [_details(kernel, facts) for kernel in facts["kernels"]]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title>"
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
    near = 100 * totals["intermediate_bytes_on_chip"] / max(1, totals["intermediate_bytes"])
    near_text = f"{size_text(totals['intermediate_bytes_on_chip'])} stay on chip"
    far_text = f"{size_text(totals['intermediate_bytes_stored'])} go to {main}"
    parts = ((near, _NEAR, near_text), (100 - near, _FAR, far_text))
    bar = "".join(
        f'<span style="width:{share:.2f}%;background:{colour}"></span>' for share, colour, _ in parts if share
    )
    keys = " &nbsp; ".join(_key(colour, text) for _, colour, text in parts)
    return (
        f"<h2>Between the operators: {size_text(totals['intermediate_bytes'])} of tensors</h2>"
        f'<p class="quiet">Schedule none stores and loads all of it; here<br>{keys}</p>'
        f'<div class="bar" role="img" aria-label="{escape(f"{near_text}, {far_text}")}">{bar}</div>'
    )


def _levels(facts: dict[str, Any]) -> str:
    """The memory levels with the most that a kernel's intermediates take of them."""
    target = facts["target"]
    level, main = target["tile_level"], target["main_level"]
    most = max(k["footprint_bytes"] for k in facts["kernels"])
    rows = []
    for number, item in enumerate(target["levels"]):
        colour = _REGISTERS if number == 0 else _FAR if item["name"] == main else _NEAR
        width = 100 * (number + 1) / len(target["levels"])
        size = "" if item["name"] == main else size_text(item["bytes"])
        used = ""
        if item["name"] == level:
            share = 100 * min(1.0, most / item["bytes"])
            used = f'<i style="width:{share:.1f}%;background:{colour}"></i>'
            size += f"; the largest tile's intermediates take {size_text(most)}"
        text = f"<b>{escape(item['name'])} &nbsp; {escape(size)}</b>"
        # colours with little opacity, and a width that may not be less than the text
        style = f"background:{colour}2e;width:max-content;min-width:calc({width:.0f}% - 1em);max-width:calc(100% - 1em)"
        rows.append(f'<div class="level" style="{style}">{used}{text}</div>')
    return f"<h2>Memory of one of {target['units']} units</h2>{''.join(rows)}"


def _legend(facts: dict[str, Any]) -> str:
    main, near = facts["target"]["main_level"], facts["target"]["tile_level"]
    keys = ((_FAR, f"result goes to {main}"), (_NEAR, f"stays at {near}"), (_STREAMED, f"streamed through {near}"),
            (_REGISTERS, "in registers"))  # fmt: skip
    marks = [_key(colour, text) for colour, text in keys]
    lead = "A frame is a kernel; a box inside is a loop nest with the model's operators."
    lead += " Beside it its predicted time and traffic."
    return f'<h2>Kernels</h2><p class="quiet">{lead}<br>{" &nbsp; ".join(marks)}</p>'


def _key(colour: str, text: str) -> str:
    return f'<span class="mark"><span class="key" style="background:{colour}"></span>{escape(text)}</span>'


def _kernels(facts: dict[str, Any]) -> str:
    slowest = max(1e-9, *(k["predicted_us_all_calls"] for k in facts["kernels"]))
    busiest = max(1, *(k["traffic_bytes_all_calls"] for k in facts["kernels"]))
    rows = []
    for kernel in facts["kernels"]:
        spent, moved = kernel["predicted_us_all_calls"], kernel["traffic_bytes_all_calls"]
        bars = ((spent / slowest, _REGISTERS, time_text(spent)),
                (moved / busiest, _FAR, f"{size_text(moved)} from and to {facts['target']['main_level']}"))  # fmt: skip
        amounts = "".join(
            f'<div class="amount" style="width:{100 * part:.1f}%;background:{colour}"></div>'
            f'<div class="small">{escape(label)}</div>'
            for part, colour, label in bars
        )
        rows.append(f'<div class="kernel">{_kernel_picture(kernel)}<div class="amounts">{amounts}</div></div>')
    return "".join(rows)


def _kernel_picture(kernel: dict[str, Any]) -> str:
    calls = f"{kernel['calls']} calls" if kernel["calls"] > 1 else "1 call"
    head = f'<b>{escape(kernel["name"])}</b> <span class="small">{calls}, {kernel["tiles"]} tiles: '
    head += f"{escape(kernel['summary'])}</span>"
    boxes = []
    for nest in kernel["nests"]:
        kinds = " + ".join(dict.fromkeys(kind_of(n) for n in nest["nodes"]))
        shape = "x".join(str(n) for n in nest["shape"]) or "scalar"
        hint = f"{nest['tensor']} {nest['shape']} at {nest['level']}"
        boxes.append(
            f'<div class="nest" style="background:{_colour(nest, kernel)}" title="{escape(hint)}">'
            f"{escape(kinds)}<div>{shape}</div></div>"
        )
    recomputed = _recomputed(kernel)
    listed = escape("recomputed in registers: " + ", ".join(recomputed))
    again = f'<div class="small">{_key(_REGISTERS, "")}{listed}</div>' if recomputed else ""
    return f'<div class="frame">{head}<div class="nests">{"".join(boxes)}</div>{again}</div>'


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
    streamed = "nothing"
    if stream:
        streamed = f"{', '.join(stream['tensors'])} in blocks of {stream['block']} of {stream['extent']}"
    rows = [
        ("nodes", ", ".join(kernel["nodes"])),
        ("tile", " ".join(f"{a}:{n}" for a, n in kernel["tile"].items()) or "whole"),
        ("intermediates", f"{size_text(kernel['footprint_bytes'])} at {kernel['footprint_level']}"),
        ("streamed", streamed),
        ("a call", f"{time_text(kernel['predicted_us'])}, {size_text(kernel['traffic_bytes'])} from and to {main}"),
        ("why", kernel["reason"] or "one nest, and nothing to join"),
    ]
    listed = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in rows)
    table = _table(f"<tr><th>nest</th><th>result at</th><th>vector</th><th>register tile</th></tr>{nests}")
    if edges:
        table += _table(f"<tr><th>edge</th><th>mode</th><th>level</th><th>whole tensor</th></tr>{edges}")
    head = f"<summary><b>{escape(kernel['name'])}</b> {escape(kernel['summary'])}</summary>"
    return f"<details>{head}<dl>{listed}</dl>{table}</details>"


def _table(rows: str) -> str:
    """Of its own width, to be moved sideways where the page is narrower."""
    return f'<div class="wide"><table>{rows}</table></div>'


def _vector(nest: dict[str, Any]) -> str:
    return f"{nest['vector']} x{nest['lanes']}" if nest["vector"] else "-"
