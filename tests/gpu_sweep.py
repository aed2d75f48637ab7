"""Plans models for GPUs at many batches and precisions, down to Loops, and counts kernels that no such GPU would start.

Nothing is compiled by NVRTC and nothing runs. A model is exported once, its batch left open. `python -m tests.gpu_sweep
--models resnet50,swin_t --batches 32 --gpus h200 --precisions float16` prints a line each and the largest numbers met.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

from bench import zoo
from bench.zoo import vit_s32
from tests.gpu_stages import no_plan_fails
from tilewright.backend.gpu.kernel.limits import limits_of, why_not_started
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.render.launch_shape import launch_shape
from tilewright.target import machine

BATCHES = (1, 8, 32, 128)
PRECISIONS = ("float32", "float16", "bfloat16")
GPUS = ("a100", "h200", "l40s")
BATCH = "batch"
BESIDE = ("vit_b16", "convnext", "vgg", "diffusion")  # shapes that the zoo has not
MODELS = (*zoo.MODELS, *BESIDE)
IMAGE, LATENT = (3, 224, 224), (320, 64, 64)
AXES = {"lstm": 1}  # along which several are taken at a time, where that is not the first: its first are steps


@dataclass(frozen=True)
class Row:
    """A model planned for a GPU: its kernels, those that would not start, and the most that one asks for."""

    model: str
    batch: int
    gpu: str
    precision: str
    kernels: int
    refused: tuple[str, ...]
    shared: float  # of what a block may have
    threads: int
    blocks: int
    seconds: float  # of this processor

    def text(self) -> str:
        return (f"{self.model:16} {self.batch:4} {self.gpu:5} {self.precision:9} {self.kernels:4} kernels, "
                f"{len(self.refused)} refused, shared {self.shared:4.0%}, {self.threads:4} threads, {self.blocks:7} "
                f"blocks, {self.seconds:6.1f} s {'; '.join(self.refused)}").rstrip()  # fmt: skip


def exported(model: str, folder: Path) -> Path:
    """The model with an open batch, as large as it is."""
    path = folder / f"{model}.onnx"
    if path.exists():
        return path
    module, inputs = built(model)
    names = list(zoo.output_names(module))
    axis = AXES.get(model, 0)
    (rows,) = {array.shape[axis] for array in inputs.values()}
    open_batch = {name: {axis: f"{BATCH}{rows}"} for name in inputs}
    given = tuple(torch.from_numpy(a) for a in inputs.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of itself
        torch.onnx.export(module, given, str(path), dynamo=False, input_names=list(inputs), output_names=names,
                          opset_version=17, dynamic_axes=open_batch)  # fmt: skip
    return path


def sizes_of(path: Path, batch: int) -> dict[str, int]:
    """The open dimension for so many of what the model takes at a time, which its name ends with."""
    inputs = onnx.load(path, load_external_data=False).graph.input
    (name,) = {dim.dim_param for value in inputs for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    return {name: batch * int(name.removeprefix(BATCH))}


def built(model: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    if model == "vit_b16":
        return vit_s32.build_base_16("full")
    if model in BESIDE:
        made, shape = {"convnext": (ConvNext, IMAGE), "vgg": (Vgg, IMAGE), "diffusion": (Diffusion, LATENT)}[model]
        return made().eval(), {"image": np.zeros((1, *shape), np.float32)}
    return zoo.build(model, "full")


def swept(
    path: Path, model: str, batches: Sequence[int] = BATCHES, gpus: Sequence[str] = GPUS,
    precisions: Sequence[str] = PRECISIONS,
) -> Iterator[Row]:  # fmt: skip
    for batch in batches:
        graph = load(path, sizes_of(path, batch))
        for name, precision in product(gpus, precisions):
            begin = time.process_time()
            target = machine(name)
            with no_plan_fails():
                made = build(graph, target, Options(target=name, precision=precision, stop_after="loops"))
            assert made.loops is not None
            kernels = made.loops.kernels
            reasons = [(k.name, why_not_started(k, target)) for k in kernels]
            shapes = [launch_shape(k) for k in kernels]
            room = limits_of(target).shared_bytes
            yield Row(
                model, batch, name, precision, len(kernels), tuple(f"{k} {why}" for k, why in reasons if why),
                max(place_shared(k).bytes for k in kernels) / room, max(s.threads for s in shapes),
                max(int(s.grid[0]) for s in shapes), time.process_time() - begin,
            )  # fmt: skip


class ConvNext(nn.Module):
    """A stem of patches, depthwise 7 x 7, LayerNorm over channels and products four times as wide, at four sizes."""

    output_names = ("logits",)

    def __init__(self) -> None:
        super().__init__()
        widths, self.stages = (3, 96, 192, 384, 768), nn.ModuleList()
        for before, width in pairwise(widths):
            step = 4 if before == 3 else 2
            self.stages.append(nn.Sequential(nn.Conv2d(before, width, step, step), _Mixed(width), _Mixed(width)))
        self.last = nn.Linear(768, 1000)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image
        for stage in self.stages:
            x = stage(x)
        logits: torch.Tensor = self.last(x.mean(dim=(2, 3)))
        return logits


class _Mixed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.near = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(self.near(x).permute(0, 2, 3, 1))
        return x + self.back(nn.functional.gelu(self.wide(inner))).permute(0, 3, 1, 2)


class Vgg(nn.Module):
    """Pairs of 3 x 3 convolutions and a maximum between sizes, then products of 25088 numbers."""

    output_names = ("logits",)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in ((3, 64), (64, 128), (128, 256), (256, 512), (512, 512)):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
                       nn.ReLU(), nn.MaxPool2d(2)]  # fmt: skip
        self.features = nn.Sequential(*layers)
        self.last = nn.Sequential(nn.Linear(25088, 512), nn.ReLU(), nn.Linear(512, 1000))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(self.features(image).flatten(1))
        return logits


class Diffusion(nn.Module):
    """A stage of a denoiser of latent images: convolutions between GroupNorms, and every place attends to all others:
    8 heads of 4096 places, so that 16 images have 2^31 scores."""

    output_names = ("image_after",)

    def __init__(self, width: int = 320, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.near = nn.Sequential(*(layer for _ in range(2) for layer in (
            nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))))  # fmt: skip
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.first, self.last = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.among, self.after = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.gates, self.back = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        beside = image + self.near(image)
        x = self.first(nn.functional.group_norm(beside, 32)).flatten(2).transpose(1, 2)
        parts = self.among(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-1, -2) * parts.shape[-1] ** -0.5
        x = x + self.after((torch.softmax(scores, -1) @ parts[2]).transpose(1, 2).flatten(2))
        wide, gate = self.gates(self.norms[1](x)).chunk(2, -1)
        x = x + self.back(wide * nn.functional.gelu(gate))
        return beside + self.last(x.transpose(1, 2).unflatten(2, image.shape[2:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, every in (("models", MODELS), ("batches", BATCHES), ("gpus", GPUS), ("precisions", PRECISIONS)):
        parser.add_argument(f"--{name}", default=",".join(map(str, every)))
    parser.add_argument("--folder", type=Path, help="keep exported models here")
    arguments = parser.parse_args()
    gpus, precisions = arguments.gpus.split(","), arguments.precisions.split(",")
    batches = [int(n) for n in arguments.batches.split(",")]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for model in arguments.models.split(","):
            path = exported(model, arguments.folder or Path(place))
            for row in swept(path, model, batches, gpus, precisions):
                rows.append(row)
                print(row.text(), flush=True)
    refused = sum(len(row.refused) for row in rows)
    print(f"{len(rows)} plans, {sum(row.kernels for row in rows)} kernels, {refused} refused, "
          f"{sum(row.seconds for row in rows):.0f} s")  # fmt: skip
    return 1 if refused else 0


if __name__ == "__main__":
    raise SystemExit(main())
