"""Models whose sizes a call tells, built anew from their descriptions: which of their axes vary, and over what."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import zoo

Arrays = dict[str, np.ndarray]
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """`axes` of inputs vary, each with what it names; `inputs` gives arrays of given sizes."""

    build: Callable[[str], nn.Module]  # "small" or "full"
    inputs: Callable[[nn.Module, Sizes], Arrays]
    axes: Mapping[str, Mapping[int, str]]
    ranges: Mapping[str, range]


def transposed(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """A layer of a transformer, of the form that normalises first; keys and values may begin before the tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projected, self.gathered = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (transposed(part, self.heads) for part in self.projected(self.before(x)).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        seen = scores if mask is None else scores + mask
        x = x + self.gathered((seen.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x)))), torch.stack([k, v])


class SpeechEncoder(nn.Module):
    """Whisper's: two convolutions, the second of which halves the frames, places, and layers of a transformer."""

    def __init__(self, bands: int, width: int, heads: int, layers: int, most: int) -> None:
        super().__init__()
        self.bands = bands
        self.first = nn.Conv1d(bands, width, 3, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.places = nn.Parameter(torch.randn(most // 2, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)

    def forward(self, sound: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.first(sound)))).transpose(1, 2)
        x = x + self.places[: x.shape[1]]
        for block in self.blocks:
            x, _ = block(x)
        return self.last(x)


class Convolved(nn.Sequential):
    def __init__(self, taken: int, given: int, side: int, stride: int = 1) -> None:
        super().__init__(nn.Conv2d(taken, given, side, stride, side // 2), nn.SiLU())


class Detector(nn.Module):
    """A backbone down to a 32nd of the side, a pyramid that goes up and adds, and a head on each of three levels."""

    def __init__(self, width: int, blocks: int, outputs: int) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(5)]
        self.stem = Convolved(3, width, 3, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(Convolved(a, b, 3, 2), *(Convolved(b, b, 3) for _ in range(blocks)))
            for a, b in pairwise(widths)
        )
        self.sides = nn.ModuleList(nn.Conv2d(w, widths[2], 1) for w in widths[2:])
        self.heads = nn.ModuleList(
            nn.Sequential(Convolved(widths[2], widths[2], 3), nn.Conv2d(widths[2], outputs, 1)) for _ in range(3)
        )

    def forward(self, image: Tensor) -> Tensor:
        x, levels = self.stem(image), []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        above, found = None, []
        for side, head, level in zip(reversed(self.sides), self.heads, reversed(levels[1:]), strict=True):
            here = side(level)
            above = here if above is None else here + F.interpolate(above, scale_factor=2.0, mode="nearest")
            found.append(head(above).flatten(2))
        return torch.cat(found, 2).transpose(1, 2)


class Gpt(nn.Module):
    """GPT-2: new tokens behind keys and values of those before them."""

    def __init__(self, words: int, width: int, heads: int, layers: int, most: int) -> None:
        super().__init__()
        self.heads, self.words = heads, words
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(most, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        count, before = tokens.shape[1], past.shape[4]
        place = torch.arange(before, before + count)
        seen = torch.arange(before + count)[None] <= place[:, None]
        mask = torch.where(seen, 0.0, -1e9)
        x = self.tokens(tokens) + self.places(place)
        states = []
        for block, own in zip(self.blocks, past, strict=True):
            x, state = block(x, mask, own)
            states.append(state[:, :, :, before:])
        return self.last(x[:, -1]) @ self.tokens.weight.t(), torch.stack(states)


def speech_encoder(size: str) -> nn.Module:
    return SpeechEncoder(80, 384, 6, 4, 3000) if size == "full" else SpeechEncoder(8, 32, 2, 2, 3000)


def detector(size: str) -> nn.Module:
    return Detector(16, 1, 85) if size == "full" else Detector(4, 1, 7)


def gpt(size: str) -> nn.Module:
    return Gpt(50257, 768, 12, 12, 2048) if size == "full" else Gpt(100, 32, 2, 2, 2048)


def sound(module: nn.Module, sizes: Sizes) -> Arrays:
    return {"sound": _normal(1, module.bands, sizes["frames"])}


def image(module: nn.Module, sizes: Sizes) -> Arrays:
    return {"image": _normal(1, 3, sizes["side"], sizes["side"])}


def text(module: nn.Module, sizes: Sizes) -> Arrays:
    heads, width = module.heads, module.tokens.weight.shape[1]
    tokens = np.random.default_rng(0).integers(0, module.words, (1, sizes["tokens"]))
    return {"tokens": tokens, "past": _normal(len(module.blocks), 2, 1, heads, sizes["past"], width // heads)}


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def of_zoo(name: str, axis: int, varying: str, sizes: range) -> Case:
    """A model of the zoo, all of whose inputs vary along one axis."""

    def inputs(module: nn.Module, told: Sizes) -> Arrays:
        return {n: _sized(a, axis, told[varying]) for n, a in zoo.build(name, module.size)[1].items()}

    def build(size: str) -> nn.Module:
        module = zoo.build(name, size)[0]
        module.size = size
        return module

    names = zoo.build(name, "small")[1]
    return Case(build, inputs, {n: {axis: varying} for n in names}, {varying: sizes})


def _sized(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """The array repeated along an axis, as far as there are so many elements."""
    times = -(-size // array.shape[axis])
    return np.ascontiguousarray(np.take(np.concatenate([array] * times, axis), range(size), axis))


CASES: Mapping[str, Callable[[], Case]] = {
    "bert_base": lambda: of_zoo("bert_base", 1, "tokens", range(1, 513)),
    "resnet50": lambda: of_zoo("resnet50", 0, "batch", range(1, 65)),
    "whisper": lambda: Case(speech_encoder, sound, {"sound": {2: "frames"}}, {"frames": range(100, 3001, 2)}),
    "detector": lambda: Case(detector, image, {"image": {2: "side", 3: "side"}}, {"side": range(320, 1281, 32)}),
    "gpt2": lambda: Case(gpt, text, {"tokens": {1: "tokens"}, "past": {4: "past"}},
                         {"tokens": range(1, 1025), "past": range(1024)}),
}  # fmt: skip
