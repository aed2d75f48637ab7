"""The ranks of a call that needs all of them: joined before it, and left where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tilewright.errors import TilewrightError, ToolError
from tilewright.runtime.ranks import RankError, Ranks


@contextmanager
def joined(timeout: float) -> Iterator[Ranks]:
    """Where what is done with them ends well they stay joined, for what was made of it."""
    try:
        ranks = Ranks.join(timeout)
    except RankError as error:
        raise ToolError(str(error)) from error
    try:
        yield ranks
    except RankError as error:
        ranks.leave()
        raise ToolError(str(error)) from error
    except TilewrightError:
        ranks.leave()
        raise
