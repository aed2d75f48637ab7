"""Tokens drawn from scores, and the loop around a step: end of text, texts that go on, tokens one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tilewright.errors import OptionError
from tilewright.integrations.decoding import Decoder, Sampling

WORDS = 20


class Counting:
    """In a step's place: the likeliest token is the one after the last. What it read stays in the cache."""

    runners = ()

    def __init__(self, size: int, *_: Any) -> None:
        self.size, self.model = size, self

    def run(self, tokens: Sequence[int], start: int, caches: Sequence[np.ndarray]) -> np.ndarray:
        assert len(tokens) <= self.size
        caches[0][0, 0, start : start + len(tokens), 0] = tokens
        scores = np.zeros(WORDS, np.float32)
        scores[(tokens[-1] + 1) % WORDS] = 1
        return scores


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setattr("tilewright.integrations.decoding._Step", Counting)
    return Decoder(lambda size: None, [(1, 1, 16, 1)], (4,))  # type: ignore[arg-type, return-value]


def read(decoder: Decoder) -> list[int]:
    return [int(t) for t in decoder.caches[0][0, 0, : decoder.written, 0]]


def test_a_text_ends_where_it_is_told_to(decoder: Decoder) -> None:
    assert decoder([0, 1, 2, 3, 4, 5], 4) == [6, 7, 8, 9] and read(decoder) == list(range(9))
    assert decoder([3], 10, end={5, 7}) == [4, 5] and read(decoder) == [3, 4]
    assert decoder([3], 1, end={9}) == [4] and decoder([3], 0) == []
    assert decoder.compilations == 2


def test_a_text_goes_on(decoder: Decoder) -> None:
    made = decoder([3], 3)
    assert decoder([*made[-1:], 11, 12], 2, goes_on=True) == [13, 14]
    assert read(decoder) == [3, 4, 5, 6, 11, 12, 13]
    with pytest.raises(OptionError, match="4 tokens and 6 more behind 7 do not fit a cache of 16"):
        decoder([1] * 4, 6, goes_on=True)
    assert decoder([1] * 4, 6) == [2, 3, 4, 5, 6, 7]


def test_tokens_come_one_by_one(decoder: Decoder) -> None:
    tokens = decoder.stream([0], 9)
    assert [next(tokens), next(tokens)] == [1, 2] and read(decoder) == [0, 1]
    with pytest.raises(OptionError, match="0 tokens and 2 more do not fit"):
        decoder.stream([], 2)  # before the first is asked for


def test_draws_follow_the_scores() -> None:
    scores = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))

    def shares(**chosen: Any) -> list[float]:
        draw = Sampling(**chosen).draws()
        return list(np.bincount([draw(scores) for _ in range(4000)], minlength=4) / 4000)

    np.testing.assert_allclose(shares(), [0.1, 0.4, 0.2, 0.3], atol=0.03)
    np.testing.assert_allclose(shares(top_k=2), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.6), [0, 4 / 7, 0, 3 / 7], atol=0.03)  # the one that reaches it, too
    assert shares(top_p=0.01) == shares(top_k=1) == shares(temperature=0.0) == [0, 1, 0, 0]
    colder = np.array([0.1, 0.4, 0.2, 0.3]) ** 2
    np.testing.assert_allclose(shares(temperature=0.5), colder / colder.sum(), atol=0.03)


def test_a_seed_gives_one_text() -> None:
    scores = np.zeros(1000, np.float32)
    texts = [[draw(scores) for _ in range(20)] for draw in (Sampling(seed=s).draws() for s in (1, 1, 2))]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_what_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match="a temperature is at least 0, top_k at least 1"):
        Sampling(**wrong)
