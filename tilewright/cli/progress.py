"""Progress on stderr: a moving line on a terminal, and elsewhere a plain line once something takes over a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tilewright.calls.progress import moving_line

QUIET_SECONDS = 1.0


@contextmanager
def working(title: str) -> Iterator[Callable[[str], None]]:
    """Work whose length is not known; the function given takes the name of the step that begins."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with _plain(console, title):
            yield lambda _step: None
        return
    with moving_line(console, title) as tell:
        yield tell


@contextmanager
def counting(title: str) -> Iterator[Callable[[str, float], None]]:
    """Work whose length is known; the function given takes the step that begins and the fraction done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with _plain(console, title):
            yield lambda _step, _fraction: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda step, fraction: progress.update(task, description=f"{title}: {step}", completed=fraction)


@contextmanager
def _plain(console: Console, title: str) -> Iterator[None]:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    start = time.monotonic()
    timer = threading.Timer(QUIET_SECONDS, say, [f"{title} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    elapsed = time.monotonic() - start
    if elapsed > QUIET_SECONDS:
        say(f"{title}: {elapsed:.1f} s")
