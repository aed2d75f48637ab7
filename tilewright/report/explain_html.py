"""The explanation as one HTML page: time, roofline, memory, and every kernel's tree of tiles, neighbours and code.

Nothing is loaded from elsewhere: style, script, facts and code are inside, so that the file can be kept and sent. What
is drawn is drawn by the scripts of `page/` from the facts that `--json` gives.
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from importlib.resources.abc import Traversable
from string import Template
from typing import Any

from tilewright.calls.profiles import Profile
from tilewright.compiler.pipeline import Artifact
from tilewright.report.explain import size_text
from tilewright.report.facts import explain_json
from tilewright.report.partition_svg import partition_svg

_SCRIPTS = ("base.js", "charts.js", "kernels.js", "page.js")


def explain_html(artifact: Artifact, name: str = "", measured: Profile | None = None) -> str:
    """The page, titled by `name`, the model's file, or else by its graph; with the times of a profile."""
    facts = explain_json(artifact, measured)
    title = f"{name or facts['model']} for {facts['target']['name']}"
    folder = resources.files("tilewright.report") / "page"
    script = "\n".join((folder / file).read_text(encoding="utf-8") for file in _SCRIPTS)
    body = [_header(title, facts), *([_sections(facts, folder)] if facts["kernels"] else []), _footer(facts)]
    return "\n".join((
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{(folder / 'page.css').read_text(encoding='utf-8')}</style></head>",
        "<body>", *body,
        f'<script type="application/json" id="facts">{_embedded(facts)}</script>',
        f'<script type="application/json" id="sources">{_embedded(artifact.sources)}</script>',
        f"<script>{script}</script></body></html>\n",
    ))  # fmt: skip


def _embedded(value: Any) -> str:
    """JSON that nothing in it can end: a text may hold the tags that HTML looks for."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _header(title: str, facts: dict[str, Any]) -> str:
    target = facts["target"]
    levels = ", ".join(f"{x['name']} {size_text(x['bytes'])}" for x in target["levels"][:-1])
    machine = f"{target['architecture']}, {target['units']} units, {target['vector_bytes']}-byte vectors, {levels}"
    schedule = f"schedule {facts['schedule']}; " if facts["schedule"] else ""
    lead = "" if facts["kernels"] else "<p>No plan was made: compilation stopped before it.</p>"
    return (
        f'<header><div><h1>{escape(title)}</h1><p class="soft small">{escape(schedule + machine)}</p>{lead}'
        "<noscript><p>This page is drawn by its own script, which is switched off here; "
        "<code>tilewright explain</code> prints the same as text.</p></noscript></div>"
        '<button id="theme" type="button" title="light or dark" aria-label="light or dark">&#9680;</button></header>'
    )


def _time(microseconds: float) -> str:
    """As the scripts have it."""
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= scale:
            return f"{microseconds / scale:.3g} {unit}"
    return f"{microseconds:.3g} \u00b5s"


def _figures(facts: dict[str, Any]) -> str:
    totals, main = facts["totals"], facts["target"]["main_level"]
    between = totals["intermediate_bytes"]
    near = totals["intermediate_bytes_on_chip"] / max(1, between)
    calls = "" if facts["calls"] == facts["kernels_distinct"] else f", {facts['calls']:,} calls"
    operators = f"from {facts['operators']:,} operators{calls}"
    measured = totals["measured_us"]
    arena = f"arena {size_text(totals['arena_bytes'])}" if totals["arena_bytes"] is not None else "nothing laid out yet"
    cards = [
        *([] if measured is None else [(_time(measured), "measured, all kernels", None)]),
        (_time(totals["predicted_us"]), "predicted, all kernels", None),
        (f"{facts['kernels_distinct']:,} kernels", operators, None),
        (size_text(totals["traffic_bytes"]), f"predicted from and to {main}", None),
        (f"{100 * near:.0f}% on chip", f"of {size_text(between)} between the operators", near),
        (f"{size_text(totals['weight_bytes'])}", f"of weights, {arena}", None),
    ]
    return '<div class="figures">' + "".join(
        f'<div class="figure"><b>{escape(value)}</b><span>{escape(label)}</span>'
        + ("" if part is None else f'<div class="meter"><i style="width:{100 * part:.1f}%"></i></div>') + "</div>"
        for value, label, part in cards
    ) + "</div>"  # fmt: skip


def _sections(facts: dict[str, Any], folder: Traversable) -> str:
    is_measured = facts["totals"]["measured_us"] is not None
    return Template((folder / "sections.html").read_text(encoding="utf-8")).substitute(
        main=escape(facts["target"]["main_level"]), timed="measured" if is_measured else "predicted",
        figures=_figures(facts), decided=_decided(facts), partition=partition_svg(facts),
    )  # fmt: skip


def _decided(facts: dict[str, Any]) -> str:
    seconds = facts["compile_seconds"]
    most = max(seconds["stages"].values(), default=0.0) or 1.0
    stages = "".join(
        f'<span>{escape(name)}</span><i style="width:{100 * s / most:.1f}%"></i><span class="num">{s:.2f} s</span>'
        for name, s in seconds["stages"].items()
    )
    remarks = "".join(f"<p class='small'>{escape(remark)}</p>" for remark in facts["decided"])
    decided = f"<details class='more'><summary>Decided on the way: {len(facts['decided'])}</summary>{remarks}</details>"
    return (
        f"<section><h2>Compiled in {seconds['total']:.2f} s</h2>"
        f'<div class="stages">{stages}</div>{decided if remarks else ""}</section>'
    )


def _footer(facts: dict[str, Any]) -> str:
    if facts["kernels"]:
        return "<footer>Times are predicted by a model of the machine unless they are called measured.</footer>"
    stages = ", ".join(f"{name} {s:.2f}" for name, s in facts["compile_seconds"]["stages"].items())
    return f"<main><p class='soft small'>{escape(stages)}</p></main>"
