"""The order in which a rank does its steps for all parts of a batch, so that stages are at different parts at a time.

What passes between stages is begun early and finished late: an array is sent while the next part is computed, one that
is taken is asked for before it is needed, and results are waited for in the end. So many parts ahead, not more: each
holds a buffer. No order of ranks can wait in a circle: the rank at the earliest part, and of those the one in the first
stage, finds all it takes sent, since those before it are further on, and all it sends asked for: nobody is behind.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from tilewright.transform.spmd import Transfer

AHEAD = 2  # parts for which buffers between two stages are there: one on its way while the other is used


class Verb(Enum):
    DO = "do"
    BEGIN = "begin"
    FINISH = "finish"


@dataclass(frozen=True)
class Turn:
    verb: Verb
    step: int
    part: int


def turns(steps: Sequence[Transfer | None], results: Container[str], parts: int, ahead: int = AHEAD) -> Iterator[Turn]:
    """Of all steps for all parts, in order; one that is no transfer is None. No later step reads `results`."""
    between = {n: step for n, step in enumerate(steps) if step is not None and step.kind == "send"}
    sends = [n for n, step in between.items() if not step.takes]
    takes = [n for n, step in between.items() if step.takes]
    late = {n for n in takes if between[n].target in results}
    for part in range(parts):
        for asked in range(part + ahead - 1 if part else 0, min(parts, part + ahead)):
            yield from (Turn(Verb.BEGIN, number, asked) for number in takes)
        for number in range(len(steps)):
            if number in sends and part >= ahead:
                yield Turn(Verb.FINISH, number, part - ahead)
            if number in sends:
                yield Turn(Verb.BEGIN, number, part)
            elif number not in between:
                yield Turn(Verb.DO, number, part)
            elif number not in late:
                yield Turn(Verb.FINISH, number, part)
    for part in range(parts):
        yield from (Turn(Verb.FINISH, number, part) for number in sends if part >= parts - ahead)
        yield from (Turn(Verb.FINISH, number, part) for number in takes if number in late)
