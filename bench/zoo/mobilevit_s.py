"""MobileViT-S: inverted residual blocks, and transformers over patches whose equal pixels attend to each other."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import initialise_image_network

EXPANSION = 4
# A patch is two by two pixels.
PATCH = 2


@dataclass(frozen=True)
class Transformers:
    """A stage that halves the image and then attends over it."""

    channels: int
    width: int
    depth: int


@dataclass(frozen=True)
class Config:
    resolution: int
    classes: int
    stem: int
    # Channels and blocks of the stages without attention; every stage but the first halves the image.
    stages: tuple[tuple[int, int], ...]
    transformers: tuple[Transformers, ...]
    heads: int
    head: int
    calibration_batch: int


FULL = Config(
    resolution=256,
    classes=1000,
    stem=16,
    stages=((32, 1), (64, 3)),
    transformers=(Transformers(96, 144, 2), Transformers(128, 192, 4), Transformers(160, 240, 3)),
    heads=4,
    head=640,
    calibration_batch=4,
)
SMALL = Config(
    resolution=32,
    classes=10,
    stem=8,
    stages=((8, 1), (8, 2)),
    transformers=(Transformers(12, 16, 1), Transformers(12, 24, 1)),
    heads=2,
    head=32,
    calibration_batch=16,
)
CONFIGS = {"full": FULL, "small": SMALL}


def convolution(inputs: int, outputs: int, *, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(),
    )


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * EXPANSION
        self.is_residual = stride == 1 and inputs == outputs
        self.branch = nn.Sequential(
            convolution(inputs, hidden, kernel=1),
            convolution(hidden, hidden, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
        )
        self.last_norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch: torch.Tensor = self.last_norm(self.branch(x))
        return x + branch if self.is_residual else branch


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.head_size).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.split_heads(self.query(x))
        key = self.split_heads(self.key(x))
        value = self.split_heads(self.value(x))
        scores = torch.matmul(query, key.transpose(-1, -2)) / self.head_size**0.5
        context = torch.matmul(torch.softmax(scores, dim=-1), value).transpose(1, 2).reshape(x.shape)
        projected: torch.Tensor = self.output(context)
        return projected


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.intermediate_norm = nn.LayerNorm(width)
        self.intermediate = nn.Linear(width, 2 * width)
        self.output = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        wide = nn.functional.silu(self.intermediate(self.intermediate_norm(x)))
        return x + self.output(wide)


class MobileViTBlock(nn.Module):
    def __init__(self, inputs: int, stage: Transformers, heads: int) -> None:
        super().__init__()
        channels, width = stage.channels, stage.width
        self.halve = InvertedResidual(inputs, channels, stride=2)
        self.local = convolution(channels, channels, kernel=3)
        self.widen = nn.Conv2d(channels, width, 1, bias=False)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(stage.depth)))
        self.norm = nn.LayerNorm(width)
        self.narrow = convolution(width, channels, kernel=1)
        self.join = convolution(2 * channels, channels, kernel=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halved = self.halve(x)
        wide = self.widen(self.local(halved))
        batch, width, height, breadth = wide.shape
        # Rows of one sequence are the pixels at one place of every patch: (batch x places, patches, width).
        cut = wide.reshape(batch * width * (height // PATCH), PATCH, breadth // PATCH, PATCH).transpose(1, 2)
        places = cut.reshape(batch, width, -1, PATCH * PATCH).transpose(1, 3)
        attended = self.norm(self.layers(places.reshape(batch * PATCH * PATCH, -1, width)))
        back = attended.view(batch, PATCH * PATCH, -1, width).transpose(1, 3)
        rows = back.reshape(batch * width * (height // PATCH), breadth // PATCH, PATCH, PATCH).transpose(1, 2)
        image = rows.reshape(batch, width, height, breadth)
        joined: torch.Tensor = self.join(torch.cat([halved, self.narrow(image)], dim=1))
        return joined


class MobileViT(nn.Module):
    output_names = ("logits",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        channels = config.stem
        layers: list[nn.Module] = [convolution(3, channels, kernel=3, stride=2)]
        for stage, (outputs, count) in enumerate(config.stages):
            for block in range(count):
                layers.append(InvertedResidual(channels, outputs, stride=2 if stage > 0 and block == 0 else 1))
                channels = outputs
        for transformers in config.transformers:
            layers.append(MobileViTBlock(channels, transformers, config.heads))
            channels = transformers.channels
        layers.append(convolution(channels, config.head, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(config.head, config.classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        pooled = torch.flatten(nn.functional.adaptive_avg_pool2d(self.features(image), 1), 1)
        logits: torch.Tensor = self.classifier(pooled)
        return logits


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = CONFIGS[size]
    module = MobileViT(config)
    last_norms = [m.last_norm for m in module.modules() if isinstance(m, InvertedResidual) and m.is_residual]
    last_layers = [m.output for m in module.modules() if isinstance(m, Attention | Layer)]
    inputs = initialise_image_network(
        module,
        config.calibration_batch,
        config.resolution,
        seed=23,
        image_seed=13,
        last_norms=last_norms,
        last_layers=last_layers,
    )
    return module, inputs
