"""Models larger than a device's memory, in sweeps: bytes over the host's link, by plan, beside the least there can be.

python -m bench.sweeps [--size 8192] [--memory 4GiB] [--target h200] [--models unet,vgg16]
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable

import torch
from torch import nn

from bench.zoo.unet import FULL, UNet
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, reads
from tilewright.ops import lower
from tilewright.options import checked_size
from tilewright.schedule.sweeps.parts import in_sweeps
from tilewright.schedule.sweeps.search import Room, choose_sweeps
from tilewright.target import machine
from tilewright.transform.clean.fold import fold_constants

_TRACED = 64  # rows and columns of the image a module is exported with; the file's size is then another


def vgg16() -> nn.Module:
    """Its features: thirteen convolutions in five levels."""
    layers: list[nn.Module] = []
    inner = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inner, width, 3, padding=1), nn.ReLU()]
            inner = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


MODELS: dict[str, Callable[[], nn.Module]] = {"unet": lambda: UNet(FULL), "vgg16": vgg16}


def exported(module: nn.Module) -> bytes:
    """In float16."""
    file = io.BytesIO()
    image = torch.zeros(1, 3, _TRACED, _TRACED).half()
    with torch.no_grad():
        torch.onnx.export(module.eval().half(), (image,), file, input_names=["image"], output_names=["y"],
                          dynamo=False, opset_version=17)  # fmt: skip
    return file.getvalue()


def layer_by_layer(program: Program) -> int:
    """Bytes where every sum and pool leaves its result on the host, with the maps behind it."""
    kept = {t for c in program.computes if not _is_passed_on(program, c.outputs[0].name) for t in c.outputs}
    kept |= set(program.outputs)
    taken = [t for c in program.computes for t in reads(c) if t in kept or t in program.inputs]
    return sum(t.most_bytes for t in kept) + sum(t.most_bytes for t in taken)


def _is_passed_on(program: Program, name: str) -> bool:
    """Whether one compute alone reads a result, place by place: it rides on that one."""
    readers = [c for c in program.computes if any(t.name == name for t in reads(c))]
    made = next(t for c in program.computes for t in c.outputs if t.name == name)
    return len(readers) == 1 and readers[0].outputs[0].shape == made.shape and not hasattr(readers[0], "reduce_axes")


def main() -> None:
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("--size", type=int, default=8192)
    about.add_argument("--memory", default="4GiB")
    about.add_argument("--target", default="h200")
    about.add_argument("--models", default=",".join(MODELS))
    asked = about.parse_args()
    room = Room(checked_size("memory", asked.memory), 2, False)
    print("| model | sweeps, parts | kinds | in, MB | back, MB | of the least | layer by layer, MB | CPU s |")
    for name in asked.models.split(","):
        model = exported(MODELS[name]())
        program = fold_constants(lower(load(model, {"image": (1, 3, asked.size, asked.size)})))
        begin = time.process_time()
        chosen = choose_sweeps(program, room, machine(asked.target))
        if chosen is None:
            print(f"| {name} | none fit |")
            continue
        swept = in_sweeps(program, chosen)
        spent = time.process_time() - begin
        into, back = swept.link_bytes
        weights = sum(a.nbytes for a in program.constants.values())
        least = sum(t.most_bytes for t in (*program.inputs, *program.outputs)) + weights
        parts = ", then ".join(" x ".join(str(n) for n in s.counts if n > 1) or "1" for s in swept.sweeps)
        kinds = sum(len(s.programs) for s in swept.sweeps)
        moved = f"{into / 1e6:.0f} | {back / 1e6:.0f} | {(into + back + weights) / least:.2f}"
        alone = f"{layer_by_layer(program) / 1e6:.0f}"
        print(f"| {name} | {len(swept.sweeps)}: {parts} | {kinds} | {moved} | {alone} | {spent:.1f} |")


if __name__ == "__main__":
    main()
