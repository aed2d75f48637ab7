"""Elements brought from lane to lane: columns of a square of vectors, every other element of two."""

from __future__ import annotations

from collections.abc import Sequence


def column(rows: Sequence[str], number: int, kind: str) -> str:
    """The text of one column: rows interleaved by halves, as often as one doubles to reach the number of lanes.

    What columns have in common is the same text, which compilers compute once.
    """
    half = len(rows) // 2
    stage = list(rows)
    for _ in range(len(rows).bit_length() - 1):
        stage = [
            f"tw_{'high' if i % 2 else 'low'}_{kind}({stage[i // 2]}, {stage[i // 2 + half]})"
            for i in range(len(rows))
        ]
    return stage[number]


def functions(kind: str, mask: str, lanes: int) -> str:
    """The first or second halves of two vectors, interleaved; every other element of both."""
    orders = {
        name: [start + i // 2 + (lanes if i % 2 else 0) for i in range(lanes)]
        for name, start in (("low", 0), ("high", lanes // 2))
    }
    orders["even"] = [2 * i for i in range(lanes)]
    text = ""
    for name, places in orders.items():
        order = ", ".join(map(str, places))
        text += (
            f"static inline {kind} tw_{name}_{kind}({kind} a, {kind} b) {{\n"
            "#if defined(__clang__)\n"
            f"    return __builtin_shufflevector(a, b, {order});\n"
            "#else\n"
            f"    return __builtin_shuffle(a, b, ({mask}){{{order}}});\n"
            "#endif\n}\n"
        )
    return text
