"""A model of the zoo under torch.compile on this machine's GPU, in a process of its own, for bench/gpu.py.

`python bench/gpu_peers.py MODEL [SIZE [PRECISION]]` prints one line of JSON: microseconds of device time of a call, and
the relative error against float32. Calls are captured into a CUDA graph as those of the other runtimes are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LONGEST = 240  # seconds that a peer may take, its compilation included


def in_its_own_process(name: str, size: str, precision: str) -> tuple[float, float]:
    """Microseconds and error; not a number where it does not run."""
    command = [sys.executable, __file__, name, size, precision]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        print(f"torch.compile: {name} took more than {LONGEST} s")
        return float("nan"), float("nan")
    last = (found.stdout.splitlines() or [""])[-1]
    if found.returncode or not last.startswith("{"):
        print(f"torch.compile: {name}: {(found.stderr.splitlines() or ['no reason given'])[-1]}")
        return float("nan"), float("nan")
    row = json.loads(last)
    return row["microseconds"], row["error"]


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
        warm_up()
        taken = device_microseconds(lambda _: compiled(*given), 10)
    print(json.dumps({"microseconds": taken, "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
