"""UNet: convolutions down to a bottleneck and back up, each level joined to its counterpart by concatenation."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import initialise_image_network


@dataclass(frozen=True)
class Config:
    resolution: int
    width: int
    # Levels with a skip; below the last of them lies the bottleneck at half its resolution.
    levels: int
    calibration_batch: int


FULL = Config(resolution=256, width=32, levels=4, calibration_batch=1)
SMALL = Config(resolution=16, width=4, levels=2, calibration_batch=4)
CONFIGS = {"full": FULL, "small": SMALL}


def two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
        layers.append(nn.BatchNorm2d(outputs))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class UNet(nn.Module):
    output_names = ("mask",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = [config.width << level for level in range(config.levels)]
        self.encoders = nn.ModuleList(
            two_convolutions(inputs, width) for inputs, width in zip([3, *widths], widths, strict=False)
        )
        self.bottleneck = two_convolutions(widths[-1], 2 * widths[-1])
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths))
        self.decoders = nn.ModuleList(two_convolutions(2 * width, width) for width in reversed(widths))
        self.output = nn.Conv2d(config.width, 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image
        skips = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottleneck(x)
        for up, decoder, skip in zip(self.ups, self.decoders, reversed(skips), strict=True):
            x = decoder(torch.cat([up(x), skip], dim=1))
        return torch.sigmoid(self.output(x))


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = CONFIGS[size]
    module = UNet(config)
    batch = config.calibration_batch
    return module, initialise_image_network(module, batch, config.resolution, seed=18, image_seed=8)
