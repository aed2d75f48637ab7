"""Files as packages ship them, beside ONNX Runtime: `python -m bench.shipped FOLDER_OR_FILE ...`.

Every .onnx file below the folders, the smallest first, equal ones once, runs in a process of its own, with a time limit
and an empty cache: at two shapes where dimensions are open, each with random numbers and with some of the size that
images and sound have. The table says what became of each (right, and how far off; refused, with the line; wrong;
crashed), what the first answer took of the processor and of memory, and the time of a call, both runtimes in turn.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime

import tilewright
from tilewright import Options, TilewrightError
from tilewright.target import machine

ROOT = Path(__file__).resolve().parents[1]

Array = np.ndarray[Any, Any]
Shapes = tuple[tuple[int, ...], ...]

ROOM = 1e-3  # of the largest number of an output
QUANTISED_ROOM = 1e-2  # a step of eight bits flips where two orders of a sum round apart
QUANTISED = ("Quantize", "QLinear", "Integer", "MatMulNBits")  # in the name of an operator
TIMED_SECONDS = 0.5
SHAKES = 4

# What open dimensions may be, by the number of axes; what a file does not take is passed over. Detectors want multiples
# of 32, recognisers lines of text, speech some thousand samples or some ten frames, language some words.
EXTENTS: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((),),
    1: ((1,), (2,), (24,), (16000,)),
    2: ((1, 3200), (2, 5000), (1, 24), (1, 576), (1, 16000), (1, 2048), (1, 512), (1, 1), (1, 64), (24, 24),
        (1, 32000)),
    3: ((1, 40, 80), (2, 33, 80), (1, 80, 40), (1, 1, 64), (2, 1, 128), (2, 1, 64), (1, 64, 96), (96, 64, 3),
        (1, 1, 3200), (1, 40, 1)),
    4: ((1, 3, 64, 96), (2, 3, 96, 64), (1, 3, 48, 160), (1, 1, 64, 96), (1, 3, 224, 224), (1, 3, 640, 640),
        (1, 64, 96, 3), (1, 1, 40, 257), (1, 3, 32, 320)),
    5: ((1, 1, 8, 32, 32), (1, 8, 3, 32, 32)),
}  # fmt: skip
WORDS = ((1, 24), (2, 17), (1, 64))  # where whole numbers have two axes
NUMBERS: dict[str, Array] = {
    "sr": np.array(16000),
    "fmin": np.array(50, np.float32),
    "fmax": np.array(2000, np.float32),
    "dial": np.array(96),  # the longer side of an image
    "scales": np.array([0, 1, 0], np.float32),  # of a voice: without its noise
}


class Kind(NamedTuple):
    """A kind of numbers to try a file with."""

    name: str
    floats: Callable[[tuple[int, ...], np.random.Generator], Array]
    below: int  # this many are the whole numbers


@dataclass(frozen=True)
class Case:
    """Inputs that ONNX Runtime takes, and what it gives."""

    about: str
    inputs: dict[str, Array]
    wanted: list[Any]


@dataclass
class Result:
    """What became of a file."""

    file: str
    nodes: int = 0
    operators: tuple[str, ...] = ()  # the most frequent first
    verdict: str = ""
    cases: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # where the two were apart, and ours was not the one that was off
    error: float = 0.0  # of the largest number of an output, the worst of all cases
    compile_cpu_s: float | None = None  # up to the first answer
    peak_mb: int | None = None
    ours_ms: float | None = None
    peer_ms: float | None = None

    @property
    def is_good(self) -> bool:
        return self.verdict.startswith(("right", "refused"))


def files(paths: Iterable[Path]) -> list[Path]:
    """The .onnx files below these paths, the smallest first, those with the same content once."""
    found = [f for path in paths for f in ([path] if path.is_file() else path.rglob("*.onnx"))]
    once = {sha256(file.read_bytes()).digest(): file for file in sorted(found, reverse=True)}
    return sorted(once.values(), key=lambda file: (file.stat().st_size, file))


def cases(session: Any, seed: int = 0) -> Iterator[Case]:
    """Up to two shapes that the session takes, each with two kinds of numbers."""
    ports = session.get_inputs()
    rng = np.random.default_rng(seed)
    refused: Exception | None = None
    taken = 0
    for shapes in _shapes(ports):
        for kind in KINDS:
            inputs = _inputs(ports, shapes, kind, rng)
            try:
                wanted = session.run(None, inputs)
            except Exception as error:  # what ONNX Runtime raises has no narrower name
                refused = refused or error
                break
            taken += kind is KINDS[0]
            yield Case(f"{kind.name} {' '.join('x'.join(map(str, shape)) or '1' for shape in shapes)}", inputs, wanted)
        if taken == 2:
            return
    if not taken and refused is not None:
        raise refused


def _shapes(ports: Sequence[Any]) -> Iterator[Shapes]:
    """Extents for what is open, dimensions of one name alike; the inputs with most axes go first through their list."""
    if not ports:
        yield ()
        return
    most = max(len(port.shape) for port in ports)
    others = max((len(_extents(port)) for port in ports if len(port.shape) < most), default=1)
    seen = set()
    for slow in range(others):
        for fast in range(max(len(_extents(port)) for port in ports if len(port.shape) == most)):
            named: dict[str, int] = {}
            by_name = {}
            for port in sorted(ports, key=lambda port: -len(port.shape)):
                choices = _extents(port)
                extents = choices[(fast if len(port.shape) == most else slow) % len(choices)]
                by_name[port.name] = tuple(
                    n if isinstance(n, int) else named.setdefault(n or f"{port.name} {axis}", extents[axis])
                    for axis, n in enumerate(port.shape)
                )
            shapes = tuple(by_name[port.name] for port in ports)
            if shapes not in seen:
                seen.add(shapes)
                yield shapes


def _extents(port: Any) -> tuple[tuple[int, ...], ...]:
    return WORDS if len(port.shape) == 2 and "int" in port.type else EXTENTS[len(port.shape)]


def _inputs(ports: Sequence[Any], shapes: Shapes, kind: Kind, rng: np.random.Generator) -> dict[str, Array]:
    pairs = list(zip(ports, shapes, strict=True))
    longest = max((n for port, shape in pairs for n, was in zip(shape, port.shape, strict=True)
                   if not isinstance(was, int)), default=1)  # fmt: skip
    return {port.name: _values(port, shape, longest, kind, rng) for port, shape in pairs}


def _values(port: Any, shape: tuple[int, ...], longest: int, kind: Kind, rng: np.random.Generator) -> Array:
    element = port.type.removeprefix("tensor(").removesuffix(")")
    if element == "string":
        return np.full(shape, "some text", object)
    dtype = np.dtype({"float": "float32", "double": "float64"}.get(element, element))
    if port.name in NUMBERS:
        return NUMBERS[port.name].reshape(shape).astype(dtype)
    if dtype.kind == "f":
        return kind.floats(shape, rng).astype(dtype)
    if dtype.kind == "b" or "mask" in port.name:
        return np.ones(shape, dtype)
    if "type" in port.name or "batch" in port.name:  # of tokens, and the sample that a row belongs to: the first
        return np.zeros(shape, dtype)
    if "len" in port.name:
        return np.full(shape, longest, dtype)
    return rng.integers(1, kind.below, shape).astype(dtype)


def _noise(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Numbers of both signs; those that come alone or in a row (thresholds, scales) above zero."""
    return np.asarray(rng.standard_normal(shape) * 0.3 if len(shape) > 1 else rng.uniform(0.2, 1.0, shape))


def _scene(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Waves with some noise: from 0 to 255 over the two axes of an image, within 1 along the last one of a sound."""
    if len(shape) < 2:
        return _noise(shape, rng)
    down, right = (np.linspace(0, 3 * n**0.5, n) for n in shape[-2:])
    waves = np.sin(right) * (np.cos(down)[:, None] if len(shape) > 2 else 1)
    values = 0.4 * waves + 0.05 * rng.standard_normal(shape)
    return np.clip(127 + 255 * values, 0, 255) if len(shape) == 4 else values


KINDS = (Kind("noise", _noise, 10), Kind("scene", _scene, 128))


def session_of(file: Path, *, optimised: bool = True) -> Any:
    options = _quiet()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it would take the cores from others
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _quiet() -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def distance(got: Any, want: Any) -> float:
    """Of two results, over the largest number of the wanted one; infinity where shape, type or kind differ."""
    if isinstance(want, list):
        parts = [distance(a, b) for a, b in zip(got, want, strict=True)] if len(got) == len(want) else [np.inf]
        return max(parts, default=0.0)
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype.kind != want.dtype.kind:
        return float("inf")
    if want.dtype.kind not in "fc":  # places among near equals, too, must be the same
        return 0.0 if np.array_equal(got, want) else float("inf")
    finite = np.isfinite(want)
    if not np.isfinite(got[finite]).all() or not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return float("inf")
    apart = np.abs(got[finite].astype(np.float64) - want[finite])
    return float(apart.max(initial=0.0) / np.abs(want[finite]).astype(np.float64).max(initial=1e-3))


def run_here(file: Path, cache: Path) -> Result:
    """The file, compiled and run in this process beside ONNX Runtime."""
    result = Result(str(file))
    graphs = _graphs(onnx.load(file, load_external_data=False).graph)
    counts = Counter(node.op_type for graph in graphs for node in graph.node)
    result.nodes, result.operators = counts.total(), tuple(name for name, _ in counts.most_common())
    try:
        session = session_of(file)
        waiting = cases(session)
        first = next(waiting)
    except Exception as error:  # what ONNX Runtime raises has no narrower name
        result.verdict = f"not run: ONNX Runtime: {_line(error)}"
        return result
    before = _cpu_seconds()
    try:
        model = tilewright.compile(file, options=Options(cache_dir=cache, fallback="error"))
        got = model.run(first.inputs)
        result.compile_cpu_s = round(_cpu_seconds() - before, 2)
        result.verdict = _judge(file, session, model, first, got, waiting, counts, result)
        result.ours_ms, result.peer_ms = _times(
            lambda: model.run(first.inputs), lambda: session.run(None, first.inputs)
        )
    except TilewrightError as error:
        result.verdict = f"refused: {_line(error)}"
    except Exception as error:  # what a table of all files is to say
        result.verdict = f"crashed: {type(error).__name__}: {_line(error)}"
    result.peak_mb = _peak_mb()
    return result


def _judge(
    file: Path, session: Any, model: Any, first: Case, got: Mapping[str, Any], others: Iterator[Case],
    counts: Mapping[str, int], result: Result,
) -> str:  # fmt: skip
    """What a table says of the file; fills in the cases and the worst error."""
    room = QUANTISED_ROOM if any(part in name for name in counts for part in QUANTISED) else ROOM
    names = [port.name for port in session.get_outputs()]
    case: Case | None = first
    while case is not None:
        result.cases += (case.about,)
        errors = {name: distance(got[name], want) for name, want in zip(names, case.wanted, strict=True)}
        worst = max(errors, key=lambda name: errors[name])
        if not errors[worst] <= room:
            if max(map(distance, session.run(None, case.inputs), case.wanted)) > room:
                return f"right as far as can be said: ONNX Runtime's own numbers are random ({case.about})"
            whose, ours, theirs = _arbitrate(file, case, [got[name] for name in names])
            note = f"{worst} {errors[worst]:.1e} apart, from {whose} {ours:.1e}, theirs {theirs:.1e} ({case.about})"
            if not ours <= max(room, 2 * theirs):
                ours, theirs = errors[worst], _steadiness(session, case)
                note += f"; theirs moves by {theirs:.1e} with the last bit of every input"
            if not ours <= max(room, 2 * theirs):
                return f"wrong: {note}"
            result.notes += (note,)
            errors[worst] = ours
        result.error = max(result.error, errors[worst])
        case = next(others, None)
        got = model.run(case.inputs) if case is not None else {}
    return "; ".join((f"right to {result.error:.0e}", *result.notes[:1]))


def _arbitrate(file: Path, case: Case, got: Sequence[Any]) -> tuple[str, float, float]:
    """Where two results are apart: the distance of either from the file's in float64, or, where that cannot be had,
    from the file's as it is written, without ONNX Runtime's optimisations."""
    try:
        exact = onnxruntime.InferenceSession(in_float64(onnx.load(file)).SerializeToString(), _quiet())
        inputs = {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in case.inputs.items()}
        whose, wanted = "float64", exact.run(None, inputs)
    except Exception:  # what ONNX Runtime raises has no narrower name
        whose, wanted = "no optimisations", session_of(file, optimised=False).run(None, case.inputs)
    return whose, max(map(distance, got, wanted)), max(map(distance, case.wanted, wanted))


def _steadiness(session: Any, case: Case) -> float:
    """How far ONNX Runtime's own results move where the last bit of every fraction it is given changes: words that are
    chosen one after the other, each by the ones before, are others from the first near tie on."""
    moved = []
    for seed in range(SHAKES):
        rng = np.random.default_rng(seed)
        inputs = {
            name: np.nextafter(a, np.where(rng.random(a.shape) < 0.5, -np.inf, np.inf), dtype=a.dtype)
            if a.dtype.kind == "f"
            else a
            for name, a in case.inputs.items()
        }
        moved += map(distance, session.run(None, inputs), case.wanted)
    return max(moved)


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float64 wherever it had float32; changed in place."""
    for graph in _graphs(model.graph):
        for tensor in graph.initializer:
            _widen(tensor)
        for info in (*graph.input, *graph.output, *graph.value_info):
            if info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
                info.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    _widen(attribute.t)
                if attribute.name in ("to", "dtype") and attribute.i == onnx.TensorProto.FLOAT:
                    attribute.i = onnx.TensorProto.DOUBLE
    return model


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == onnx.TensorProto.FLOAT:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                yield from _graphs(inner)


def _times(*calls: Callable[[], object]) -> tuple[float, ...]:
    """The shortest of the calls, in milliseconds, taken in turn."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + TIMED_SECONDS * len(calls)
    while time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return tuple(round(1e3 * seconds, 3) for seconds in best)


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _peak_mb() -> int:
    """Of this process, both runtimes together; what getrusage says counts what this process was forked from."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    peak = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return (peak or [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss])[0] // 1024


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def run_apart(file: Path, described: Path, limit: float) -> Result:
    """The file in a process of its own, its cache empty but for the description of this machine."""
    with tempfile.TemporaryDirectory(prefix="tilewright-shipped-") as folder:
        cache = Path(folder) / "cache"
        shutil.copytree(described, cache)
        command = [sys.executable, "-m", "bench.shipped", "--here", str(cache), str(file)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return Result(str(file), verdict=f"crashed: no answer in {limit:.0f} s")
    if done.returncode == 0:
        return Result(**json.loads(done.stdout.splitlines()[-1]))
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return Result(str(file), verdict=f"crashed: status {done.returncode}: {last[:300]}")


def report(results: Sequence[Result]) -> list[str]:
    from bench.support import table  # which brings torch along, whose memory would count in every file's

    header = ("file", "nodes", "operators", "result", "first answer, CPU s", "peak MB", "ms", "ONNX Runtime ms")
    return table(header, [_row(result) for result in results])


def _row(result: Result) -> tuple[str, ...]:
    shown = (result.compile_cpu_s, result.peak_mb, result.ours_ms, result.peer_ms)
    return (
        "/".join(Path(result.file).parts[-3:]),
        str(result.nodes),
        str(len(result.operators)),
        result.verdict.replace("|", "\\|"),
        *("" if number is None else f"{number:.4g}" for number in shown),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="folders, or files")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each file (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the results there, as they come; what is there is kept")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here is not None:
        print(json.dumps(asdict(run_here(arguments.paths[0], arguments.here))))
        return
    kept = [Result(**each) for each in json.loads(arguments.json.read_text())] if _is_file(arguments.json) else []
    results = {result.file: result for result in kept}
    with tempfile.TemporaryDirectory(prefix="tilewright-machine-") as described:
        machine("cpu", cache_dir=Path(described))
        for file in files(arguments.paths):
            if str(file) not in results:
                results[str(file)] = run_apart(file.absolute(), Path(described), arguments.limit)
                print(*_row(results[str(file)]), sep=" | ", flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps([asdict(each) for each in results.values()], indent=1) + "\n")
    print(*report(list(results.values())), sep="\n")
    verdicts = Counter(each.verdict.split(":")[0].split(" to ")[0] for each in results.values())
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))


def _is_file(path: Path | None) -> bool:
    return path is not None and path.is_file()


if __name__ == "__main__":
    main()
