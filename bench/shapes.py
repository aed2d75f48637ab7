"""One artifact for a range of sizes beside artifacts for single ones: time of a call, of compiling, and bytes.

    python -m bench.shapes --model resnet50                     a batch of 1 to 64; 20 random sizes
    python -m bench.shapes --model bert_base --range 1 128 --sizes 5
    python -m bench.shapes --model gpt2 --size small            new tokens and past ones
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
from torch import nn

import tilewright
from bench import zoo
from bench.shape_cases import CASES, Case
from bench.support import RESULTS


def exported(case: Case, module: nn.Module, folder: Path) -> Path:
    """The model with the axes open that vary."""
    some = {name: sizes[len(sizes) // 3] for name, sizes in case.ranges.items()}
    examples = case.inputs(module, some)
    path = folder / "model.onnx"
    torch.onnx.export(
        module, tuple(map(torch.from_numpy, examples.values())), str(path), input_names=list(examples),
        output_names=[f"y{k}" for k in range(8)][: _outputs(module, examples)], opset_version=17, dynamo=False,
        external_data=False, dynamic_axes={n: dict(axes) for n, axes in case.axes.items()},
    )  # fmt: skip
    return path


def _outputs(module: nn.Module, examples: Mapping[str, np.ndarray]) -> int:
    with torch.no_grad():
        found = module(*map(torch.from_numpy, examples.values()))
    return len(found) if isinstance(found, tuple) else 1


def chosen_sizes(ranges: Mapping[str, range], count: int, seed: int) -> list[dict[str, int]]:
    """Random ones, no two alike where there are so many."""
    pick, found = random.Random(seed), list[dict[str, int]]()
    for _ in range(20 * count):
        sizes = {name: pick.choice(of) for name, of in ranges.items()}
        if len(found) < count and sizes not in found:
            found.append(sizes)
    return sorted(found, key=lambda sizes: tuple(sizes.values()))


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
    parser.add_argument("--model", default="resnet50", choices=list(CASES))
    parser.add_argument("--size", choices=zoo.SIZES, default="full")
    parser.add_argument("--range", type=int, nargs=2, metavar=("LOW", "HIGH"), help="of a model with one that varies")
    parser.add_argument("--sizes", type=int, default=20, help="random sizes that are compared (default: 20)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="time of the processor is compared (default: 1)")
    parser.add_argument("--effort", default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help=f"a file for the figures, such as {RESULTS / 'shapes.json'}")
    arguments = parser.parse_args()
    case = CASES[arguments.model]()
    ranges = dict(case.ranges)
    if arguments.range is not None:
        ((name, known),) = ranges.items()
        ranges = {name: range(arguments.range[0], arguments.range[1] + 1, known.step)}
    torch.manual_seed(0)
    module = case.build(arguments.size).eval()
    chosen = {"threads": arguments.threads, "effort": arguments.effort}
    with tempfile.TemporaryDirectory(prefix="tilewright-shapes-") as temporary:
        path = exported(case, module, Path(temporary))
        spent = time.process_time()
        ranged = tilewright.compile(path, dynamic=ranges, **chosen)
        own_seconds = time.process_time() - spent
        print(f"{arguments.model}: {'; '.join(str(v) for v in ranged.variants)}", flush=True)
        rows = []
        for sizes in chosen_sizes(ranges, arguments.sizes, arguments.seed):
            inputs = case.inputs(module, sizes)
            exact = tilewright.compile(path, shapes={n: a.shape for n, a in inputs.items()}, **chosen)
            seconds, alone, error = compared(ranged, exact, inputs, arguments.rounds)
            rows.append({**sizes, "ranged": seconds, "exact": alone, "ratio": seconds / alone, "error": error})
            both = f"{seconds * 1e3:9.3f} ms  {alone * 1e3:9.3f} ms"
            print(f"{' '.join(map(str, sizes.values())):>9}  {both}  {seconds / alone:5.2f}  {error:.1e}", flush=True)
        ratios = [row["ratio"] for row in rows]
        bytes_of = folder_bytes(ranged, Path(temporary) / "ranged"), folder_bytes(exact, Path(temporary) / "exact")
        print(f"geometric mean {statistics.geometric_mean(ratios):.3f}, worst {max(ratios):.3f}; {ranged.compilations} "
              f"compiled forms; {bytes_of[0] / bytes_of[1]:.2f} times the bytes of one size; this process spent "
              f"{own_seconds:.1f} s on them")  # fmt: skip
    if arguments.results is not None:
        told = {"model": arguments.model, "ranges": {n: [r.start, r.stop, r.step] for n, r in ranges.items()},
                "rows": rows}  # fmt: skip
        arguments.results.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
