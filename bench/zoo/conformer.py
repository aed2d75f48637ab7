"""Conformer: an encoder of speech; its blocks attend over all frames by their distance and convolve over near ones."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import RESIDUAL_SCALE, calibrate_batch_norms, he_normal, initialise_layers, small_normal


@dataclass(frozen=True)
class Config:
    frames: int
    features: int
    width: int
    heads: int
    layers: int
    kernel: int  # frames that a block's convolution sees
    calibration_batch: int


FULL = Config(frames=512, features=80, width=512, heads=8, layers=12, kernel=31, calibration_batch=4)
SMALL = Config(frames=47, features=20, width=16, heads=2, layers=2, kernel=7, calibration_batch=16)
CONFIGS = {"full": FULL, "small": SMALL}


def halved(extent: int) -> int:
    """What a window of three in steps of two leaves of an extent."""
    return (extent - 3) // 2 + 1


def distances(positions: int, width: int) -> torch.Tensor:
    """Waves of falling frequency for each distance from positions - 1 to 1 - positions, far ahead first."""
    distance = torch.arange(positions - 1, -positions, -1.0)
    frequency = torch.exp(torch.arange(0, width, 2.0) * (-np.log(1e4) / width))
    angle = distance[:, None] * frequency
    return torch.stack([torch.sin(angle), torch.cos(angle)], dim=2).flatten(1)


class Subsampling(nn.Module):
    """Two convolutions, each of which halves frames and features."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, config.width, 3, stride=2)
        self.second = nn.Conv2d(config.width, config.width, 3, stride=2)
        self.projection = nn.Linear(config.width * halved(halved(config.features)), config.width)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(frames.unsqueeze(1)))))
        projected: torch.Tensor = self.projection(x.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.intermediate = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.output(nn.functional.silu(self.intermediate(self.norm(x))))
        return projected


class RelativeAttention(nn.Module):
    """Scores from content and from distance, each with a bias of its own that takes the query's place."""

    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.distance = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width)
        self.content_bias = nn.Parameter(torch.zeros(heads, 1, self.head_size))
        self.distance_bias = nn.Parameter(torch.zeros(heads, 1, self.head_size))
        self.register_buffer("waves", distances(positions, width)[None], persistent=False)

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.head_size).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.norm(x)
        query, key, value = (self.split_heads(part(normal)) for part in (self.query, self.key, self.value))
        far = self.split_heads(self.distance(self.waves))
        content = torch.matmul(query + self.content_bias, key.transpose(-1, -2))
        by_distance = aligned(torch.matmul(query + self.distance_bias, far.transpose(-1, -2)))
        weights = torch.softmax((content + by_distance) / self.head_size**0.5, dim=-1)
        context = torch.matmul(weights, value).transpose(1, 2).flatten(2)
        projected: torch.Tensor = self.output(context)
        return projected


def aligned(scores: torch.Tensor) -> torch.Tensor:
    """Scores of n queries by 2n - 1 distances as scores by n keys: one more column moves each row on by one."""
    batch, heads, queries, far = scores.shape
    padded = nn.functional.pad(scores, (1, 0)).view(batch, heads, far + 1, queries)
    return padded[:, :, 1:].reshape(batch, heads, queries, far)[:, :, :, :queries]


class Convolution(nn.Module):
    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width, bias=False)
        self.batch_norm = nn.BatchNorm1d(width)
        self.output = nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = nn.functional.glu(self.expand(self.norm(x).transpose(1, 2)), dim=1)
        mixed = nn.functional.silu(self.batch_norm(self.depthwise(gated)))
        projected: torch.Tensor = self.output(mixed).transpose(1, 2)
        return projected


class Block(nn.Module):
    def __init__(self, config: Config, positions: int) -> None:
        super().__init__()
        self.first = FeedForward(config.width)
        self.attention = RelativeAttention(config.width, config.heads, positions)
        self.convolution = Convolution(config.width, config.kernel)
        self.second = FeedForward(config.width)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self.attention(x)
        x = x + self.convolution(x)
        normal: torch.Tensor = self.norm(x + 0.5 * self.second(x))
        return normal


class Conformer(nn.Module):
    output_names = ("encoded",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.subsampling = Subsampling(config)
        positions = halved(halved(config.frames))
        self.blocks = nn.Sequential(*(Block(config, positions) for _ in range(config.layers)))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.blocks(self.subsampling(frames))
        return encoded


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = CONFIGS[size]
    generator = torch.Generator().manual_seed(26)
    module = Conformer(config)
    initialise_layers(module, generator)
    for layer in module.modules():
        if isinstance(layer, FeedForward | RelativeAttention | Convolution):
            he_normal(layer.output.weight, generator, scale=RESIDUAL_SCALE)
        if isinstance(layer, RelativeAttention):
            small_normal(layer.content_bias, generator, std=0.5)
            small_normal(layer.distance_bias, generator, std=0.5)
    shape = (config.frames, config.features)
    calibrate_batch_norms(module, torch.randn((config.calibration_batch, *shape), generator=generator))
    return module, {"frames": np.random.default_rng(16).standard_normal((1, *shape), dtype=np.float32)}
