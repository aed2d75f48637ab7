"""Restormer: an image restored by a UNet of transformers, in which channels attend to each other, not pixels."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import RESIDUAL_SCALE, he_normal, initialise_layers, small_normal

EXPANSION = 2.66


@dataclass(frozen=True)
class Config:
    resolution: int
    width: int
    # Blocks and heads of each level on the way down; the way up has the same.
    levels: tuple[tuple[int, int], ...]
    refinement: int  # blocks after the way up


FULL = Config(resolution=256, width=48, levels=((4, 1), (6, 2), (6, 4), (8, 8)), refinement=4)
SMALL = Config(resolution=16, width=8, levels=((1, 1), (1, 2), (1, 4)), refinement=1)
CONFIGS = {"full": FULL, "small": SMALL}


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels = x.flatten(2).transpose(1, 2)
        normal: torch.Tensor = self.norm(pixels)
        return normal.transpose(1, 2).view(x.shape)


class TransposedAttention(nn.Module):
    """Every channel of a head, as the vector of its pixels, attends to the other channels of the head."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.Conv2d(channels, 3 * channels, 1, bias=False)
        self.depthwise = nn.Conv2d(3 * channels, 3 * channels, 3, padding=1, groups=3 * channels, bias=False)
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.output = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        parts = self.depthwise(self.projections(x)).chunk(3, dim=1)
        shape = (batch, self.heads, channels // self.heads, height * width)
        query, key, value = (part.reshape(shape) for part in parts)
        query = nn.functional.normalize(query, dim=-1)
        key = nn.functional.normalize(key, dim=-1)
        weights = torch.softmax(torch.matmul(query, key.transpose(-1, -2)) * self.temperature, dim=-1)
        projected: torch.Tensor = self.output(torch.matmul(weights, value).reshape(x.shape))
        return projected


class GatedFeedForward(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = int(channels * EXPANSION)
        self.expand = nn.Conv2d(channels, 2 * hidden, 1, bias=False)
        self.depthwise = nn.Conv2d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden, bias=False)
        self.output = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, passed = self.depthwise(self.expand(x)).chunk(2, dim=1)
        projected: torch.Tensor = self.output(nn.functional.gelu(gate) * passed)
        return projected


class Block(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = ChannelNorm(channels)
        self.attention = TransposedAttention(channels, heads)
        self.intermediate_norm = ChannelNorm(channels)
        self.intermediate = GatedFeedForward(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.intermediate(self.intermediate_norm(x))


def blocks(channels: int, count: int, heads: int) -> nn.Sequential:
    return nn.Sequential(*(Block(channels, heads) for _ in range(count)))


def down(channels: int) -> nn.Sequential:
    """Half of both sides, twice the channels."""
    return nn.Sequential(nn.Conv2d(channels, channels // 2, 3, padding=1, bias=False), nn.PixelUnshuffle(2))


def up(channels: int) -> nn.Sequential:
    """Twice both sides, half of the channels."""
    return nn.Sequential(nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False), nn.PixelShuffle(2))


def narrowed(width: int, level: int) -> nn.Module:
    """After the join with what skipped the way: half of the channels, but for the topmost level, which keeps all."""
    return nn.Identity() if level == 0 else nn.Conv2d(2 * width, width, 1, bias=False)


class Restormer(nn.Module):
    output_names = ("restored",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        *above, (deepest, deepest_heads) = config.levels
        widths = [config.width << level for level in range(len(config.levels))]
        self.first = nn.Conv2d(3, config.width, 3, padding=1, bias=False)
        self.encoders = nn.ModuleList(blocks(w, *level) for w, level in zip(widths, above, strict=False))
        self.downs = nn.ModuleList(down(w) for w in widths[:-1])
        self.middle = blocks(widths[-1], deepest, deepest_heads)
        upwards = range(len(above) - 1, -1, -1)
        self.ups = nn.ModuleList(up(widths[level + 1]) for level in upwards)
        self.narrows = nn.ModuleList(narrowed(widths[level], level) for level in upwards)
        self.decoders = nn.ModuleList(blocks(max(widths[level], widths[1]), *above[level]) for level in upwards)
        self.refinement = blocks(widths[1], config.refinement, config.levels[0][1])
        self.last = nn.Conv2d(widths[1], 3, 3, padding=1, bias=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.first(image)
        skips = []
        for encoder, halve in zip(self.encoders, self.downs, strict=True):
            x = encoder(x)
            skips.append(x)
            x = halve(x)
        x = self.middle(x)
        for double, narrow, decoder in zip(self.ups, self.narrows, self.decoders, strict=True):
            x = decoder(narrow(torch.cat([double(x), skips.pop()], dim=1)))
        restored: torch.Tensor = self.last(self.refinement(x)) + image
        return restored


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = CONFIGS[size]
    generator = torch.Generator().manual_seed(28)
    module = Restormer(config)
    initialise_layers(module, generator)
    for layer in module.modules():
        # No activation halves what follows a convolution here: half of He's variance keeps it.
        if isinstance(layer, nn.Conv2d):
            he_normal(layer.weight, generator, scale=0.5**0.5)
    for layer in module.modules():
        if isinstance(layer, TransposedAttention | GatedFeedForward):
            he_normal(layer.output.weight, generator, scale=RESIDUAL_SCALE)
        if isinstance(layer, TransposedAttention):
            # Scores lie between -1 and 1 before: larger temperatures let channels differ.
            small_normal(layer.temperature, generator, mean=4.0, std=0.5)
    module.eval()
    shape = (1, 3, config.resolution, config.resolution)
    return module, {"image": np.random.default_rng(18).standard_normal(shape, dtype=np.float32)}
