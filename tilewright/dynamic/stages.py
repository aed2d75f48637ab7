"""Compiled parts of a model, and those behind each, found by the numbers that a run came upon.

The first numbers are compiled for as they are. Where others come, those that differ are left to the run: a part is
compiled for all up to the next power of two, which bounds how many there are. None and one are compiled for as they
are, since operators treat them in their own ways."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.calls.arguments import Array
from tilewright.errors import CutError, ModelError, RegionError, TilewrightError, UndecidedError, UnsupportedError
from tilewright.ir.forms.graph import Form, Node, Room, item_name

if TYPE_CHECKING:
    from tilewright.dynamic.model import Compiled

_MOST = 1 << 30  # a larger number is compiled for as it is
_MOST_ELEMENTS = 64  # of an answer whose numbers are looked at one by one
_NARROWER = 5  # rooms that are tried, each half of the one before: operators may do something else beyond some number
_MOST_ROOMS = 4  # numbers that one part leaves to the run: each is lowered for a few more values

Forms = Mapping[str | int, tuple[Form, ...]]
BODIES = {"Loop": ("body",), "If": ("then_branch", "else_branch")}  # by operator the attributes that hold them


def is_followed(cut: CutError) -> bool:
    """Whether a part ends before a node whose bodies are models of their own: a loop whose number of steps data decide,
    or a branch that has one inside."""
    node = cut.node
    if not isinstance(node, Node) or node.domain or node.op not in BODIES:
        return False
    return isinstance(cut, RegionError) or (isinstance(cut, UndecidedError) and node.op == "Loop")


@dataclass(frozen=True)
class Tie:
    """A number that is so much more than another one, whatever that is: the extents of values that grow together."""

    leader: int
    offset: int


# Of every number: what it may be where the run tells, which other one tells it, None where it is compiled for.
Slots = tuple[Room | Tie | None, ...]
Refuse = Callable[[Slots, TilewrightError], None]  # told of rooms that cannot be compiled for, and why


@dataclass(frozen=True)
class PartNumbers:
    """What a part is compiled for: a kind, which has to be the same, and numbers."""

    kind: Any
    values: tuple[int, ...] = ()
    most: int | None = None  # that each of them can be

    def behind(self, left: tuple[int, ...]) -> PartNumbers:
        """With those before that the stage before leaves to the run."""
        return PartNumbers(self.kind, (*left, *self.values), self.most)

    @staticmethod
    def of_answer(answer: Array, most: int | None) -> PartNumbers:
        """Elements of an array that decides shapes."""
        kind = (answer.dtype.str, answer.shape)
        if answer.dtype.kind not in "iu" or answer.size > _MOST_ELEMENTS:
            return PartNumbers((*kind, answer.tobytes()))
        return PartNumbers(kind, tuple(answer.ravel().tolist()), most)

    @staticmethod
    def of_values(values: Mapping[str, Any]) -> PartNumbers:
        """Extents of arrays and of lists of them."""
        return PartNumbers(tuple(_kind(v) for v in values.values()),
                           tuple(n for _, array in arrays_of(values) for n in array.shape))  # fmt: skip


def _kind(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return tuple(map(_kind, value))
    return value.dtype.name, value.ndim


def arrays_of(values: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """The arrays among values, those of a list under names of their own."""
    for name, value in values.items():
        if isinstance(value, list):
            yield from ((item_name(name, k), item) for k, item in enumerate(value))
        elif value is not None:
            yield name, value


@dataclass(frozen=True, eq=False)
class ModelStage:
    """A compiled part for the nodes from `start` on, and what comes after it, by what was found."""

    start: int
    model: Compiled | None  # None where there is nothing to run
    takes: Mapping[str, tuple[int, ...]]  # by name the shape it takes, with room for all its numbers
    gives: tuple[str, ...]
    fixed: Mapping[str, Array]  # constants that the part before, or a call, gave
    told: Mapping[str, Any] = field(default_factory=dict)  # values known while compiling
    cut: CutError | None = None
    place: int = 0  # of the node behind the part
    decided: Mapping[int, Array] = field(default_factory=dict)
    bodies: tuple[Any, ...] = ()  # StagedModels: of a loop behind it that data end, or of the branches that have one
    slots: Slots = ()
    forms: Forms = field(default_factory=dict)  # extents of values, elements of `fixed` and `decided`, by the rooms
    following: Following = field(default_factory=lambda: Following())

    @property
    def rooms(self) -> tuple[Room, ...]:
        return rooms_of(self.slots)

    def left(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Of the numbers that it was found by, those that it leaves to the run."""
        return tuple(n for n, slot in zip(numbers, self.slots, strict=True) if isinstance(slot, Room))


@dataclass(frozen=True)
class Opening:
    """Which numbers a part leaves to the run, and what follows from them."""

    slots: Slots = ()
    forms: Forms = field(default_factory=dict)

    @property
    def rooms(self) -> tuple[Room, ...]:
        return rooms_of(self.slots)

    def own(self, inherited: int, numbers: PartNumbers) -> list[Form]:
        """What stands for the numbers that no stage before has."""
        found: list[Form] = []
        place = 0
        for slot, number in zip(self.slots, numbers.values, strict=True):
            if isinstance(slot, Tie):
                leader = found[slot.leader]
                found.append(Form(leader.constant + slot.offset, leader.factors))
            elif slot is None:
                found.append(Form(number))
            else:
                found.append(Form(0, (*[0] * place, 1)))
                place += 1
        return found[inherited:]


def rooms_of(slots: Slots) -> tuple[Room, ...]:
    return tuple(slot for slot in slots if isinstance(slot, Room))


class Following:
    """Stages by the numbers they are for, those used last; of every kind of number the first ones that came, which of
    them differed since, and rooms that could not be compiled for."""

    def __init__(self) -> None:
        self.kept: OrderedDict[Any, ModelStage] = OrderedDict()
        self.first: dict[Any, tuple[int, ...]] = {}
        self.differ: dict[Any, set[int]] = {}
        self.refused: set[Any] = set()

    def find(
        self, inherited: Sequence[Room], numbers: PartNumbers, keep: int, build: Callable[[Slots], ModelStage],
        refuse: Refuse,
    ) -> ModelStage:  # fmt: skip
        """The stage for numbers, of which the first have the rooms of the stage before; built where there is none."""
        key: tuple[Any, tuple[Room | Tie | int, ...]] = (numbers.kind, numbers.values)
        slots = self._slots(inherited, numbers)
        if key not in self.kept:
            for _ in range(_NARROWER):
                if all(room.low == room.high for room in rooms_of(slots)):
                    break
                pairs = list(zip(slots, numbers.values, strict=True))
                open_key = (numbers.kind, tuple(n if s is None else s for s, n in pairs))
                if self._is_open(open_key, slots, build, refuse):
                    key = open_key
                    break
                slots = tuple(s.around(n) if isinstance(s, Room) else s for s, n in pairs)
        if key not in self.kept:
            self.kept[key] = build((None,) * len(slots))
        self.kept.move_to_end(key)
        found = self.kept[key]
        if len(self.kept) > keep:
            self.kept.popitem(last=False)
        return found

    def _is_open(self, key: Any, slots: Slots, build: Callable[[Slots], ModelStage], refuse: Refuse) -> bool:
        """Whether there is a stage for all numbers in these rooms."""
        if key not in self.kept and key not in self.refused:
            try:
                self.kept[key] = build(slots)
            except (ModelError, UnsupportedError) as error:  # the number itself may do, or tell what is wrong
                self.refused.add(key)
                refuse(slots, error)
        return key in self.kept

    def _slots(self, inherited: Sequence[Room], numbers: PartNumbers) -> Slots:
        """The rooms of the stage before; of the other numbers one for each that was another before, unless it follows
        from one that has a room: then and now it was as much more."""
        values = numbers.values
        first = self.first.setdefault(numbers.kind, values)
        differ = self.differ.setdefault(numbers.kind, set())
        differ.update(k for k, (a, b) in enumerate(zip(first, values, strict=True)) if a != b)
        found: list[Room | Tie | None] = list(inherited)
        for place in range(len(inherited), len(values)):
            room = room_for(values[place], numbers.most) if place in differ else None
            ties = (Tie(k, values[place] - values[k]) for k, slot in enumerate(found)
                    if isinstance(slot, Room) and values[place] - values[k] == first[place] - first[k])  # fmt: skip
            found.append(room and next(ties, room))
        return tuple(found) if len(rooms_of(tuple(found))) <= _MOST_ROOMS else (None,) * len(found)


def room_for(number: int, most: int | None = None) -> Room | None:
    """All numbers up to the next power of two, above the one before."""
    if not 2 < number <= _MOST:
        return None
    power = 1 << (number - 1).bit_length()
    room = Room(power // 2 + 1, power if most is None else min(power, max(most, number)))
    return room if room.low < room.high else None


def padded(array: Array, shape: tuple[int, ...]) -> Array:
    """The array with room behind its elements."""
    if array.shape == shape:
        return array
    wide = np.zeros(shape, array.dtype)
    wide[tuple(map(slice, array.shape))] = array
    return wide


def cropped(array: Array, forms: Sequence[Form] | None, numbers: Sequence[int]) -> Array:
    """The elements there are of an array with room for more."""
    if forms is None or not any(f.varies for f in forms):
        return array
    return np.ascontiguousarray(array[tuple(slice(f.at(numbers)) for f in forms)])
