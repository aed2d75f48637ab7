"""The MLP of a radiance field: density from encoded positions, colour from what it found and the viewing direction."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import initialise_layers

DIRECTION = 3


@dataclass(frozen=True)
class Config:
    rows: int
    # Sines and cosines of each coordinate; the coordinates themselves go along.
    frequencies: int
    width: int
    trunk: int

    @property
    def encoded(self) -> int:
        return 3 + 6 * self.frequencies


# 207,360 rows: 64 samples along the ray of each of 72 x 45 pixels. Trunk, colour layer and output: seven layers.
FULL = Config(rows=207_360, frequencies=10, width=64, trunk=5)
SMALL = Config(rows=37, frequencies=2, width=16, trunk=3)
CONFIGS = {"full": FULL, "small": SMALL}


class RadianceField(nn.Module):
    output_names = ("colour", "density")

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = [config.encoded, *([config.width] * config.trunk)]
        self.trunk = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths))
        self.density = nn.Linear(config.width, 1)
        self.hidden = nn.Linear(config.width + DIRECTION, config.width)
        self.colour = nn.Linear(config.width, 3)

    def forward(self, positions: torch.Tensor, directions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = positions
        for layer in self.trunk:
            x = torch.relu(layer(x))
        density = torch.relu(self.density(x))
        hidden = torch.relu(self.hidden(torch.cat([x, directions], dim=-1)))
        return torch.sigmoid(self.colour(hidden)), density


def encode(points: np.ndarray, frequencies: int) -> np.ndarray:
    """Each coordinate with its sines and cosines at doubling frequencies."""
    scaled = [np.pi * 2.0**power * points for power in range(frequencies)]
    waves = [wave(angle) for angle in scaled for wave in (np.sin, np.cos)]
    return np.concatenate([points, *waves], axis=-1).astype(np.float32)


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = CONFIGS[size]
    module = RadianceField(config)
    initialise_layers(module, torch.Generator().manual_seed(19))
    module.eval()
    rng = np.random.default_rng(9)
    directions = rng.standard_normal((config.rows, DIRECTION), dtype=np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    positions = encode(rng.uniform(-1.0, 1.0, (config.rows, 3)), config.frequencies)
    return module, {"positions": positions, "directions": directions}
