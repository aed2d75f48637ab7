"""generate() of transformers, with its own caches, on models that torch.compile has given to Tilewright: prompts and
steps write what PyTorch writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from tests.frontend.torch_causal import ALL, MOST_USED, build, prompt
from tests.frontend.torch_programs import Interpreted
from tilewright.integrations.torch_backend import tilewright as dynamo_backend
from tilewright.pytorch.backend import compile_for_dynamo

COUNT = 6
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 8000,
        "max_position_embeddings": 256}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def native(kernel_cache: Path) -> Any:
    return partial(dynamo_backend, options={"cache_dir": str(kernel_cache), "threads": 2})


def left(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call gives, and what it says that it leaves to PyTorch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return found, [str(w.message) for w in caught if "left to PyTorch" in str(w.message)]


def written(model: Any, backend: Any, given: Any, count: int = COUNT, **named: Any) -> list[str]:
    """Tokens by generate() are PyTorch's own; what was left to PyTorch is returned."""
    wanted = model.generate(**given, max_new_tokens=count, do_sample=False, **named)
    model.forward = torch.compile(model.forward, backend=backend)
    found, told = left(lambda: model.generate(**given, max_new_tokens=count, do_sample=False, **named))
    assert found.tolist() == wanted.tolist()
    return told


@pytest.mark.slow
def test_generate() -> None:
    """By the interpreter, which compiles nothing; machine code is for the tests below."""
    model = build("gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=20)
    given = prompt(1, 5, 20)
    assert written(model, partial(compile_for_dynamo, build=Interpreted), given, 3) == []


@pytest.mark.slow
@pytest.mark.part(2)
@pytest.mark.parametrize("name", ALL)
def test_generate_with_a_growing_cache(name: str, native: Any) -> None:
    told = written(build(name), native, prompt())
    assert name not in MOST_USED or told == []


@pytest.mark.slow
@pytest.mark.part(2)
@pytest.mark.parametrize("name", MOST_USED)
def test_generate_with_a_cache_of_fixed_length(name: str, native: Any) -> None:
    written(build(name), native, prompt(), cache_implementation="static")


@pytest.mark.slow
@pytest.mark.parametrize("named", [{}, {"cache_implementation": "static"}], ids=["growing", "fixed"])
def test_generate_with_a_wider_model(named: dict[str, Any], native: Any) -> None:
    assert written(build("qwen2", **WIDE), native, prompt(1, 12, 8000), 4, **named) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "shapes", "named"),
    [(2, [(1, 12)], {"logits_to_keep": 1}), (4, [(1, 64), (2, 64), (2, 100)], {})],
    ids=["one score", "three shapes"],
)
def test_prompts_of_a_wider_model(layers: int, shapes: Sequence[Any], named: dict[str, Any], native: Any) -> None:
    model = build("qwen2", **WIDE, num_hidden_layers=layers)
    fast = torch.compile(model, backend=native)
    for rows, length in shapes:
        given = {**prompt(rows, length, 8000), **named}
        found, told = left(partial(fast, **given))
        wanted = model(**given)
        assert told == []
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-3, atol=1e-4)
        pairs = zip(found.past_key_values.layers, wanted.past_key_values.layers, strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one.keys, other.keys, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(one.values, other.values, rtol=1e-3, atol=1e-4)
