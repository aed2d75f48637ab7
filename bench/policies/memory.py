"""What `optimize="memory"` saves and costs over the zoo: memory that a run needs, as planned, and time, as measured.
"""


from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.support import table
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.options import POLICIES, Options
from tilewright.schedule.objectives import Looked, plan_for
from tilewright.target import Target
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tune.fresh import measured

_SECONDS = 3.0  # of a sitting


def both(path: Path, target: Target, options: Options) -> tuple[Looked, Looked]:
    """The quickest plan, and the one of least memory."""
    memo = Memo()
    made = build(load(path, {}), target, options.override(stop_after="plan"), memo=memo)
    assert made.program is not None and made.plan is not None
    small = plan_for(POLICIES["memory"], made.program, made.plan, target, memo)
    return Looked(made.program, made.plan, target), Looked(made.program, small, target)


def timed(quick: Looked, small: Looked, options: Options) -> list[str]:
    times = measured(quick.program, (quick.plan, small.plan), quick.target, options, _SECONDS)
    if times is None:
        raise SystemExit("no process could be started to measure it")
    ratio, itself = times.whole.ratio, times.whole.itself
    return [f"{ratio.middle:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}", f"{itself.middle:.3f}"]


def _ratio(small: float, quick: float) -> str:
    return f"{small / quick:.3f}" if quick else "1.000"


def compared(paths: Mapping[str, Path], target: Target, options: Options, time: bool) -> bool:
    """Prints a row a model; whether none needs more memory than by its quickest plan."""
    rows, larger = [], 0
    for name, path in paths.items():
        quick, small = both(path, target, options)
        larger += small.memory > quick.memory
        rows.append([name, str(quick.memory), _ratio(small.memory, quick.memory), _ratio(small.arena, quick.arena),
                     _ratio(small.seconds, quick.seconds),
                     *(timed(quick, small, options) if time else ())])  # fmt: skip
        print("\t".join(rows[-1]), flush=True)
    measures = ["time", "19 of 20", "A/A"] if time else []
    print("\n".join(table(["model", "bytes", "of them", "between kernels", "predicted time", *measures], rows)))
    return not larger
