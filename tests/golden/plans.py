"""Digests of Plans of the zoo's models, in small, on every machine that is described: what is chosen, as text, hashed.

Plans must be the same wherever they are made. `plans.json` holds the digests; what is predicted of a Plan is no part of
them, since it is not what is chosen. `python -m tests.golden.plans model.onnx` prints those of a model, to be compared
between hosts; `--texts FOLDER` writes the texts, to be compared line by line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.target import machine, stored_machines
from tilewright.tile_graph.plan.text import plan_text
from tilewright.tune.parts import bare

FILE = Path(__file__).resolve().parent / "plans.json"
MODELS = ("mmoe", "nerf", "lstm", "vit_s32", "unet", "mobilenet_v2", "bsrn", "bert_base")  # each planned in a second

Digests = Mapping[str, Mapping[str, str]]  # by model and machine


def committed() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return found


def text_of(path: Path, name: str) -> str:
    made = build(load(path, {}), machine(name), Options(target=name, stop_after="plan"))
    assert made.plan is not None
    return plan_text(bare(made.plan))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sample() -> list[tuple[str, str]]:
    """A model for each machine, and a machine for each model."""
    names = stored_machines()
    return [(MODELS[i % len(MODELS)], names[i % len(names)]) for i in range(max(len(MODELS), len(names)))]


def changes(before: Digests, after: Digests) -> list[str]:
    """A line for every Plan that is another, for those that are new, and for those that are gone."""
    pairs = {(model, name): None for side in (before, after) for model, each in side.items() for name in each}
    lines = []
    for model, name in pairs:
        was, now = before.get(model, {}).get(name), after.get(model, {}).get(name)
        if was != now:
            what = "new" if was is None else "gone" if now is None else f"another, {now} in place of {was}"
            lines.append(f"the Plan of {model} for {name} is {what}")
    return lines


def simd() -> list[str]:
    """Instructions that NumPy chose for this processor, beyond those it is compiled for."""
    told: Any = np.show_config(mode="dicts")
    return list(told["SIMD Extensions"].get("found", []))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.plans", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("files", nargs="+", metavar="FILE.onnx[@MACHINE]", help="for one machine, or for all")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="write the texts there")
    given = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    for each in given.files:
        file, _, chosen = each.partition("@")
        for name in (chosen,) if chosen else stored_machines():
            text = text_of(Path(file), name)
            found.setdefault(file, {})[name] = digest(text)
            if given.texts is not None:
                given.texts.mkdir(parents=True, exist_ok=True)
                (given.texts / f"{Path(file).stem}.{name}.txt").write_text(text)
    print(json.dumps({"simd": simd(), "plans": found}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
