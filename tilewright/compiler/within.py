"""A model within so much memory: first as it is, then with fewer copies of what it has, then its batch part by part,
then any dimension of its results, with halos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewright.backend import backend_for
from tilewright.compiler.pipeline import Artifact, build
from tilewright.compiler.settling import Tuner
from tilewright.compiler.swept import Bound, TooMuch, build_swept
from tilewright.errors import OptionError, UnsupportedError
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import elements, extents
from tilewright.lower.memory import arena
from tilewright.ops import lower
from tilewright.options import Options
from tilewright.schedule.batches import Batches, in_parts
from tilewright.target import Target
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.plan.form import Plan
from tilewright.transform.clean.fold import fold_constants


@dataclass(frozen=True)
class _Way:
    model: Graph | Program
    options: Options
    batches: Batches | None = None
    is_last: bool = False


def build_within(model: Graph, target: Target, options: Options, tuner: Tuner | None = None) -> Artifact:
    """The model, where the options bound its memory in a way that keeps to it; an error that says what it needs."""
    if isinstance(options.device_memory, int):
        return _within_device(model, target, options, options.device_memory, tuner)
    limit = options.memory
    if limit is None:
        return build(model, target, options, tuner)
    assert isinstance(limit, int)
    backend = backend_for(target)

    def measure(loops: LoopProgram, plan: Plan) -> int:
        needed = backend.run_bytes(loops, plan, options)
        if needed is None:
            raise OptionError("memory is what a run on a CPU may allocate: leave it out for other targets")
        return needed

    def check(loops: LoopProgram, plan: Plan) -> None:
        needed = measure(loops, plan)
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
    swept = _in_sweeps(model, target, options, Bound(limit, measure, keeps=True, slots=1))
    if swept is not None:
        return swept
    raise OptionError(f"memory={limit} is not enough: a run allocates {least} bytes at the least, beside what goes in "
                      f"and out; give it {-(-least >> 20)}MiB, fewer threads or a smaller batch")  # fmt: skip


def _within_device(model: Graph, target: Target, options: Options, limit: int, tuner: Tuner | None) -> Artifact:
    """The model on a device with so much memory: its weights pass through where they are too large, and where what is
    computed is, parts of it do."""

    def check(loops: LoopProgram, plan: Plan) -> None:
        ports = sum(elements(t.shape) * t.dtype.bytes for t in loops.tensors if t.role in ("input", "output"))
        needed = arena(loops)[1] + ports
        if needed > limit:
            raise TooMuch(needed)

    try:
        return build(model, target, options, tuner, check=check)
    except TooMuch as error:
        needed = error.needed
        swept = _in_sweeps(model, target, options, _device_bound(limit))
    except UnsupportedError:
        swept = _in_sweeps(model, target, options, _device_bound(limit))
        if swept is None:
            raise
    if swept is None:
        raise OptionError(f"device_memory={limit} is not enough: it takes {needed} bytes for what is computed and goes "
                          f"in and out, and no parts of it fit; give it {-(-needed >> 20)}MiB")  # fmt: skip
    return swept


def _device_bound(limit: int) -> Bound:
    return Bound(limit, lambda loops, _: arena(loops)[1], keeps=False, slots=2)


def _in_sweeps(model: Graph, target: Target, options: Options, bound: Bound) -> Artifact | None:
    if model.part is not None:
        return None  # rows of it may hold anything: it is a part already
    program = fold_constants(lower(model))
    return build_swept(model, program, target, options, bound)


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
