"""The nested partition as a picture: a box a part in the colour of its level, a line an edge where it is connected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

_WIDTH = 960
_GAP, _PAD, _HEAD, _ROW = 12, 9, 18, 22
_BESIDE = 2 * (_PAD + _HEAD)  # that nests of one row may lie above each other, where one is in a nearer part
_MOST_SAG = 24
_LETTER = 6.6  # of the small type that names are set in
_MOST_LETTERS = 22
_MOST_LINES = 120  # beyond, lines hide the boxes
# as on the page around it: near levels blue and green, far ones red
_COLOURS = ("#2f6fb7", "#16857a", "#3f8f3a", "#9a7a10", "#bf4d2c")
_INK, _SOFT, _PAPER = "var(--ink, #1c2126)", "var(--soft, #5a646e)", "var(--card, #ffffff)"


@dataclass
class _Box:
    """A part or a nest: where it is drawn, and what is in it."""

    title: str
    level: str
    width: float = 0.0
    height: float = 0.0
    x: float = 0.0
    y: float = 0.0
    inside: list[_Box] = field(default_factory=list)

    def walk(self) -> Iterator[_Box]:
        yield self
        for box in self.inside:
            yield from box.walk()


def partition_svg(facts: dict[str, Any]) -> str:
    """Of the facts of `explain --json`: equal kernels once, as they are listed there."""
    target = facts["target"]
    order = [level["name"] for level in target["levels"]]
    kernels = [_kernel(k, order[0]) for k in facts["kernels"]]
    count = f"{len(kernels)} kernel{'' if len(kernels) == 1 else 's'}"
    whole = _Box(f"{target['main_level']}: {count}", target["main_level"], inside=kernels)
    _laid_out(whole, _WIDTH)
    nests = {box.title: box for box in whole.walk() if not box.inside and box.level == order[0]}
    edges = [e for k in facts["kernels"] for e in k["meets"] if e["maker"] != e["reader"]]
    drawn = [e for e in edges if e["maker"] in nests and e["reader"] in nests]
    lines = [_line(nests[e["maker"]], nests[e["reader"]], e, order) for e in drawn] if len(drawn) <= _MOST_LINES else []
    below = whole.height + _ROW
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole.width:.0f} {below + 6:.0f}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11" role="img" '
        'aria-label="parts of the model inside parts, level by level">',
        *(_drawn(box, order) for box in whole.walk()), *lines, *_legend(order, edges, below), "</svg>",
    )) + "\n"  # fmt: skip


def _kernel(kernel: dict[str, Any], registers: str) -> _Box:
    times = f" x {kernel['calls']}" if kernel["calls"] > 1 else ""
    return _part(kernel["partition"], f"{kernel['name']}{times}: {kernel['partition']['level']}", registers)


def _part(part: dict[str, Any], title: str, registers: str) -> _Box:
    inside = [_Box(p, registers) if isinstance(p, str) else _part(p, p["level"], registers) for p in part["parts"]]
    return _Box(title, part["level"], inside=inside)


def _laid_out(box: _Box, room: float) -> None:
    """Sizes from the inside out, then places; what does not fit beside the others begins a new row."""
    if not box.inside:
        box.width, box.height = 2 * _PAD + _LETTER * len(_short(box.title)), float(_ROW)
        return
    for inner in box.inside:
        _laid_out(inner, room - 2 * _PAD)
    x, y, tallest, widest = float(_PAD), float(_HEAD + _PAD), 0.0, _LETTER * len(box.title) + 2 * _PAD
    for inner in box.inside:
        if x > _PAD and x + inner.width > room - _PAD:
            x, y, tallest = float(_PAD), y + tallest + _GAP, 0.0
        _moved(inner, x, y)
        x, tallest = x + inner.width + _GAP, max(tallest, inner.height)
        widest = max(widest, x - _GAP + _PAD)
    box.width, box.height = widest, y + tallest + _PAD


def _moved(box: _Box, x: float, y: float) -> None:
    for each in box.walk():
        each.x += x
        each.y += y


def _drawn(box: _Box, order: Sequence[str]) -> str:
    colour = _colour(box.level, order)
    is_nest = not box.inside
    text = _short(box.title) if is_nest else box.title
    place = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
    return (
        f'<rect {place} rx="4" fill="{_PAPER}" stroke="{colour}" stroke-width="{1 if is_nest else 1.5}">'
        f"<title>{escape(box.title)}</title></rect>"
        f'<text x="{box.x + _PAD:.1f}" y="{box.y + 14:.1f}" fill="{_INK if is_nest else colour}">{escape(text)}</text>'
    )


def _line(maker: _Box, reader: _Box, edge: dict[str, Any], order: Sequence[str]) -> str:
    """Below nests that lie beside each other; else from the lower edge of one to the upper edge of the other."""
    x, y, to_x = maker.x + maker.width * 0.6, maker.y + _ROW, reader.x + reader.width * 0.4
    is_beside = abs(reader.y - maker.y) < _BESIDE
    to_y = reader.y + (_ROW if is_beside else 0)
    sag = min(_MOST_SAG, 8 + abs(to_x - x) / 14)
    lower = (max(y, to_y) + sag,) * 2 if is_beside else (y + sag, to_y - sag)
    words = escape(f"{edge['tensor']} to {edge['reader']}: at {edge['level']}")
    curve = f"M{x:.1f},{y:.1f} C{x:.1f},{lower[0]:.1f} {to_x:.1f},{lower[1]:.1f} {to_x:.1f},{to_y:.1f}"
    return (f'<path d="{curve}" fill="none" stroke="{_colour(edge["level"], order)}" stroke-width="1.4" '
            f'stroke-opacity="0.75"><title>{words}</title></path>')  # fmt: skip


def _legend(order: Sequence[str], edges: Sequence[dict[str, Any]], y: float) -> Iterator[str]:
    x = 0.0
    for level in order:
        count = sum(e["level"] == level for e in edges)
        if count:
            words = f"{count} between nests at {level}"
            yield f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="14" height="4" fill="{_colour(level, order)}"/>'
            yield f'<text x="{x + 20:.1f}" y="{y - 3:.1f}" fill="{_SOFT}">{escape(words)}</text>'
            x += 40 + _LETTER * len(words)


def _colour(level: str, order: Sequence[str]) -> str:
    place = len(_COLOURS) - 1 if level == order[-1] else min(order.index(level), len(_COLOURS) - 2)
    return f"var(--l{place}, {_COLOURS[place]})"


def _short(name: str) -> str:
    """Names differ at their end."""
    return name if len(name) <= _MOST_LETTERS else ".." + name[2 - _MOST_LETTERS :]
