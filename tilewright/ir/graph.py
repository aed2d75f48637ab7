"""The Graph: operators, attributes and tensors, as the model says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.ir.dtypes import DType
from tilewright.ir.expr import Extent


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
class Graph:
    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, np.ndarray]
    values: Mapping[str, Value] = field(default_factory=dict)  # what is known of every tensor, inputs included
