"""What `optimize="memory"` saves and costs over the zoo: memory that a run needs, as planned, and time, as measured.

    python -m bench.policies                          all models, planned for the machine at hand
    python -m bench.policies --time                   and timed beside the quickest plan, in a process of its own
    python -m bench.policies --machine neoverse_n1    planned for a description; nothing runs

The exit status is 1 where a model needs more memory than by its quickest plan.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.support import exported, table
from bench.zoo import MODELS, SIZES
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.options import POLICIES, Options
from tilewright.schedule.objectives import Looked, plan_for
from tilewright.target import Target, machine
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


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="of the zoo, comma-separated (default: all)")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--exports", type=Path, help="folder of exported models, filled as needed and kept")
    parser.add_argument("--machine", default="cpu", help="a description, to plan for alone (default: what is at hand)")
    parser.add_argument("--threads", type=int, help="of a CPU; 1 is timed by its processor time")
    parser.add_argument("--time", action="store_true", help="measure as well")
    given = parser.parse_args()
    options = Options.from_environment(target=given.machine, threads=given.threads, tune=1.0 if given.time else None)
    target = machine(options.target, options.threads, cache_dir=options.cache_dir)
    rows, larger = [], 0
    with tempfile.TemporaryDirectory(prefix="tilewright-policies-") as temporary:
        folder = (given.exports or Path(temporary)) / given.size
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in exported(given.models.split(","), given.size, folder, print).items():
            quick, small = both(path, target, options)
            larger += small.memory > quick.memory
            rows.append([name, str(quick.memory), _ratio(small.memory, quick.memory), _ratio(small.arena, quick.arena),
                         _ratio(small.seconds, quick.seconds),
                         *(timed(quick, small, options) if given.time else ())])  # fmt: skip
            print("\t".join(rows[-1]), flush=True)
    measures = ["time", "19 of 20", "A/A"] if given.time else []
    header = ["model", "bytes", "of them", "between kernels", "predicted time", *measures]
    print("\n".join(table(header, rows)))
    return int(larger > 0)


if __name__ == "__main__":
    sys.exit(main())
