"""Operators of classical machine learning (ai.onnx.ml) that stand before networks in files."""

from __future__ import annotations

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import cast
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.maps.elementwise import broadcast_map
from tilewright.ops.registry import operator

DOMAIN = "ai.onnx.ml"


@operator("Scaler", domain=DOMAIN)
def scaler(b: Builder, node: Node, x: Tensor) -> Tensor:
    """(x - offset) * scale in float32, one of each or as many as there are columns."""
    offset, scale = (_columns(b, node, name, x) for name in ("offset", "scale"))
    return broadcast_map(b, "", lambda v, o, s: (cast(v, dtypes.float32) - o) * s, x, offset, scale)


def _columns(b: Builder, node: Node, name: str, x: Tensor) -> Tensor:
    values = np.array(node.attributes.get(name, ()), np.float32)
    if values.size not in (1, dims(x)[-1]):
        raise b.invalid(f"it has {values.size} numbers as {name} for {dims(x)[-1]} columns")
    return b.constant(values, name)
