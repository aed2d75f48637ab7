"""A model's constants one behind the other, each in the layout that the kernels read; packed one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.target.instruction_sets import LINE_BYTES
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Plan


@dataclass(frozen=True)
class PackedWeights:
    """Weights as pieces in order. Each is packed when its turn comes and held by nobody here: all of them together may
    be more than memory holds."""

    parts: tuple[tuple[np.ndarray, Layout], ...]
    nbytes: int

    def __iter__(self) -> Iterator[memoryview]:
        for array, layout in self.parts:
            packed = layout.pack(array)
            yield packed.reshape(-1).view(np.uint8).data
            yield memoryview(bytes(-packed.nbytes % LINE_BYTES))


def pack_weights(loops: LoopProgram, program: Program, plan: Plan) -> tuple[dict[str, int], PackedWeights]:
    """All constants in the layouts the kernels read, one after the other, and where each begins."""
    layouts = dict(plan.layouts)
    used = {t.name for t in loops.tensors if t.role == "constant"}
    offsets: dict[str, int] = {}
    parts: list[tuple[np.ndarray, Layout]] = []
    size = 0
    for tensor, array in program.constants.items():
        if tensor.name not in used:
            continue
        layout = layouts.get(tensor.name) or Layout.natural(tensor.rank)
        shape = tuple(extent_of(e) for e in tensor.shape)
        parts.append((np.asarray(array).reshape(shape), layout))
        offsets[tensor.name] = size
        size += -(-_packed_bytes(tensor, shape, layout) // LINE_BYTES) * LINE_BYTES
    return offsets, PackedWeights(tuple(parts), size)


def _packed_bytes(tensor: Tensor, shape: tuple[int, ...], layout: Layout) -> int:
    return prod(extent_of(e) for e in layout.storage_shape(shape)) * tensor.dtype.bytes
