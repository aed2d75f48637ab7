"""The Plan that is kept and its Loops: where a better plan turns out to be none, the plainer one before it is taken.

Costs nothing while all goes well. A mistake of ours in one kernel then makes that kernel slower and is told, instead of
ending the compilation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod
from typing import Any

from tilewright.backend import backend_for
from tilewright.errors import InternalError, UnsupportedError, printable
from tilewright.ir.forms.bounds import upper
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.loops import Kernel, LoopProgram
from tilewright.ir.forms.tensor import Extent
from tilewright.lower.kernel import Binding
from tilewright.lower.program import lower_program
from tilewright.ops.builder import MOST_STORED
from tilewright.options import Options
from tilewright.schedule.objectives import plan_for
from tilewright.schedule.planner import make_plan, plan_seconds
from tilewright.target import Target
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.plan.form import Plan, Tile

_LOG = logging.getLogger("tilewright")
_WORTH_PARTS = 0.25  # of the time of a model: so much longer it may take, to hold what is very large in parts

Run = Callable[..., Any]  # a stage by name: checks what it gives
Tuner = Callable[[Program, Plan, Target, Options], Plan]


def settle(
    run: Run, results: dict[str, Any], program: Program, target: Target, options: Options, memo: Memo,
    tuner: Tuner | None,
) -> tuple[Plan, LoopProgram]:  # fmt: skip
    """The stages from Program to Loops; `results` has what each of them gave last."""

    def tried(schedule: str, whole: bool, plain: frozenset[str] = frozenset()) -> tuple[Plan, LoopProgram]:
        make = partial(make_plan, memo=memo, whole=whole, plain=plain, hurried=options.effort == "fast",
                       packed=dict(options.packed))  # fmt: skip
        if schedule == "connected" and large:
            seconds = plan_seconds(make_plan(program, target, schedule, memo=memo, whole=False), program)
            make = partial(make, dear={name: share * seconds for name, share in large.items()})
        if whole and not plain and schedule == "connected":
            plan = run("plan", lambda *given: plan_for(options.objectives, program, make(*given), target, memo),
                       program, target, schedule)  # fmt: skip
        else:
            plan = run("plan", make, program, target, schedule)
        if tuner is not None:
            plan = run("tune", tuner, program, plan, target, options)
        return plan, run("loops", lower_program, program, plan, backend_for(target).lower_kernel)

    # what is to be in parts, by the share of the whole time that this may cost
    large = {}
    for tensor in (t for c in program.computes for t in c.outputs):
        if not _is_storable(tensor.shape):
            large[tensor.name] = 1.0
        elif prod(map(upper, tensor.shape)) * tensor.dtype.bytes > backend_for(target).most_between:
            large[tensor.name] = _WORTH_PARTS
    try:
        return tried(options.schedule, options.effort != "fast")
    except InternalError as error:
        if options.schedule != "connected" or any(name in ("plan", "tune", "loops") for name, _ in options.overrides):
            raise  # there is nothing plainer, or an edited plan is the editor's
        found = error
    plain = _unlowered(program, results["plan"], target) if "plan" in results else frozenset()
    ways = [("connected", bool(plain), plain), ("register", False, frozenset())]
    for schedule, whole, apart in ways:
        _tell(found, schedule, apart)
        try:
            return tried(schedule, whole, apart)
        except InternalError as error:
            _LOG.debug("%s", printable(str(error)))
    raise found


def _is_storable(shape: Sequence[Extent]) -> bool:
    return prod(map(upper, shape)) <= MOST_STORED


def check_stored(loops: LoopProgram, program: Program | None) -> None:
    """What memory has whole is no larger than supported: of what kernels keep parts alone there may be more."""
    origins = {t.name: c.origin for c in (program.computes if program else ()) for t in c.outputs}
    for stored in loops.tensors:
        if stored.role == "constant" or _is_storable(stored.shape):
            continue
        is_given = stored.role == "input"
        whose = f"input '{stored.name}'" if is_given else f"{origins.get(stored.name) or stored.name}: its result"
        raise UnsupportedError(f"{whose} would have the shape {list(stored.shape)}, {prod(stored.shape)} elements; "
                               f"{MOST_STORED} are supported of what is stored")  # fmt: skip


def predicted(program: Program, target: Target, schedule: str, memo: Memo) -> tuple[float, int]:
    """The time that a Program is predicted to take, which is compared with others, and the kernels it has; one that no
    plan is found for by a mistake of ours never pays."""
    try:
        plan = make_plan(program, target, schedule, memo=memo, whole=False)
    except InternalError as error:
        _LOG.warning("%s", printable(f"a form of {program.outputs[0].name} was not looked at: no plan of Tilewright's "
                                     f"was found for it; please report this: {error}"))  # fmt: skip
        return inf, len(program.computes)
    return plan_seconds(plan, program), len(plan.kernels)


def _unlowered(program: Program, plan: Plan, target: Target) -> frozenset[str]:
    """What kernels store that cannot be lowered as they are planned."""
    backend = backend_for(target)
    failed: set[str] = set()

    def lower(tile: Tile, *rest: Any) -> Binding:
        try:
            return backend.lower_kernel(tile, *rest)
        except InternalError:
            failed.update(leaf.tensor for leaf in tile.leaves)
            return Binding(Kernel(tile.name, (), ()), ())

    try:
        lower_program(program, plan, lower)
    except InternalError:
        return frozenset()  # it is not one kernel that fails
    return frozenset(failed)


def _tell(error: InternalError, schedule: str, plain: frozenset[str]) -> None:
    kept = f"'{min(plain)}' and what shared its kernel" if plain else "the model"
    way = "one kernel each" if plain else "without refinement" if schedule == "connected" else "kernel by kernel"
    _LOG.warning("%s", printable(f"a plan of Tilewright's failed and {kept} runs {way} instead, with the same answers, "
                                 f"perhaps slower; please report this: {error}"))  # fmt: skip
