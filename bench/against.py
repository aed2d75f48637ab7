"""This code beside an earlier revision of itself: python -m bench.against REVISION --batch 8.

The revision is checked out into a folder that vanishes afterwards. Either side has a process and a cache of its own,
and is stopped while the other one is timed; rounds alternate, and medians are shown.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean, median
from typing import IO

from bench.support import ROOT, add_zoo_options, checked_out, chosen_models, export_folder, exported

# What a process of either revision runs: it compiles, says so, and times rounds of as many seconds as it is told.
_SIDE = """
import sys, time
from pathlib import Path
import numpy as np
import tilewright
from tilewright.options import Options
path, schedule, threads, cache = sys.argv[1:]
options = Options(schedule=schedule, threads=int(threads), cache_dir=Path(cache))
model = tilewright.compile(path, options=options)
rng = np.random.default_rng(0)
given = {p.name: rng.random(p.shape).astype(np.float32) if np.dtype(p.dtype).kind == "f"
         else np.ones(p.shape, p.dtype) for p in model.inputs}
model.run(given)
print("ready", flush=True)
for line in sys.stdin:
    taken, end = [], time.perf_counter() + float(line)
    while time.perf_counter() < end or len(taken) < 3:
        begin = time.perf_counter()
        model.run(given)
        taken.append(time.perf_counter() - begin)
    print(1e3 * sorted(taken)[len(taken) // 2], flush=True)
"""


class Side:
    """A revision's process, which stands still until it is asked."""

    def __init__(self, root: Path, model: Path, schedule: str, threads: int, cache: Path) -> None:
        command = [sys.executable, "-c", _SIDE, str(model), schedule, str(threads), str(cache)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
                                        env={**os.environ, "PYTHONPATH": str(root)}, process_group=0)  # fmt: skip
        if self._answer() != "ready":
            raise SystemExit(f"{model.name} cannot be run by the code in {root}")
        os.killpg(self.process.pid, signal.SIGSTOP)

    def milliseconds(self, seconds: float) -> float:
        os.killpg(self.process.pid, signal.SIGCONT)
        self._pipe(self.process.stdin).write(f"{seconds}\n")
        self._pipe(self.process.stdin).flush()
        found = float(self._answer())
        os.killpg(self.process.pid, signal.SIGSTOP)
        return found

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.communicate()

    def _answer(self) -> str:
        return self._pipe(self.process.stdout).readline().strip()

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


def times(sides: dict[str, Side], rounds: int, seconds: float) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            found[name].append(side.milliseconds(seconds))
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=__doc__)
    parser.add_argument("revision", help="as git names it")
    parser.add_argument("--schedule", default="connected", help="of the earlier revision (default: %(default)s)")
    add_zoo_options(parser, "against", batch=True, results=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="per round and side")
    arguments = parser.parse_args()
    names = chosen_models(parser, arguments)
    with (
        export_folder(arguments) as (temporary, folder),
        checked_out(arguments.revision, temporary / "earlier") as earlier,
    ):
        paths = exported(names, arguments.size, folder, lambda text: print(text, flush=True), arguments.batch)
        ratios = []
        for name, path in paths.items():
            sides = {
                "earlier": Side(earlier, path, arguments.schedule, arguments.threads, temporary / "earlier-cache"),
                "this": Side(ROOT, path, "connected", arguments.threads, temporary / "cache"),
            }
            took = times(sides, arguments.rounds, arguments.seconds)
            for side in sides.values():
                side.close()
            ratios.append(took["earlier"] / took["this"])
            print(f"{name:16} {arguments.revision} {arguments.schedule} {took['earlier']:9.2f} ms, "
                  f"this {took['this']:9.2f} ms: {ratios[-1]:.3f}x", flush=True)  # fmt: skip
        print(f"geometric mean {geometric_mean(ratios):.3f}x")


if __name__ == "__main__":
    main()
