"""What is said of a compilation that a call waits for: a moving line on a terminal, then one line of the log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tilewright.errors import printable
from tilewright.options import Options

if TYPE_CHECKING:
    from rich.console import Console

_LOG = logging.getLogger("tilewright")
LONG = 1.0  # seconds; a call that stood still for so long says why without being asked


@contextmanager
def moving_line(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """On a terminal; the function given takes the name of the step that begins."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda step: progress.update(task, description=f"{title}: {step}")


@contextmanager
def shown(title: str, options: Options) -> Iterator[Options]:
    """Options for a compilation during a call: a terminal shows how it gets on, unless somebody follows it already."""
    if options.progress is not None or sys.stderr is None or not sys.stderr.isatty():
        yield options
        return
    from rich.console import Console

    with moving_line(Console(stderr=True), printable(f"tilewright: compiling {title}")) as tell:
        yield options.override(progress=tell)


def log_compiled(what: str, seconds: float, is_rare: bool = True) -> None:
    """One line of the log, which is seen by default where the call was held up, or is again and again."""
    level = logging.WARNING if seconds >= LONG or not is_rare else logging.INFO
    _LOG.log(level, "%s", printable(what))
