"""One artifact for a range of sizes beside artifacts for single ones: time of a call, of compiling, and bytes.

    python -m bench.shapes --model resnet50 --range 1 64
    python -m bench.shapes --model bert_base --range 1 512 --sizes 20
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tilewright
from bench import zoo
from bench.support import RESULTS

# by model which axis of its inputs varies
AXES = {"bert_base": 1, "bert_384": 1}


def exported(name: str, size: str, low: int, folder: Path) -> tuple[Path, dict[str, np.ndarray], int]:
    """The model with one open dimension, and inputs of one sample."""
    module, inputs = zoo.build(name, size)
    axis = AXES.get(name, 0)
    path = folder / f"{name}.onnx"
    examples = {n: sized(a, axis, max(low, 3)) for n, a in inputs.items()}
    torch.onnx.export(
        module, tuple(map(torch.from_numpy, examples.values())), str(path), input_names=list(inputs),
        output_names=list(zoo.output_names(module)), opset_version=17, dynamo=False, external_data=False,
        dynamic_axes={n: {axis: "n"} for n in inputs},
    )  # fmt: skip
    return path, inputs, axis


def sized(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """The array repeated along an axis, as far as there are so many elements."""
    times = -(-size // array.shape[axis])
    return np.ascontiguousarray(np.take(np.concatenate([array] * times, axis), range(size), axis))


def process_seconds(call: Any) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def compared(ranged: Any, exact: Any, inputs: Mapping[str, np.ndarray], rounds: int) -> tuple[float, float, float]:
    """Seconds of the processor of one call, of each, taken in turn; and how far the results are apart."""
    values = list(inputs.values())
    pairs = zip(ranged(*values), exact(*values), strict=True)
    error = max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in pairs)
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        times.append((process_seconds(lambda: ranged(*values)), process_seconds(lambda: exact(*values))))
    return min(t[0] for t in times), min(t[1] for t in times), error


def folder_bytes(model: Any, folder: Path) -> int:
    model.save(folder)
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", choices=list(zoo.MODELS))
    parser.add_argument("--size", choices=zoo.SIZES, default="full")
    parser.add_argument("--range", type=int, nargs=2, default=(1, 64), metavar=("LOW", "HIGH"))
    parser.add_argument("--sizes", type=int, default=20, help="random sizes that are compared (default: 20)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="time of the processor is compared (default: 1)")
    parser.add_argument("--effort", default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help=f"a file for the figures, such as {RESULTS / 'shapes.json'}")
    arguments = parser.parse_args()
    low, high = arguments.range
    count = min(arguments.sizes, high - low + 1)
    sizes = sorted(random.Random(arguments.seed).sample(range(low, high + 1), count))
    chosen = {"threads": arguments.threads, "effort": arguments.effort}
    with tempfile.TemporaryDirectory(prefix="tilewright-shapes-") as temporary:
        path, one, axis = exported(arguments.model, arguments.size, low, Path(temporary))
        spent = time.process_time()
        ranged = tilewright.compile(path, dynamic={"n": (low, high)}, **chosen)
        own_seconds = time.process_time() - spent
        print(f"{arguments.model}, n from {low} to {high}: {'; '.join(str(v) for v in ranged.variants)}", flush=True)
        rows = []
        for size in sizes:
            inputs = {n: sized(a, axis, size) for n, a in one.items()}
            exact = tilewright.compile(path, shapes={n: a.shape for n, a in inputs.items()}, **chosen)
            seconds, alone, error = compared(ranged, exact, inputs, arguments.rounds)
            rows.append({"size": size, "ranged": seconds, "exact": alone, "ratio": seconds / alone, "error": error})
            both = f"{seconds * 1e3:9.3f} ms  {alone * 1e3:9.3f} ms"
            print(f"{size:5d}  {both}  {seconds / alone:5.2f}  {error:.1e}", flush=True)
        ratios = [row["ratio"] for row in rows]
        bytes_of = folder_bytes(ranged, Path(temporary) / "ranged"), folder_bytes(exact, Path(temporary) / "exact")
        print(f"geometric mean {statistics.geometric_mean(ratios):.3f}, worst {max(ratios):.3f}; {ranged.compilations} "
              f"compiled forms; {bytes_of[0] / bytes_of[1]:.2f} times the bytes of one size; this process spent "
              f"{own_seconds:.1f} s on them")  # fmt: skip
    if arguments.results is not None:
        told = {"model": arguments.model, "range": [low, high], "rows": rows}
        arguments.results.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
