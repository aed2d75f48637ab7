"""Nodes in an order in which each comes behind what it reads."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tilewright.ir.forms.graph import Node, read_by


def in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes so that each stands behind those whose outputs it and its bodies read: as they are, where they do.

    Tools that change models lose sight of what bodies read. Nodes in a circle stay as they are."""
    makers: dict[str, int] = {}
    for place, node in enumerate(nodes):
        for name in node.outputs:
            makers.setdefault(name, place)
    needs = [{makers[name] for name in read_by(node) if name in makers} for node in nodes]
    if all(made < place for place, found in enumerate(needs) for made in found):
        return tuple(nodes)
    readers: list[list[int]] = [[] for _ in nodes]
    for place, found in enumerate(needs):
        for made in found:
            readers[made].append(place)
    waits = [len(found) for found in needs]
    ready = [place for place, count in enumerate(waits) if not count]  # sorted, so that it is a heap
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(nodes[place])
        for reader in readers[place]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, reader)
    return tuple(order) if len(order) == len(nodes) else tuple(nodes)
