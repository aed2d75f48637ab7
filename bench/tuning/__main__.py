"""What tuning can be held to.

    python -m bench.tuning legal                 every plan it would measure, on four machines, without running any
    python -m bench.tuning gain --for 2m         what it gains, measured once more in a process of its own
    python -m bench.tuning aa                    how often equal plans are taken for faster
    python -m bench.tuning families              trials that families save, replayed from the judge's records

The exit status is 1 where a plan is illegal, a model becomes slower, or more than 5% of equal plans are changed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.judge.judge import STORED
from bench.support import exported
from bench.tuning import families, legal, timed
from bench.zoo import MODELS, SIZES
from tilewright.options import Options

_MOST_CHANGED = 5  # percent


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tuning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("legal", "gain", "aa", "families"))
    parser.add_argument("--models", default=",".join(MODELS), help="of the zoo, comma-separated (default: all)")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--exports", type=Path, help="folder of exported models, filled as needed and kept")
    parser.add_argument("--machines", default=",".join(legal.MACHINES), help="of legal (default: %(default)s)")
    parser.add_argument("--plans", type=int, default=12, help="of legal: of each kernel (default: %(default)s)")
    parser.add_argument("--for", dest="tune", default="2m", help="of gain: how long (default: %(default)s)")
    parser.add_argument("--sittings", type=int, default=3, help="of aa: with each model (default: %(default)s)")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--threads", type=int, help="of a CPU; 1 is timed by its processor time")
    parser.add_argument("--precision", help="as tilewright run takes it")
    parser.add_argument("--records", type=Path, nargs="*", help="of families (default: those of bench/judge/records)")
    parser.add_argument("--seeds", type=int, default=3, help="of families: of models, and of each (default: 3)")
    given = parser.parse_args()
    if given.action == "families":
        families.report(given.records or sorted(STORED.glob("*.jsonl*")), given.seeds, given.seeds)
        return 0
    with tempfile.TemporaryDirectory(prefix="tilewright-tuning-") as temporary:
        folder = (given.exports or Path(temporary)) / given.size
        folder.mkdir(parents=True, exist_ok=True)
        paths = exported(given.models.split(","), given.size, folder, print)
        if given.action == "legal":
            return int(legal.report(paths, given.machines.split(","), given.plans) > 0)
        options = Options.from_environment(target=given.target, threads=given.threads, precision=given.precision,
                                           tune=given.tune)  # fmt: skip
        if given.action == "gain":
            return int(timed.gain(paths, options) > 0)
        return int(timed.aa(paths, options, given.sittings) > _MOST_CHANGED)


if __name__ == "__main__":
    sys.exit(main())
