"""A batch of any size in blocks: whether its samples go through a model each by itself, and which blocks pay.

One run for each block is the model compiled for the block's size, loop for loop. What it costs beside one run for all
are the weights, which every run reads again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from statistics import fmean

from tilewright.backend import backend_for
from tilewright.errors import ModelError, OptionError, UnsupportedError
from tilewright.ir.forms.blocks import Blocks, in_blocks
from tilewright.ir.forms.bounds import upper
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.graph import Graph
from tilewright.ops import lower
from tilewright.schedule.batches import are_same, in_parts
from tilewright.target import Target
from tilewright.transform.analysis import operations
from tilewright.transform.clean.fold import fold_constants

_CALL = 20e-6  # seconds that a call takes around its kernels, on a machine that runs Python as they do
_SIZES = ((4, 1), (8, 2, 1))  # fewer are compiled sooner, more leave fewer runs
_USUALLY, _AT_MOST = 1.05, 1.15  # of the time of one run for all: in the mean over all sizes, and for any of them


def blocks_of(exact: Callable[[int], Graph], low: int, high: int, target: Target) -> Blocks | None:
    """The blocks that batches of `low` to `high` samples go through a model in; None where samples meet, or one run for
    all is much faster. `exact` gives the model for a batch."""
    if not backend_for(target).fills_by_sample or low < 1 or high < 2:
        return None

    exact = cache(exact)

    @cache
    def lowered(samples: int) -> Program:
        return lower(exact(samples))

    try:
        apart = in_parts(lowered(2), 2)
        if not are_same(apart.program, lowered(1)):
            return None
        sizes = _paying(fold_constants(lowered(1)), low, high, target)
        if sizes is None or not all(_is_apart(lowered, *way) for way in _ways(sizes[0], high)):
            return None
    except (ModelError, OptionError, UnsupportedError):  # such a batch is refused, or its samples meet
        return None
    inputs = _varying(exact(1), exact(2))
    pairs = zip(apart.program.output_names, apart.program.outputs, strict=True)
    return None if inputs is None else Blocks(sizes, inputs, {name: apart.outputs[t.name] for name, t in pairs})


def _varying(one: Graph, other: Graph) -> dict[str, int] | None:
    """By input, read or not, the dimension that has another size in the other; None where there are several."""
    found: dict[str, int] = {}
    for value, its in zip(one.inputs, other.inputs, strict=True):
        dims = [k for k, (n, m) in enumerate(zip(value.shape, its.shape, strict=True)) if n != m]
        if len(dims) > 1:
            return None
        if dims:
            found[value.name] = dims[0]
    return found


def _ways(largest: int, high: int) -> list[tuple[int, int]]:
    """Numbers of parts and their sizes by which is judged whether parts are models of their own at every size; none is
    beyond what the model is to take."""
    return [(parts, size) for parts, size in ((3, 1), (largest, 1), (2, high // 2)) if parts * size <= high]


def _is_apart(lowered: Callable[[int], Program], parts: int, size: int) -> bool:
    """Whether a batch of so many parts is each part by itself."""
    return are_same(in_parts(lowered(parts * size), parts).program, lowered(size))


def _paying(one: Program, low: int, high: int, target: Target) -> tuple[int, ...] | None:
    """Sizes of blocks that take little longer than one run for all, by the bytes that each run reads again."""
    weights = sum(prod(map(upper, t.shape)) * t.dtype.bytes for t in one.constants)
    level = target.shared_cache if target.shared_cache is not None and weights <= target.shared_room else target.main
    again = weights / (level.bandwidth * target.units) + len(one.computes) * target.kernel_cost + _CALL
    own = sum(map(operations, one.computes)) / (2 * target.fma_rate * target.units)
    for sizes in _SIZES:
        used = tuple(size for size in sizes if size <= high)
        # further on they rise no more than up to the last
        some = (*range(low, min(high, low + 8 * used[0])), high)
        ratios = [_ratio(samples, used, again / own) for samples in some] if own else [_AT_MOST]
        if max(ratios) < _AT_MOST and fmean(ratios) < _USUALLY:
            return used
    return None


def _ratio(samples: int, sizes: Sequence[int], again: float) -> float:
    """The time in blocks over that of one run; `again` is what each run adds, a sample being the unit."""
    return (samples + len(in_blocks(samples, sizes)) * again) / (samples + again)
