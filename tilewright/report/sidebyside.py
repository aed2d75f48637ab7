"""Times a model in several runtimes side by side: a process each, one awake at a time, rounds alternating.

Two runtimes in one process make their thread pools fight, and an idle pool that spins steals a core, so a
worker is stopped by signal whenever it is not its turn.
"""

import contextlib
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx

from tilewright.report import cuda_peers
from tilewright.report.peers import Job, Peer, find_peer
from tilewright.runtime.processor import processor_name

Progress = Callable[[str, float], None]
"""Called with what is going on and the fraction that is done."""

Report = Callable[[str], None]
"""Called with a line about a runtime as soon as something is known of it."""

OURS = "tilewright"
BOOTSTRAP = "import sys; sys.path[:] = sys.argv[1:]; from tilewright.report.peers import serve; serve()"


@dataclass(frozen=True)
class RuntimeResult:
    """One runtime's times; `error` says why there are none, `skipped` that it was never started."""

    name: str
    version: str | None
    median_ms: float | None = None
    min_ms: float | None = None
    cold_start_s: float | None = None
    error: str | None = None
    skipped: bool = False
    relative_error: float | None = None


@dataclass(frozen=True)
class Comparison:
    model: str
    threads: int
    machine: Mapping[str, Any]
    runtimes: tuple[RuntimeResult, ...]
    # Cores that other work kept busy meanwhile, on average: well above zero, distrust the times.
    disturbance_cores: float | None = None

    @property
    def ratio_to_best_peer(self) -> float | None:
        """Our median over the fastest peer's: below one is faster than all. None where either is missing."""
        ours = self.median_of(OURS)
        peers = [
            result.median_ms
            for result in self.runtimes
            if result.median_ms is not None and result.name.partition(":")[0] != OURS
        ]
        return ours / min(peers) if ours is not None and peers else None

    def median_of(self, name: str) -> float | None:
        return next((result.median_ms for result in self.runtimes if result.name == name), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "threads": self.threads,
            "machine": dict(self.machine),
            "runtimes": [asdict(result) for result in self.runtimes],
            "ratio_to_best_peer": self.ratio_to_best_peer,
            "disturbance_cores": self.disturbance_cores,
        }


@dataclass(frozen=True)
class ModelInterface:
    """What the harness must know of a model: inputs to generate, and the order of the outputs."""

    inputs: tuple[onnx.ValueInfoProto, ...]
    output_names: tuple[str, ...]


class WorkerError(Exception):
    """A worker failed, died or did not answer in time; the message says which, in one line."""


class Worker:
    """One runtime in a process of its own, stopped except while it serves a request."""

    def __init__(self, log: IO[bytes], bootstrap: str = BOOTSTRAP) -> None:
        self.log = log
        paths = [path or os.getcwd() for path in sys.path]
        # A group of its own: stopping it stops its helpers too, and the kernel hangs it up if we die.
        self.process = subprocess.Popen(
            [sys.executable, "-c", bootstrap, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            process_group=0,
        )
        self.pending = b""

    def request(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write((json.dumps(message) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(self._describe_end()) from error
        reply = self._read_reply(timeout_s)
        if "error" in reply:
            raise WorkerError(reply["error"])
        self._signal(signal.SIGSTOP)
        return reply

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):  # bytes unsent to a process that has ended
                    stream.close()
        self.log.close()

    def _read_reply(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self.pending:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"no answer within {timeout_s:.0f} s")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise WorkerError(self._describe_end())
            self.pending += chunk
        line, _, self.pending = self.pending.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _describe_end(self) -> str:
        status = self.process.wait()
        ending = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return f"{ending}: {lines[-1]}" if lines else ending

    def _signal(self, number: signal.Signals) -> None:
        # The process is reaped only in wait(), so until then its id cannot belong to another.
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):  # ended on its own; the next read says so
            os.killpg(self.process.pid, number)


def compare(
    model_path: Path | str,
    runtimes: Sequence[str],
    threads: int,
    *,
    inputs: Mapping[str, np.ndarray] | None = None,
    rounds: int = 7,
    seconds_per_round: float = 0.5,
    progress: Progress | None = None,
    torch_spec: str | None = None,
    algorithms: Mapping[str, str | None] | None = None,
    dimensions: Mapping[str, int] | None = None,
    reference: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
    timeout_s: float = 300.0,
    target: str = "cpu",
    report: Report | None = None,
) -> Comparison:
    """Time the model in each runtime on the same inputs.

    A runtime is spelled as in the table of peers, with variants such as tilewright:none. One that is missing,
    fails or hangs is recorded in its entry. `torch_spec` names a function that gives torch the model as a
    module, `algorithms` are options of Tilewright's such as {"contraction": "strassen"}, `dimensions` gives values
    to symbolic dimensions, and `reference` asks for relative errors. With the target cuda every runtime runs on the
    GPU, its arrays staying there. One that has not loaded the model after `timeout_s` is left out. `report` is told
    a first time of each as soon as there is one: others may compile for long.
    """
    if not Path(model_path).is_file():
        raise FileNotFoundError(f"no model file at {model_path}")
    if threads < 1 or rounds < 1 or seconds_per_round <= 0:
        raise ValueError("threads, rounds and seconds per round must be positive")
    if len(set(runtimes)) != len(runtimes):
        raise ValueError("a runtime is named twice")
    peers = [(name, *find_peer(name)) for name in runtimes]
    interface = read_interface(model_path)
    chosen = dict(inputs) if inputs is not None else random_inputs(interface.inputs, dimensions or {}, seed)
    tell = progress or (lambda _message, _fraction: None)

    with tempfile.TemporaryDirectory(prefix="tilewright-bench-") as directory:
        inputs_path = Path(directory, "inputs.npz")
        np.savez(inputs_path, **chosen)  # type: ignore[arg-type]
        session = _Session(directory, rounds, seconds_per_round, timeout_s, tell, report)
        try:
            for name, peer, variant in peers:
                job = Job(
                    runtime=peer.name,
                    variant=variant,
                    model_path=str(Path(model_path).resolve()),
                    inputs_path=str(inputs_path),
                    output_names=interface.output_names,
                    threads=threads,
                    torch_spec=torch_spec,
                    algorithms=dict(algorithms or {}),
                    target=target,
                )
                session.start(name, peer, job, reference)
            session.run_rounds()
            results = tuple(session.result(name) for name in runtimes)
        finally:
            session.close()
    return Comparison(str(model_path), threads, describe_machine(), results, session.disturbance_cores())


class _Session:
    """The workers of one comparison, and what has been learnt about each runtime so far."""

    def __init__(
        self, directory: str, rounds: int, seconds: float, timeout_s: float, tell: Progress, report: Report | None
    ) -> None:
        self.directory = directory
        self.rounds = rounds
        self.seconds = seconds
        self.timeout_s = timeout_s
        self.tell = tell
        self.report = report
        self.workers: dict[str, Worker] = {}
        self.times: dict[str, list[list[float]]] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.other_cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def start(self, name: str, peer: Peer, job: Job, reference: Mapping[str, np.ndarray] | None) -> None:
        facts: dict[str, Any] = {"version": None}
        self.facts[name] = facts
        if not peer.is_installed():
            facts.update(error=f"{peer.module} is not installed", skipped=True)
            return
        facts["version"] = peer.version()
        if job.target == "cuda" and peer.name not in cuda_peers.RUNTIMES:
            facts.update(error=f"{peer.name} is not timed on GPUs", skipped=True)
            return
        if peer.needs_torch_spec and job.torch_spec is None:
            reason = f"{peer.name} cannot read an ONNX file; give the model as a spec module:function"
            facts.update(error=reason, skipped=True)
            return
        self.tell(f"loading the model in {name}", 0.0)
        log_path = Path(self.directory, f"{name.replace(':', '-')}.log")
        worker = Worker(log_path.open("w+b"))
        self.workers[name] = worker
        self.times[name] = []
        try:
            loaded = worker.request({"command": "load", "job": job.to_json()}, self.timeout_s)
            facts["cold_start_s"] = loaded["cold_start_s"]
            facts["version"] = facts["version"] or loaded["version"]  # a source tree is no distribution
            if reference is not None:
                path = str(log_path.with_suffix(".npz"))
                worker.request({"command": "outputs", "path": path}, self.timeout_s)
                facts["relative_error"] = relative_error(path, reference)
            if self.report is not None:
                message = {"command": "measure", "seconds": self.seconds, "iterations": None}
                first = worker.request(message, self.timeout_s + self.seconds)["times"]
                ready = f"ready after {facts['cold_start_s']:.1f} s"
                self.report(f"{name}: {1e3 * statistics.median(first):.3f} ms in a first round, {ready}")
        except WorkerError as error:
            self.drop(name, str(error))

    def run_rounds(self) -> None:
        for index in range(self.rounds):
            # Every other round runs backwards, so that none always follows the same neighbour.
            order = list(self.workers) if index % 2 == 0 else list(reversed(self.workers))
            for name in order:
                self.tell(f"round {index + 1} of {self.rounds}: {name}", index / self.rounds)
                message = {"command": "measure", "seconds": self.seconds, "iterations": None}
                busy_before, start = machine_cpu_seconds(), time.monotonic()
                try:
                    reply = self.workers[name].request(message, self.timeout_s + self.seconds)
                except WorkerError as error:
                    self.drop(name, str(error))
                    continue
                self.times[name].append(reply["times"])
                if busy_before is not None:
                    busy = (machine_cpu_seconds() or 0.0) - busy_before
                    self.other_cpu_s.append(busy - reply["cpu_s"])
                    self.wall_s.append(time.monotonic() - start)
        self.tell("done", 1.0)

    def result(self, name: str) -> RuntimeResult:
        rounds = self.times.get(name)
        if self.facts[name].get("error") is not None or not rounds:
            return RuntimeResult(name, **self.facts[name])
        return RuntimeResult(
            name,
            median_ms=1e3 * statistics.median(statistics.median(times) for times in rounds),
            min_ms=1e3 * min(min(times) for times in rounds),
            **self.facts[name],
        )

    def disturbance_cores(self) -> float | None:
        return max(0.0, sum(self.other_cpu_s) / sum(self.wall_s)) if self.wall_s else None

    def drop(self, name: str, error: str) -> None:
        self.facts[name]["error"] = error
        if self.report is not None:
            self.report(f"{name}: {error}")
        self.workers.pop(name).close()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def read_interface(model_path: Path | str) -> ModelInterface:
    graph = onnx.load(str(model_path), load_external_data=False).graph
    initialised = {tensor.name for tensor in graph.initializer}
    inputs = tuple(value for value in graph.input if value.name not in initialised)
    return ModelInterface(inputs, tuple(value.name for value in graph.output))


def random_inputs(
    values: Sequence[onnx.ValueInfoProto], dimensions: Mapping[str, int], seed: int
) -> dict[str, np.ndarray]:
    """Normal floats, and integers 0 or 1, which are in range for indices, masks and lengths alike."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for value in values:
        tensor = value.type.tensor_type
        if tensor.elem_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
            raise ValueError(f"input {value.name!r} is not a tensor of numbers; give its value")
        shape = tuple(
            dimension.dim_value if dimension.HasField("dim_value") else dimensions.get(dimension.dim_param, 1)
            for dimension in tensor.shape.dim
        )
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if dtype.kind in "iub":
            arrays[value.name] = rng.integers(0, 2, shape).astype(dtype)
        else:
            arrays[value.name] = rng.standard_normal(shape).astype(dtype)
    return arrays


def relative_error(path: str, reference: Mapping[str, np.ndarray]) -> float:
    """The largest over the outputs of norm(output - reference) / norm(reference)."""
    errors = []
    with np.load(path) as outputs:
        for name, expected in reference.items():
            output = outputs[name].astype(np.float64)
            if output.shape != expected.shape:
                raise WorkerError(f"output {name!r} has shape {output.shape}, not {expected.shape}")
            errors.append(float(np.linalg.norm(output - expected) / np.linalg.norm(expected)))
    return max(errors)


def machine_cpu_seconds() -> float | None:
    """Seconds that all cores together have been busy since the system started, where it says so."""
    path = Path("/proc/stat")
    if not path.is_file():
        return None
    fields = [int(field) for field in path.read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = fields
    ticks = user + nice + system + interrupts + soft_interrupts + stolen
    return ticks / os.sysconf("SC_CLK_TCK")


def describe_machine() -> dict[str, Any]:
    return {
        "processor": processor_name(),
        "architecture": platform.machine(),
        "logical_cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
