"""The order in which a rank does its steps for all parts of a batch, so that stages are at different parts at a time.

Every stage is one part behind the one before it. A rank goes on beat by beat: at each it does the stages that it has,
the last one first, each for the part that it is at. What passes between stages is begun early and finished late: an
array is sent while the next part is computed, one that is taken is asked for at the beat at which it is sent, and
results are waited for in the end. So many parts ahead, not more: each holds a buffer. No order of ranks can wait in a
circle: what the ranks of a stage exchange all of them do at one beat, in the same place of it; all that is taken was
sent at a beat before, and all that is sent is waited for at a later beat than it is asked for.
"""
from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from tilewright.transform.spmd import Transfer, When

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


def turns(
    steps: Sequence[Transfer | None], when: Sequence[When], results: Container[str], parts: int, ahead: int = AHEAD
) -> Iterator[Turn]:
    """Of all steps for all parts, in order; one that is no transfer is None. No later step reads `results`."""
    between = {n: step for n, step in enumerate(steps) if step is not None and step.kind == "send"}
    sends = [n for n, step in between.items() if not step.takes]
    takes = sorted((n for n, step in between.items() if step.takes), key=lambda n: (-when[n].begun, n))  # as they come
    late = {n for n in takes if between[n].target in results}
    stages = sorted({each.done for each in when}, reverse=True)
    for beat in range(parts + max(map(max, when), default=0)):
        yield from (Turn(Verb.BEGIN, n, beat - when[n].begun) for n in takes if 0 <= beat - when[n].begun < parts)
        for stage in (each for each in stages if 0 <= beat - each < parts):
            part = beat - stage
            for number in (n for n, each in enumerate(when) if each.done == stage):
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
