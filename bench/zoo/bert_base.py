"""BERT-base: summed embeddings, post-norm transformer layers with erf-GELU, and a tanh pooler."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.zoo.initialise import RESIDUAL_SCALE, he_normal, initialise_layers

# Far below any real score, so that the softmax weight of a masked position is exactly zero.
MASKED_SCORE = -10000.0


@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    heads: int
    intermediate: int
    sequence: int
    positions: int
    # BERT's own vocabulary has 30522 entries; a shorter table gathers the same way from a file 70 MB smaller.
    vocabulary: int
    padding: int


FULL = Config(
    layers=12,
    hidden=768,
    heads=12,
    intermediate=3072,
    sequence=128,
    positions=512,
    vocabulary=8000,
    padding=17,
)
SMALL = Config(layers=2, hidden=64, heads=2, intermediate=128, sequence=16, positions=32, vocabulary=100, padding=3)
CONFIGS = {"full": FULL, "small": SMALL}


class Embeddings(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocabulary, config.hidden)
        self.position = nn.Embedding(config.positions, config.hidden)
        self.token_type = nn.Embedding(2, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        embedded = self.word(input_ids) + self.token_type(token_type_ids) + self.position(positions)
        normalised: torch.Tensor = self.norm(embedded)
        return normalised


class SelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_size = config.hidden // config.heads
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.head_size).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query = self.split_heads(self.query(x))
        key = self.split_heads(self.key(x))
        value = self.split_heads(self.value(x))
        scores = torch.matmul(query, key.transpose(-1, -2)) / self.head_size**0.5
        weights = torch.softmax(scores + mask, dim=-1)
        context = torch.matmul(weights, value).permute(0, 2, 1, 3).reshape(x.shape)
        projected: torch.Tensor = self.output(context)
        return projected


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.intermediate = nn.Linear(config.hidden, config.intermediate)
        self.output = nn.Linear(config.intermediate, config.hidden)
        self.output_norm = nn.LayerNorm(config.hidden, eps=1e-12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attended = self.attention_norm(x + self.attention(x, mask))
        wide = nn.functional.gelu(self.intermediate(attended))
        normalised: torch.Tensor = self.output_norm(attended + self.output(wide))
        return normalised


class Bert(nn.Module):
    output_names = ("last_hidden_state", "pooler_output")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.hidden, config.hidden)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embeddings(input_ids, token_type_ids)
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * MASKED_SCORE
        for layer in self.layers:
            x = layer(x, mask)
        return x, torch.tanh(self.pooler(x[:, 0]))


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    return build_sized(CONFIGS[size])


def build_sized(config: Config) -> tuple[nn.Module, dict[str, np.ndarray]]:
    generator = torch.Generator().manual_seed(12)
    module = Bert(config)
    initialise_layers(module, generator)
    for layer in module.modules():
        if isinstance(layer, SelfAttention | Layer):
            he_normal(layer.output.weight, generator, scale=RESIDUAL_SCALE)
    # Normalised activations have unit variance: this keeps the pooler's tanh out of saturation.
    he_normal(module.pooler.weight, generator, scale=0.5)
    module.eval()

    rng = np.random.default_rng(2)
    shape = (1, config.sequence)
    attention_mask = np.ones(shape, np.int64)
    attention_mask[:, config.sequence - config.padding :] = 0
    token_type_ids = np.zeros(shape, np.int64)
    token_type_ids[:, config.sequence // 2 :] = 1
    inputs = {
        "input_ids": rng.integers(0, config.vocabulary, shape, dtype=np.int64),
        "attention_mask": attention_mask,
        "token_type_ids": token_type_ids,
    }
    return module, inputs
