"""Random models with an open dimension: the one Program for a range of it agrees with the Program for each number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.fuzz.graphs import random_case
from tests.unit.dynamic.test_extents import check
from tilewright.errors import CutError, TilewrightError, UnevenError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.graph import Form, Graph, Part, Room
from tilewright.ops.extents import lower_open
from tilewright.ops.lower import lower_with_recipes

QUICK = (2, 4, 9, 300)


def opened(graph: Graph, seed: int) -> Graph | None:
    """The Graph with one extent of its inputs, wherever it is, as a run-time number."""
    extents = sorted({int(n) for v in graph.inputs for n in v.shape if n > 2})  # type: ignore[operator, call-overload]
    if not extents:
        return None
    number = extents[seed % len(extents)]
    room = Room(max(number - 2, 2), number + 1)
    forms: dict[str | int, tuple[Form, ...]] = {
        v.name: tuple(Form(0, (1,)) if n == number else Form(int(n)) for n in v.shape)  # type: ignore[call-overload]
        for v in graph.inputs
    }
    return replace(graph, part=Part(rooms=(room,), forms=forms))


def agree(seed: int) -> bool:
    """Whether there is such a Program; an assertion where it is wrong."""
    graph = opened(load(random_case(seed).model), seed)
    if graph is None or graph.part is None:
        return False
    try:
        lower_open(graph, lower_with_recipes)
    except (CutError, UnevenError):
        return False
    (room,) = graph.part.rooms
    with np.errstate(all="ignore"):
        for number in range(room.low, room.high + 1):
            try:
                check(graph, (number,))
            except TilewrightError as error:
                raise AssertionError(f"seed {seed}, {number}: {error}") from error
    return True


@pytest.mark.parametrize("seed", QUICK)
def test_open_extents_agree(seed: int) -> None:
    assert agree(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_many_open_extents_agree(first: int) -> None:
    found = [agree(seed) for seed in range(first, first + 100)]
    assert sum(found) > 10
