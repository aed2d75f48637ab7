"""ResNet-50: bottleneck residual blocks, the stride in the 3x3 convolution, ReLU."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import initialise_image_network


@dataclass(frozen=True)
class Config:
    resolution: int
    classes: int
    stem: int
    # Channels inside the bottlenecks and number of blocks of each stage; every stage but the first halves the image.
    stages: tuple[tuple[int, int], ...]
    calibration_batch: int
    # Channels that leave a bottleneck for each inside it.
    expansion: int = 4
    # Groups of channels that the 3x3 convolutions keep apart.
    groups: int = 1


FULL = Config(
    resolution=224,
    classes=1000,
    stem=64,
    stages=((64, 3), (128, 4), (256, 6), (512, 3)),
    calibration_batch=4,
)
SMALL = Config(resolution=32, classes=10, stem=8, stages=((4, 2), (8, 2)), calibration_batch=16)
CONFIGS = {"full": FULL, "small": SMALL}


def convolution(inputs: int, outputs: int, *, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int, *, stride: int, groups: int = 1) -> None:
        super().__init__()
        self.reduce = convolution(inputs, width, kernel=1)
        self.middle = convolution(width, width, kernel=3, stride=stride, groups=groups)
        self.expand = nn.Conv2d(width, outputs, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(outputs)
        is_same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_same_shape else convolution(inputs, outputs, kernel=1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = torch.relu(self.middle(torch.relu(self.reduce(x))))
        return torch.relu(self.last_norm(self.expand(branch)) + self.shortcut(x))


class ResNet(nn.Module):
    output_names = ("logits",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = convolution(3, config.stem, kernel=7, stride=2)
        channels = config.stem
        blocks: list[nn.Module] = []
        for stage, (width, count) in enumerate(config.stages):
            for block in range(count):
                outputs = width * config.expansion
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels, width, outputs, stride=stride, groups=config.groups))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, config.classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.max_pool2d(torch.relu(self.stem(image)), 3, stride=2, padding=1)
        features = self.blocks(pooled)
        logits: torch.Tensor = self.classifier(torch.flatten(nn.functional.adaptive_avg_pool2d(features, 1), 1))
        return logits


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    return build_seeded(CONFIGS[size], seed=15, image_seed=5)


def build_seeded(config: Config, *, seed: int, image_seed: int) -> tuple[nn.Module, dict[str, np.ndarray]]:
    module = ResNet(config)
    last_norms = [m.last_norm for m in module.modules() if isinstance(m, Bottleneck)]
    inputs = initialise_image_network(
        module, config.calibration_batch, config.resolution, seed=seed, image_seed=image_seed, last_norms=last_norms
    )
    return module, inputs
