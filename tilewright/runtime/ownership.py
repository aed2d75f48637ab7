"""Whose a file is: what runs as code, or is mapped for it to read, belongs to this user or to root, and nobody else may
write to it. A file is opened once, and what was opened is looked at and used: another one in its place comes too late.

Root's files are everybody's: whoever is root needs no trick. A group's right to write counts as the user's own where it
is the group of this process, as where every user has a group of the same name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from tilewright.errors import ToolError

_ACL = "system.posix_acl_access"
_DESCRIPTORS = Path("/proc/self/fd")

Library = TypeVar("Library", bound=ctypes.CDLL)


class ForeignError(ToolError):
    """A file or folder that another user has, or may write to; its text says which and why."""


def complaint(info: os.stat_result, place: int | str | os.PathLike[str]) -> str | None:
    """What speaks against using a file or folder; `info` is of what `place` names or has open."""
    if not hasattr(os, "geteuid"):
        return None
    if info.st_uid not in (0, os.geteuid()):
        return "belongs to another user"
    if info.st_mode & stat.S_IWOTH:
        return "can be written to by others"
    if info.st_mode & stat.S_IWGRP and (info.st_gid != os.getegid() or _has_acl(place)):
        return "can be written to by others of its group"
    return None


def check(info: os.stat_result, place: int | str | os.PathLike[str], name: object) -> None:
    if (reason := complaint(info, place)) is not None:
        raise ForeignError(f"{name} {reason}")


def check_way(path: Path) -> None:
    """No folder above lets anybody put another one in the place of this one, as the sticky /tmp does not."""
    for folder in path.resolve().parents:
        try:
            mode = folder.stat().st_mode
        except OSError:
            continue  # what cannot be looked at cannot be used either
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ForeignError(f"{path} can be replaced by others, who may write to {folder}")


@contextlib.contextmanager
def opened(path: Path, *, trust: bool = False, folder: int | None = None) -> Iterator[BinaryIO]:
    """The file, open for reading and this user's own, or trusted unseen; `path` is below an open `folder`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0), dir_fd=folder)
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ForeignError(f"{path} is no file")  # reading from a pipe would wait for its writer
        if not trust:
            check(info, descriptor, path)
        yield file


def loadable_name(file: BinaryIO, path: Path) -> str:
    """What the system's loader takes for this open file. The loader takes a library for one that it has when their
    names are spelled alike, so the file's number is written into the name as empty folders."""
    info = os.fstat(file.fileno())
    bits = f"{info.st_dev << 64 | info.st_ino:b}"
    spelled = "".join("/." if bit == "1" else "/" for bit in bits)
    if _DESCRIPTORS.is_dir():
        return f"{_DESCRIPTORS}{spelled}/{file.fileno()}"
    whole = path.resolve()
    return f"{whole.parent}{spelled}/{whole.name}"


def load_library(path: Path, kind: type[Library], *, trust: bool = False) -> Library:
    """Runs the file's code. Raises ForeignError, or OSError."""
    with opened(path, trust=trust) as file:
        return kind(loadable_name(file, path))


def _has_acl(place: int | str | os.PathLike[str]) -> bool:
    """Whether rights beyond the group's are hidden behind its bits."""
    try:
        return hasattr(os, "getxattr") and bool(os.getxattr(place, _ACL))
    except OSError:
        return False
