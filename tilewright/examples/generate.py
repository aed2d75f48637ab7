"""Text from a causal language model of Hugging Face: prompts of any length through a few compiled sizes, then one
compiled step a token. Keys and values go in and come out as tensors of a fixed length; nothing changes in place.

    python -m tilewright.examples.generate
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.api import compile as compile_module
from tilewright.errors import OptionError
from tilewright.options import Options

BUCKETS = (16, 128, 512)


class Step(torch.nn.Module):
    """A model over some tokens of one text, given the keys and values before them: scores after one of the tokens, and
    the keys and values with these tokens' own."""

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        self.model, self.config, self.length = model, model.config, length

    def forward(
        self, tokens: torch.Tensor, start: torch.Tensor, last: torch.Tensor, *states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        from transformers import StaticCache

        cache: Any = StaticCache(config=self.config, max_cache_len=self.length)
        for layer, keys, values in zip(cache.layers, states[::2], states[1::2], strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values, layer.cumulative_length = keys.clone(), values.clone(), start.clone()
        places = start + torch.arange(tokens.shape[1])
        given = {"input_ids": tokens, "position_ids": places[None], "past_key_values": cache, "use_cache": True}
        found = self.model(**given, logits_to_keep=last[None])
        return (found.logits[0, 0], *(x for layer in cache.layers for x in (layer.keys, layer.values)))


class Generator:
    """The likeliest token after the other. A prompt is cut into pieces of at most the largest bucket, each padded to
    the next bucket: what is padded is overwritten before anything looks at it."""

    def __init__(
        self, model: Any, length: int, buckets: Sequence[int] = BUCKETS, options: Options | None = None
    ) -> None:
        self.step, self.length, self.options = Step(model.eval(), length), length, options
        self.buckets = sorted({min(b, length) for b in buckets})
        self._compiled: dict[int, Any] = {}
        shapes = self._state_shapes(model)
        self._empty = [torch.zeros(shape) for shape in shapes]

    @property
    def compilations(self) -> int:
        return len(self._compiled)

    @torch.no_grad()
    def __call__(self, prompt: torch.Tensor, count: int) -> torch.Tensor:
        """`count` tokens after the prompt, a row of tokens."""
        tokens = prompt.reshape(-1)
        if not 0 < len(tokens) <= self.length - count:
            raise OptionError(f"{len(tokens)} tokens and {count} more do not fit a cache of {self.length}")
        states, scores, done = self._empty, torch.empty(0), 0
        while done < len(tokens):
            piece = tokens[done : done + self.buckets[-1]]
            size = next(b for b in self.buckets if b >= len(piece))
            padded = torch.nn.functional.pad(piece, (0, size - len(piece)))
            scores, *states = self._run(padded, done, len(piece) - 1, states)
            done += len(piece)
        made = [scores.argmax()]
        for place in range(done, done + count - 1):
            scores, *states = self._run(made[-1].reshape(1), place, 0, states)
            made.append(scores.argmax())
        return torch.stack(made)

    def _run(self, tokens: torch.Tensor, start: int, last: int, states: list[torch.Tensor]) -> Any:
        inputs = (tokens[None], torch.tensor(start), torch.tensor(last), *states)
        size = len(tokens)
        if size not in self._compiled:
            self._compiled[size] = compile_module(self.step, inputs, options=self.options)
        return self._compiled[size](*inputs)

    def _state_shapes(self, model: Any) -> list[tuple[int, ...]]:
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return [(1, heads, self.length, width)] * (2 * config.num_hidden_layers)


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1376,
        vocab_size=4000, max_position_embeddings=2048,
    )  # fmt: skip
    generate = Generator(LlamaForCausalLM(config), 1280)
    for length in (7, 100, 700):
        generate(torch.randint(0, 4000, (length,)), 4)
        begin = time.perf_counter()
        generate(torch.randint(0, 4000, (length,)), 1)
        prompt = time.perf_counter()
        generate(torch.randint(0, 4000, (length,)), 65)
        rate = 64 / (time.perf_counter() - prompt - (prompt - begin))
        print(f"{length} tokens in {1e3 * (prompt - begin):.1f} ms, then {rate:.1f} tokens a second")
    print(f"{generate.compilations} compilations")


if __name__ == "__main__":
    main()
