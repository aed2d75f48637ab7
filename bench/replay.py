"""Plans and sources of the zoo beside those of an earlier revision, without hardware: python -m bench.replay REVISION.

Each model is planned and written out as text for every machine description, by this code and by the revision's, which
is checked out into a folder that vanishes afterwards. What is printed: the cases that differ, in how many kernels, and
what either side predicts. Equal Plans and equal sources everywhere is what a change that only moves code has to show.

    python -m bench.replay HEAD~1                                    everything: an hour or two on two cores
    python -m bench.replay HEAD~1 --size small                       small models: minutes
    python -m bench.replay HEAD~1 --models vit_s32 --machines h200 --show 1     and the first text that differs
    python -m bench.replay HEAD --keep DIR                           a side that was made before is read from DIR

The exit status is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import difflib
import json
import lzma
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support import ROOT, add_zoo_options, checked_out, chosen_models, exported
from tilewright.target import machine, stored_machines

PRECISIONS = ("float32", "16 bits")
# What a process of either revision runs: a case a line comes in, its texts go to the file that the line names. It uses
# only what a user of the package has, so that revisions whose rooms lie elsewhere can be compared.
_SIDE = """
import json, lzma, sys
from pathlib import Path
import tilewright
from tilewright.options import Options
for line in sys.stdin:
    model, target, precision, file = json.loads(line)
    try:
        made = tilewright.compile(model, options=Options(target=target, precision=precision, stop_after="source"))
        plan = made.artifact.plan
        found = {"plan": json.loads(plan.to_json()), "sources": made.artifact.sources,
                 "seconds": sum(kernel.estimate.seconds for kernel in plan.kernels)}
    except Exception as error:  # whatever it is: the other side may raise the same
        found = {"error": f"{type(error).__name__}: {error}"}
    Path(file).write_bytes(lzma.compress(json.dumps(found).encode(), preset=1))
    print("done", flush=True)
"""


@dataclass(frozen=True)
class Case:
    """One model for one machine; its name is that of the file of its texts."""

    model: str
    batch: int
    precision: str
    target: str

    @property
    def name(self) -> str:
        return f"{self.model}.{self.batch}.{self.precision}.{self.target}"


@dataclass(frozen=True)
class Difference:
    """What two sides made of a case; `kernels` counts the texts that only one of them has."""

    case: Case
    kernels: int
    of: int
    plans_differ: bool
    ratio: float | None  # predicted seconds of this side over those of the earlier one
    error: str | None

    @property
    def any(self) -> bool:
        return bool(self.kernels or self.plans_differ or self.error)

    def line(self) -> str:
        if self.error is not None:
            return f"{self.case.name}: {self.error}"
        if not self.any:
            return f"{self.case.name}: equal"
        plans = "plans differ" if self.plans_differ else "equal plans"
        predicted = "" if self.ratio is None else f", predicted {self.ratio:.4f} of before"
        return f"{self.case.name}: {plans}, {self.kernels} of {self.of} kernels differ{predicted}"


def compare(case: Case, earlier: Mapping[str, Any], this: Mapping[str, Any]) -> Difference:
    """Equal errors are no difference; one side's alone is."""
    errors = [side.get("error") for side in (earlier, this)]
    if any(errors):
        told = f"earlier: {errors[0] or 'compiles'}; this: {errors[1] or 'compiles'}"
        return Difference(case, 0, 0, False, None, None if errors[0] == errors[1] else told)
    texts = [sorted(side["sources"].values()) for side in (earlier, this)]
    alone = len(set(texts[1]) - set(texts[0]) | set(texts[0]) - set(texts[1]))
    moved = 1 if not alone and earlier["sources"] != this["sources"] else 0  # the same texts in another order
    ratio = this["seconds"] / earlier["seconds"] if earlier["seconds"] else None
    return Difference(case, alone + moved, len(texts[1]), earlier["plan"] != this["plan"], ratio, None)


def shown(case: Case, earlier: Mapping[str, Any], this: Mapping[str, Any], lines: int = 60) -> str:
    """The first lines of what differs: of the Plan, otherwise of the sources."""
    sides = [json.dumps(side.get("plan"), indent=1) for side in (earlier, this)]
    if sides[0] == sides[1]:
        sides = ["\n".join(f"// {k}\n{t}" for k, t in side.get("sources", {}).items()) for side in (earlier, this)]
    found = list(difflib.unified_diff(*(s.splitlines() for s in sides), "earlier", "this", n=2, lineterm=""))
    return "\n".join([f"--- {case.name}", *found[:lines]])


class Side:
    """A revision's processes, one a worker thread; each makes the texts of the cases it is given, one after another."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.local = threading.local()
        self.processes: list[subprocess.Popen[str]] = []

    def make(self, case: Case, model: Path) -> dict[str, Any]:
        file = self.folder / f"{case.name}.json.xz"
        if not file.is_file():
            process = self._process()
            assert process.stdin is not None and process.stdout is not None
            waiting = file.with_name(f"{file.name}.part")
            process.stdin.write(json.dumps([str(model), case.target, _option(case), str(waiting)]) + "\n")
            process.stdin.flush()
            if process.stdout.readline().strip() != "done":
                self.local.process = None
                return {"error": f"the process of {self.root.name} ended with status {process.wait()}"}
            waiting.replace(file)
        found: dict[str, Any] = json.loads(lzma.decompress(file.read_bytes()))
        return found

    def close(self) -> None:
        for process in self.processes:
            process.communicate()

    def _process(self) -> subprocess.Popen[str]:
        if getattr(self.local, "process", None) is None:
            self.local.process = subprocess.Popen(
                [sys.executable, "-c", _SIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self.root,
                env={**os.environ, "PYTHONPATH": str(self.root)},
            )  # fmt: skip
            self.processes.append(self.local.process)
        process: subprocess.Popen[str] = self.local.process
        return process


def cases(models: Sequence[str], machines: Sequence[str], batches: Sequence[int]) -> list[Case]:
    return [Case(m, b, p, t) for m in models for b in batches for t in machines for p in PRECISIONS]


def _option(case: Case) -> str | None:
    """What a precision is called on a machine: CPUs have no tensor cores for float16."""
    if case.precision == "float32":
        return None
    return "float16" if machine(case.target).kind == "gpu" else "bfloat16"


def _commit(revision: str) -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", f"{revision}^{{commit}}"]
    told = subprocess.run(git, stdout=subprocess.PIPE, text=True)
    if told.returncode != 0:
        raise SystemExit(f"there is no revision {revision!r}")
    return told.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", help="as git names it")
    add_zoo_options(parser, "replay", results=False)
    known = stored_machines()
    parser.add_argument("--machines", default=",".join(known), help="comma-separated (default: %(default)s)")
    parser.add_argument("--batches", default="1,8", help="comma-separated (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the texts of the revision here, by its commit")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the first lines of N differences")
    arguments = parser.parse_args()
    names, machines = chosen_models(parser, arguments), arguments.machines.split(",")
    for name in machines:
        if name not in known:
            parser.error(f"no machine named {name!r}; there are {', '.join(known)}")
    commit = _commit(arguments.revision)
    batches = [int(batch) for batch in arguments.batches.split(",")]
    with tempfile.TemporaryDirectory(prefix="tilewright-replay-") as temporary:
        exports = arguments.exports or Path(temporary) / "exports"
        files: dict[tuple[str, int], Path] = {}
        for batch in batches:
            folder = exports / (arguments.size if batch == 1 else f"{arguments.size}-batch{batch}")
            folder.mkdir(parents=True, exist_ok=True)
            found = exported(names, arguments.size, folder, lambda text: print(text, file=sys.stderr), batch)
            files |= {(name, batch): path.absolute() for name, path in found.items()}
        kept = arguments.keep / commit / arguments.size if arguments.keep else Path(temporary) / "earlier-texts"
        mine = Path(temporary) / "this-texts"
        for made in (kept, mine):
            made.mkdir(parents=True, exist_ok=True)
        with checked_out(commit, Path(temporary) / "earlier") as earlier:
            sides = Side(earlier, kept.absolute()), Side(ROOT, mine)
            try:
                return report(cases(names, machines, batches), sides, files, arguments.jobs, arguments.show)
            finally:
                for side in sides:
                    side.close()


def report(
    all_cases: Sequence[Case], sides: tuple[Side, Side], files: Mapping[tuple[str, int], Path], jobs: int, show: int
) -> int:
    def both(case: Case) -> tuple[Difference, str]:
        earlier, this = (side.make(case, files[case.model, case.batch]) for side in sides)
        difference = compare(case, earlier, this)
        return difference, shown(case, earlier, this) if difference.any and difference.error is None else ""

    different: list[Difference] = []
    with ThreadPoolExecutor(jobs) as pool:
        for number, (difference, text) in enumerate(pool.map(both, all_cases), 1):
            print(f"[{number}/{len(all_cases)}] {difference.line()}", flush=True)
            if difference.any:
                different.append(difference)
                if text and len(different) <= show:
                    print(text)
    ratios = [d.ratio for d in different if d.ratio]
    print(f"{len(all_cases) - len(different)} of {len(all_cases)} cases equal")
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"predicted time of the others: {mean:.4f} of before in geometric mean, "
              f"{min(ratios):.4f} to {max(ratios):.4f}")  # fmt: skip
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
