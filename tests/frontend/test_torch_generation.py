"""Text token by token from compiled steps, as the model itself would write it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.frontend.torch_models import build
from tilewright import OptionError, Options

pytest.importorskip("transformers")
from tilewright.examples.generate import Generator

CASES = [("llama", (4,)), ("llama", (4, 16)), ("gpt2", (4, 16))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "buckets"), CASES)
@torch.no_grad()
def test_generation(name: str, buckets: tuple[int, ...], kernel_cache: Path) -> None:
    model, _ = build(name)
    generate = Generator(model, 48, buckets=buckets, options=Options(cache_dir=kernel_cache, threads=2))
    for length in (1, 3, 4, 9, 19):
        prompt = torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(length))
        tokens = prompt.clone()
        for _ in range(6):
            tokens = torch.cat([tokens, model(input_ids=tokens[None], use_cache=False).logits[0, -1].argmax()[None]])
        assert generate(prompt, 6).tolist() == tokens[length:].tolist()
    assert generate(prompt.tolist(), 6).tolist() == generate(prompt[None], 6).tolist() == tokens[length:].tolist()
    for wrong in (prompt.reshape(1, 19).repeat(2, 1), [0.5, 1.0]):
        with pytest.raises(OptionError, match="a prompt is one row of whole numbers"):
            generate(wrong, 2)
    begun = generate(prompt[:5], 3)
    rest = generate([*begun[-1:].tolist(), *prompt[:6].tolist()], 4, goes_on=True)
    assert rest.tolist() == generate(torch.cat([prompt[:5], begun, prompt[:6]]), 4).tolist()
    after = tokens[length:].tolist()
    assert generate(prompt, 6, end={after[2]}).tolist() == after[: after.index(after[2]) + 1]
    assert generate.compilations == len(buckets) + 1
    with pytest.raises(OptionError, match="do not fit a cache of 48"):
        generate(prompt, 30)


@pytest.mark.slow
@torch.no_grad()
def test_prompts_of_every_length(kernel_cache: Path) -> None:
    """The token after a prompt of each length from 1 to 1024, and 256 tokens after many of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
            vocab_size=90, max_position_embeddings=1280,
        )
    ).eval()  # fmt: skip
    generate = Generator(model, 1280, options=Options(cache_dir=kernel_cache, threads=2))
    text = torch.randint(0, 90, (1024,))
    after = likeliest(model, text)
    for length in range(1, 1025):
        assert generate(text[:length], 1).tolist() == [after[length - 1]], length
    for length in (1, 2, *range(63, 1025, 31), 1024):
        tokens = torch.cat([text[:length], generate(text[:length], 256)])
        assert tokens[length:].tolist() == likeliest(model, tokens)[length - 1 : -1], length
    assert generate.compilations <= 4


def likeliest(model: torch.nn.Module, tokens: torch.Tensor) -> list[int]:
    """After each token of a text the one that the model itself would write."""
    found: list[int] = model(input_ids=tokens[None], use_cache=False).logits[0].argmax(-1).tolist()
    return found
