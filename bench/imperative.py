"""Programs written imperatively, as TensorSSA's evaluation has them, beside PyTorch: eager, scripted and compiled.

Each runtime in a process of its own, one awake at a time, rounds alternating; medians of rounds. What a runtime cannot
run is told in its place.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from bench.support import geometric_mean, table

OURS, PEERS = "tilewright", ("eager", "jit", "inductor")
_LARGEST_ERROR = 1e-3


class Worker:
    """One program by one runtime, in a process that runs while it is asked to."""

    def __init__(self, program: str, runtime: str, threads: int) -> None:
        command = [sys.executable, "-m", "bench.imperative", "--worker", program, runtime, "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()

    def seconds(self, duration: float) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{duration}\n")
        self.process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        return {"error": f"its process ended with {self.process.wait()}"}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def made(name: str, runtime: str, threads: int) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A call of a program, and how long it took to make and how far its answer is from PyTorch's."""
    import torch

    import tilewright
    from bench.imperative_programs import PROGRAMS

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module, inputs = PROGRAMS[name]()
    module.eval()
    expected = module(*inputs)
    start = time.process_time()
    if runtime == OURS:
        fast: Any = tilewright.compile(module, inputs, threads=threads)
    elif runtime == "inductor":
        fast = torch.compile(module)
    elif runtime == "jit":
        try:
            fast = torch.jit.script(module)
        except (RuntimeError, torch.jit.frontend.NotSupportedError):
            fast = torch.jit.trace(module, inputs, check_trace=False)
        fast = torch.jit.optimize_for_inference(torch.jit.freeze(fast))
    else:
        fast = module
    found = fast(*inputs)
    about = {"made_s": time.process_time() - start}
    pairs = zip(_tensors(found), _tensors(expected), strict=True)
    about["difference"] = max(_difference(one, other) for one, other in pairs)
    return lambda: fast(*inputs), about


def _tensors(found: Any) -> Sequence[Any]:
    return found if isinstance(found, tuple | list) else (found,)


def _difference(one: Any, other: Any) -> float:
    scale = max(float(other.double().abs().max()), 1e-9)
    return float((one.double() - other.double()).abs().max()) / scale


def work(name: str, runtime: str, threads: int) -> None:
    """Answers, line by line: first what it took to make, then seconds a call for every duration that is asked for."""
    import torch

    warnings.simplefilter("ignore")
    with torch.no_grad():
        call, about = made(name, runtime, threads)
        print(json.dumps(about), flush=True)
        for _ in range(3):
            call()
        for line in sys.stdin:
            end, count, start = time.perf_counter() + float(line), 0, time.perf_counter()
            while not count or time.perf_counter() < end:
                call()
                count += 1
            print(json.dumps({"seconds": (time.perf_counter() - start) / count}), flush=True)


def measured(name: str, runtimes: Sequence[str], threads: int, rounds: int, duration: float) -> dict[str, Any]:
    """Milliseconds by runtime, or why there are none."""
    workers: dict[str, Worker] = {}
    row: dict[str, Any] = {}
    for runtime in runtimes:
        worker = Worker(name, runtime, threads)
        difference = worker.about.get("difference")
        if difference is None:
            row[runtime] = "fails"
            worker.end()
        elif not difference <= _LARGEST_ERROR:
            row[runtime] = f"wrong by {difference:.1g}"
            worker.end()
        else:
            workers[runtime] = worker
    times: dict[str, list[float]] = {runtime: [] for runtime in workers}
    for _ in range(rounds):
        for runtime, worker in workers.items():
            times[runtime].append(worker.seconds(duration))
    for runtime, worker in workers.items():
        row[runtime] = 1e3 * statistics.median(times[runtime])
        row[f"{runtime} made"] = worker.about["made_s"]
        worker.end()
    return row


def line_of(name: str, row: dict[str, Any], peers: Sequence[str]) -> list[str]:
    times = [row[p] for p in peers if isinstance(row[p], float)]
    ratio = min(times) / row[OURS] if times and isinstance(row[OURS], float) else None
    row["ratio"] = ratio
    cells = [f"{row[r]:.3f}" if isinstance(row[r], float) else str(row[r]) for r in (OURS, *peers)]
    made_s = row.get(f"{OURS} made")
    return [name, *cells, "-" if ratio is None else f"{ratio:.2f}", "-" if made_s is None else f"{made_s:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.imperative", description=__doc__)
    parser.add_argument("--peers", default=",".join(PEERS), help="of eager, jit, inductor")
    parser.add_argument("--programs", default="", help="names with commas between them; all, if none are given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each runtime in each round")
    parser.add_argument("--worker", nargs=2, metavar=("PROGRAM", "RUNTIME"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker, arguments.threads)
        return
    from bench.imperative_programs import PROGRAMS

    peers = arguments.peers.split(",")
    names = arguments.programs.split(",") if arguments.programs else list(PROGRAMS)
    unknown = [n for n in names if n not in PROGRAMS] + [p for p in peers if p not in PEERS]
    if unknown:
        parser.error(f"'{unknown[0]}' is neither a program ({', '.join(PROGRAMS)}) nor a peer ({', '.join(PEERS)})")
    rows, lines = {}, []
    for name in names:
        rows[name] = measured(name, (OURS, *peers), arguments.threads, arguments.rounds, arguments.seconds)
        lines.append(line_of(name, rows[name], peers))
        print("  ".join(lines[-1]), file=sys.stderr, flush=True)
    head = ["program", "tilewright ms", *(f"{p} ms" for p in peers), "best peer / ours", "compiled, CPU s"]
    print("\n".join(table(head, lines)))
    ratios = [row["ratio"] for row in rows.values() if row["ratio"] is not None]
    if ratios:
        print(f"\ngeomean {geometric_mean(ratios):.2f}, lowest {min(ratios):.2f}, {arguments.threads} threads")


if __name__ == "__main__":
    main()
