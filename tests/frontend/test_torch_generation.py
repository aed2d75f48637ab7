"""Text token by token from compiled steps, as the model itself would write it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.frontend.torch_models import build
from tilewright import OptionError, Options

pytest.importorskip("transformers")
from tilewright.examples.generate import Generator

CASES = [("llama", (4,)), *(pytest.param(name, (4, 16), marks=pytest.mark.slow) for name in ("llama", "gpt2"))]


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
    assert generate.compilations == len(buckets) + 1
    with pytest.raises(OptionError, match="do not fit a cache of 48"):
        generate(prompt, 30)
