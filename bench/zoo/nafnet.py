"""NAFNet: an image restored by a UNet of blocks without activations, where halves of the channels gate each other."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import RESIDUAL_SCALE, he_normal, initialise_layers, small_normal


@dataclass(frozen=True)
class Config:
    resolution: int
    width: int
    # Blocks of each level on the way down, between, and on the way up.
    down: tuple[int, ...]
    middle: int
    up: tuple[int, ...]


FULL = Config(resolution=256, width=32, down=(1, 1, 1, 28), middle=1, up=(1, 1, 1, 1))
SMALL = Config(resolution=16, width=8, down=(1,), middle=1, up=(1,))
CONFIGS = {"full": FULL, "small": SMALL}


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(dim=1, keepdim=True)
        variance = centred.pow(2).mean(dim=1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-6) * self.weight + self.bias


class Gate(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(x, self.channels, dim=1)
        return first * second


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first_norm = ChannelNorm(channels)
        self.expand = nn.Conv2d(channels, 2 * channels, 1)
        self.depthwise = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels)
        self.gate = Gate(channels)
        self.attention = nn.Conv2d(channels, channels, 1)
        self.first_output = nn.Conv2d(channels, channels, 1)
        self.second_norm = ChannelNorm(channels)
        self.intermediate = nn.Conv2d(channels, 2 * channels, 1)
        self.second_output = nn.Conv2d(channels, channels, 1)
        self.first_scale = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.second_scale = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.gate(self.depthwise(self.expand(self.first_norm(image))))
        x = x * self.attention(nn.functional.adaptive_avg_pool2d(x, 1))
        image = image + self.first_output(x) * self.first_scale
        x = self.gate(self.intermediate(self.second_norm(image)))
        return image + self.second_output(x) * self.second_scale


def blocks(channels: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(Block(channels) for _ in range(count)))


class NAFNet(nn.Module):
    output_names = ("restored",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = [config.width << level for level in range(len(config.down))]
        self.first = nn.Conv2d(3, config.width, 3, padding=1)
        self.encoders = nn.ModuleList(blocks(*level) for level in zip(widths, config.down, strict=True))
        self.downs = nn.ModuleList(nn.Conv2d(width, 2 * width, 2, stride=2) for width in widths)
        self.middle = blocks(2 * widths[-1], config.middle)
        self.ups = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * width, 4 * width, 1, bias=False), nn.PixelShuffle(2))
            for width in reversed(widths)
        )
        self.decoders = nn.ModuleList(blocks(*level) for level in zip(reversed(widths), config.up, strict=True))
        self.last = nn.Conv2d(config.width, 3, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.first(image)
        skips = []
        for encoder, down in zip(self.encoders, self.downs, strict=True):
            x = encoder(x)
            skips.append(x)
            x = down(x)
        x = self.middle(x)
        for up, decoder, skip in zip(self.ups, self.decoders, reversed(skips), strict=True):
            x = decoder(up(x) + skip)
        restored: torch.Tensor = self.last(x) + image
        return restored


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = CONFIGS[size]
    generator = torch.Generator().manual_seed(24)
    module = NAFNet(config)
    initialise_layers(module, generator)
    for layer in module.modules():
        # No activation halves what follows a convolution here: half of He's variance keeps it.
        if isinstance(layer, nn.Conv2d):
            he_normal(layer.weight, generator, scale=0.5**0.5)
        elif isinstance(layer, ChannelNorm):
            small_normal(layer.weight, generator, mean=1.0)
            small_normal(layer.bias, generator)
        elif isinstance(layer, Block):
            small_normal(layer.first_scale, generator, mean=RESIDUAL_SCALE, std=0.05)
            small_normal(layer.second_scale, generator, mean=RESIDUAL_SCALE, std=0.05)
    module.eval()
    shape = (1, 3, config.resolution, config.resolution)
    return module, {"image": np.random.default_rng(14).standard_normal(shape, dtype=np.float32)}
