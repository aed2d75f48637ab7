"""Error of the zoo in bfloat16, beside PyTorch's own: `python -m bench.precision [--size full] [--model NAME]`.

Both are measured against the model in float64. PyTorch converts the whole module and its inputs; Tilewright keeps
operands of contractions in bfloat16 and everything else in float32.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tilewright
from bench import zoo
from tilewright.options import Options

LIMIT = 1.5  # of PyTorch's error


@dataclass(frozen=True)
class Row:
    """Relative errors of one model: the largest over its outputs of norm(output - reference) / norm(reference)."""

    model: str
    size: str
    float32: float  # Tilewright in float32
    bfloat16: float  # Tilewright in bfloat16
    torch_bfloat16: float

    @property
    def ratio(self) -> float:
        return self.bfloat16 / self.torch_bfloat16


def torch_outputs(module: nn.Module, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What PyTorch computes with every float in bfloat16."""
    narrow = copy.deepcopy(module).to(torch.bfloat16)
    tensors = [torch.from_numpy(array) for array in inputs.values()]
    with torch.no_grad():
        results = narrow(*(t.to(torch.bfloat16) if t.is_floating_point() else t for t in tensors))
    if isinstance(results, torch.Tensor):
        results = (results,)
    return {n: r.float().numpy() for n, r in zip(zoo.output_names(module), results, strict=True)}


def measure(name: str, size: str, options: Options) -> Row:
    module, inputs = zoo.build(name, size)
    reference = zoo.reference(module, inputs)
    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.onnx"
        zoo.export_module(module, inputs, path)
        for precision in ("float32", "bfloat16"):
            model = tilewright.compile(path, options=options.override(precision=precision))
            errors[precision] = zoo.relative_error(model.run(inputs), reference)
    peer = zoo.relative_error(torch_outputs(module, inputs), reference)
    return Row(name, size, errors["float32"], errors["bfloat16"], peer)


def table(rows: list[Row]) -> str:
    lines = [
        "| model | size | float32 | bfloat16 | PyTorch bfloat16 | ratio |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        errors = " | ".join(f"{e:.2e}" for e in (row.float32, row.bfloat16, row.torch_bfloat16))
        lines.append(f"| {row.model} | {row.size} | {errors} | {row.ratio:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.precision", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=zoo.SIZES, default="small")
    parser.add_argument("--model", choices=tuple(zoo.MODELS), action="append", help="only this one; repeatable")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.model or zoo.MODELS:
        rows.append(measure(name, arguments.size, Options.from_environment()))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(r) | {"ratio": r.ratio} for r in rows], indent=2) + "\n")
    worst = max(rows, key=lambda r: r.ratio)
    print(f"\nworst: {worst.model}, {worst.ratio:.2f} times PyTorch's error; the limit is {LIMIT}")
    return 0 if worst.ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
