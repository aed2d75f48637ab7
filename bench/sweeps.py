"""Models larger than a device's memory, in sweeps: bytes over the host's link beside the least there can be, and times.

python -m bench.sweeps [--size 8192] [--memory 4GiB] [--target h200] [--models unet,vgg16]    by plan, on any machine
python -m bench.sweeps run                                                                    on the GPU that is here

`run` holds the rest of the device's memory itself, so that the bound is real, and prints time beside the larger of what
the link and the kernels take, and beside a pipeline of PyTorch that is tiled by hand. Welder's figures are of other
machines and float32: how much less passes the link and how much faster that is than without reuse on the device.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

import tilewright
from bench.hand_tiled import HandTiled
from bench.zoo.unet import FULL, UNet
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, reads
from tilewright.ops import lower
from tilewright.options import checked_size
from tilewright.schedule.sweeps.parts import in_sweeps
from tilewright.schedule.sweeps.search import PartRoom, choose_sweeps
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


@dataclass(frozen=True)
class ByHand:
    """What one works out before tiling a network: how far its windows reach, and pixels of the image a result; and
    what Welder's paper has for it, how much faster and how much less over the link."""

    halo: int
    stride: int
    paper: tuple[float, float]


BY_HAND = {"unet": ByHand(96, 1, (2.63, 3.11)), "vgg16": ByHand(96, 32, (1.89, 2.90))}
_TIMES = 5
_BESIDE = 512 << 20  # bytes for the code of kernels and what the driver takes, beside the bound


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


# --- on a device


def link_rates() -> tuple[float, float]:
    """Bytes a second to the device and back, from pinned memory."""
    here = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def seconds(target: torch.Tensor, source: torch.Tensor) -> float:
        return median(_timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(_TIMES))

    return here.nbytes / seconds(there, here), here.nbytes / seconds(here, there)


def _timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def ballast(room: int) -> torch.Tensor:
    """Memory that leaves so many bytes of the device to others."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(1, free - room), dtype=torch.uint8, device="cuda")


def measure(name: str, size: int, memory: str, effort: str) -> None:
    """Prints what was found for one model."""
    torch.manual_seed(0)
    module, about = MODELS[name]().eval(), BY_HAND[name]
    model = exported(module)
    image = np.random.default_rng(0).standard_normal((1, 3, size, size), np.float32).astype(np.float16)
    limit = checked_size("memory", memory)
    rates = link_rates()
    held = ballast(limit + _BESIDE)
    begin = time.perf_counter()
    made: Any = tilewright.compile(model, shapes={"image": image.shape}, target="cuda", device_memory=memory,
                                   effort=effort)  # fmt: skip
    compile_s = time.perf_counter() - begin
    runner, program = made.artifact.runner, made.artifact.program
    result = np.zeros([int(e) for e in made.outputs[0].shape], np.float16)
    copied = runner.copied([image], [result])
    ours = median(_timed(lambda: runner.run([image], [result])) for _ in range(_TIMES))
    taken = limit + _BESIDE - torch.cuda.mem_get_info()[0]
    kernels = sum(runner.profile([image], [np.empty_like(result)])) / 1e9
    runner.device.rest()
    del held
    weights = sum(a.nbytes for a in program.constants.values())
    least = sum(t.most_bytes for t in (*program.inputs, *program.outputs)) + weights
    link = max(copied.into / rates[0], copied.back / rates[1])
    alone = layer_by_layer(program)
    other, right = by_hand(module, about, image, limit, result.shape)
    wrong = np.abs(result.astype(np.float32) - right).max() / np.abs(right).max()
    parts = ", ".join(" x ".join(str(n) for n in each) for each in _grids(runner))
    print(f"{name}, {size} x {size}, float16 in {memory}: {parts} parts, compiled in {compile_s:.0f} s ({effort})")
    passed = copied.into + copied.back
    print(f"  link bytes of the least {(passed + weights) / least:.3f} (must 1.25); {copied.into} to the device and "
          f"{copied.back} back; device memory taken {taken / 2**20:.0f} MiB")  # fmt: skip
    print(f"  {1e3 * ours:.1f} ms; link {1e3 * link:.1f} ms at {rates[0] / 1e9:.1f} and {rates[1] / 1e9:.1f} GB/s, "
          f"kernels {1e3 * kernels:.1f} ms: {ours / max(link, kernels):.3f} of the larger (must 1.15)")  # fmt: skip
    print(f"  tiled by hand in PyTorch {1e3 * other:.1f} ms: {ours / other:.2f} of it (must 1.1); largest difference "
          f"{wrong:.1e}")  # fmt: skip
    without = max(kernels, alone / sum(rates))
    print(f"  layer by layer {alone / 1e9:.1f} GB pass, {alone / passed:.0f} times as much (Welder {about.paper[1]}), "
          f"{without / ours:.2f} times as long by the link's rate alone (Welder {about.paper[0]})")  # fmt: skip


def _grids(runner: Any) -> list[list[int]]:
    """Parts of each sweep along the dimensions of its first result, where there are several."""
    found = []
    for each in runner.rounds:
        starts = zip(*([at.start for at in visit.gives[0][0]] for visit in each.visits), strict=True)
        found.append([len(set(dim)) for dim in starts if len(set(dim)) > 1] or [1])
    return found


def by_hand(
    module: nn.Module, about: ByHand, image: np.ndarray, limit: int, shape: tuple[int, ...]
) -> tuple[float, np.ndarray]:
    """Seconds of the pipeline that is tiled by hand, within the same memory, and its results."""
    torch.backends.cudnn.benchmark = True
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    tiled = HandTiled(module.half().to(memory_format=torch.channels_last), about.halo, about.stride)  # type: ignore[call-overload]
    given, result = torch.from_numpy(image), torch.empty(shape, dtype=torch.float16)
    tiled(given, result)
    seconds = median(_timed(lambda: tiled(given, result)) for _ in range(_TIMES))
    torch.cuda.set_per_process_memory_fraction(1.0)
    return seconds, result.float().numpy()


def main() -> None:
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("what", nargs="?", choices=("plan", "run"), default="plan")
    about.add_argument("--size", type=int, default=8192)
    about.add_argument("--memory", default="4GiB")
    about.add_argument("--target", default="h200", help="of a plan")
    about.add_argument("--effort", choices=("fast", "full"), default="fast", help="of a run")
    about.add_argument("--models", default=",".join(MODELS))
    asked = about.parse_args()
    if asked.what == "run":
        for name in asked.models.split(","):
            measure(name, asked.size, asked.memory, asked.effort)
        return
    plan(asked.models.split(","), asked.size, asked.memory, asked.target)


def plan(names: list[str], size: int, memory: str, target: str) -> None:
    room = PartRoom(checked_size("memory", memory), 2, False)
    print("| model | sweeps, parts | kinds | in, MB | back, MB | of the least | layer by layer, MB | CPU s |")
    for name in names:
        model = exported(MODELS[name]())
        program = fold_constants(lower(load(model, {"image": (1, 3, size, size)})))
        begin = time.process_time()
        chosen = choose_sweeps(program, room, machine(target))
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
