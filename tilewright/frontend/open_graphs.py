"""One Graph of those that a front end makes for some sizes: where they differ, in numbers alone, stand forms of the
numbers that the sizes follow from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.errors import UnevenError
from tilewright.ir.forms.graph import Form, Graph, Part, Room
from tilewright.ops.extents import are_equal, element_forms, form_of, is_begin, sample_numbers


def opened(at: Callable[[tuple[int, ...]], Graph], rooms: Sequence[Room]) -> Graph:
    """The Graph for all numbers in the rooms, from those that `at` makes for some."""
    samples = sample_numbers(rooms)
    return merged([at(numbers) for numbers in samples], samples)


def merged(graphs: Sequence[Graph], samples: Sequence[tuple[int, ...]]) -> Graph:
    """Of Graphs at these numbers, the first of which are the largest."""
    first = graphs[0]
    if any(_outline(g) != _outline(first) for g in graphs):
        raise UnevenError("the module does something else for other sizes")
    forms: dict[str | int, tuple[Form, ...]] = {}
    begins: dict[str, tuple[Form, ...]] = {}
    for values in zip(*(g.inputs for g in graphs), strict=True):
        extents = _extents([v.shape for v in values], samples)
        if any(f.varies for f in extents):
            forms[values[0].name] = extents
    for name, array in first.constants.items():
        arrays = [g.constants[name] for g in graphs]
        if all(_is_same(a, array) for a in arrays):
            continue
        if len({a.shape for a in arrays}) == 1:
            forms[name] = element_forms(arrays, samples)
        elif all(is_begin(a, array) for a in arrays):
            begins[name] = _extents([a.shape for a in arrays], samples)
        else:
            raise UnevenError(f"the constant '{name}' holds other elements for other sizes")
    return replace(first, part=Part(forms=forms, begins=begins))


def with_rooms(graph: Graph, rooms: tuple[Room, ...]) -> Graph:
    """A Graph whose part has forms, for rooms that these hold in."""
    part = graph.part or Part()
    inputs = tuple(replace(v, shape=tuple(f.most(rooms) for f in part.forms[v.name])) if v.name in part.forms else v
                   for v in graph.inputs)  # fmt: skip
    return replace(graph, inputs=inputs, part=replace(part, rooms=rooms))


def _extents(shapes: Sequence[Sequence[Any]], samples: Sequence[tuple[int, ...]]) -> tuple[Form, ...]:
    return tuple(form_of([int(n) for n in extents], samples) for extents in zip(*shapes, strict=True))


def _outline(graph: Graph) -> Any:
    """What has to be the same."""
    nodes = tuple((n.op, n.domain, n.version, n.inputs, n.outputs, tuple(map(_plain, sorted(n.attributes.items()))))
                  for n in graph.nodes)  # fmt: skip
    inputs = tuple((v.name, v.dtype.name, len(v.shape)) for v in graph.inputs)
    constants = tuple((name, a.dtype.str, a.ndim) for name, a in graph.constants.items())
    return inputs, graph.outputs, nodes, constants


def _plain(attribute: tuple[str, Any]) -> Any:
    name, value = attribute
    if isinstance(value, Graph):
        bodies = tuple((k, a.tobytes()) for k, a in value.constants.items())
        return name, _outline(value), bodies
    return name, (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else repr(value)


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Parameters are views of the same memory in all Graphs, and need not be looked at."""
    if one is other:
        return True
    same_place = one.__array_interface__["data"] == other.__array_interface__["data"]
    if same_place and one.shape == other.shape and one.strides == other.strides and one.dtype == other.dtype:
        return True
    return are_equal(one, other)
