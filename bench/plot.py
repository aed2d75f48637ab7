"""Grouped bar charts as SVG text, so that results are seen wherever a browser is."""

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1f6f8b", "#e08e45", "#7a9e5f", "#a05195", "#8c8c8c", "#c44e52")
BAR, GAP, LEFT, TOP, WIDTH, RIGHT = 13, 14, 150, 64, 560, 70


def grouped_bars(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: str = "x",
    marked: float | None = None,
) -> str:
    """Horizontal bars, one block a group and one bar a series; `marked` draws a line at that value."""
    if any(len(values) != len(groups) for values in series.values()):
        raise ValueError("every series needs one value a group")
    known = [value for values in series.values() for value in values if value is not None]
    largest = max([*known, marked or 0.0], default=1.0) or 1.0
    block = BAR * len(series) + GAP
    height = TOP + block * len(groups) + 20
    total = LEFT + WIDTH + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" font-family="sans-serif">',
        f'<rect width="{total}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    x = 12.0
    for index, name in enumerate(series):
        parts.append(f'<rect x="{x:.0f}" y="34" width="11" height="11" fill="{_colour(index)}"/>')
        parts.append(f'<text x="{x + 15:.0f}" y="44" font-size="12">{escape(name)}</text>')
        x += 30 + 7.0 * len(name)
    for row, group in enumerate(groups):
        top = TOP + row * block
        middle = top + BAR * len(series) / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle:.0f}" font-size="12" text-anchor="end">{escape(group)}</text>')
        for index, values in enumerate(series.values()):
            parts += _bar(values[row], largest, top + index * BAR, _colour(index), unit)
    if marked is not None:
        at = LEFT + WIDTH * marked / largest
        line = f'x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{height - 20}"'
        parts.append(f'<line {line} stroke="black" stroke-dasharray="4 3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(value: float | None, largest: float, top: int, colour: str, unit: str) -> list[str]:
    if value is None:
        return [f'<text x="{LEFT + 4}" y="{top + 10}" font-size="10" fill="#888">no number</text>']
    width = WIDTH * value / largest
    return [
        f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>',
        f'<text x="{LEFT + width + 4:.1f}" y="{top + 10}" font-size="10">{value:.2f}{escape(unit)}</text>',
    ]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
