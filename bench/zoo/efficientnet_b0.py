"""EfficientNet-b0: inverted residual blocks with SiLU and a squeeze-and-excite gate on the depthwise result."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import initialise_image_network

# The gate's hidden width is this fraction of the channels that enter the block, not of the expanded ones.
SQUEEZE = 4


@dataclass(frozen=True)
class Stage:
    expansion: int
    channels: int
    blocks: int
    stride: int
    kernel: int


@dataclass(frozen=True)
class Config:
    resolution: int
    classes: int
    stem: int
    head: int
    stages: tuple[Stage, ...]
    calibration_batch: int


FULL = Config(
    resolution=224,
    classes=1000,
    stem=32,
    head=1280,
    stages=(
        Stage(1, 16, 1, 1, 3),
        Stage(6, 24, 2, 2, 3),
        Stage(6, 40, 2, 2, 5),
        Stage(6, 80, 3, 2, 3),
        Stage(6, 112, 3, 1, 5),
        Stage(6, 192, 4, 2, 5),
        Stage(6, 320, 1, 1, 3),
    ),
    calibration_batch=4,
)
SMALL = Config(
    resolution=24,
    classes=10,
    stem=8,
    head=32,
    stages=(Stage(1, 8, 1, 1, 3), Stage(6, 8, 2, 2, 5), Stage(6, 12, 1, 1, 3)),
    calibration_batch=16,
)
CONFIGS = {"full": FULL, "small": SMALL}


def convolution(inputs: int, outputs: int, *, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
        nn.SiLU(),
    )


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, hidden, 1)
        self.excite = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.excite(nn.functional.silu(self.squeeze(pooled))))


class Block(nn.Module):
    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        hidden = inputs * stage.expansion
        self.is_residual = stride == 1 and inputs == stage.channels
        layers: list[nn.Module] = [] if stage.expansion == 1 else [convolution(inputs, hidden, kernel=1)]
        layers.append(convolution(hidden, hidden, kernel=stage.kernel, stride=stride, groups=hidden))
        layers.append(SqueezeExcite(hidden, max(1, inputs // SQUEEZE)))
        layers.append(nn.Conv2d(hidden, stage.channels, 1, bias=False))
        self.branch = nn.Sequential(*layers)
        self.last_norm = nn.BatchNorm2d(stage.channels, eps=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch: torch.Tensor = self.last_norm(self.branch(x))
        return x + branch if self.is_residual else branch


class EfficientNet(nn.Module):
    output_names = ("logits",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        channels = config.stem
        layers: list[nn.Module] = [convolution(3, channels, kernel=3, stride=2)]
        for stage in config.stages:
            for block in range(stage.blocks):
                layers.append(Block(channels, stage, stage.stride if block == 0 else 1))
                channels = stage.channels
        layers.append(convolution(channels, config.head, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(config.head, config.classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.features(image)
        logits: torch.Tensor = self.classifier(torch.flatten(nn.functional.adaptive_avg_pool2d(features, 1), 1))
        return logits


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = CONFIGS[size]
    module = EfficientNet(config)
    last_norms = [m.last_norm for m in module.modules() if isinstance(m, Block) and m.is_residual]
    inputs = initialise_image_network(
        module, config.calibration_batch, config.resolution, seed=16, image_seed=6, last_norms=last_norms
    )
    return module, inputs
