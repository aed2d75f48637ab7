"""The Graph: operators, attributes and tensors, as the model says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Extent


@dataclass(frozen=True)
class Value:
    """A tensor of the Graph: its name, element type and shape."""

    name: str
    dtype: DType
    shape: tuple[Extent, ...]


@dataclass(frozen=True)
class Node:
    """One operator. An omitted optional input or output is the empty string."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)  # a subgraph attribute is a Graph
    domain: str = ""
    version: int = 0  # the operator set version the model imports for the domain

    def describe(self) -> str:
        """How messages name this node."""
        label = f"{self.domain}.{self.op}" if self.domain else self.op
        return f"{label} node '{self.name or next(iter(self.outputs), '')}'"


@dataclass(frozen=True)
class Room:
    """A number that only a run tells, such as how many elements NonZero finds: one from `low` to `high`."""

    low: int
    high: int

    def around(self, number: int) -> Room:
        """The half of it that the number is in."""
        middle = (self.low + self.high) // 2
        return Room(self.low, middle) if number <= middle else Room(middle + 1, self.high)


@dataclass(frozen=True)
class Form:
    """A whole number that follows from the run-time numbers of a part: a sum of multiples of them, in their order."""

    constant: int
    factors: tuple[int, ...] = ()  # those left out at the end are 0

    def at(self, numbers: Sequence[int]) -> int:
        return self.constant + sum(factor * number for factor, number in zip(self.factors, numbers, strict=False))

    def most(self, rooms: Sequence[Room]) -> int:
        return self.at([r.high if f > 0 else r.low for f, r in zip(self.factors, rooms, strict=False)])

    @property
    def varies(self) -> bool:
        return any(self.factors)


def filled(array: np.ndarray, forms: Sequence[Form], numbers: Sequence[int]) -> np.ndarray:
    """An array of the same kind with what its elements are for these numbers."""
    return np.array([f.at(numbers) for f in forms], array.dtype).reshape(array.shape)


@dataclass(frozen=True)
class Part:
    """What a Graph knows of the run before it, where a model runs in several parts.

    `sequences` are values that hold so many tensors, each an input named by `item_name`; `absent` are optional values
    that hold nothing; of `outside` values, such as strings, there are no tensors. `decided` answers what the first node
    has to know while compiling, by the number of its question; where the part `asks`, it ends with what its last node
    has to know, as one more output.

    Where it has `rooms`, it is for all numbers in them: the run gives them as one more input, `NUMBERS`. `forms` are of
    an input's extents and a constant's elements, by name, and of an answer's elements, by the number of its question.
    `begins` are the extents of constants of which a run sees no more than the begin.
    """

    sequences: Mapping[str, int] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()
    decided: Mapping[int, np.ndarray] = field(default_factory=dict)
    asks: bool = False
    rooms: tuple[Room, ...] = ()
    forms: Mapping[str | int, tuple[Form, ...]] = field(default_factory=dict)
    begins: Mapping[str, tuple[Form, ...]] = field(default_factory=dict)


NUMBERS = "\0numbers"  # the input that tells the run-time numbers of a part
ASKED = "\0asked"  # the output that answers what the last node of a part asks


def item_name(sequence: str, place: int) -> str:
    """The name of one tensor of a sequence: no name of a model has this character."""
    return f"{sequence}\0{place}"


@dataclass(frozen=True)
class Graph:
    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, np.ndarray]
    values: Mapping[str, Value] = field(default_factory=dict)  # what is known of every tensor, inputs included
    part: Part | None = None


def read_by(node: Node) -> set[str]:
    """Names that a node takes from the graph it stands in: its inputs, and what its bodies read of that graph."""
    bodies = [captured(value) for value in node.attributes.values() if isinstance(value, Graph)]
    return {name for name in node.inputs if name}.union(*bodies)


def captured(body: Graph) -> set[str]:
    """Names that a body takes from the graph around it."""
    own = {value.name for value in body.inputs} | body.constants.keys()
    found: set[str] = set()
    for node in body.nodes:
        found |= read_by(node) - own
        own.update(node.outputs)
    return found | (set(body.outputs) - own)
