"""The demonstration behind ./demo: compiles MobileNet-V2, checks it against ONNX Runtime and times both."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tilewright.api import compile
from tilewright.cli.progress import counting, working
from tilewright.dynamic.open_model import OpenModel
from tilewright.dynamic.staged_model import StagedModel
from tilewright.errors import TilewrightError
from tilewright.examples import mobilenet
from tilewright.model import Array, Model
from tilewright.options import Options, usable_cores
from tilewright.report.sidebyside import Comparison, compare

SIZE = 224
MODEL = Path(".cache", "mobilenet_v2.onnx")
# Both compute in float32 in their own order of summation, so agreement is to rounding, not to the bit.
LARGEST_DIFFERENCE = 1e-4

NEXT = """
Try next (first: source .venv/bin/activate):
  tilewright explain {path}
      which kernels it became, and why
  tilewright run {path} --dump stages
      every form on the way to machine code, as text in stages/
  tilewright bench {path}
      longer, and beside more runtimes
  tilewright run YOUR_MODEL.onnx
  ./test
"""

# In a process of its own: two thread pools in one process fight for the cores.
REFERENCE = """\
import sys, numpy, onnxruntime
model, inputs, outputs = sys.argv[1:]
with numpy.load(inputs) as given:
    results = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, dict(given))
numpy.savez(outputs, *results)
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="./demo", description="Compile, check and time MobileNet-V2.")
    parser.add_argument("--threads", metavar="N", type=int, help="threads for both runtimes (default: every core)")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="rounds of timing (default: 5)")
    arguments = parser.parse_args()
    try:
        return demonstrate(arguments.threads, arguments.rounds)
    except TilewrightError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def demonstrate(threads: int | None, rounds: int) -> int:
    options = Options.from_environment(threads=threads)
    print(f"MobileNet-V2 at {SIZE}x{SIZE}, seeded weights, float32", flush=True)
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    with working("building the model"):
        mobilenet.build(MODEL, size=SIZE)
    print(f"  model        {MODEL} ({MODEL.stat().st_size / 2**20:.1f} MiB)", flush=True)
    if not compile_and_check(options):
        return 1
    with counting("timing") as progress:
        comparison = compare(
            MODEL,
            ["tilewright", "tilewright:none", "onnxruntime"],
            options.threads or usable_cores(),
            rounds=rounds,
            seconds_per_round=0.5,
            progress=progress,
        )
    show_times(comparison)
    print(NEXT.format(path=MODEL), end="")
    return 0


def compile_and_check(options: Options) -> bool:
    """The compiled model lives only in here: its worker threads must not be up while others are timed."""
    start = time.perf_counter()
    with working("compiling") as tell:
        model = compile(MODEL, options=options.override(progress=tell))
    calls = model.calls
    kernels = f"{len({call.kernel for call in calls})} distinct kernels, {len(calls)} calls"
    print(f"  compiled     in {time.perf_counter() - start:.1f} s: {kernels}", flush=True)
    difference = difference_to_onnxruntime(model, MODEL)
    if difference is None:
        print("  checked      no: onnxruntime is not installed (pip install onnxruntime)")
        return True
    if not difference <= LARGEST_DIFFERENCE:
        print(f"  checked      WRONG: differs from ONNX Runtime by {difference:.1e} (relative)")
        return False
    print(f"  checked      same as ONNX Runtime to {difference:.1e} (relative)", flush=True)
    return True


def difference_to_onnxruntime(model: Model | OpenModel | StagedModel, path: Path) -> float | None:
    """The relative difference of the outputs on one random input; None without ONNX Runtime."""
    inputs = model.random_inputs(seed=1)
    ours = model.run(inputs)
    with tempfile.TemporaryDirectory(prefix="tilewright-demo-") as folder:
        given, results = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        np.savez(given, **inputs)
        command = [sys.executable, "-c", REFERENCE, str(path), str(given), str(results)]
        with working("running ONNX Runtime"):
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            if "ModuleNotFoundError" in finished.stderr:
                return None
            raise TilewrightError(f"ONNX Runtime failed: {finished.stderr.strip().splitlines()[-1]}")
        with np.load(results) as archive:
            theirs = [archive[name] for name in archive.files]
    return max(relative_difference(a, b) for a, b in zip(ours.values(), theirs, strict=True))


def relative_difference(ours: Array, theirs: Array) -> float:
    reference = theirs.astype(np.float64)
    return float(np.linalg.norm(ours.astype(np.float64) - reference) / np.linalg.norm(reference))


def show_times(comparison: Comparison) -> None:
    labels = {"tilewright": "tilewright", "tilewright:none": "  unfused", "onnxruntime": "onnxruntime"}
    print(f"  latency      {comparison.threads} threads, median over rounds, {comparison.machine['processor']}")
    for result in comparison.runtimes:
        time_text = f"{result.median_ms:8.2f} ms" if result.median_ms is not None else f"-  ({result.error})"
        print(f"    {labels[result.name]:<14}{time_text}")


if __name__ == "__main__":
    sys.exit(main())
