"""Work in a process of its own that gives way to everything else: a compilation whose result the cache then holds."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Any
from weakref import finalize

_LOWEST_PRIORITY = 19
# At priority 19 alone, work that runs when a call begins keeps its processor until the next tick (Linux 6.18: a median
# of 20 ms a call for 14.5 ms, and of 12.2 for 11.4 as idle work).
# The pipe stays open for as long as whoever wants the result is there: its end is the end of the work, compilers that
# it has started included. SystemExit lets them tidy up.
_CHILD = f"""
import os, pickle, signal, sys, threading
os.setpriority(os.PRIO_PROCESS, 0, {_LOWEST_PRIORITY})
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
except (AttributeError, OSError):
    pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
stream = sys.stdin.buffer
sys.path[:] = pickle.load(stream)
call, arguments = pickle.load(stream)
def watch():
    while os.read(stream.fileno(), 1):
        pass
    os.killpg(0, signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
call(*arguments)
"""


class Background:
    """A call at the lowest priority in another process, begun at once; `finished` is called from a thread of this one
    with whether it went well, unless the work is cancelled before. It is when this object is gone, or this process."""

    def __init__(self, call: Callable[..., object], arguments: Sequence[Any], finished: Callable[[bool], None]) -> None:
        # in a group of its own, so that all of it ends together, and Ctrl-C is not for it
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        self._over = Event()
        unwanted = Event()
        self.cancel = finalize(self, _end, process, unwanted, os.getpid())
        work = (process, call, tuple(arguments), finished, unwanted, self._over)
        Thread(target=_follow, args=work, name="tilewright-background", daemon=True).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is over, at the latest after so many seconds."""
        return self._over.wait(seconds)


def can_start() -> bool:
    """Whether there is an interpreter to start: a program that embeds Python may have none."""
    return bool(sys.executable) and os.name == "posix"


def _follow(
    process: subprocess.Popen[bytes], call: Callable[..., object], arguments: tuple[Any, ...],
    finished: Callable[[bool], None], unwanted: Event, over: Event,
) -> None:  # fmt: skip
    try:
        assert process.stdin is not None
        with suppress(OSError):  # it has ended, as its status says
            pickle.dump(sys.path, process.stdin)
            pickle.dump((call, arguments), process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
        status = process.wait()
        with suppress(OSError):
            process.stdin.close()
        if not unwanted.is_set():
            finished(status == 0)
    finally:
        over.set()


def _end(process: subprocess.Popen[bytes], unwanted: Event, owner: int) -> None:
    if os.getpid() != owner:
        return  # a copy of the process that began it
    unwanted.set()
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
