"""ALCOP (MLSys 2023): products on a GPU in one stage, in several, and with registers filled ahead as well.

The plan of each product is taken as it is and its ring given another number of stages: all else stays, so that the ring
alone differs. What tensor cores read from registers (`mma`) is fetched a step ahead wherever the ring has more than one
stage, which is the second level; what they read from shared memory (`wgmma`), and sums of threads, have the ring alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median

from bench.arithmetic import Contraction
from bench.papers.operators import graph_of
from bench.papers.steps import Step, counted, lowered, planned
from tilewright.errors import InternalError
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.loops import Alloc, Instruction, Memory, statements
from tilewright.options import Options
from tilewright.target import Target
from tilewright.tile_graph.plan.form import COPIES, Leaf, Plan, Tile
from tilewright.tile_graph.plan.leaf_form import ThreadForm
from tilewright.tune.answers import ports
from tilewright.tune.models import TrialBuilder

PROBLEMS = (
    Contraction(1, 512, 3072, 768, True),
    Contraction(1, 4096, 1024, 1024, True),
    Contraction(1, 2048, 2048, 2048, True),
)
STAGES = (1, 2, 3, 4)
SAID = (
    "ALCOP, A100, single operators: 1.23x of TVM without pipelining on average, 0.93x of the vendor's libraries; the "
    "best of 10 trials chosen by its model reaches 0.95 of an exhaustive search.",
)


@dataclass(frozen=True)
class Row:
    """A product by one instruction with its ring in so many stages."""

    problem: str
    form: str
    stages: int
    is_chosen: bool
    levels: int  # that are filled ahead
    shared_bytes: int  # of a block
    copies: int  # instructions that copy asynchronously, in the text
    predicted: float | None  # seconds; None: fewer stages than the model of the machine ever looks at
    refused: str = ""
    measured: float | None = None


def rows(
    target: Target, options: Options, problems: Sequence[Contraction] = PROBLEMS, rounds: int = 0
) -> Iterator[Row]:
    """Every product on tensor cores of either kind and on threads, each run so many times; 0: nothing runs."""
    narrow, wide = replace(options, precision="float16"), replace(options, contraction="direct")
    single = replace(target, rates=tuple((n, r) for n, r in target.rates if not _by_groups(n)))
    ways = [(narrow, single), (wide, target)]
    if any(_by_groups(name) for name, _ in target.rates):
        ways.insert(1, (narrow, target))
    for problem in problems:
        graph = graph_of(problem)
        for chosen, described in ways:
            step = planned(problem.describe(), graph, described, chosen)
            own = _stages_of(step.plan)
            for stages in sorted({*STAGES, own}):
                yield _row(step, stages, stages == own, target, options, rounds)


def _by_groups(name: str) -> bool:
    """Whether an instruction is one of four warps together."""
    return name in FORMS and FORMS[name].warps > 1


def _row(step: Step, stages: int, is_chosen: bool, target: Target, options: Options, rounds: int) -> Row:
    made = replace(step, plan=in_stages(step.plan, stages))
    leaf = _summed(made.plan)
    form = leaf.instruction or "threads"
    levels = 0 if stages == 1 else 2 if form in FORMS and not _by_groups(form) else 1
    row = Row(step.name, form, stages, is_chosen, levels, 0, 0, None)
    try:
        loops = lowered(made, target)
        seconds = counted(made, target).predicted
    except InternalError as error:
        return replace(row, refused=str(error))
    kernel = next(k for k in loops.kernels if k.name == loops.calls[-1].kernel)
    found = list(statements(kernel.body))
    room = sum(prod(int(e) for e in s.buffer.shape) * s.buffer.dtype.bytes for s in found  # type: ignore[arg-type]
               if isinstance(s, Alloc) and s.buffer.memory is Memory.SHARED)  # fmt: skip
    copies = sum(isinstance(s, Instruction) and s.name.startswith("copy_async") for s in found)
    price = seconds if seconds < float("inf") else None
    taken = _measured(made, target, options, rounds) if rounds else None
    return replace(row, shared_bytes=room, copies=copies, predicted=price, measured=taken)


def _measured(step: Step, target: Target, options: Options, rounds: int) -> float:
    """Seconds of the sum's own launch."""
    inputs, outputs = ports(step.program)
    with TrialBuilder(step.program, target, options).built(step.plan) as made:
        return median(float(made.runner.profile(inputs, outputs)[-1]) for _ in range(rounds)) * 1e-9


def in_stages(plan: Plan, stages: int) -> Plan:
    """A plan whose sums bring operands in so many stages."""

    def held(tile: Tile) -> Tile:
        body = tuple(held(node) if isinstance(node, Tile) else node for node in tile.body)
        return replace(tile, body=body, holds=tuple(
            replace(h, stages=stages) if h.fill in COPIES else h for h in tile.holds))  # fmt: skip

    return replace(plan, body=held(plan.body).map_leaves(lambda leaf: _with_ring(leaf, stages)))


def _with_ring(leaf: Leaf, stages: int) -> Leaf:
    """Of threads that sum up steps through shared memory the leaf says how many steps there are at a time."""
    return leaf.with_options(ThreadForm, at_once=stages) if leaf.options(ThreadForm).step else leaf


def _summed(plan: Plan) -> Leaf:
    return plan.kernels[-1].leaves[-1]


def _stages_of(plan: Plan) -> int:
    tiles = [n for n in plan.kernels[-1].walk() if isinstance(n, Tile)]
    own = _summed(plan).options(ThreadForm).at_once
    return max([h.stages for t in tiles for h in t.holds if h.fill in COPIES], default=own)


Cell = Callable[[Row], str]
COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("product", lambda r: r.problem),
    ("by", lambda r: r.form),
    ("stages", lambda r: f"{r.stages}{' (chosen)' if r.is_chosen else ''}"),
    ("levels ahead", lambda r: "" if r.refused else str(r.levels)),
    ("kB shared", lambda r: "" if r.refused else f"{r.shared_bytes / 1e3:.1f}"),
    ("async copies", lambda r: "" if r.refused else str(r.copies)),
    ("predicted us", lambda r: r.refused or ("not priced" if r.predicted is None else f"{1e6 * r.predicted:.1f}")),
    ("measured us", lambda r: "" if r.measured is None else f"{1e6 * r.measured:.1f}"),
)
