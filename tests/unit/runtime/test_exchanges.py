"""What an exchange puts where, on two ranks of one process: messages lie in a box until they are taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from tilewright.runtime.outputs import ArrayMemory
from tilewright.runtime.ranks import Array, Ranks
from tilewright.transform.spmd import Slices, Transfer

torch = pytest.importorskip("torch", reason="ranks pass arrays on by torch.distributed")


@dataclass
class Done:
    what: Callable[[], None] | None = None

    def wait(self, limit: timedelta) -> None:
        if self.what is not None:
            self.what()


@dataclass
class Box:
    """torch.distributed as one of two ranks sees it."""

    rank: int
    messages: dict[tuple[int, int], deque[Any]] = field(default_factory=dict)  # by who sends, and the tag

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return 2

    def isend(self, tensor: Any, peer: int, tag: int) -> Done:
        self.messages.setdefault((self.rank, tag), deque()).append(tensor.clone())
        return Done()

    def irecv(self, tensor: Any, peer: int, tag: int) -> Done:
        return Done(lambda: tensor.copy_(self.messages[peer, tag].popleft()))


def exchanged(moves: list[Transfer], sources: list[Array]) -> list[Array | None]:
    """What each rank has got."""
    messages: dict[tuple[int, int], deque[Any]] = {}
    ranks = [Ranks(Box(rank, messages), torch, 5.0) for rank in range(2)]
    values: list[dict[str, Array]] = [{"out": source} for source in sources]
    begun = [rank.begin(move, its, "step") for rank, move, its in zip(ranks, moves, values, strict=True)]
    for rank, passing, its in zip(ranks, begun, values, strict=True):
        rank.finish(passing, its, "step")
    return [its.get("in") for its in values]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory may hold by chance what was sent."""
    monkeypatch.setattr(ArrayMemory, "empty", lambda memory, shape, dtype: np.full(shape, -7, dtype))


def transfer(shape: tuple[int, ...], **more: Any) -> Transfer:
    return Transfer("send", "out", "in", shape, np.dtype(np.float32), **more)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (40_000,)])
def test_a_whole_array_is_sent(shape: tuple[int, ...]) -> None:
    place = tuple(slice(0, n) for n in shape)
    one = np.asarray(np.random.default_rng(0).standard_normal(shape), np.float32)
    nothing, came = exchanged([transfer(shape, sends=((1, place),)), transfer(shape, takes=((0, place),))],
                              [one, one * 0])  # fmt: skip
    assert nothing is None
    np.testing.assert_array_equal(came, one)


@pytest.mark.parametrize("cut", [0, 1], ids=["parts lie whole in memory", "parts lie in rows"])
@pytest.mark.parametrize("width", [6, 300])
def test_parts_come_to_their_places(cut: int, width: int) -> None:
    shape = (width, width)
    halves: list[Slices] = []
    for n in range(2):
        part = slice(n * width // 2, (n + 1) * width // 2)
        halves.append((part, slice(0, width)) if cut == 0 else (slice(0, width), part))
    whole = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    moves = [transfer(shape, sends=((1 - n, (slice(None), slice(None))),), takes=((0, halves[0]), (1, halves[1])))
             for n in range(2)]  # fmt: skip
    for found in exchanged(moves, [np.ascontiguousarray(whole[half]) for half in halves]):
        np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("shape", [(), (4, 3)])
def test_terms_are_added_up_in_the_order_of_ranks(shape: tuple[int, ...]) -> None:
    place = tuple(slice(0, n) for n in shape)
    rng = np.random.default_rng(2)
    terms = [np.asarray(rng.standard_normal(shape), np.float32) for _ in range(2)]
    moves = [transfer(shape, operator="add", sends=((1 - n, place),), takes=((0, place), (1, place))) for n in range(2)]
    for found in exchanged(moves, terms):
        np.testing.assert_array_equal(found, terms[0] + terms[1])
