"""Text from a causal language model of Hugging Face: prompts of any length through a few compiled sizes, then one
compiled step a token, with caches of keys and values that stay where they are.

    python -m tilewright.examples.generate
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from tilewright.errors import OptionError
from tilewright.frontend.pytorch.exported import export
from tilewright.integrations.decoding import LIKELIEST, SIZES, Decoder, Role, Sampling, StepGraph
from tilewright.ir.forms.graph import Graph
from tilewright.options import Options

_ROLES: tuple[Role, ...] = ("tokens", "places", "mask", "last")


class Step(torch.nn.Module):
    """A model over some tokens of one text, given the keys and values before them: scores after one of the tokens, and
    these tokens' own keys and values."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: torch.Tensor, places: torch.Tensor, mask: torch.Tensor, last: torch.Tensor, *states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        from transformers import DynamicCache

        cache: Any = DynamicCache(zip(states[::2], states[1::2], strict=True))
        given = {"input_ids": tokens, "position_ids": places, "attention_mask": mask, "past_key_values": cache}
        found = self.model(**given, use_cache=True, logits_to_keep=last[None])
        past = states[0].shape[2]
        new = (x[:, :, past:] for layer in cache.layers for x in (layer.keys, layer.values))
        return (found.logits[0, 0], *new)


class Generator:
    """A model's text, with room for `length` tokens of it."""

    def __init__(self, model: Any, length: int, buckets: Sequence[int] = SIZES, options: Options | None = None) -> None:
        self.step = Step(model.eval())
        self.shapes = _state_shapes(model.config, length)
        self.decoder = Decoder(self._graph, self.shapes, buckets, options)

    @property
    def compilations(self) -> int:
        return self.decoder.compilations

    def __call__(
        self, prompt: torch.Tensor | Sequence[int], count: int, *, end: Collection[int] = (),
        sampling: Sampling = LIKELIEST, goes_on: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """At most `count` tokens after the prompt, a row of tokens: a tensor, an array or a list (see `Decoder`)."""
        tokens = torch.as_tensor(prompt)
        if tokens.numel() and (tokens.is_floating_point() or tokens.numel() != tokens.shape[-1:].numel()):
            raise OptionError(
                f"a prompt is one row of whole numbers, not {list(tokens.shape)} of {tokens.dtype}; "
                f"give one text at a time"
            )
        row = tokens.reshape(-1).numpy()
        return torch.tensor(self.decoder(row, count, end=end, sampling=sampling, goes_on=goes_on))

    def _graph(self, size: int) -> StepGraph:
        length = self.shapes[0][2]
        tokens = torch.zeros(1, size, dtype=torch.int64)
        mask = torch.ones(1, length + size, dtype=torch.int64)
        # the exporter only looks at their shapes
        states = [torch.empty(shape) for shape in self.shapes]
        found = export(self.step, (tokens, tokens.clone(), mask, torch.tensor(0), *states), {})
        assert isinstance(found.graph, Graph)
        places = [place.what for place in found.inputs]
        return StepGraph(found.graph, tuple(_ROLES[k] if k < len(_ROLES) else k - len(_ROLES) for k in places))


def _state_shapes(config: Any, length: int) -> list[tuple[int, ...]]:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [(1, heads, length, width)] * (2 * config.num_hidden_layers)


def small_llama() -> Any:
    """Four layers of 512, 8 heads over 2, 4,000 words, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1376,
        vocab_size=4000, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def main() -> None:
    generate = Generator(small_llama(), 1280)
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
