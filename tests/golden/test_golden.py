"""Few, small texts: a change in generated kernels shows in a difference that a person reads."""

from __future__ import annotations

import pytest

from tests.golden.texts import FOLDER, MODELS, texts


@pytest.mark.parametrize("name", MODELS)
def test_texts(name: str) -> None:
    for file, content in texts(name).items():
        assert (FOLDER / file).read_text() == content, "meant? then: python -m tests.golden.update"


def test_nothing_is_left_over() -> None:
    made = {file for name in MODELS for file in texts(name)}
    assert {p.name for p in (*FOLDER.glob("*.txt"), *FOLDER.glob("*.c"))} == made
