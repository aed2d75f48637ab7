"""What is said of a compilation that a call waits for."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from tilewright import Options
from tilewright.calls import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown("the model", Options()) as options:
        assert options.progress is not None
        options.progress("planning")
    assert "tilewright: compiling the model: planning" in screen.getvalue()


def test_elsewhere_and_for_who_follows_already_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Options(progress=lambda step: None)
    with progress.shown("the model", own) as options:
        assert options is own
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress.shown("the model", Options()) as options:
        assert options.progress is None
    assert screen.getvalue() == ""


CASES = [(0.1, True, "INFO"), (2, True, "WARNING"), (0.1, False, "WARNING")]


@pytest.mark.parametrize(("seconds", "is_rare", "level"), CASES)
def test_long_or_repeated_compilations_are_seen_by_default(
    seconds: float, is_rare: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tilewright"):
        progress.log_compiled("compiled\nit", seconds, is_rare)
    assert [(r.levelname, r.message) for r in caplog.records] == [(level, "compiled\\nit")]
