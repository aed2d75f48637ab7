"""What the system grants a process only when asked: the large state of AMX tiles on Linux."""

from __future__ import annotations

import ctypes
import platform
import sys

_ARCH_PRCTL = 158  # the system call's number on x86-64
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18


class PermissionRefused(RuntimeError):
    """The system does not let this process use an extension of its processor."""


def request(what: str) -> None:
    """Asks for what a row of the intrinsics table names; asking again is harmless."""
    if what != "amx":
        raise ValueError(f"unknown permission {what!r}")
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        raise PermissionRefused("AMX needs Linux on x86-64; compile for this machine's own description")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    arguments = (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    if libc.syscall(*(ctypes.c_long(a) for a in arguments)) != 0:
        raise PermissionRefused(f"the system refuses AMX tiles to this process (error {ctypes.get_errno()})")
