"""Kernels whose loops end where a run tells give what the Program for that number alone gives, whatever lies behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.dynamic.test_extents import CASES, open_graph
from tilewright import Options
from tilewright.api import compile_open
from tilewright.ir.forms.graph import Graph, Room
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops.extents import settled
from tilewright.ops.lower import lower

QUICK = ("attention",)
WIDE = Room(5, 40)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES if n != "all in order"]
)
def test_one_model_for_all_numbers(name: str, kernel_cache: Path) -> None:
    nodes, inputs, constants = CASES[name]
    is_wide = name not in ("gather by run-time places", "split", "the largest")
    room = WIDE if is_wide else Room(5, 8)
    rooms = (room, Room(9, 16)) if any("m" in shape for _, shape in inputs.values()) else (room,)
    graph = open_graph(nodes, inputs, rooms, **constants)
    model = compile_open(graph, Options(cache_dir=kernel_cache, threads=2))
    for number in (room.low, room.low + 1, room.high - 3, room.high - 1, room.high):
        check(model, graph, (number, *(9 + number % 8 for _ in rooms[1:])))


def check(model: Any, graph: Graph, numbers: tuple[int, ...]) -> None:
    exact = lower(settled(graph, numbers))
    rng = np.random.default_rng(sum(numbers))
    given = [rng.standard_normal(t.shape).astype(t.dtype.numpy) * (0 if t.dtype.is_int else 1) for t in exact.inputs]
    wanted = evaluate(exact, {t.name: a for t, a in zip(exact.inputs, given, strict=True)})
    found = model.at(numbers, given)
    for got, want in zip(found, wanted.values(), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
