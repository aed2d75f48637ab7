"""The link between ranks, measured as exchanges use it: every one sends to all others at once, little and much."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from tilewright.distributed.meshes import PROCESSES
from tilewright.errors import OptionError, ToolError
from tilewright.runtime.ranks import RankError, Ranks
from tilewright.target import Link, Target, cluster
from tilewright.transform.spmd import Transfer

_LITTLE, _MUCH = 64, 2 << 20  # bytes from each: one is all latency, the other as much as layers pass on
_TIMES = 15  # of each; the median is not spoiled by what else runs


def described_links(timeout: float, device: Target) -> dict[str, Any] | None:
    """A description of these processes as a cluster, which `explain --cluster` takes; rank 0's alone."""
    try:
        ranks = Ranks.join(timeout)
    except RankError as error:
        raise ToolError(str(error)) from error
    try:
        if ranks.size < 2:
            raise OptionError("there is no link between one process: torchrun --nproc-per-node 2")
        little, much = _timed(ranks, _LITTLE, _MUCH)
        found = link_of(little, much, ranks.size)
        ranks.wait("measuring links")
    except RankError as error:
        raise ToolError(str(error)) from error
    finally:
        ranks.leave()
    host = cluster(PROCESSES, lambda name: device).host
    about = {"name": host.name, "capacity": host.capacity, "transaction": host.transaction,
             "bandwidth": host.bandwidth, "latency": host.latency}  # fmt: skip
    link = {"name": found.name, "size": found.size, "bandwidth": found.bandwidth, "latency": found.latency}
    return None if ranks.rank else {"device": "cpu", "host": about, "links": [link]}


def link_of(little: Sequence[float], much: Sequence[float], size: int) -> Link:
    """From the seconds that little and much took. An exchange counts a turn for every other rank."""
    least = median(little)
    return Link("ranks", size, _MUCH / max(median(much) - least, 1e-9), least / (size - 1))


def _timed(ranks: Ranks, *sizes: int) -> list[list[float]]:
    """The seconds that exchanges of each size take, one of each in turn: what else runs then slows all alike."""
    moves = [_to_all(ranks, size) for size in sizes]
    values = {"out": np.ones(max(sizes), np.uint8)}
    found: list[list[float]] = [[] for _ in sizes]
    for _ in range(_TIMES + 1):
        for move, seconds in zip(moves, found, strict=True):
            start = time.perf_counter()
            ranks.move(move, values, "measuring links")
            seconds.append(time.perf_counter() - start)
    return [seconds[1:] for seconds in found]  # the first ones connect


def _to_all(ranks: Ranks, size: int) -> Transfer:
    each = size // (ranks.size - 1)
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    places = tuple((rank, (slice(n * each, (n + 1) * each),)) for n, rank in enumerate(others))
    return Transfer("all-to-all", "out", "in", (size,), np.dtype(np.uint8), sends=places, takes=places)
