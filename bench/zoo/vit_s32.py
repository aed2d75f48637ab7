"""ViT-S/32, and ViT-B/16: an image cut into patches, a class token, pre-norm transformer layers with erf-GELU."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import RESIDUAL_SCALE, he_normal, initialise_layers, small_normal


@dataclass(frozen=True)
class Config:
    resolution: int
    patch: int
    width: int
    depth: int
    heads: int
    intermediate: int
    classes: int

    @property
    def tokens(self) -> int:
        return (self.resolution // self.patch) ** 2 + 1


FULL = Config(resolution=224, patch=32, width=384, depth=12, heads=6, intermediate=1536, classes=1000)
SMALL = Config(resolution=24, patch=8, width=32, depth=2, heads=2, intermediate=64, classes=10)
BASE_16 = Config(resolution=224, patch=16, width=768, depth=12, heads=12, intermediate=3072, classes=1000)
CONFIGS = {"full": FULL, "small": SMALL}


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_size = config.width // config.heads
        self.projections = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        split = self.projections(x).reshape(batch, tokens, 3, self.heads, self.head_size)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(query * self.head_size**-0.5, key.transpose(-1, -2))
        context = torch.matmul(torch.softmax(scores, dim=-1), value)
        projected: torch.Tensor = self.output(context.transpose(1, 2).reshape(batch, tokens, width))
        return projected


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.intermediate_norm = nn.LayerNorm(config.width, eps=1e-6)
        self.intermediate = nn.Linear(config.width, config.intermediate)
        self.output = nn.Linear(config.intermediate, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        wide = nn.functional.gelu(self.intermediate(self.intermediate_norm(x)))
        return x + self.output(wide)


class VisionTransformer(nn.Module):
    output_names = ("logits",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(torch.zeros(1, config.tokens, config.width))
        self.layers = nn.Sequential(*(Layer(config) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        self.classifier = nn.Linear(config.width, config.classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        patches = self.patches(image).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(image.shape[0], -1, -1), patches], dim=1)
        x = self.norm(self.layers(tokens + self.positions))
        logits: torch.Tensor = self.classifier(x[:, 0])
        return logits


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    return build_sized(CONFIGS[size])


def build_base_16(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    return build_sized({"full": BASE_16, "small": SMALL}[size])


def build_sized(config: Config) -> tuple[nn.Module, dict[str, np.ndarray]]:
    generator = torch.Generator().manual_seed(17)
    module = VisionTransformer(config)
    initialise_layers(module, generator)
    for layer in module.modules():
        if isinstance(layer, Attention | Layer):
            he_normal(layer.output.weight, generator, scale=RESIDUAL_SCALE)
    small_normal(module.class_token, generator, std=1.0)
    small_normal(module.positions, generator, std=0.5)
    module.eval()
    shape = (1, 3, config.resolution, config.resolution)
    return module, {"image": np.random.default_rng(7).standard_normal(shape, dtype=np.float32)}
