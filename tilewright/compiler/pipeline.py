"""The whole compiler as a plain sequence of named stages; each result is checked, timed, and dumped on request."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tilewright.backend import backend_for, renderable
from tilewright.backend.protocol import Backend
from tilewright.compiler.controlled import linked, places, refuse_edits
from tilewright.compiler.settling import Tuner, check_stored, predicted, settle
from tilewright.compiler.verifying import Verifier
from tilewright.errors import InternalError, OptionError
from tilewright.ir.analysis import verify
from tilewright.ir.forms.compute import Program, reads
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.loops import Call, LoopProgram
from tilewright.ir.forms.tensor import Layout
from tilewright.ir.text import parse, text
from tilewright.lower.parts import has_regions
from tilewright.lower.program import lower_program
from tilewright.lower.regions import Lowered
from tilewright.ops import lower
from tilewright.options import Options
from tilewright.schedule.batches import Batches
from tilewright.schedule.objectives import one_of_many
from tilewright.schedule.price import wholly_priced
from tilewright.target import Target, machine
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan
from tilewright.tile_graph.plan.text import plan_text
from tilewright.transform.algorithms import Predict, choose_algorithms
from tilewright.transform.bilinear.toom_cook import SIZES, WINDOWED
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.clean.triangles import compare_indices
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.layout.staging import stage_operands
from tilewright.transform.merge.horizontal import merge_alike
from tilewright.transform.precision.choose import set_precision
from tilewright.transform.recurrence.counted import without_counters
from tilewright.transform.recurrence.reroll import reroll
from tilewright.transform.recurrence.updates import update_in_place

_LOG = logging.getLogger("tilewright")


@dataclass
class Stages:
    """Runs stages by name: verifies, times, dumps, stops, and takes an edited dump in a stage's place."""

    options: Options
    target: Target
    seconds: dict[str, float] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    verifier: Verifier | None = field(init=False)

    def __post_init__(self) -> None:
        flush = self.options.denormals == "flush" and backend_for(self.target).flushes_denormals
        self.verifier = Verifier(self.options.seed, flush) if self.options.verify else None

    def run(self, name: str, stage: Callable[..., Any], *inputs: Any) -> Any:
        if self.options.progress is not None:
            self.options.progress(name)
        start = time.perf_counter()
        edited = dict(self.options.overrides).get(name)
        result = stage(*inputs) if edited is None else _edited(name, Path(edited), stage, inputs, self.target)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.results[name] = result
        is_new = not any(result is given for given in inputs)
        # Loops that are only spelled out are as large as the text: they are checked where that was asked for, or edited
        if is_new and (name not in _SPELLED_OUT or edited is not None or self.verifier is not None):
            _verify(result, inputs, self.target)
        if self.options.dump is not None:
            _dump(self.options.dump, len(self.seconds), name, result, self.target)
        if self.verifier is not None and is_new:
            self.verifier.check(name, result)
        if self.options.stop_after == name:
            raise Stopped(name)
        return result


class Stopped(Exception):
    """The pipeline stopped after the stage the user named."""


class ArtifactPort(NamedTuple):
    """An input or output of a compiled model."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CompiledPart:
    """What is compiled by itself of a model with control flow that data decide, or in sweeps, and where it runs, in
    words."""

    place: str
    artifact: Artifact


@dataclass(frozen=True)
class Artifact:
    """Everything a compilation made."""

    graph: Graph
    target: Target
    program: Program | None
    plan: Plan | None
    loops: LoopProgram | None
    sources: dict[str, str]
    runner: Any
    inputs: tuple[ArtifactPort, ...]
    outputs: tuple[ArtifactPort, ...]
    stage_seconds: dict[str, float]
    effort: str = "full"
    parts: tuple[CompiledPart, ...] = ()  # where data decide what runs
    batches: int = 1  # that follow each other; all forms are of one of them
    visits: tuple[int, ...] = ()  # the parts that run one after the other, by number: of a model in sweeps

    @property
    def packed(self) -> tuple[tuple[str, Layout], ...]:
        """How constants lie that are packed, by name."""
        if self.plan is None or self.program is None:
            return ()
        constants = {t.name for t in self.program.constants}
        return tuple((name, layout) for name, layout in self.plan.layouts if name in constants)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Kernel calls of one run, in order."""
        if self.visits:
            return tuple(call for number in self.visits for call in self.parts[number].artifact.calls)
        return self.loops.calls * self.batches if self.loops is not None else ()


STAGES = (
    "graph", "program", "precision", "fold", "merge", "algorithm", "staging", "layout", "plan", "loops", "unroll",
    "join_calls", "source", "machine",
)  # fmt: skip
_PLANNED = STAGES.index("plan") + 1
_SPELLED_OUT = ("unroll", "join_calls")


def build(
    model: Graph | Program, target: Target, options: Options, tuner: Tuner | None = None, memo: Memo | None = None,
    *, check: Callable[[LoopProgram, Plan], None] | None = None, batches: Batches | None = None,
) -> Artifact:  # fmt: skip
    """A Graph, or a Program that was made of one, to something that runs; stops early where the options say so. A
    `tuner` may better the plan. Programs that have much in common share a `memo`. What `check` raises of Loops that are
    to run ends it before there is code. A Program of one of several `batches` is run for each of them."""
    stage_names = STAGES if tuner is None else (*STAGES[:_PLANNED], "tune", *STAGES[_PLANNED:])
    if options.stop_after is not None and options.stop_after not in stage_names:
        raise OptionError(f"no stage '{options.stop_after}': choose one of {', '.join(stage_names)}")
    for name, _ in options.overrides:
        if name not in stage_names:
            raise OptionError(f"no stage '{name}' to override: choose one of {', '.join(stage_names)}")
    stages = Stages(options, target)
    run = stages.run
    backend = backend_for(target)
    memo = memo or Memo()
    if isinstance(model, Graph) and model.part is not None:
        # rows beyond those of a run may hold anything, NaN too: whatever was asked for, none is mixed with another; and
        # how far they are needed is not followed through Winograd's tiles, which would be computed for all the room
        own_windows = "direct" if options.convolution == "direct" or model.part.rooms else "auto"
        options = replace(options, contraction="direct", convolution=own_windows)
    planned_for = target
    if options.optimize == "throughput":
        planned_for = one_of_many(target if target.units > 1 else _whole(target, options))
    if options.effort == "fast":
        options, planned_for = hurried(options), backend.hurried(planned_for)
    # machine code is begun as soon as there is text, and what has begun is over when the stages are
    with suppress(Stopped), uncollected(), backend.early(target, options) as early:
        if isinstance(model, Graph):
            program = run("program", partial(lower, regions=backend.runs_regions), run("graph", lambda: model))
        else:
            program = run("program", lambda: model)
        if has_regions(program):
            return _in_parts(model, program, stages, target, options, memo, early, check)
        program = run("precision", set_precision, program, target, options.precision)
        program = run("fold", _folded, program, backend)
        program = run("merge", partial(_merge, target=planned_for, options=options, memo=memo), program)
        program = run("algorithm", choose_algorithms, program, planned_for, *_predictors(planned_for, options, memo),
                      memo.splits, _sizes(options), _terms_predictor(planned_for, options, memo),
                      _steps_predictor(planned_for, options, memo),
                      _rows_predictor(planned_for, options, memo))  # fmt: skip
        program = run("staging", partial(_staged, options=options, memo=memo), program, planned_for)
        program = run("layout", choose_layouts, program, planned_for)
        plan, loops = settle(run, stages.results, program, planned_for, options, memo, tuner)
        if check is not None:
            check(loops, plan)
        loops = run("unroll", backend.unroll, loops)
        loops = run("join_calls", backend.join_calls, loops, target)
        sources = run("source", partial(backend.render, early=early), loops, target)
        load = partial(backend.load, early=early, blocks=None if batches is None else batches.blocks)
        run("machine", load, sources, loops, program, plan, target, options)
    return _artifact(model, stages, target, options, batches)


def _whole(target: Target, options: Options) -> Target:
    """The machine that a target of one thread is a core of."""
    return machine(options.target, cache_dir=options.cache_dir) if options.target == target.name else target


def _in_parts(
    model: Graph | Program, program: Program, stages: Stages, target: Target, options: Options, memo: Memo, early: Any,
    check: Callable[[LoopProgram, Plan], None] | None,
) -> Artifact:  # fmt: skip
    """A Program with control flow that data decide: what is between is planned by itself."""
    refuse_edits(bool(options.overrides))
    if options.is_tuned:
        _LOG.warning("a model with loops or branches that data decide is not tuned: it is compiled as without tune")
    program = update_in_place(program)
    verify.verify_program(program)
    stop = options.stop_after if options.stop_after in STAGES[: STAGES.index("loops")] else "loops"

    made: list[Artifact] = []

    def plan_part(part: Program, number: int) -> Lowered | None:
        folder = None if options.dump is None else options.dump / f"part-{number}"
        found = build(part, target, replace(options, stop_after=stop, dump=folder, tune=None), memo=memo)
        for name, seconds in found.stage_seconds.items():
            stages.seconds[name] = stages.seconds.get(name, 0.0) + seconds
        made.append(found)
        if found.program is None or found.plan is None or found.loops is None:
            return None
        return Lowered(found.program, found.plan, found.loops)

    whole = linked(program, plan_part)
    if whole is not None:
        backend = backend_for(target)
        made = [replace(part, loops=loops) for part, loops in zip(made, whole.parts, strict=True)]
        stages.results.update({"layout": whole.program, "plan": whole.plan})
        with suppress(Stopped):
            loops = stages.run("loops", lambda: whole.loops)
            if check is not None:
                check(loops, whole.plan)
            loops = stages.run("unroll", backend.unroll, loops)
            loops = stages.run("join_calls", backend.join_calls, loops, target)
            sources = stages.run("source", partial(backend.render, early=early), loops, target)
            stages.run("machine", partial(backend.load, early=early), sources, loops, whole.program, whole.plan, target,
                       options)  # fmt: skip
    parts = tuple(CompiledPart(place, part) for place, part in zip(places(program), made, strict=True))
    return replace(_artifact(model, stages, target, options), parts=parts)


def _artifact(
    model: Graph | Program, stages: Stages, target: Target, options: Options, batches: Batches | None = None
) -> Artifact:
    done = stages.results
    programs = ("layout", "staging", "algorithm", "merge", "fold", "precision", "program")
    last: Program | None = next((done[name] for name in programs if name in done), None)
    graph = model if isinstance(model, Graph) else Graph("", (), (), (), {})
    return Artifact(
        graph, target, last, done.get("tune") or done.get("plan"), done.get("loops"), done.get("source", {}),
        done.get("machine"),
        _ports(last.inputs, last.input_names, batches) if last else (),
        _ports(last.outputs, last.output_names, batches) if last else (),
        stages.seconds, options.effort, batches=1 if batches is None else batches.parts,
    )  # fmt: skip


def _folded(program: Program, backend: Backend) -> Program:
    folded = fold_constants(without_counters(program), backend.least_rows)
    return compare_indices(folded) if backend.compares_places else folded


@contextmanager
def uncollected() -> Iterator[None]:
    """Without looking for cycles among all that a compilation makes and still needs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def hurried(options: Options) -> Options:
    """What takes most of a compilation's time left out: ways that are planned to be compared with each other."""
    return replace(
        options,
        schedule="register" if options.schedule == "connected" else options.schedule,
        merging="off",
        convolution="direct" if options.convolution == "auto" else options.convolution,
        contraction="direct" if options.contraction == "auto" else options.contraction,
    )


def machine_code(
    program: Program, plan: Plan, target: Target, options: Options, weights_dir: Path | None = None
) -> tuple[LoopProgram, Any]:
    """The lower half alone, for plans that are tried: a Plan to something that runs."""
    backend = backend_for(target)
    check_plan(plan, program, target)
    loops = lower_program(program, plan, backend.lower_kernel)
    backend.check_limits(loops, target)
    loops = renderable(loops, target)
    sources = backend.render(loops, target)
    return loops, backend.load(sources, loops, program, plan, target, options, weights_dir=weights_dir)


def _predictors(
    target: Target, options: Options, memo: Memo
) -> tuple[Predict | None, Predict | None, Predict | None, Predict | None]:
    """What tells the time of a convolution, a product, stacked recurrences and long reductions; None where the model's
    own way is kept."""
    # without joining: what that gains an algorithm is not known before its neighbours are
    apart = "none" if options.schedule == "none" else "register"

    def alone(program: Program) -> float:
        return predicted(program, target, apart, memo)[0]

    def contraction(program: Program) -> float:
        # of seven products only the sums behind them are what the model has beside it anyway
        return predicted(program, target, options.schedule, memo)[0]

    def recurrence(program: Program) -> float:
        # the computes of a step, and what feeds a reduction, have their neighbours beside them
        return predicted(choose_layouts(program, target), target, options.schedule, memo)[0]

    reduction = recurrence if options.schedule == "connected" and "splits" not in options.without else None

    def convolution(program: Program) -> float:
        # the sum as it stands may copy what the user hands over first; the order of everything else is ours
        if len(program.computes) > 1 or any(t in program.layouts for t in program.inputs):
            return alone(program)
        staged = _staged(program, target, options, memo)
        if not staged.staged:
            return alone(program)
        return min(alone(program), alone(choose_layouts(staged, target)))

    if not backend_for(target).other_algorithms:
        return None, None, recurrence, reduction
    return (
        None if options.convolution == "direct" else convolution,
        contraction if options.contraction == "strassen" else None,
        recurrence,
        reduction,
    )


def _sizes(options: Options) -> Sequence[int]:
    """Winograd's algorithms that may be chosen: unasked those alone whose outputs keep to their windows."""
    return SIZES if options.convolution == "winograd" else WINDOWED


def _merge(program: Program, target: Target, options: Options, memo: Memo) -> Program:
    """Alike computes as one, where that takes no longer with all that the later stages make of it."""
    if options.merging == "off":
        return program
    steps = _steps_predictor(target, options, memo)

    def predict(part: Program, connecting: bool) -> tuple[float, int]:
        schedule = "register" if options.schedule == "connected" and not connecting else options.schedule
        return _predicted_part(part, target, options, memo, schedule, steps)

    # steps first: what is alike in every one of them is then merged once, in the Scan
    return merge_alike(reroll(program, steps), predict, lambda whole: choose_layouts(whole, target).layouts,
                       dict(options.packed))  # fmt: skip


def _steps_predictor(target: Target, options: Options, memo: Memo) -> Predict:
    """What tells the time of steps, written out or as a Scan."""
    return lambda program: _predicted_part(program, target, options, memo, options.schedule, None)[0]


def _rows_predictor(target: Target, options: Options, memo: Memo) -> Predict | None:
    """What tells the time of a product and of all that leads to it; None where products are to be summed as the model
    says, or stand alone."""
    if options.contraction == "direct" or options.schedule != "connected":
        return None
    return _steps_predictor(target, options, memo)


def _predicted_part(
    part: Program, target: Target, options: Options, memo: Memo, schedule: str, steps: Predict | None
) -> tuple[float, int]:
    """The time and the kernels of a part of a model with all that the later stages make of it; without `steps`,
    recurrences are as they stand in it."""

    def beside(made: Program) -> Program:
        # other weights of the model are read in between, and decide where those of a part come from
        read = {t for c in part.computes for t in reads(c)}
        others = {t: a for t, a in part.constants.items() if t not in read}
        return replace(made, constants={**others, **made.constants})

    # products as the model says them: one of several, or several of one, may run by Strassen's algorithm alike
    convolutions, _, recurrences, reductions = _predictors(target, options, memo)
    ways = (convolutions, None, recurrences if steps is not None else None, reductions)
    chosen = choose_algorithms(part, target, *ways, memo.splits, _sizes(options), steps=steps)
    staged = _staged(beside(chosen), target, options, memo)
    return predicted(choose_layouts(beside(staged), target), target, schedule, memo)


def _staged(program: Program, target: Target, options: Options, memo: Memo) -> Program:
    """With copies of operands, unless they are left out."""
    if "staging" in options.without:
        return program
    return stage_operands(program, target, _staging_predictor(target, options, memo))


def _staging_predictor(target: Target, options: Options, memo: Memo) -> Predict:
    """What tells the time of a copy and the sum that reads it."""
    return lambda program: predicted(choose_layouts(program, target), target, options.schedule, memo)[0]


def _terms_predictor(target: Target, options: Options, memo: Memo) -> Predict | None:
    """What tells the time of a float32 product and of the maps in front of it; None where it is to be summed as the
    model says, and where operands have fewer digits already."""
    wide = options.precision in (None, "float32", "tf32_convolutions")
    if options.contraction == "direct" or not wide:
        return None
    staging = _staging_predictor(target, options, memo)

    def seconds(program: Program) -> float:
        return staging(stage_operands(program, target, staging))

    return seconds


def _ports(tensors: Any, names: tuple[str, ...], batches: Batches | None) -> tuple[ArtifactPort, ...]:
    ports = []
    for tensor, name in zip(tensors, names or [""] * len(tensors), strict=True):
        shape = [int(e) for e in tensor.shape]
        if batches is not None and tensor.name in batches.blocks:
            shape[{**batches.inputs, **batches.outputs}[tensor.name]] *= batches.parts
        ports.append(ArtifactPort(name or tensor.name, tensor.dtype, tuple(shape)))
    return tuple(ports)


def _verify(result: Any, inputs: tuple[Any, ...], target: Target) -> None:
    """The grammar of the form a stage gave."""
    if isinstance(result, Graph):
        verify.verify_graph(result)
    elif isinstance(result, Program):
        verify.verify_program(result, next((i for i in inputs if isinstance(i, Program)), None))
    elif isinstance(result, Plan):
        check_plan(result, inputs[0], target, measured=False)
    elif isinstance(result, LoopProgram):
        verify.verify_loops(result)
        check_stored(result, next((i for i in inputs if isinstance(i, Program)), None))
        backend_for(target).check_limits(result, target)


def _dump(folder: Path, number: int, name: str, result: Any, target: Target) -> None:
    stem = f"{number:02d}-{name}"
    files: dict[str, str] = {}
    if isinstance(result, Graph):
        files[f"{stem}.txt"] = text.graph_text(result)
    elif isinstance(result, Program):
        files[f"{stem}.txt"] = text.program_text(result)
    elif isinstance(result, Plan):
        files = {f"{stem}.json": result.to_json(), f"{stem}.txt": plan_text(result)}
    elif isinstance(result, LoopProgram):
        files[f"{stem}.txt"] = text.loops_text(result)
    elif isinstance(result, dict):
        suffix = backend_for(target).source_suffix
        files = {f"{stem}-{kernel}.{suffix}": source for kernel, source in result.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write to {folder}: {error.strerror}; dump takes a folder") from error


def _edited(name: str, path: Path, stage: Callable[..., Any], inputs: tuple[Any, ...], target: Target) -> Any:
    """An edited dump in place of a stage's result; what is wrong with it is the editor's to mend."""
    try:
        edited = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot read {path} to put in place of stage '{name}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"cannot read {path} to put in place of stage '{name}': it is no text") from error
    try:
        if name == "plan":
            plan = Plan.from_json(edited)
            check_plan(plan, inputs[0], target)  # here too, so that it is reported as the editor's mistake
            return wholly_priced(inputs[0], plan, target)
        if name in ("loops", "unroll", "join_calls"):
            return parse.parse_loops(edited)
        if name in ("precision", "fold", "merge", "algorithm", "staging", "layout"):
            made = stage(*inputs).constants  # a stage may make constants, which the text only names
            return parse.parse_program(edited, {t.name: a for t, a in {**inputs[0].constants, **made}.items()})
    except InternalError as error:
        raise OptionError(f"{path} in place of stage '{name}': {error}") from error
    if name == "source":
        sources: dict[str, str] = stage(*inputs)
        kernel = path.stem.rpartition("-")[2]
        if kernel not in sources:
            raise OptionError(f"{path}: no kernel '{kernel}'; the file's name ends in one of {', '.join(sources)}")
        return {**sources, kernel: edited}
    takes = "precision, fold, merge, algorithm, staging, layout, plan, loops, unroll, join_calls and source"
    raise OptionError(f"stage '{name}' takes no edited dump; {takes} do")
