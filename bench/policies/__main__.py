"""What policies can be held to.

    python -m bench.policies                          what `optimize="memory"` saves over the zoo, and costs as planned
    python -m bench.policies --time                   and timed beside the quickest plan, in a process of its own
    python -m bench.policies --machine neoverse_n1    planned for a description; nothing runs
    python -m bench.policies table                    measures small kernels x orders of objectives, and makes the table
    python -m bench.policies polybench --plans 40     PolyBench: the best of at most 8 plans a kernel, of the best found

The last two run on one core of the machine at hand and count its processor time; what they measure is appended to a
file (`--out`), and what it has is not measured again. The exit status is 1 where a model needs more memory than by its
quickest plan, or the best of few is not within 1.05 of the best found in the geometric mean.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.judge.measure import one_core
from bench.policies import found, memory, polybench
from bench.policies import table as policy_table
from bench.support import exported, table
from bench.zoo import MODELS, SIZES
from tilewright.options import Options
from tilewright.target import machine


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=("memory", "table", "polybench"), default="memory")
    parser.add_argument("--models", default=",".join(MODELS), help="of the zoo, comma-separated (default: all)")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--exports", type=Path, help="folder of exported models, filled as needed and kept")
    parser.add_argument("--machine", default="cpu", help="a description, to plan for alone (default: what is at hand)")
    parser.add_argument("--threads", type=int, help="of a CPU; 1 is timed by its processor time")
    parser.add_argument("--time", action="store_true", help="measure as well")
    parser.add_argument("--kernels", default=",".join(polybench.SIZES), help="of PolyBench (default: all)")
    parser.add_argument("--plans", type=int, default=40, help="of polybench, beside those of policies (%(default)s)")
    parser.add_argument("--programs", type=int, default=46, help="of table: small Programs (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="what was measured")
    given = parser.parse_args()
    if given.action == "memory":
        return _memory(given)
    options = Options.from_environment(target="cpu", threads=1)
    given.out = given.out or Path(f"policies-{given.action}.jsonl")
    target = one_core(machine("cpu"))
    if given.action == "table":
        policy_table.measure(range(given.programs), target, options, given.out)
        seen = policy_table.read(given.out)
        policy_table.write(seen, policy_table.STORED)
        print("\n".join(table(["dependences", "kernels", "loss", "most"], policy_table.report(seen))))
        return 0
    rows = []
    for one in found.search(given.kernels.split(","), given.plans, target, options, given.out):
        rows.append(one)
        print("\t".join(one.row()), flush=True)
    mean = found.mean(rows)
    print("\n".join(table(found.HEADER, [row.row() for row in rows])))
    print(f"the best of at most 8 takes {mean:.3f} of the best found, in the geometric mean; {found.MUST} is asked for")
    return int(mean > found.MUST)


def _memory(given: argparse.Namespace) -> int:
    options = Options.from_environment(
        target=given.machine, threads=given.threads, tune=1.0 if given.time else None
    )  # fmt: skip
    target = machine(options.target, options.threads, cache_dir=options.cache_dir)
    with tempfile.TemporaryDirectory(prefix="tilewright-policies-") as temporary:
        folder = (given.exports or Path(temporary)) / given.size
        folder.mkdir(parents=True, exist_ok=True)
        paths = exported(given.models.split(","), given.size, folder, print)
        return int(not memory.compared(paths, target, options, given.time))


if __name__ == "__main__":
    sys.exit(main())
