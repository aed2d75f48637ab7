"""Models whose activations are larger than a memory: sweeps that keep to it, each distinct part compiled once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from tilewright.compiler.pipeline import Artifact, ArtifactPort, CompiledPart, build
from tilewright.errors import OptionError
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.mesh import slices
from tilewright.ir.forms.swept import Sweep, Swept, SweptPart
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.options import Options
from tilewright.runtime.swept import Kind, Round, Runner, SweptModel, SweptResult, Visit, device_of, opener
from tilewright.schedule.sweeps.parts import in_sweeps
from tilewright.schedule.sweeps.search import PartRoom, choose_sweeps
from tilewright.target import Target
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.plan.form import Plan

_LOG = logging.getLogger("tilewright")
_TRIES = 8  # rooms that are planned for, each smaller than the one before


class TooMuch(Exception):
    """A plan whose run would hold more than there is."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


Measure = Callable[[LoopProgram, Plan], int]
Opened = Callable[[], AbstractContextManager[Runner]]


@dataclass(frozen=True)
class Bound:
    """So many bytes for a run, in all but number the `room` of the search. `measure` tells what kernels hold beside
    what goes in and out of them."""

    limit: int
    measure: Measure
    keeps: bool
    slots: int

    def room(self, part: float) -> PartRoom:
        return PartRoom(self.limit * part, self.slots, self.keeps)


def build_swept(graph: Graph, program: Program, target: Target, options: Options, bound: Bound) -> Artifact | None:
    """The Program in sweeps that keep to the bound; None where there are none."""
    if options.overrides:
        raise OptionError("stages of a model in sweeps are those of its parts: none can be overridden")
    if options.is_tuned:
        _LOG.warning("a model that goes through in sweeps is not tuned: it is compiled as without tune")
    own = replace(options, memory=None, device_memory=None, tune=None)
    memo, part = Memo(), 1.0
    for _ in range(_TRIES):
        chosen = choose_sweeps(program, bound.room(part), target)
        if chosen is None:
            return None
        swept = in_sweeps(program, chosen)
        try:
            return _Built(graph, swept, target, own, bound, memo).run()
        except TooMuch as error:  # of copies that algorithms make, and what plans keep, the search knows nothing
            part *= min(0.9, bound.limit / error.needed)
    return None


@dataclass
class _Built:
    graph: Graph
    swept: Swept
    target: Target
    options: Options
    bound: Bound
    memo: Memo

    def run(self) -> Artifact:
        made = [[self._artifact(sweep, kind, f"{number}-{kind}") for kind in range(len(sweep.programs))]
                for number, sweep in enumerate(self.swept.sweeps)]  # fmt: skip
        self._check_weights([artifact for each in made for artifact in each])
        program = self.swept.program
        parts = [CompiledPart(f"sweep {n}, {self._about(n, kind)}", artifact)
                 for n, each in enumerate(made) for kind, artifact in enumerate(each)]  # fmt: skip
        firsts = [sum(len(each) for each in made[:n]) for n in range(len(made))]
        visits = [first + kind for first, sweep in zip(firsts, self.swept.sweeps, strict=True)
                  for kind in sorted(part.kind for part in sweep.parts)]  # fmt: skip
        seconds: dict[str, float] = {}
        for part in parts:
            for name, spent in part.artifact.stage_seconds.items():
                seconds[name] = seconds.get(name, 0.0) + spent
        told = replace(program, remarks=(*program.remarks, self._remark()))
        return Artifact(
            self.graph, self.target, told, None, None, {}, None if self.options.stop_after else self._runner(made),
            _ports(program.inputs, program.input_names), _ports(program.outputs, program.output_names), seconds,
            self.options.effort, tuple(parts), visits=tuple(visits),
        )  # fmt: skip

    def _artifact(self, sweep: Sweep, kind: int, name: str) -> Artifact:
        folder = None if self.options.dump is None else self.options.dump / f"part-{name}"
        beside = self._beside(sweep, kind)

        def check(loops: LoopProgram, plan: Plan) -> None:
            needed = self.bound.measure(loops, plan) + beside
            if needed > self.bound.limit:
                raise TooMuch(needed)

        return build(sweep.programs[kind], self.target, replace(self.options, dump=folder), memo=self.memo, check=check)

    def _beside(self, sweep: Sweep, kind: int) -> int:
        """What is held beside kernels: parts that go in and out, and what passes between sweeps where it lies in the
        same memory."""
        program = sweep.programs[kind]
        own = self.bound.slots * sum(t.most_bytes for t in (*program.inputs, *program.outputs))
        return own + (self._between(self.swept.sweeps.index(sweep)) if self.bound.keeps else 0)

    def _between(self, number: int) -> int:
        alive = {name for name, first, last in self._lives() if first <= number <= last}
        return sum(t.most_bytes for t in self.swept.program.tensors() if t.name in alive)

    def _lives(self) -> list[tuple[str, int, int]]:
        """Of every result that later sweeps read, and is not the caller's: the sweep that leaves it, the last to read
        it."""
        left = {t.name: n for n, sweep in enumerate(self.swept.sweeps) for p in sweep.programs for t in p.outputs}
        read = {t.name: n for n, sweep in enumerate(self.swept.sweeps) for p in sweep.programs for t in p.inputs}
        given = {t.name for t in self.swept.program.outputs}
        return [(name, first, read[name]) for name, first in left.items() if name not in given]

    def _check_weights(self, made: list[Artifact]) -> None:
        """On a device each code has weights of its own, and all of them are there together."""
        if self.bound.keeps:
            return
        programs = [artifact.program for artifact in made if artifact.program is not None]
        weights = sum(array.nbytes for program in programs for array in program.constants.values())
        sizes = [self.bound.measure(a.loops, a.plan) for a in made if a.loops is not None and a.plan is not None]
        beside = [self._beside(sweep, kind) for sweep in self.swept.sweeps for kind in range(len(sweep.programs))]
        # one arena for all, and slots for any two parts that follow each other
        needed = weights + max(sizes, default=0) + max(beside, default=0)
        if needed > self.bound.limit:
            raise TooMuch(needed)

    # --- what runs

    def _runner(self, made: list[list[Artifact]]) -> SweptModel:
        program = self.swept.program
        named = {t.name: t for t in program.tensors()}
        taken = {t.name for sweep in self.swept.sweeps for p in sweep.programs for t in p.inputs}
        rounds = [round_of(sweep, [opener(artifact.runner) for artifact in artifacts])
                  for sweep, artifacts in zip(self.swept.sweeps, made, strict=True)]  # fmt: skip
        constants = {t.name: a for t, a in program.constants.items() if t.name in taken or t in program.outputs}
        between = [_result(named[name]) for name, _, _ in self._lives()]
        inputs, outputs = ([t.name for t in side] for side in (program.inputs, program.outputs))
        device = device_of([artifact.runner for artifacts in made for artifact in artifacts])
        return SweptModel(rounds, inputs, outputs, between, constants, device)

    # --- for people

    def _about(self, number: int, kind: int) -> str:
        count = sum(part.kind == kind for part in self.swept.sweeps[number].parts)
        return f"{count} part{'s' if count > 1 else ''}"

    def _remark(self) -> str:
        program = self.swept.program
        told = [f"{' x '.join(str(n) for n in s.counts if n > 1) or 1} parts of {len(s.programs)} kinds"
                for s in self.swept.sweeps]  # fmt: skip
        into, back = self.swept.link_bytes
        least = sum(t.most_bytes for t in (*program.inputs, *program.outputs))
        weights = sum(a.nbytes for a in program.constants.values())
        again = (into + back + weights) / max(1, least + weights)
        where = "beside the arena" if self.bound.keeps else "over the host's link"
        count = f"{len(told)} sweep{'s' if len(told) > 1 else ''}"
        return (f"to keep to its memory it goes through in {count}: {', then '.join(told)}; {into} bytes to them and "
                f"{back} back {where}, {again:.2f} of inputs, outputs and weights once")  # fmt: skip


def round_of(sweep: Sweep, opened: Sequence[Opened]) -> Round:
    """A sweep as it runs, with what runs each of its Programs."""
    kinds = tuple(
        Kind(tuple(t.name for t in program.inputs), tuple(map(_result, program.outputs)), each)
        for program, each in zip(sweep.programs, opened, strict=True)
    )
    return Round(kinds, tuple(map(_visit, sweep.parts)))


def _visit(part: SweptPart) -> Visit:
    takes, gives = tuple(map(slices, part.takes)), tuple((slices(g.place), slices(g.own)) for g in part.gives)
    return Visit(part.kind, takes, gives)


def _result(tensor: Tensor) -> SweptResult:
    return SweptResult(tensor.name, extents(tensor), tensor.dtype.numpy)


def _ports(tensors: tuple[Tensor, ...], names: tuple[str, ...]) -> tuple[ArtifactPort, ...]:
    named = zip(tensors, names or [""] * len(tensors), strict=True)
    return tuple(ArtifactPort(name or tensor.name, tensor.dtype, extents(tensor)) for tensor, name in named)
