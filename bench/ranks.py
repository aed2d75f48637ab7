"""One model on several processes beside one: python -m bench.ranks [--size full] [--ranks 2 4] [--models gpt2].

For each way to share a model out: how far its results are from one process's, what part of the weights a rank has, and
the time predicted beside the time measured: of all of it, of what each rank computes, by the plans of its segments, and
of what ranks exchange, by the link between them as it is measured first. Where there are cores for all, each rank has
its own, and is planned for them as they are while all others are busy too: clock, caches and memory are shared.
`python -m bench.ranks failures --times 20` has a rank killed, stopped, or of another model, and says how soon the other
told of it, in how many lines, and whether a process was left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from tilewright.target import Target

_BATCH = 4
_RUNS = 5
_LIMIT = 3600.0  # seconds that all ranks may take to compile and run
_WAYS = {"tensor": ("tp={}", 1), "data": ("dp={}", 1), "pipeline": ("pp={}", _BATCH)}  # mesh, parts of the batch
_TIMEOUT = 5.0  # seconds that a rank waits for another, of the failures
_SLACK = 2.0
_RANK = "beside_{}.json"  # in a rank's cache: its cores, as they are while those of so many ranks are busy
_MODES = ("killed", "stopped", "other")


# --- models


def export(name: str, size: str, path: Path) -> None:
    from bench import zoo

    if name != "gpt2":
        zoo.export(name, size, path, batch=_BATCH)
        return
    import torch

    module, tokens = _gpt2(size)
    torch.onnx.export(module, (tokens,), str(path), input_names=["tokens"], output_names=["logits"], opset_version=18,
                      dynamo=True, external_data=False, verbose=False)  # fmt: skip


def _gpt2(size: str) -> tuple[Any, Any]:
    """GPT-2 small, 124 million weights, or the same with two narrow layers; 64 tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512} if size == "small" else {}
    torch.manual_seed(0)
    config = GPT2Config(**small, use_cache=False, attn_implementation="eager")

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = GPT2LMHeadModel(config)

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.inner(tokens).logits

    return Logits().eval(), torch.randint(0, config.vocab_size, (_BATCH, 64))


# --- processes


@dataclass(frozen=True)
class Started:
    """Processes that run one thing together."""

    ranks: list[subprocess.Popen[str]]

    def outputs(self, seconds: float) -> list[str]:
        try:
            return [process.communicate(timeout=seconds)[0] for process in self.ranks]
        finally:
            for process in self.ranks:
                process.kill()
                process.wait()


def start(ranks: int, *arguments: str, threads: int = 0, caches: Path | None = None) -> Started:
    """Processes of which each has as many cores of its own as it has threads, and a cache of its own, where that is
    said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = []
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(ranks):
        own = cores[rank * threads : (rank + 1) * threads] if len(cores) >= ranks * threads > 0 else cores
        about = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        about |= {} if caches is None else {"TILEWRIGHT_CACHE": str(caches / f"rank_{rank}")}
        command = [sys.executable, "-m", "bench.ranks", *arguments]
        found.append(subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      env={**os.environ, **about, "OMP_NUM_THREADS": "1"}))  # fmt: skip
        os.sched_setaffinity(found[-1].pid, own)  # before it has looked how many there are
    return Started(found)


def tell(word: str, row: Mapping[str, Any]) -> None:
    """A line for `told`, in one piece whoever else writes."""
    os.write(1, f"{word} {json.dumps(row)}\n".encode())


def told(outputs: Sequence[str], word: str) -> list[dict[str, Any]]:
    """What workers printed behind a word, in the order of the ranks."""
    lines = [line for output in outputs for line in output.splitlines() if line.startswith(f"{word} ")]
    if not lines:
        raise RuntimeError("a worker said nothing:\n" + "\n".join(output[-2000:] for output in outputs))
    return [json.loads(line.removeprefix(f"{word} ")) for line in lines]


# --- errors, weights, times


def work(model: Path, mesh: str, parts: int, target: str, threads: int, effort: str, results: Path) -> None:
    """One of the processes: compile, run, and tell."""
    import tilewright
    from tilewright.options import Options

    started = time.perf_counter()
    if mesh != "one" and (beside := _described(Options.from_environment().cache_dir)).exists() and target == "cpu":
        target = str(beside)
    options = {"target": target, "threads": threads, "effort": effort}
    together = mesh != "one"
    compiled: Any = tilewright.compile(model, mesh=mesh, micro_batches=parts, timeout=600.0, **options) if together \
        else tilewright.compile(model, **options)  # type: ignore[arg-type]  # fmt: skip
    compile_s = time.perf_counter() - started
    inputs = compiled.random_inputs(0)
    found = compiled.run(inputs)
    times = [_timed(lambda: compiled.run(inputs)) for _ in range(_RUNS)]
    row = {"compile_s": compile_s, "ms": 1e3 * statistics.median(times), "weights": 0, "explained": ""}
    if together:
        row |= {"weights": compiled.weights, "explained": compiled.explain(), "by": compiled.on_devices}
        row |= _turns(compiled, inputs)
    if not together or compiled.rank == 0:
        np.savez(results, **found)
    tell("row", row)
    if together:
        compiled.close()


def _turns(compiled: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank computes for one part of a batch, predicted and measured, and its exchanges: kind, ranks, bytes that
    one sends, and when they began and ended in each run."""
    from tilewright.backend.seconds import price_in_turn
    from tilewright.distributed.turns import Verb

    steps = compiled.steps
    segments = [n for n, step in enumerate(steps) if hasattr(step, "artifact")]
    runs = [compiled.timeline(inputs) for _ in range(_RUNS)]
    own = [[sum(t.end - t.begin for t in run if t.turn.step in segments and t.turn.part == part) for run in runs]
           for part in range(compiled.about.parts)]  # fmt: skip
    plans = [steps[n].artifact for n in segments if steps[n].artifact.plan is not None]
    known = [p.seconds for p in price_in_turn([(a.program, a.plan) for a in plans], plans[0].target)] if plans else []
    passed = [n for n, step in enumerate(steps) if n not in segments and step.kind != "send"]
    exchanges = [(steps[n].kind, *_sent(steps[n], compiled.rank, compiled.size),
                  [[(t.begin, t.end) for t in run if t.turn.step == n and t.turn.verb is Verb.DO] for run in runs])
                 for n in passed]  # fmt: skip
    measured = statistics.median(statistics.median(each) for each in own)
    return {"segments": len(segments), "predicted": float(sum(known)), "computed": measured, "exchanges": exchanges}


def _sent(move: Any, rank: int, size: int) -> tuple[int, int, int]:
    """How many ranks take part in an exchange, the bytes that one of them sends, and those that it copies and adds."""
    item = move.dtype.itemsize
    if move.kind == "all-reduce":
        count, whole = len(move.peers), int(np.prod(move.shape)) * item
        return count, 2 * (count - 1) * whole // count, 2 * whole
    passed = move.sends or [(peer, place) for peer, place in move.takes if peer != rank]  # what is gathered one takes
    here = [place for _, place in move.sends] + ([move.own] if move.own else [])
    given = [max(at.stop for at in along) for along in zip(*here, strict=True)]
    copied = sum(_count(place) for _, place in move.sends if _is_in_pieces(place, given))
    for peer, place in move.takes:
        if peer == rank or (move.operator is None and _is_in_pieces(place, move.shape)):
            copied += _count(place)
        elif move.operator is not None:  # two are read where one is written
            copied += 1.5 * _count(place)
    count = min(size, len(passed) + 1)
    return count, sum(_count(place) for _, place in passed) * item, int(2 * copied * item)


def _count(place: Sequence[slice]) -> int:
    return int(np.prod([at.stop - at.start for at in place]))


def _is_in_pieces(place: Sequence[slice], shape: Sequence[int]) -> bool:
    """Whether a part of an array is no row of its bytes."""
    cut = [n for n, at in enumerate(place) if at.stop - at.start < shape[n]]
    return bool(cut) and any(at.stop - at.start > 1 for at in place[: cut[-1]])


def exchanges(
    rows: Sequence[Mapping[str, Any]], described: Mapping[str, float], device: Target
) -> list[tuple[float, float]]:
    """Predicted and measured seconds of what all ranks exchange with each other, where they all do: from when the last
    has begun until the last has ended."""
    from tilewright.schedule.cluster.cost import exchange_seconds
    from tilewright.target import Link

    found = []
    for alike in zip(*(row["exchanges"] for row in rows), strict=False):
        kind, count, *_ = alike[0]
        link = Link("ranks", count, described["bandwidth"], described["latency"])
        sent, handled = (max(row[place] for row in alike) for place in (2, 3))
        times = [max(end for _, end in parts) - max(begin for begin, _ in parts)
                 for run in zip(*(each[4] for each in alike), strict=True)
                 for parts in zip(*run, strict=True)]  # fmt: skip
        found.append((exchange_seconds(kind, sent, handled, link, device), statistics.median(times)))
    return found


def measured_link(ranks: int, threads: int, caches: Path) -> dict[str, Any]:
    """The link, after the cores of all ranks were measured: by one process, for what several measure by themselves is
    the best of moments in which the others happened to wait."""
    whole = caches / "whole.json"
    told(start(1, "cores", str(whole), threads=ranks * threads, caches=caches).outputs(_LIMIT), "row")
    rows = told(start(ranks, "links", str(whole), threads=threads, caches=caches).outputs(_LIMIT), "row")
    return next((row for row in rows if row), {"links": [{}]})["links"][0]  # type: ignore[no-any-return]


def tell_cores(whole: Path) -> None:
    whole.write_text(_here(anew=True).to_json())
    tell("row", {})


def tell_links(whole: Path) -> None:
    from tilewright.distributed.links import described_links
    from tilewright.options import Options
    from tilewright.runtime.ranks import Ranks
    from tilewright.target import machine

    ranks = Ranks.join(_LIMIT)
    device = beside_others(_here(anew=True), machine(str(whole)))
    _described(Options.from_environment().cache_dir).write_text(device.to_json())
    ranks.wait("measuring links")
    tell("row", (described_links(_LIMIT, device) if ranks.size > 1 else None) or {})


def _described(cache: Path) -> Path:
    return cache / _RANK.format(os.environ.get("WORLD_SIZE", "1"))


def _here(*, anew: bool) -> Target:
    from tilewright.options import Options
    from tilewright.target import this_cpu
    from tilewright.target.kept import measured

    options = Options.from_environment()
    return measured(this_cpu(), options.cache_dir, options.compiler, anew=anew)


def beside_others(own: Target, whole: Target) -> Target:
    """The cores of one rank, with rates and parts of caches as they are while the cores of all ranks are busy."""
    around = {level.name: level for level in whole.levels}
    levels = tuple(replace(level, capacity=min(level.capacity, around[level.name].capacity),
                           bandwidth=around[level.name].bandwidth, alone=around[level.name].alone,
                           write=around[level.name].write) for level in own.levels)  # fmt: skip
    return replace(own, fma_rate=whole.fma_rate, rates=whole.rates, levels=levels)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def error(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> float:
    """The largest difference of any output, relative to its largest value."""
    return max(float(np.abs(found[n].astype(np.float64) - a).max() / np.abs(a).max()) for n, a in right.items())


def compare(asked: argparse.Namespace) -> None:
    from tilewright.distributed.compiling import program_of
    from tilewright.frontend.onnx.model import load
    from tilewright.target import machine

    threads, begun = asked.threads, time.perf_counter()
    print(f"batch {_BATCH}, {threads} threads a rank, {asked.target}, effort {asked.effort}, {os.cpu_count()} cores; "
          "weights: the most a rank has, times the ranks; computed and exchanged: measured of predicted, median and "
          "furthest\n")  # fmt: skip
    print("| model | ranks | mesh | parts | error | weights x n | predicted ms | measured ms | one process ms | "
          "computed | exchanged | compile s |")  # fmt: skip
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|---|---|---:|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        links = {count: measured_link(count, threads, Path(place)) for count in sorted(asked.ranks)}
        for name in asked.models:
            path = Path(place) / f"{name}.onnx"
            export(name, asked.size, path)
            whole = sum(array.nbytes for array in program_of(load(path, {})).constants.values())
            one = Path(place) / "one.npz"
            alone = told(_started(1, path, "one", 1, one, asked).outputs(_LIMIT), "row")[0]
            ways = {**_WAYS, "auto": ("auto", _BATCH)}
            for count, way in ((count, way) for count in asked.ranks for way in asked.ways):
                if asked.within and time.perf_counter() - begun > asked.within:
                    print(f"| {name} | {count} | {way} | the time is out |", flush=True)
                    continue
                form, parts = ways[way]
                mesh = form.format(count)
                out = Path(place) / "out.npz"
                rows = told(_started(count, path, mesh, parts, out, asked).outputs(_LIMIT), "row")
                wrong = error(np.load(out), np.load(one))
                share = max(row["weights"] for row in rows) * count / whole
                predicted = _predicted(rows[0]["explained"])
                computed = [row["computed"] / row["predicted"] for row in rows if row["predicted"]]
                device = machine(str(Path(place) / "rank_0" / _RANK.format(count)))
                passed = [b / a for a, b in exchanges(rows, links[count], device)] if count > 1 else []
                mesh += " (NCCL)" if rows[0]["by"] else ""
                print(f"| {name} | {count} | {mesh} | {parts} | {wrong:.1e} | {share:.2f} | {predicted:.3g} | "
                      f"{rows[0]['ms']:.3g} | {alone['ms']:.3g} | {_ratios(computed)} | {_ratios(passed)} | "
                      f"{max(row['compile_s'] for row in rows):.0f} |", flush=True)  # fmt: skip


def _ratios(found: Sequence[float]) -> str:
    """The median and the one that is furthest off."""
    if not found:
        return "-"
    return f"{statistics.median(found):.2f}, {max(found, key=lambda r: max(r, 1 / r)):.2f} of {len(found)}"


def _started(count: int, path: Path, mesh: str, parts: int, results: Path, asked: argparse.Namespace) -> Started:
    about = [asked.target, str(asked.threads), asked.effort, str(results)]
    caches = results.parent
    return start(count, "work", str(path), mesh, str(parts), *about, threads=asked.threads, caches=caches)


def _predicted(text: str) -> float:
    line = next(line for line in text.splitlines() if line.startswith("predicted: "))
    return float(line.split()[1])


# --- failures


def fail(folder: Path, mode: str) -> None:
    """One of two processes, of which the second fails after the first call, or is another's from the beginning."""
    import tilewright
    from tilewright.errors import TilewrightError

    rank = int(os.environ["RANK"])
    place = folder / ("other" if mode == "other" and rank == 1 else "saved")
    tell("here", {"pid": os.getpid()})
    try:
        model: Any = tilewright.load(place, timeout=_TIMEOUT)
        inputs = model.random_inputs(0)
        model.run(inputs)
        if rank == 1:
            tell("gone", {"at": time.time()})
            os.kill(os.getpid(), signal.SIGKILL if mode == "killed" else signal.SIGSTOP)
        model.run(inputs)
    except TilewrightError as error:
        tell("line", {"at": time.time(), "text": str(error)})
        sys.exit(2)


def save_pair(folder: Path) -> None:
    """Two saved models, of which one is the other with twice the width."""
    rng = np.random.default_rng(0)
    for name, width in (("saved", 128), ("other", 256)):
        arrays = {"w": rng.standard_normal((64, width)), "v": rng.standard_normal((width, 64))}
        nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["g"]),
                 helper.make_node("MatMul", ["g", "v"], ["y"])]  # fmt: skip
        ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, [32, 64])] for n in "xy"]
        fixed = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
        onnx.save(helper.make_model(helper.make_graph(nodes, name, *ports, fixed)), folder / f"{name}.onnx")
        outputs = start(2, "save", str(folder / f"{name}.onnx"), str(folder / name)).outputs(_LIMIT)
        if not (folder / name / "manifest.json").exists():
            raise RuntimeError("\n".join(outputs))


def save_one(model: Path, folder: Path) -> None:
    import tilewright

    made = tilewright.compile(model, mesh="tp=2", threads=1, effort="fast")
    made.save(folder)
    made.close()


@dataclass(frozen=True)
class Failure:
    """How one went: seconds until the other told of it, its lines, and the processes left when all had ended."""

    seconds: float
    lines: tuple[str, ...]
    left: int
    ended_s: float


def failed(folder: Path, mode: str, launch: Callable[[Path, str], str]) -> Failure:
    begun = time.time()
    output = launch(folder, mode)
    ended = time.time()
    lines = told([output], "line")
    pids = [row["pid"] for row in told([output], "here")]
    gone = told([output], "gone")[0]["at"] if mode != "other" else begun
    left = sum(Path(f"/proc/{pid}").exists() for pid in pids)
    texts = tuple(row["text"] for row in lines)
    return Failure(max(row["at"] for row in lines) - gone, texts, left, ended - gone)


def under_torchrun(folder: Path, mode: str) -> str:
    """As a user starts it. It ends what is left when one has ended; a stopped one after half a minute."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               "bench.ranks", "fail", str(folder), mode]  # fmt: skip
    done = subprocess.run(command, text=True, capture_output=True, timeout=_LIMIT, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    return done.stdout


def forked(folder: Path, mode: str) -> str:
    """From this process, which has imported everything already; when the first has ended, what is left is ended too."""
    import torch.distributed  # noqa: F401

    import tilewright  # noqa: F401

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = [folder / f"rank_{rank}.txt" for rank in range(2)]
    pids = [_child(folder, mode, rank, port, place) for rank, place in enumerate(places)]
    os.waitpid(pids[0], 0)
    if mode != "other":
        os.kill(pids[1], signal.SIGKILL)
    os.waitpid(pids[1], 0)
    return "".join(place.read_text() for place in places)


def _child(folder: Path, mode: str, rank: int, port: int, place: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    with place.open("w") as file:
        os.dup2(file.fileno(), 1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        fail(folder, mode)
    finally:
        os._exit(0)


def failures(times: int, modes: Sequence[str], launch: Callable[[Path, str], str]) -> int:
    """Status 1 where a failure was told late, in other words or not at all, or left a process."""
    wrong = 0
    print("| failure | times | told after, median and most s | allowed s | ended after s | lines of one kind | left |")
    print("|---|---:|---:|---:|---:|---|---:|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        save_pair(Path(place))
        for mode in modes:
            found = [failed(Path(place), mode, launch) for _ in range(times)]
            allowed = {"killed": _SLACK, "stopped": _TIMEOUT + _SLACK, "other": float("inf")}[mode]
            said = {text.split(" (")[0] for each in found for text in each.lines}
            told_by = {len(each.lines) for each in found}
            most = max(each.seconds for each in found)
            left = sum(each.left for each in found)
            wrong += most > allowed or left > 0 or told_by != {2 if mode == "other" else 1}
            middle, ended = statistics.median(e.seconds for e in found), max(e.ended_s for e in found)
            print(f"| {mode} | {times} | {middle:.2f}, {most:.2f} | {allowed:g} | {ended:.1f} | "
                  f"{'; '.join(sorted(said))} | {left} |", flush=True)  # fmt: skip
    return int(wrong > 0)


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "work":
        path, mesh, parts, target, threads, effort, results = sys.argv[2:]
        work(Path(path), mesh, int(parts), target, int(threads), effort, Path(results))
        return 0
    if len(sys.argv) > 1 and sys.argv[1] == "cores":
        tell_cores(Path(sys.argv[2]))
        return 0
    if len(sys.argv) > 1 and sys.argv[1] == "links":
        tell_links(Path(sys.argv[2]))
        return 0
    if len(sys.argv) > 1 and sys.argv[1] == "fail":
        fail(Path(sys.argv[2]), sys.argv[3])
        return 0
    if len(sys.argv) > 1 and sys.argv[1] == "save":
        save_one(Path(sys.argv[2]), Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m bench.ranks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", choices=("compare", "failures"), default="compare")
    parser.add_argument("--models", nargs="+", default=["gpt2", "bert_base", "resnet50"])
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--threads", type=int, default=1, help="of every rank")
    parser.add_argument("--ways", nargs="+", choices=(*_WAYS, "auto"), default=[*_WAYS, "auto"])
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--within", type=float, metavar="S", help="begin nothing after so many seconds")
    parser.add_argument("--effort", choices=("fast", "full"), default="fast")
    parser.add_argument("--times", type=int, default=20, help="of every failure")
    parser.add_argument("--torchrun", action="store_true", help="start failures by it, not by forks of this process")
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=list(_MODES))
    asked = parser.parse_args()
    if asked.what == "failures":
        return failures(asked.times, asked.modes, under_torchrun if asked.torchrun else forked)
    compare(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
