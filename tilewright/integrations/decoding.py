"""Text token by token: one compiled step for a new token, a few for pieces of a prompt, and caches of keys and values
that stay where they are.

A step reads the caches at their full length, with a mask over what is not there yet, and gives the new tokens' keys and
values alone, which are written behind the others in place. No shape depends on how long a text is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tilewright.api import compile_graph
from tilewright.calls.arguments import checked_path
from tilewright.dynamic.model import share_weights
from tilewright.errors import ModelError, OptionError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.graph import Graph, Node, Value
from tilewright.model import Model
from tilewright.options import Options

SIZES = (16, 128, 512)
Role = Literal["tokens", "places", "mask", "last"] | int
"""What an input of a step is: tokens [1, n], their places in the text [1, n], which of the cached and new tokens are
there [1, length + n], the token whose scores are asked for, or the number of a cache [1, heads, length, width]."""


@dataclass(frozen=True)
class StepGraph:
    """A model over n tokens of one text. It gives scores after token `last`, or after every one, and the rows that the
    tokens add to each cache, [1, heads, n, width]."""

    graph: Graph
    roles: tuple[Role, ...]  # of the graph's inputs


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: from scores over a temperature, among so many of the likeliest, or those that together have
    at least this probability. A temperature of 0 takes the likeliest; one seed gives one text."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or not 0 < self.top_p <= 1 or (self.top_k is not None and self.top_k < 1):
            raise OptionError(f"{self}: a temperature is at least 0, top_k at least 1, and top_p above 0 and at most 1")

    def draws(self) -> Callable[[NDArray[Any]], int]:
        """A function of scores, which draws the next token at each call."""
        if self.temperature == 0:
            return lambda scores: int(scores.argmax())
        random = np.random.default_rng(self.seed)

        def draw(scores: NDArray[Any]) -> int:
            count = min(self.top_k or scores.size, scores.size)
            best = np.argpartition(scores, -count)[-count:]
            best = best[np.argsort(-scores[best], kind="stable")]
            wide = scores[best].astype(np.float64) / self.temperature
            chances = np.exp(wide - wide[0])
            chances /= chances.sum()
            enough = int(np.searchsorted(np.cumsum(chances), self.top_p)) + 1  # the one that reaches it, too
            chances = chances[:enough] / chances[:enough].sum()
            return int(best[random.choice(chances.size, p=chances)])

        return draw


LIKELIEST = Sampling(temperature=0.0)


class _Step:
    """A compiled step with its own memory for everything but the caches."""

    def __init__(
        self, size: int, length: int, step: StepGraph, caches: Sequence[NDArray[Any]], options: Options
    ) -> None:
        self.size, self.length = size, length
        self.model: Model = compile_graph(step.graph, options)
        self.inputs: list[NDArray[Any]] = []
        self.named: dict[str, NDArray[Any]] = {}
        for role, port in zip(step.roles, self.model.inputs, strict=True):
            if isinstance(role, int):
                self.inputs.append(caches[role])
                continue
            self.named[role] = np.zeros(port.shape, port.dtype)
            self.inputs.append(self.named[role])
        self.outputs = [np.zeros(port.shape, port.dtype) for port in self.model.outputs]
        self.counting = np.arange(size)
        if "mask" in self.named:
            self.named["mask"][0, length:] = 1  # the new tokens, of which each sees those before it

    def run(self, tokens: Sequence[int] | NDArray[Any], start: int, caches: Sequence[NDArray[Any]]) -> NDArray[Any]:
        count, named = len(tokens), self.named
        named["tokens"][0, :count] = tokens
        if "places" in named:
            np.add(self.counting, start, out=named["places"][0], casting="unsafe")
        if "mask" in named:
            named["mask"][0, :start] = 1
            named["mask"][0, start : self.length] = 0
        if "last" in named:
            named["last"].fill(count - 1)
        self.model.run_into(self.inputs, self.outputs)
        for cache, new in zip(caches, self.outputs[1:], strict=True):
            cache[:, :, start : start + count] = new[:, :, :count]
        scores = self.outputs[0]
        return scores.reshape(-1, scores.shape[-1])[0 if "last" in named else count - 1]


class Decoder:
    """A token after the other, for one text at a time, which stays until the next one begins. A prompt is cut into
    pieces of at most the largest size, each padded to the next one. Steps of all sizes have one copy of the weights
    that they read alike."""

    def __init__(
        self, make: Callable[[int], StepGraph], shapes: Sequence[tuple[int, ...]], sizes: Sequence[int] = SIZES,
        options: Options | None = None,
    ) -> None:  # fmt: skip
        """`make` gives the step for so many tokens, `shapes` are those of the caches."""
        self.length = shapes[0][2]
        self.sizes = sorted({min(size, self.length) for size in (1, *sizes)})
        self.options = options or Options.from_environment()
        self.caches = [np.zeros(shape, np.float32) for shape in shapes]
        self._make = make
        self._steps: dict[int, _Step] = {}
        self.written = 0  # tokens of the text whose keys and values are in the caches

    @property
    def compilations(self) -> int:
        return len(self._steps)

    @property
    def models(self) -> dict[int, Model]:
        """The compiled steps by their number of tokens."""
        return {size: step.model for size, step in self._steps.items()}

    def scores(self, tokens: Sequence[int] | NDArray[Any], start: int) -> NDArray[Any]:
        """The scores after tokens that stand at `start` of the text; they are overwritten by the next call."""
        size = next(s for s in self.sizes if s >= len(tokens))
        if size not in self._steps:
            step = _Step(size, self.length, self._make(size), self.caches, self.options)
            share_weights([step.model], self.models.values())
            self._steps[size] = step
        found = self._steps[size].run(tokens, start, self.caches)
        self.written = start + len(tokens)
        return found

    def __call__(
        self, prompt: Sequence[int] | NDArray[Any], count: int, *, end: Collection[int] = (),
        sampling: Sampling = LIKELIEST, goes_on: bool = False,
    ) -> list[int]:  # fmt: skip
        """At most `count` tokens after the prompt, the last of them the first that is one of `end`. A prompt that
        `goes_on` stands behind the text so far, of which the last token that came out may be its begin: caches of what
        was read stay as they are."""
        return list(self.stream(prompt, count, end=end, sampling=sampling, goes_on=goes_on))

    def stream(
        self, prompt: Sequence[int] | NDArray[Any], count: int, *, end: Collection[int] = (),
        sampling: Sampling = LIKELIEST, goes_on: bool = False,
    ) -> Iterator[int]:  # fmt: skip
        """The same, each token when it is there."""
        begin = self.written if goes_on else 0
        if not 0 < len(prompt) <= self.length - begin - count:
            behind = f" behind {begin}" if begin else ""
            raise OptionError(f"{len(prompt)} tokens and {count} more{behind} do not fit a cache of {self.length}")
        return self._written_on(prompt, count, begin, frozenset(end), sampling.draws())

    def _written_on(
        self, prompt: Sequence[int] | NDArray[Any], count: int, begin: int, end: frozenset[int],
        draw: Callable[[NDArray[Any]], int],
    ) -> Iterator[int]:  # fmt: skip
        scores = np.empty(0)
        for done in range(0, len(prompt), self.sizes[-1]):
            scores = self.scores(prompt[done : done + self.sizes[-1]], begin + done)
        for left in range(count, 0, -1):
            token = draw(scores)
            yield token
            if token in end or left == 1:
                return
            scores = self.scores([token], self.written)


# ONNX files with past and present


def from_onnx(
    path: str | os.PathLike[str], length: int, sizes: Sequence[int] = SIZES, options: Options | None = None
) -> Decoder:
    """A Decoder of a model file as people export them: `input_ids`, `attention_mask` and perhaps `position_ids` go in,
    with past keys and values [batch, heads, past, width]; scores come out, then present ones in that order."""
    from tilewright.frontend.onnx.model import load, ports

    found = checked_path(path)
    inputs, outputs = ports(found, {})
    past = [value.name for value in inputs if value.shape is not None and len(value.shape) == 4]
    if not past or len(outputs) != len(past) + 1:
        raise ModelError(
            f"'{found.name}' has {len(past)} inputs of four dimensions and {len(outputs)} outputs; keys and values go "
            f"in as past [batch, heads, past, width], and come out in the same order behind the scores"
        )
    kinds: dict[str, Role] = {"input_ids": "tokens", "position_ids": "places", "attention_mask": "mask"}
    shapes: dict[str, tuple[int, ...]] = {}
    for value in inputs:
        name, extents = value.name, value.shape
        if name in past and extents is not None:
            heads, width = extents[1], extents[3]
            if not isinstance(heads, int) or not isinstance(width, int):
                raise ModelError(f"input {name!r} leaves its heads or its width open; export it with fixed ones")
            shapes[name] = (1, heads, length, width)
        elif name not in kinds:
            raise ModelError(f"input {name!r} is none of {', '.join(kinds)} and no past keys or values")

    def make(size: int) -> StepGraph:
        given = {"input_ids": (1, size), "position_ids": (1, size), "attention_mask": (1, length + size)}
        names = {value.name for value in inputs}
        graph = load(found, {**{n: s for n, s in given.items() if n in names}, **shapes})
        roles = tuple(past.index(v.name) if v.name in past else kinds[v.name] for v in graph.inputs)
        return StepGraph(_stepping(graph, length, size), (*roles, "last"))

    return Decoder(make, [shapes[name] for name in past], sizes, options)


def _stepping(graph: Graph, length: int, size: int) -> Graph:
    """The same with the scores of one token, and of keys and values the new ones alone."""
    taken = {*graph.constants, *(v.name for v in graph.inputs), *(o for n in graph.nodes for o in n.outputs)}

    def unique(stem: str) -> str:
        name = next(f"{stem}{k or ''}" for k in range(len(taken) + 1) if f"{stem}{k or ''}" not in taken)
        taken.add(name)
        return name

    constants = dict(graph.constants)
    bounds = []
    for value in (length, length + size, 2):
        bounds.append(unique("bound"))
        constants[bounds[-1]] = np.asarray([value], np.int64)
    last = Value(unique("last"), dtypes.int64, (1,))
    nodes, scores = _of_one_token(graph, last.name, unique)
    outputs = [scores]
    for present in graph.outputs[1:]:
        outputs.append(unique("new"))
        nodes.append(Node("Slice", outputs[-1], (present, *bounds), (outputs[-1],)))
    inputs = (*graph.inputs, last)
    return replace(graph, inputs=inputs, outputs=tuple(outputs), nodes=tuple(nodes), constants=constants,
                   values={**graph.values, last.name: last})  # fmt: skip


def _of_one_token(graph: Graph, last: str, unique: Callable[[str], str]) -> tuple[list[Node], str]:
    """The nodes, the token chosen in front of the product that makes the scores where that can be, else behind it."""
    nodes, scores = list(graph.nodes), graph.outputs[0]
    place = next(k for k, n in enumerate(nodes) if scores in n.outputs)
    product = nodes[place]
    if product.op == "MatMul" and product.inputs[1] in graph.constants:
        chosen = unique("chosen")
        nodes[place] = replace(product, inputs=(chosen, product.inputs[1]))
        nodes.insert(place, Node("Gather", chosen, (product.inputs[0], last), (chosen,), {"axis": 1}))
        return nodes, scores
    chosen = unique("chosen")
    nodes.append(Node("Gather", chosen, (scores, last), (chosen,), {"axis": 1}))
    return nodes, chosen
