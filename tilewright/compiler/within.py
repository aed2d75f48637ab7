"""A model within so much memory: first as it is, then with fewer copies of what it has, then its batch part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewright.backend import backend_for
from tilewright.compiler.pipeline import Artifact, build
from tilewright.compiler.settling import Tuner
from tilewright.errors import OptionError
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import extents
from tilewright.ops import lower
from tilewright.options import Options
from tilewright.schedule.batches import Batches, in_parts
from tilewright.target import Target
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.plan.form import Plan
from tilewright.transform.clean.fold import fold_constants


class TooMuch(Exception):
    """A plan whose run would allocate more than there is."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


@dataclass(frozen=True)
class _Way:
    model: Graph | Program
    options: Options
    batches: Batches | None = None
    is_last: bool = False


def build_within(model: Graph, target: Target, options: Options, tuner: Tuner | None = None) -> Artifact:
    """The model, where the options bound its memory in a way that keeps to it; an error that says what it needs."""
    limit = options.memory
    if limit is None:
        return build(model, target, options, tuner)
    assert isinstance(limit, int)
    backend = backend_for(target)

    def check(loops: LoopProgram, plan: Plan) -> None:
        needed = backend.run_bytes(loops, plan, options)
        if needed is None:
            raise OptionError("memory is what a run on a CPU may allocate: leave it out for other targets")
        if needed > limit:
            raise TooMuch(needed)

    memo = Memo()
    least: int | None = None
    for way in _ways(model, options):
        few = way.batches is not None and least is not None and least > limit * way.batches.parts
        if few and not way.is_last:  # of which one is tried for what it takes
            continue
        try:
            return build(way.model, target, way.options, tuner, memo, check=check, batches=way.batches)
        except TooMuch as error:
            least = error.needed if least is None else min(least, error.needed)
    assert least is not None
    raise OptionError(f"memory={limit} is not enough: a run allocates {least} bytes at the least, beside what goes in "
                      f"and out; give it {-(-least >> 20)}MiB, fewer threads or a smaller batch")  # fmt: skip


def _ways(model: Graph, options: Options) -> Iterator[_Way]:
    """The quickest first."""
    yield _Way(model, options)
    convolution = "direct" if options.convolution == "auto" else options.convolution
    fewer = replace(options, merging="off", convolution=convolution)
    if fewer != options:
        yield _Way(model, fewer)
    if model.part is not None:
        return  # rows of it may hold anything: it is a part already
    program = fold_constants(lower(model))
    divisors = _divisors(program)
    for parts in divisors:
        try:
            batches = in_parts(program, parts)
        except OptionError:
            return  # what mixes a batch does so in any number of parts
        if is_in_blocks(program, batches):
            yield _Way(batches.program, options, batches, parts == divisors[-1])


def _divisors(program: Program) -> list[int]:
    """Numbers of parts that there may be, the fewest first."""
    if not program.outputs or any(not isinstance(e, int) for t in program.outputs for e in t.shape):
        return []
    batch = max((extents(t)[0] for t in program.outputs[:1] if t.rank), default=1)
    return [parts for parts in range(2, batch + 1) if batch % parts == 0]


def is_in_blocks(program: Program, batches: Batches) -> bool:
    """Whether a part of every input and output lies in one piece."""
    sides = ((program.inputs, batches.inputs), (program.outputs, batches.outputs))
    cut = [(t, dims[t.name]) for tensors, dims in sides for t in tensors if t.name in dims]
    return all(extent == 1 for t, dim in cut for extent in extents(t)[:dim])
