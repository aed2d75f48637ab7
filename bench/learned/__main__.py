"""Whether a learned correction makes predictions better, on programs and machines that it has not seen.

    python -m bench.learned                          the judge's records, shared out by program
    python -m bench.learned FILES... --split machine     each machine predicted by what the others taught
    python -m bench.learned --networks               networks beside it: up the Plan's tree (DLBCM), along reads (LPM)

Nothing runs but predictions: it is fitted anew to the predictor of this code each time, in about a minute. By machine
and class: rank within a task, loss (what the plan predicted best takes over the best measured) and the tasks in which
that is within 10%, for the fold over the Plan's tree, for that times a forest's correction, for the same only in
classes where it was better on the other programs beyond noise, and for a forest that is not told the prediction.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.judge.judge import STORED
from bench.judge.price import read_all
from bench.learned.judge import report
from bench.learned.rows import rows_of


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learned", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="records (default: those of bench/judge/records)")
    parser.add_argument("--split", choices=("program", "machine"), default="program")
    parser.add_argument("--networks", action="store_true", help="also networks, which take some minutes to fit")
    given = parser.parse_args()
    rows = rows_of(read_all(given.files or sorted(STORED.glob("*.jsonl*"))), given.networks)
    if given.split == "machine" and len({row.machine for row in rows}) < 2:
        parser.error("--split machine needs records of two machines or more")
    print(report(rows, given.split, given.networks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
