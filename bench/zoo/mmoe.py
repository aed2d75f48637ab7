"""Multi-gate mixture of experts: every task weighs the same experts by a softmax gate of its own."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import initialise_layers


@dataclass(frozen=True)
class Config:
    batch: int
    features: int
    experts: int
    expert_width: int
    tasks: int
    tower_width: int


FULL = Config(batch=1, features=128, experts=8, expert_width=64, tasks=2, tower_width=32)
SMALL = Config(batch=3, features=12, experts=4, expert_width=8, tasks=2, tower_width=5)
CONFIGS = {"full": FULL, "small": SMALL}


class Tower(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, width)
        self.output = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.output(torch.relu(self.hidden(x))))


class Mmoe(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.output_names = tuple(f"task{task}" for task in range(config.tasks))
        experts, tasks = range(config.experts), range(config.tasks)
        self.experts = nn.ModuleList(nn.Linear(config.features, config.expert_width) for _ in experts)
        self.gates = nn.ModuleList(nn.Linear(config.features, config.experts, bias=False) for _ in tasks)
        self.towers = nn.ModuleList(Tower(config.expert_width, config.tower_width) for _ in tasks)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        experts = torch.stack([torch.relu(expert(features)) for expert in self.experts], dim=1)
        outputs = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = torch.softmax(gate(features), dim=-1)
            mixed = (weights.unsqueeze(-1) * experts).sum(dim=1)
            outputs.append(tower(mixed))
        return tuple(outputs)


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = CONFIGS[size]
    generator = torch.Generator().manual_seed(14)
    module = Mmoe(config)
    initialise_layers(module, generator)
    module.eval()
    shape = (config.batch, config.features)
    return module, {"features": np.random.default_rng(4).standard_normal(shape, dtype=np.float32)}
