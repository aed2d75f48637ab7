"""Tiles that different workers write at the same time do not meet inside cache lines, and a table costs what is looked
up in it."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.cpu_stages import Step, model_of, programs
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import const
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import build_nest
from tilewright.tile_graph.algebra.propagate import Range
from tilewright.tile_graph.plan.form import Plan
from tilewright.tile_graph.traffic.moving import looked_up, shared_seconds

N1 = machine("neoverse_n1")  # two cores, lines of 64 bytes
CONTEXT = NestContext(N1, lambda t: Layout.natural(t.rank), frozenset())


def gather(rows: int, width: int, count: int) -> ModelProto:
    types = {"i": TensorProto.INT64}
    step: Step = ("Gather", ("x", "i"), "y", {"axis": 0})
    return model_of([step], {"x": (rows, width), "i": (count,)}, {"y": (count, width)}, types=types)


def added(rows: int, width: int) -> ModelProto:
    step: Step = ("Add", ("x", "z"), "y", {})
    return model_of([step], {"x": (1, rows, width), "z": (width,)}, {"y": (1, rows, width)})


def planned(model: ModelProto) -> Plan:
    return make_plan(programs(model, N1)["layout"], N1, "connected")


@pytest.mark.parametrize("model", [added(197, 768), added(331, 1001), gather(3000, 768, 150), gather(900, 515, 333)])
def test_rows_are_not_cut_between_workers(model: ModelProto) -> None:
    (kernel,) = planned(model).kernels
    last = f"o{len(model.graph.output[0].type.tensor_type.shape.dim) - 1}"
    assert kernel.tiles > 1
    assert last not in dict(kernel.cut)


def shared(shape: tuple[int, ...], tile: tuple[int, ...]) -> float:
    box = tuple(Range(const(0), np.array([n]), extent) for n, extent in zip(tile, shape, strict=True))
    return float(shared_seconds(Tensor("t", shape, dtypes.float32), box, CONTEXT)[0])


def test_what_is_shared() -> None:
    assert shared((100, 96), (100, 96)) == 0.0
    assert shared((100, 90), (50, 90)) == shared((1, 100, 90), (1, 25, 90)) < 1e-6  # one run each
    assert shared((100, 90), (100, 45)) > 10 * shared((100, 90), (50, 90))
    # runs of whole lines share none in buffers of ours
    assert 0.0 < shared((100, 96), (100, 48)) < 0.5 * shared((100, 90), (100, 45))
    assert shared((10, 90, 16), (10, 45, 16)) < 0.5 * shared((10, 90, 15), (10, 45, 15))
    # but where a row begins inside a line its first half is no less shared for being of whole lines
    assert shared((100, 90), (100, 48)) > 0.9 * shared((100, 90), (100, 45))


def test_a_table_costs_what_is_looked_up() -> None:
    program = programs(gather(5000, 64, 30))["fold"]
    nest = build_nest(program.computes[-1], [], {})
    table, places = (next(t for t in nest.reads() if len(t.shape) == rank) for rank in (2, 1))
    points = prod((30, 64))
    assert looked_up(nest, table, points, CONTEXT) == 4 * points
    assert places not in nest.tables
    assert planned(gather(500_000, 64, 30)).kernels[0].estimate.seconds < 1e-4
