"""A deep LSTM: stacked recurrent layers over a sequence, starting from zero state."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import he_normal, small_normal


@dataclass(frozen=True)
class Config:
    layers: int
    steps: int
    inputs: int
    hidden: int
    batch: int


FULL = Config(layers=10, steps=100, inputs=256, hidden=256, batch=1)
SMALL = Config(layers=2, steps=6, inputs=16, hidden=16, batch=1)
CONFIGS = {"full": FULL, "small": SMALL}


class DeepLstm(nn.Module):
    output_names = ("output", "hidden", "cell")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.lstm = nn.LSTM(config.inputs, config.hidden, config.layers)

    def forward(self, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output, (hidden, cell) = self.lstm(sequence)
        return output, hidden, cell


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = CONFIGS[size]
    generator = torch.Generator().manual_seed(13)
    module = DeepLstm(config)
    for name, parameter in module.named_parameters():
        if "bias" in name:
            small_normal(parameter, generator)
        else:
            # Half of He keeps the recurrence contractive; an expanding one amplifies rounding every step.
            he_normal(parameter, generator, scale=0.5 if "weight_hh" in name else 1.0)
    module.eval()
    shape = (config.steps, config.batch, config.inputs)
    return module, {"sequence": np.random.default_rng(3).standard_normal(shape, dtype=np.float32)}
