"""Cold compile time by stage: `python -m bench.compile_time model.onnx ...` compiles each with an empty cache.

Processor seconds are printed beside wall time, those of the C compiler apart: they hold on a machine that others use.
`--machine NAME` plans for a stored machine description and stops before machine code.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from tilewright.compiler import build
from tilewright.frontend.onnx import load
from tilewright.options import Options
from tilewright.target import machine


def measure(path: Path, name: str | None) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        # the machine is described first: its probes are run once a machine, not once a model
        target = machine(name or "cpu")
        options = Options(cache_dir=Path(folder), stop_after=None if name is None else "source")
        wall, own = time.perf_counter(), time.process_time()
        below = _children()
        artifact = build(load(path, {}), target, options)
        result: dict[str, object] = {
            "model": path.stem,
            "machine": name or "this one",
            "wall_s": round(time.perf_counter() - wall, 2),
            "python_cpu_s": round(time.process_time() - own, 2),
            "compiler_cpu_s": round(_children() - below, 2),
            "kernels": len(artifact.sources),
            "text_bytes": sum(map(len, artifact.sources.values())),
            "stages_s": {stage: round(seconds, 2) for stage, seconds in artifact.stage_seconds.items()},
        }
    return result


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--machine", help="a stored machine description, such as emerald_rapids")
    arguments = parser.parse_args()
    for path in arguments.models:
        print(json.dumps(measure(path, arguments.machine)), flush=True)


if __name__ == "__main__":
    main()
