"""BSRN: an image enlarged four times by blocks of separated convolutions that distil channels and attend twice."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import RESIDUAL_SCALE, he_normal, initialise_layers

# The image enters as so many copies of its channels.
COPIES = 4
SCALE = 4


@dataclass(frozen=True)
class Config:
    resolution: int
    width: int
    blocks: int


FULL = Config(resolution=256, width=64, blocks=8)
SMALL = Config(resolution=24, width=16, blocks=2)
CONFIGS = {"full": FULL, "small": SMALL}


def separated(inputs: int, outputs: int, *, stride: int = 1, padding: int = 1) -> nn.Sequential:
    """Blueprint convolution: channels are mixed first, then each is filtered alone."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.Conv2d(outputs, outputs, 3, stride, padding, groups=outputs),
    )


class SpatialAttention(nn.Module):
    """Weights of pixels, found on an image of a sixth of the sides."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // 4
        self.narrow = nn.Conv2d(channels, inner, 1)
        self.skip = nn.Conv2d(inner, inner, 1)
        self.halve = separated(inner, inner, stride=2, padding=0)
        self.first, self.second, self.third = (separated(inner, inner) for _ in range(3))
        self.widen = nn.Conv2d(inner, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = self.narrow(x)
        coarse = nn.functional.max_pool2d(self.halve(narrow), 7, stride=3)
        coarse = nn.functional.gelu(self.second(nn.functional.gelu(self.first(coarse))))
        fine = nn.functional.interpolate(self.third(coarse), size=x.shape[2:], mode="bilinear", align_corners=False)
        return x * torch.sigmoid(self.widen(fine + self.skip(narrow)))


class ContrastAttention(nn.Module):
    """Weights of channels, from the mean and the deviation of each."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(channels, channels // 16, 1)
        self.widen = nn.Conv2d(channels // 16, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=(2, 3), keepdim=True)
        deviation = (x - mean).pow(2).mean(dim=(2, 3), keepdim=True).sqrt()
        return x * torch.sigmoid(self.widen(torch.relu(self.narrow(mean + deviation))))


class Block(nn.Module):
    """Three times half of the channels is distilled, the rest refined; what is distilled is joined again."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.distil = nn.ModuleList(nn.Conv2d(channels, channels // 2, 1) for _ in range(3))
        self.refine = nn.ModuleList(separated(channels, channels) for _ in range(3))
        self.last = separated(channels, channels // 2)
        self.join = nn.Conv2d(2 * channels, channels, 1)
        self.spatial = SpatialAttention(channels)
        self.contrast = ContrastAttention(channels)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x, distilled = image, []
        for distil, refine in zip(self.distil, self.refine, strict=True):
            distilled.append(nn.functional.gelu(distil(x)))
            x = nn.functional.gelu(refine(x) + x)
        distilled.append(nn.functional.gelu(self.last(x)))
        joined = self.join(torch.cat(distilled, dim=1))
        return image + self.contrast(self.spatial(joined))


class Bsrn(nn.Module):
    output_names = ("enlarged",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first = separated(COPIES * 3, config.width)
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(config.blocks))
        self.join = nn.Conv2d(config.blocks * config.width, config.width, 1)
        self.smooth = separated(config.width, config.width)
        self.last = nn.Conv2d(config.width, 3 * SCALE**2, 3, padding=1)
        self.enlarge = nn.PixelShuffle(SCALE)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        shallow = self.first(torch.cat([image] * COPIES, dim=1))
        x, deep = shallow, []
        for block in self.blocks:
            x = block(x)
            deep.append(x)
        joined = self.smooth(nn.functional.gelu(self.join(torch.cat(deep, dim=1))))
        enlarged: torch.Tensor = self.enlarge(self.last(joined + shallow))
        return enlarged


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = CONFIGS[size]
    generator = torch.Generator().manual_seed(27)
    module = Bsrn(config)
    initialise_layers(module, generator)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.bias is None:
            # No activation between the two halves of a separated convolution: half of He's variance keeps it.
            he_normal(layer.weight, generator, scale=0.5**0.5)
        elif isinstance(layer, Block):
            he_normal(layer.join.weight, generator, scale=RESIDUAL_SCALE)
    module.eval()
    shape = (1, 3, config.resolution, config.resolution)
    return module, {"image": np.random.default_rng(17).standard_normal(shape, dtype=np.float32)}
