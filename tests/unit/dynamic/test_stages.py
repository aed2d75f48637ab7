"""Which numbers a part is compiled for, and which it leaves to the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewright.dynamic.stages import Following, ModelStage, Opening, PartNumbers, Slots, Tie, room_for
from tilewright.errors import TilewrightError, UnevenError
from tilewright.ir.forms.graph import Form, Room


class Table:
    """Stages that are made of nothing; of some rooms there are none."""

    def __init__(self, refused: tuple[Room, ...] = ()) -> None:
        self.following, self.built, self.refused, self.said = Following(), list[Slots](), refused, list[str]()

    def find(
        self, *values: int, inherited: tuple[Room, ...] = (), most: int | None = None, keep: int = 8
    ) -> ModelStage:
        return self.following.find(inherited, PartNumbers("kind", values, most), keep, self._build, self._refuse)

    def _build(self, slots: Slots) -> ModelStage:
        if any(slot in self.refused for slot in slots):
            raise UnevenError("too many")
        self.built.append(slots)
        return ModelStage(0, None, {}, (), {}, slots=slots)

    def _refuse(self, slots: Slots, error: TilewrightError) -> None:
        self.said.append(f"{slots}: {error}")


def test_the_first_numbers_and_small_ones_are_compiled_for() -> None:
    table = Table()
    for number in (12, 0, 1, 2, 12, 0):
        table.find(number)
    assert table.built == [(None,)] * 4
    for number in (3, 9, 10, 16, 17):
        table.find(number)
    assert table.built[4:] == [(Room(3, 4),), (Room(9, 16),), (Room(17, 32),)]
    assert table.find(11).left((11,)) == (11,) and table.find(12).left((12,)) == ()


@pytest.mark.parametrize(
    ("number", "most", "room"),
    [(2, None, None), (3, None, Room(3, 4)), (33, 40, Room(33, 40)), (33, 33, None), (1 << 40, None, None)],
)
def test_rooms(number: int, most: int | None, room: Room | None) -> None:
    assert room_for(number, most) == room


def test_numbers_that_grow_together_are_one() -> None:
    table = Table()
    for number in (3, 4, 5, 6, 9):
        table.find(number, number + 1, 7, number)
    ties = (Tie(0, 1), None, Tie(0, 0))
    assert table.built == [(None,) * 4, *((Room(*room), *ties) for room in ((3, 4), (5, 8), (9, 16)))]
    stage = table.find(10, 5, 7, 10)
    assert stage.slots == (Room(9, 16), Room(5, 8), None, Tie(0, 0))
    forms = Opening(stage.slots).own(0, PartNumbers("kind", (10, 5, 7, 10)))
    assert forms == [Form(0, (1,)), Form(0, (0, 1)), Form(7), Form(0, (1,))]


def test_numbers_of_the_stage_before_stay_open() -> None:
    table = Table()
    before = (Room(9, 16),)
    assert table.find(10, 5, inherited=before).slots == (Room(9, 16), None)
    assert table.find(11, 6, inherited=before).slots == (Room(9, 16), Tie(0, -5))
    assert table.find(11, 7, inherited=before).slots == (Room(9, 16), Room(5, 8))
    assert table.find(11, 7, inherited=before).left((11, 7)) == (11, 7)


def test_halves_are_tried_where_a_room_is_refused() -> None:
    table = Table(refused=(Room(33, 64), Room(33, 48)))
    for number in (5, 40, 39, 33, 50):
        table.find(number)
    assert table.built == [(None,), (Room(33, 40),), (Room(49, 64),)]
    assert len(table.said) == 2  # once each
    never = Table(refused=tuple(Room(low, high) for low in range(65) for high in range(low, 65)))
    for number in (5, 40, 41):
        assert never.find(number).slots == (None,)


def test_what_was_unused_for_longest_goes() -> None:
    table = Table()
    for number in (5, 0, 1, 5, 2, 0):
        table.find(number, keep=2)
    assert table.built == [(None,), (None,), (None,), (Room(5, 8),), (None,), (None,)]


def test_kinds_of_answers() -> None:
    def kinds(*arrays: Any) -> list[tuple[int, ...]]:
        return [PartNumbers.of_answer(np.asarray(a), None).values for a in arrays]

    assert kinds(np.int64(5), np.array([[1, 2]], np.int32), True, np.zeros(65, np.int64)) == [(5,), (1, 2), (), ()]
    one, other = (PartNumbers.of_answer(np.asarray(flag), None) for flag in (True, False))
    assert one != other
    assert PartNumbers.of_values({"a": np.zeros((2, 3)), "s": [np.zeros(4)], "n": None}).values == (2, 3, 4)
