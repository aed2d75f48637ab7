"""A model's constants as one run of bytes, each in the layout that the kernels read."""

from __future__ import annotations

import numpy as np

from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import Layout
from tilewright.lower.memory import ALIGNMENT
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Plan


def pack_weights(loops: LoopProgram, program: Program, plan: Plan) -> tuple[dict[str, int], bytes]:
    """All constants in the layouts the kernels read, one after the other."""
    layouts = dict(plan.layouts)
    used = {t.name for t in loops.tensors if t.role == "constant"}
    offsets: dict[str, int] = {}
    pieces: list[bytes] = []
    size = 0
    for tensor, array in program.constants.items():
        if tensor.name not in used:
            continue
        layout = layouts.get(tensor.name) or Layout.natural(tensor.rank)
        shape = tuple(extent_of(e) for e in tensor.shape)
        packed = layout.pack(np.asarray(array).reshape(shape))
        data = packed.tobytes()
        data += bytes(-len(data) % ALIGNMENT)
        offsets[tensor.name] = size
        pieces.append(data)
        size += len(data)
    return offsets, b"".join(pieces)
