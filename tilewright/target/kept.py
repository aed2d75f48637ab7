"""This computer's processor as measured: once, kept in the cache directory, and read back ever after, so that plans
stay the same until someone measures anew."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tilewright.errors import OptionError
from tilewright.runtime import Cache, CacheError, CompileError, ToolchainError, content_key, this_machine
from tilewright.target.by_hand import from_json
from tilewright.target.machine import Target
from tilewright.target.probe import VERSION, ProbeError, probe

MEASURED = "measured"


def measured(
    usual: Target,
    cache_dir: Path,
    compiler: str | None = None,
    *,
    anew: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Target:
    """The processor as measured before, or now; where that is not possible the usual target, its source saying why."""
    about = (str(VERSION), this_machine().identity)
    return kept(usual, cache_dir, about, lambda cache: probe(usual, compiler, cache), anew=anew, tell=tell)


def kept(
    usual: Target,
    cache_dir: Path,
    about: Sequence[str],
    measure: Callable[[Cache], tuple[Target, str]],
    *,
    anew: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Target:
    """What `measure` gave for this machine, told apart by `about`: the target, and a remark on it."""
    cache = Cache(cache_dir)
    key = content_key("machine", *about, usual.to_json(), suffix=".json")
    try:
        if not anew and (known := _known(cache, key, usual)) is not None:
            return known
        # Two that measure at once would disturb each other, and then plan for different machines.
        with _turn(cache):
            if not anew and (known := _known(cache, key, usual)) is not None:
                return known
            if tell is not None:
                tell("measuring the machine")
            found = _measure(usual, measure, cache)
            cache.put(key, found.to_json().encode())
            return found
    except (ToolchainError, CompileError, CacheError) as error:
        # Nothing is kept: this may be mended by the next time.
        return _not_measured(usual, str(error))


def _measure(usual: Target, measure: Callable[[Cache], tuple[Target, str]], cache: Cache) -> Target:
    try:
        found, remark = measure(cache)
    except ProbeError as error:
        return _not_measured(usual, str(error))
    today = datetime.date.today().isoformat()
    return replace(found, source=f"{MEASURED} {today}" + (f"; {remark}" if remark else ""))


def _not_measured(usual: Target, reason: str) -> Target:
    return replace(usual, source=f"{usual.source}, not measured: {' '.join(reason.split())}")


def _known(cache: Cache, key: str, usual: Target) -> Target | None:
    """What was kept; anything that is damaged or not about this machine is as good as nothing."""
    path = cache.get(key)
    if path is None:
        return None
    try:
        kept = from_json(path.read_text(errors="replace"), str(path))
    except (OptionError, OSError):
        return None
    return kept if _shape(kept) == _shape(usual) else None


def _shape(target: Target) -> tuple[object, ...]:
    sizes = tuple((level.name, level.capacity, level.shared_by) for level in target.levels)
    return (target.kind, target.architecture, target.units, target.vector_bytes, target.vector_registers, sizes)


@contextlib.contextmanager
def _turn(cache: Cache) -> Iterator[None]:
    """One process at a time; where the system has no such lock, all at once."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    while True:
        lock = cache.lock()
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not cache.is_lock(lock):
                continue  # the cache was cleared meanwhile, and whoever came next has another
            yield
            return
