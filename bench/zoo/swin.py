"""Swin transformers: attention inside windows of the image, shifted by half a window in every other block."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import RESIDUAL_SCALE, he_normal, initialise_layers, small_normal

# What Swin adds to the score of two positions that a shift has brought into one window: small enough for a weight
# near nothing, yet exp(-100) is not zero in float32 but denormal.
MASKED_SCORE = -100.0


@dataclass(frozen=True)
class Config:
    resolution: int
    patch: int
    window: int
    width: int
    # Blocks and heads of each stage; every stage but the first halves the image and doubles the width.
    stages: tuple[tuple[int, int], ...]
    classes: int
    seed: int


TINY = Config(
    resolution=224,
    patch=4,
    window=7,
    width=96,
    stages=((2, 3), (2, 6), (6, 12), (2, 24)),
    classes=1000,
    seed=21,
)
BASE = Config(
    resolution=224,
    patch=4,
    window=7,
    width=128,
    stages=((2, 4), (2, 8), (18, 16), (2, 32)),
    classes=1000,
    seed=22,
)
SMALL_TINY = Config(resolution=24, patch=2, window=3, width=16, stages=((2, 2), (2, 4)), classes=10, seed=21)
SMALL_BASE = Config(resolution=16, patch=2, window=4, width=24, stages=((2, 3), (1, 6)), classes=10, seed=22)


def pairs_of_positions(window: int) -> torch.Tensor:
    """For each pair of positions of a window, the row of its offset in a table of all offsets."""
    down, right = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
    place = torch.stack([down.flatten(), right.flatten()])
    offset = place[:, :, None] - place[:, None, :] + window - 1
    return offset[0] * (2 * window - 1) + offset[1]


def shift_mask(side: int, window: int, shift: int) -> torch.Tensor:
    """For each window of the shifted image, which pairs of positions were neighbours before the shift."""
    line = torch.arange(side)
    part = (line >= side - window).long() + (line >= side - shift).long()
    regions = 3 * part[:, None] + part[None, :]
    windows = regions.view(side // window, window, side // window, window).transpose(1, 2).reshape(-1, window**2)
    return torch.where(windows[:, None, :] == windows[:, :, None], 0.0, MASKED_SCORE)


class WindowAttention(nn.Module):
    def __init__(self, width: int, heads: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.side, self.window, self.shift = heads, side, window, shift
        self.head_size = width // heads
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.register_buffer("pairs", pairs_of_positions(window), persistent=False)
        if shift:
            self.register_buffer("mask", shift_mask(side, window, shift), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of an image (batch, side, side, width)."""
        batch, _, _, width = x.shape
        across, positions = self.side // self.window, self.window**2
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), dims=(1, 2))
        windows = x.view(batch, across, self.window, across, self.window, width).permute(0, 1, 3, 2, 4, 5)
        split = self.projections(windows.reshape(-1, positions, width))
        split = split.view(-1, positions, 3, self.heads, self.head_size)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(query * self.head_size**-0.5, key.transpose(-1, -2))
        bias = self.bias[self.pairs.view(-1)].view(positions, positions, self.heads)
        scores = scores + bias.permute(2, 0, 1).unsqueeze(0)
        if self.shift:
            by_image = scores.view(batch, across**2, self.heads, positions, positions)
            scores = (by_image + self.mask[:, None]).view(-1, self.heads, positions, positions)
        context = torch.matmul(torch.softmax(scores, dim=-1), value).transpose(1, 2)
        projected = self.output(context.reshape(-1, positions, width))
        tiles = projected.view(batch, across, across, self.window, self.window, width).permute(0, 1, 3, 2, 4, 5)
        image = tiles.reshape(batch, self.side, self.side, width)
        return torch.roll(image, (self.shift, self.shift), dims=(1, 2)) if self.shift else image


class Block(nn.Module):
    def __init__(self, width: int, heads: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = WindowAttention(width, heads, side, window, shift)
        self.intermediate_norm = nn.LayerNorm(width)
        self.intermediate = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        wide = nn.functional.gelu(self.intermediate(self.intermediate_norm(x)))
        return x + self.output(wide)


class Merging(nn.Module):
    """Four neighbours become one position of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quarters = [x[:, down::2, right::2] for right in (0, 1) for down in (0, 1)]
        merged: torch.Tensor = self.reduction(self.norm(torch.cat(quarters, dim=-1)))
        return merged


class Swin(nn.Module):
    output_names = ("logits",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.patch_norm = nn.LayerNorm(config.width)
        width, side = config.width, config.resolution // config.patch
        blocks: list[nn.Module] = []
        for stage, (count, heads) in enumerate(config.stages):
            if stage > 0:
                blocks.append(Merging(width))
                width, side = 2 * width, side // 2
            for block in range(count):
                # One window that covers the image has nothing to be shifted against.
                shift = config.window // 2 if block % 2 and side > config.window else 0
                blocks.append(Block(width, heads, side, config.window, shift))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, config.classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch_norm(self.patches(image).permute(0, 2, 3, 1))
        x = self.norm(self.blocks(x))
        logits: torch.Tensor = self.classifier(x.mean(dim=(1, 2)))
        return logits


def build_sized(config: Config) -> tuple[nn.Module, dict[str, np.ndarray]]:
    generator = torch.Generator().manual_seed(config.seed)
    module = Swin(config)
    initialise_layers(module, generator)
    for layer in module.modules():
        if isinstance(layer, WindowAttention | Block):
            he_normal(layer.output.weight, generator, scale=RESIDUAL_SCALE)
        if isinstance(layer, WindowAttention):
            small_normal(layer.bias, generator, std=0.5)
    module.eval()
    shape = (1, 3, config.resolution, config.resolution)
    return module, {"image": np.random.default_rng(config.seed - 10).standard_normal(shape, dtype=np.float32)}


def build_tiny(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    return build_sized({"full": TINY, "small": SMALL_TINY}[size])


def build_base(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    return build_sized({"full": BASE, "small": SMALL_BASE}[size])
