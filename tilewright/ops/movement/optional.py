"""Optional values: whether there is one is known when compiling."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder
from tilewright.ops.outside import ABSENT
from tilewright.ops.registry import operator


@operator("Optional", since=15)
def optional(b: Builder, node: Node, x: Tensor | None = None) -> Any:
    return ABSENT if x is None else x


@operator("OptionalHasElement", since=15)
def optional_has_element(b: Builder, node: Node, x: Tensor | None = None) -> Tensor:
    return b.constant(np.asarray(x is not None), "")


@operator("OptionalGetElement", since=15)
def optional_get_element(b: Builder, node: Node, x: Tensor | None) -> Tensor:
    if x is None:
        raise b.invalid("the optional value that it reads holds nothing")
    return x
