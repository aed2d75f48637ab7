"""ONNX models for ranges of sizes: the Graph with forms of its inputs' extents, and what it takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tilewright.dynamic.parts import name_of
from tilewright.dynamic.ranged_model import RangedModel, Ways, compile_ranges
from tilewright.dynamic.spans import Places, Span, read_spans
from tilewright.dynamic.variants import OpenPort
from tilewright.errors import OpenShapeError, OptionError
from tilewright.frontend.open_graphs import with_rooms
from tilewright.ir.forms.graph import Form, Graph, Part, Room
from tilewright.ops.extents import settled

if TYPE_CHECKING:
    from tilewright.frontend.onnx.model import OpenValue

Shapes = Mapping[str, int | tuple[int, ...]]


def ranged_model(source: Any, shapes: Shapes, dynamic: Mapping[Any, Any], ways: Ways) -> RangedModel:
    """An ONNX model compiled for all sizes that `dynamic` tells; `shapes` settles the other dimensions."""
    from tilewright.frontend.onnx.model import ports

    inputs, outputs = ports(source, shapes)
    spans, places = read_spans(dynamic, {v.name: v.shape for v in inputs})
    takes = [_named(_port(v), spans, places.get(v.name, {})) for v in inputs]
    family = _Opened(_opened(source, takes, spans, places))
    kept, blocks = compile_ranges(family, spans, ways)
    return RangedModel(name_of(source), takes, [_port(v) for v in outputs], spans, places, kept, blocks)


@dataclass(frozen=True)
class _Opened:
    """One Graph with forms, for all sizes."""

    graph: Graph

    def exact(self, numbers: tuple[int, ...]) -> Graph:
        return replace(settled(self.graph, numbers), part=None)

    def open(self, rooms: tuple[Room, ...]) -> Graph:
        return with_rooms(self.graph, rooms)


def _port(value: OpenValue) -> OpenPort:
    return OpenPort(value.name, None if value.dtype is None else value.dtype.numpy, value.shape)


def _named(port: OpenPort, spans: tuple[Span, ...], axes: Mapping[int, int]) -> OpenPort:
    """With the names of the dimensions that vary."""
    if port.shape is None and axes:
        raise OptionError(f"dynamic: the model does not say how many axes input {port.name!r} has; give it a shape")
    shape = None if port.shape is None else tuple(
        spans[axes[k]].name if k in axes else n for k, n in enumerate(port.shape))  # fmt: skip
    return OpenPort(port.name, port.dtype, shape)


def _opened(source: Any, takes: list[OpenPort], spans: tuple[Span, ...], places: Places) -> Graph:
    from tilewright.frontend.onnx.model import load

    full: dict[str, tuple[int, ...]] = {}
    forms: dict[str | int, tuple[Form, ...]] = {}
    for port in takes:
        axes = places.get(port.name, {})
        largest = [spans[axes[k]].high if k in axes else n for k, n in enumerate(port.shape or ())]
        left = next((k for k, n in enumerate(largest) if not isinstance(n, int)), None)
        if left is not None or port.shape is None:
            what = "its shape" if left is None else f"axis {left} ({largest[left] or 'without a name'})"
            raise OpenShapeError(
                f"input {port.name!r}: {what} stays open; settle it with shapes=, or give dynamic= its range"
            )
        full[port.name] = tuple(n for n in largest if isinstance(n, int))
        if axes:
            forms[port.name] = tuple(
                spans[axes[k]].form(axes[k]) if k in axes else Form(n) for k, n in enumerate(full[port.name])
            )
    return replace(load(source, full), part=Part(forms=forms))
