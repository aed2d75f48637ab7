"""A model of the zoo under torch.compile on this machine's GPU, in a process of its own, for bench/gpu.py.

`python bench/gpu_peers.py MODEL [SIZE [PRECISION]]` prints `ready`, waits for a line, and prints one of JSON:
microseconds of device time of a call, and the relative error against float32. Calls are captured into a CUDA graph as
those of the other runtimes are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LONGEST = 150  # seconds until a peer is ready, its compilation included


class Peer:
    """A model under torch.compile in a process of its own: it compiles at once, and is timed when it is asked to."""

    def __init__(self, name: str, size: str, precision: str) -> None:
        self.name = name
        command = [sys.executable, __file__, name, size, precision]
        # all peers compile at a time
        threads = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=threads
        )
        self._started = time.monotonic()

    def wait(self) -> None:
        """Until it is compiled, or has failed."""
        left = threading.Timer(max(1.0, self._started + LONGEST - time.monotonic()), self._process.kill)
        left.start()
        assert self._process.stdout is not None
        self._ready = self._process.stdout.readline().strip() == "ready"
        left.cancel()

    def timed(self) -> tuple[float, float]:
        """Microseconds and error; not a number where it does not run."""
        found = self._process.communicate("\n" if self._ready else "", timeout=LONGEST)[0]
        last = (found.splitlines() or [""])[-1]
        if not last.startswith("{"):
            self._errors.seek(0)
            print(f"torch.compile: {self.name}: {(self._errors.read().splitlines() or ['took too long'])[-1]}")
            return float("nan"), float("nan")
        row = json.loads(last)
        return row["microseconds"], row["error"]


def microseconds(names: Sequence[str], size: str, precision: str) -> dict[str, float]:
    """Of every model under torch.compile: all compile together, and are timed one after the other."""
    peers = [Peer(name, size, precision) for name in names]
    for peer in peers:
        peer.wait()
    found = {}
    for peer in peers:
        found[peer.name] = peer.timed()[0]
        print(f"{peer.name}: torch.compile {found[peer.name]:.1f} us", flush=True)
    return found


def main(name: str, size: str = "full", precision: str = "float16") -> None:
    import torch

    from bench import zoo
    from bench.device import relative_error
    from bench.gpu import built, device_microseconds, warm_up

    module, inputs = built(name, size)
    reference = list(zoo.reference(module, inputs).values())
    kind = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(precision, torch.float32)
    compiled = torch.compile(module.to("cuda").to(kind))
    given = [torch.from_numpy(a).cuda() for a in inputs.values()]
    given = [a.to(kind) if a.is_floating_point() else a for a in given]
    with torch.no_grad():
        for _ in range(3):
            found = compiled(*given)
        outputs = [found] if isinstance(found, torch.Tensor) else list(found)
        error = max(relative_error(f.float().cpu().numpy(), r) for f, r in zip(outputs, reference, strict=False))
        print("ready", flush=True)
        sys.stdin.readline()
        warm_up()
        taken = device_microseconds(lambda _: compiled(*given), 10)
    print(json.dumps({"microseconds": taken, "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
