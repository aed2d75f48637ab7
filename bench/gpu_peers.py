"""Models of the zoo in other runtimes on this machine's GPU, each model and runtime in a process of its own.

`python bench/gpu_peers.py RUNTIME MODEL SIZE BATCH PRECISION FILE` prints `ready` when it is compiled, waits for a
line, and prints one of JSON: microseconds of device time of a call. RUNTIME is `eager` (PyTorch inside a CUDA graph),
`compile` (torch.compile inside one) or `xla` (the exported FILE node by node in JAX). XLA's executables cannot be
captured: calls in flight and a loop of calls inside one executable are timed, and the shorter counts. While one is
timed all others are stopped; those that are not ready in time are ended, and the others count.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RUNTIMES = ("eager", "compile", "xla")
Measured = tuple[str, int, str]  # size, batch and precision of models
LONGEST = 60  # seconds for a peer's own timing
_FILE_SECONDS = 120  # until the exported model is there
_IN_FLIGHT, _ROUNDS = 20, 7
_WARM_SECONDS = 0.5
_AT_ONCE = 16  # peers alive: each has PyTorch or JAX and a context of the device in memory


def is_file(name: str) -> bool:
    return name.endswith(".onnx")


def file_of(name: str) -> str:
    """The name of an exported model's file."""
    stem = Path(name).stem if is_file(name) else name.replace(":", ".")
    return f"{stem}.onnx"


class Peer:
    """A model in another runtime: it compiles at once, politely, and is timed when it is asked to."""

    def __init__(self, runtime: str, name: str, command: Sequence[str]) -> None:
        self.runtime, self.name = runtime, name
        variables = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                 "OMP_NUM_THREADS": "2"}  # fmt: skip
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        self._process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._errors, text=True, env=variables,
                                         start_new_session=True)  # fmt: skip
        self.started = time.monotonic()
        self.ready_after = 0.0  # seconds; 0: not ready
        self.has_ended = False
        self.answer: dict[str, Any] = {}  # what it printed when it was timed
        self._answered = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready":
                self.ready_after = time.monotonic() - self.started
            elif line.startswith("{"):
                self.answer = json.loads(line)
                break
        self.has_ended = True
        self._answered.set()

    def signal(self, number: int) -> None:
        """To the process and all it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def timed(self) -> float:
        """Microseconds; 0 where it does not run."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        self._answered.wait(LONGEST)
        self.end()
        if not self.answer:
            print(f"{self.runtime}: {self.name}: {self.why('took too long to be timed')}", flush=True)
        return self.answer.get("microseconds", 0.0)

    def why(self, otherwise: str) -> str:
        self._errors.seek(0)
        return (self._errors.read().splitlines() or [otherwise])[-1][:300]

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._process.wait()


class Peers:
    """All peers of some models, some of them at a time, compiling beside whatever else is done."""

    def __init__(
        self, wanted: Sequence[tuple[str, str, Sequence[str]]], seconds: float, at_once: int | None = None
    ) -> None:
        """`wanted`: runtime, model and the Python script that runs it so, with its arguments."""
        self._queue, self._at_once = list(wanted), at_once or _AT_ONCE
        self._until = time.monotonic() + seconds
        self.alive: list[Peer] = []
        self.found: dict[tuple[str, str], float] = {}  # microseconds by runtime and model
        self.answers: dict[tuple[str, str], dict[str, Any]] = {}  # all that was said beside them
        self.failed: dict[tuple[str, str], str] = {}
        self._start()

    def _start(self) -> None:
        while self._queue and len(self.alive) < self._at_once:
            self.alive.append(Peer(*self._queue.pop(0)))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nobody else at work on the device."""
        for peer in self.alive:
            peer.signal(signal.SIGSTOP)
        time.sleep(0.05)  # what they launched is over
        try:
            yield
        finally:
            for peer in self.alive:
                peer.signal(signal.SIGCONT)

    def collect(self) -> None:
        """Times those that are ready, each alone, and starts others in their place."""
        for peer in list(self.alive):
            if peer.ready_after:
                self.alive.remove(peer)
                with self.quiet():
                    taken = self.found[peer.runtime, peer.name] = peer.timed()
                self.answers[peer.runtime, peer.name] = peer.answer
                print(f"{peer.name}: {peer.runtime} {taken:.1f} us, ready in {peer.ready_after:.0f} s", flush=True)
            elif peer.has_ended:
                self._leave(peer, peer.why("ended without a word"))
        self._start()

    def finish(self) -> None:
        """Until all have answered or their time is over."""
        while self.alive and time.monotonic() < self._until:
            self.collect()
            time.sleep(0.1)
        for peer in list(self.alive):
            self._leave(peer, "not compiled in time")
        for runtime, name, *_ in self._queue:
            print(f"{runtime}: {name}: no time was left for it", flush=True)
        self._queue.clear()

    def _leave(self, peer: Peer, why: str) -> None:
        print(f"{peer.runtime}: {peer.name}: {why}", flush=True)
        self.failed[peer.runtime, peer.name] = why
        self.alive.remove(peer)
        peer.end()


def of_models(
    runtimes: Mapping[str, Sequence[str]], about: Measured, folder: Path
) -> list[tuple[str, str, Sequence[str]]]:
    """Every model by the runtimes that are wanted for it, those that compile longest first."""
    there = [r for r in ("compile", "xla", "eager") if r != "xla" or importlib.util.find_spec("jax") is not None]
    return [(r, n, [__file__, r, n, *map(str, about), str(folder / file_of(n))])
            for r in there for n, own in runtimes.items() if r in own]  # fmt: skip


def main(runtime: str, name: str, size: str, batch: str, precision: str, path: str) -> None:
    os.nice(19)
    call = xla_call(precision, path) if runtime == "xla" else torch_call(runtime, name, size, int(batch), precision)
    taken = call()
    print(json.dumps({"microseconds": taken}), flush=True)


def announced() -> None:
    """Compiled: from here on it is timed, alone."""
    print("ready", flush=True)
    sys.stdin.readline()


def torch_call(runtime: str, name: str, size: str, batch: int, precision: str) -> Callable[[], float]:
    import torch

    from bench.gpu import device_microseconds, warm_up
    from bench.gpu_models import built, torch_kind

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    kind = torch_kind(precision)
    module, inputs = built(name, size, batch)
    module = module.to("cuda").to(kind)
    given = [torch.from_numpy(a).cuda() for a in inputs.values()]
    given = [a.to(kind) if a.is_floating_point() else a for a in given]
    run = torch.compile(module) if runtime == "compile" else module

    def timed() -> float:
        with torch.no_grad():
            for _ in range(3):
                run(*given)
            torch.cuda.synchronize()
            announced()
            warm_up(_WARM_SECONDS)
            return device_microseconds(lambda _: run(*given), 10)

    return timed


def xla_call(precision: str, path: str) -> Callable[[], float]:
    import jax

    from tilewright.report.xla import jax_function

    jax.config.update("jax_default_matmul_precision", "highest" if precision == "float32" else "tensorfloat32")
    begin = time.monotonic()
    while not Path(path).exists():
        if time.monotonic() > begin + _FILE_SECONDS:
            raise TimeoutError(f"no {path}")
        time.sleep(0.5)
    run, weights, names = jax_function(path, "float32" if precision == "tf32" else precision)
    inputs = np.load(Path(path).with_suffix(".npz"))
    weights = jax.device_put(weights)
    given = jax.device_put({n: inputs[n] for n in names})

    def step(kept: Any, values: Any) -> Any:
        """One inference that the next waits for: XLA does not know that nothing is added to its inputs."""
        waited = sum(found.astype("float32").sum() for found in run(kept, values)) * 0
        return {name: value + waited.astype(value.dtype) for name, value in values.items()}

    def in_flight(call: Callable[[], Any], calls: int) -> float:
        taken = []
        begin = time.perf_counter()
        while len(taken) < _ROUNDS or time.perf_counter() - begin < _WARM_SECONDS:  # the clock rises under load
            start = time.perf_counter()
            for _ in range(calls):
                last = call()
            jax.block_until_ready(last)
            taken.append((time.perf_counter() - start) / _IN_FLIGHT * 1e6)
        return median(taken[-_ROUNDS:])

    def timed() -> float:
        one = jax.jit(run).lower(weights, given).compile()
        repeated = jax.jit(lambda kept, x: jax.lax.fori_loop(0, _IN_FLIGHT, lambda _, v: step(kept, v), x))
        many = repeated.lower(weights, given).compile()
        jax.block_until_ready((one(weights, given), many(weights, given)))
        announced()
        return min(in_flight(lambda: one(weights, given), _IN_FLIGHT), in_flight(lambda: many(weights, given), 1))

    return timed


if __name__ == "__main__":
    main(*sys.argv[1:])
