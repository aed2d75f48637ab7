"""MobileNet-V2: inverted residual blocks of pointwise and depthwise convolutions with ReLU6."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import initialise_image_network


@dataclass(frozen=True)
class Stage:
    expansion: int
    channels: int
    blocks: int
    stride: int


@dataclass(frozen=True)
class Config:
    resolution: int
    width: float
    classes: int
    stem: int
    head: int
    stages: tuple[Stage, ...]
    calibration_batch: int


FULL = Config(
    resolution=224,
    width=1.0,
    classes=1000,
    stem=32,
    head=1280,
    stages=(
        Stage(1, 16, 1, 1),
        Stage(6, 24, 2, 2),
        Stage(6, 32, 3, 2),
        Stage(6, 64, 4, 2),
        Stage(6, 96, 3, 1),
        Stage(6, 160, 3, 2),
        Stage(6, 320, 1, 1),
    ),
    calibration_batch=4,
)
SMALL = Config(
    resolution=32,
    width=0.25,
    classes=10,
    stem=32,
    head=128,
    stages=(Stage(1, 16, 1, 1), Stage(6, 24, 2, 2), Stage(6, 32, 2, 2)),
    calibration_batch=16,
)
CONFIGS = {"full": FULL, "small": SMALL}


def round_channels(channels: float) -> int:
    """The nearest multiple of 8 that loses no more than a tenth, as the MobileNet papers scale widths."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def convolution(inputs: int, outputs: int, *, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.is_residual = stride == 1 and inputs == outputs
        layers: list[nn.Module] = [] if expansion == 1 else [convolution(inputs, hidden, kernel=1)]
        layers.append(convolution(hidden, hidden, kernel=3, stride=stride, groups=hidden))
        layers.append(nn.Conv2d(hidden, outputs, 1, bias=False))
        self.branch = nn.Sequential(*layers)
        self.last_norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch: torch.Tensor = self.last_norm(self.branch(x))
        return x + branch if self.is_residual else branch


class MobileNetV2(nn.Module):
    output_names = ("logits",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        channels = round_channels(config.stem * config.width)
        layers: list[nn.Module] = [convolution(3, channels, kernel=3, stride=2)]
        for stage in config.stages:
            outputs = round_channels(stage.channels * config.width)
            for block in range(stage.blocks):
                stride = stage.stride if block == 0 else 1
                layers.append(InvertedResidual(channels, outputs, stride, stage.expansion))
                channels = outputs
        layers.append(convolution(channels, config.head, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(config.head, config.classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.features(image)
        pooled = torch.flatten(nn.functional.adaptive_avg_pool2d(features, 1), 1)
        logits: torch.Tensor = self.classifier(pooled)
        return logits


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = CONFIGS[size]
    module = MobileNetV2(config)
    last_norms = [m.last_norm for m in module.modules() if isinstance(m, InvertedResidual) and m.is_residual]
    inputs = initialise_image_network(
        module, config.calibration_batch, config.resolution, seed=11, image_seed=1, last_norms=last_norms
    )
    return module, inputs
