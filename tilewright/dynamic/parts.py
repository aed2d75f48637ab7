"""Which models run in parts, and what their parts take and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.calls.arguments import Array
from tilewright.dynamic.borders import Border
from tilewright.dynamic.model import Compiled
from tilewright.dynamic.open_model import MOST_ELEMENTS
from tilewright.dynamic.staged_model import StagedModel, Tools
from tilewright.dynamic.stages import is_followed
from tilewright.errors import BorderError, CutError, OutsideError, RegionError, UndecidedError
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.graph import Form, Graph
from tilewright.options import Options

if TYPE_CHECKING:
    from tilewright.frontend.onnx.model import OpenValue

Shapes = Mapping[str, int | tuple[int, ...]]
CompilePart = Callable[[Graph], Compiled]


def border_model(
    source: Any, shapes: Shapes, options: Options, reason: BorderError, compile_part: CompilePart
) -> StagedModel:
    """A model that takes or gives something else than tensors of numbers."""
    from tilewright.frontend.onnx.model import load_border

    graph, inputs, outputs = load_border(source, shapes)
    if options.fallback == "error" and any(v.dtype is None for v in (*inputs, *outputs)):
        raise reason  # strings
    takes, gives = (list(map(_border, side)) for side in (inputs, outputs))
    return StagedModel(name_of(source), graph, takes, gives, tools_for(options, compile_part))


def in_parts(
    source: Any, shapes: Shapes, values: Mapping[str, Array], options: Options, reason: CutError,
    compile_part: CompilePart,
) -> StagedModel:  # fmt: skip
    """A model of known shapes that has to run in parts; the reason where that would not help."""
    from tilewright.frontend.long_loops import in_pieces
    from tilewright.frontend.onnx.model import load, ports

    refused = isinstance(reason, OutsideError) and options.fallback == "error"
    stuck = isinstance(reason, RegionError) or (isinstance(reason, UndecidedError) and reason.tensor is None)
    if refused or (stuck and not is_followed(reason)):
        raise reason
    graph = source if isinstance(source, Graph) else load(source, shapes, values)
    if isinstance(source, Graph):
        outputs = [Border(name, is_checked=False) for name in graph.outputs]
    else:
        outputs = list(map(_border, ports(source, shapes)[1]))
    return StagedModel(name_of(source), in_pieces(graph), _takes(graph), outputs, tools_for(options, compile_part))


def _takes(graph: Graph) -> list[Border]:
    return [Border(v.name, v.dtype.numpy, tuple(map(int, v.shape))) for v in graph.inputs]  # type: ignore[arg-type]


def _border(value: OpenValue) -> Border:
    dtype = None if value.dtype is None else value.dtype.numpy
    return Border(value.name, dtype, value.shape, value.is_sequence, value.is_optional)


def is_settled_by_few(error: UndecidedError, source: Any, shapes: Shapes) -> bool:
    """Whether the inputs that decide are few numbers, worth being part of the code: one compilation then knows all that
    follows from them. Data is not: what is asked of it is computed by a part of its own."""
    from tilewright.frontend.onnx.model import ports

    if isinstance(source, Graph) or error.most is not None:
        return False
    inputs = {v.name: v for v in ports(source, shapes)[0]}
    deciding = [inputs[name] for name in error.inputs]
    return bool(deciding) and all(_are_few(v.dtype, v.shape) for v in deciding)


def _are_few(dtype: DType | None, shape: Sequence[int | str | None] | None) -> bool:
    extents = [n for n in shape or () if isinstance(n, int)]
    if shape is None or len(extents) < len(shape):
        return True  # as many as the call gives
    room = int(np.prod(extents, dtype=np.int64))
    return room <= 1 or (room <= MOST_ELEMENTS and (dtype is None or not dtype.is_float))


def name_of(source: Any) -> str:
    return source.name if isinstance(source, Path | Graph) else "the model"


def tools_for(options: Options, compile_part: CompilePart) -> Tools:
    """How parts are compiled by these options."""
    from tilewright.dynamic.host import evaluate

    return Tools(compile_part, _output_forms, None if options.fallback == "error" else evaluate, options)


def _output_forms(graph: Graph) -> Mapping[str, tuple[Form, ...]]:
    from tilewright.ops.lower import output_forms

    return output_forms(graph)
