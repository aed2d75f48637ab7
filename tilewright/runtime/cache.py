"""A content-addressed cache of files on disk, shared by any number of processes. An entry is a file and a checksum
beside it: whatever a crash or a full disk leaves behind reads as "not there", never as a wrong file. Code is loaded
from it, so its folders belong to this user or to root, and nobody else may write to them (see `ownership`); a file in
them that is somebody else's, or was moved there from another key, reads as "not there". What cannot be written there
goes to a folder that lasts as long as it is used."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, BinaryIO

import numpy as np

from tilewright.errors import ToolError
from tilewright.runtime.ownership import ForeignError, check, check_way, opened

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

Content = bytes | bytearray | memoryview | Callable[[Path], None]

DEFAULT_LIMIT_BYTES = 8 << 30
# Of larger files a digest is remembered by what the system says of the file, which any change to it changes: what was
# just written waits until the system's clock has gone on, where that is cheaper than reading it once more.
_REMEMBERED_FROM_BYTES = 1 << 20
_AWAITED_FROM_BYTES = 16 << 20
_SETTLED_NS = 100_000_000
_KEY = re.compile(r"[0-9a-f]{16,128}(\.[a-z0-9]+)?")
_SUM_SUFFIX = ".sum"
_LOCK = "machine.lock"
_BESIDE = ("zig",)  # folders of other programs
_TEMPORARY_PREFIX = "tmp-"
_AT_WORK = "lock"  # in a folder of that prefix
# Larger files, of packed weights, are summed as numbers, as fast as memory is: at every start they are read whole.
_DIGEST_UP_TO_BYTES = 64 << 20
_ROW_WORDS = 512
_CHUNK_BYTES = 1 << 20
_SUMMING_THREADS = 4  # fewer than these fill the memory of most machines
_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o755  # at most: nobody else writes here, whatever is usual for this user's files
# An entry used this recently may be in the hands of another process between its lookup and its use.
_GRACE_SECONDS = 600.0
_STALE_TEMPORARY_SECONDS = 3600.0
_PRUNE_TO_FRACTION = 0.8
# There is no room, or no permission: nothing is wrong with the content.
_NOT_HERE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOG = logging.getLogger("tilewright")


class CacheError(ToolError):
    """The cache directory cannot be used."""


@dataclass(frozen=True)
class CacheStats:
    root: Path
    entries: int
    total_bytes: int
    limit_bytes: int


@dataclass(frozen=True)
class _Entry:
    path: Path
    size: int
    last_use: float


def default_root(environ: Mapping[str, str]) -> Path:
    """Where the cache lives when the user says nothing else."""
    if chosen := environ.get("TILEWRIGHT_CACHE"):
        return Path(chosen).expanduser()
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "tilewright"
    return Path("~/.cache/tilewright").expanduser()


def content_key(*parts: str | bytes | bytearray | memoryview, suffix: str = "") -> str:
    """A key from everything that determines the content; each part's length keeps neighbours apart."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else memoryview(part).cast("B")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest() + suffix


class Cache:
    """Files by key. Keys are hexadecimal digests with an optional suffix (see content_key)."""

    def __init__(self, root: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        if limit_bytes <= 0:
            raise CacheError(f"the cache limit must be positive, not {limit_bytes} bytes")
        self.root = root
        self.limit_bytes = limit_bytes
        self._spare: tempfile.TemporaryDirectory[str] | None = None
        self._choosing = Lock()

    @property
    def spare(self) -> object:
        """Whoever uses a file of this cache after the cache itself is gone holds this; None where nothing needs it."""
        return self._spare

    def path_of(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise CacheError(f"not a cache key: {key!r}")
        return self.root / key[:2] / key

    def get(self, key: str) -> Path | None:
        """The whole and unchanged file of this key, or None. Counts as a use."""
        path = self.path_of(key)
        self._check_owner(path.parent)
        sum_path = _sum_path(path)
        try:
            with opened(path) as file, opened(sum_path) as recorded:
                if recorded.read() != self._sum_line(key, file):
                    return None
        except FileNotFoundError:
            return self._in_spare(key)
        except ForeignError as error:
            _LOG.warning("a file in the cache is not used: %s", error)
            return None
        except OSError as error:
            raise self._unusable(error) from error
        with contextlib.suppress(OSError):  # where it may only be read
            os.utime(sum_path)
        return path

    def digest(self, file: BinaryIO, kind: str, compute: Callable[[], str]) -> str:
        """What `compute` gives of a file's content; not computed again of a large one that has not changed."""
        before = os.fstat(file.fileno())
        if before.st_size < _REMEMBERED_FROM_BYTES or not _is_settled(before):
            return compute()
        about = (before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns)
        key = content_key("digest", kind, repr(about), suffix=".digest")
        if (known := self.get(key)) is not None:
            with contextlib.suppress(OSError):
                return known.read_text()
        found = compute()
        after = os.fstat(file.fileno())
        if (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == about[2:]:
            self.put(key, found.encode())
        return found

    def _sum_line(self, key: str, file: BinaryIO) -> bytes:
        """Of a file under its key: one that was moved to another is not that one's."""
        return f"{key} {self.digest(file, 'checksum', lambda: checksum(file))}\n".encode()

    def put(self, key: str, content: Content) -> Path:
        """Store bytes, or what a function writes to the path it is given, in a folder where it may leave other files.
        The last of several writers wins."""
        return self._here_or_spare(lambda cache: cache._put(key, content))

    def _here_or_spare(self, store: Callable[[Cache], Path]) -> Path:
        """What `store` does with this cache, or with one for this process alone where this one cannot be written."""
        try:
            return store(self)
        except CacheError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _NOT_HERE:
                raise
            return store(self._spare_cache(cause))

    def put_pieces(self, kind: str, size: int, pieces: Callable[[], Iterable[memoryview]], suffix: str) -> Path:
        """Store what comes in pieces, `size` bytes in all, under a key of its own content."""
        return self._here_or_spare(lambda cache: cache._put_pieces(kind, size, pieces, suffix))

    def _put_pieces(self, kind: str, size: int, pieces: Callable[[], Iterable[memoryview]], suffix: str) -> Path:
        try:
            self._make(self.root)
            self._check_owner(self.root)
            with _workplace(self.root) as folder:
                temporary = folder / f"entry{suffix}"
                # two to three times as fast as SHA-256 where processors have no instructions for that
                digest = hashlib.blake2b(f"{kind} {size} ".encode(), digest_size=32)
                with temporary.open("wb") as file:
                    for piece in pieces():
                        digest.update(piece)
                        file.write(piece)
                key = digest.hexdigest() + suffix
                if (known := self.get(key)) is not None:
                    return known
                path = self.path_of(key)
                self._make(path.parent)
                self._check_owner(path.parent)
                self._move_in(key, temporary, path)
        except OSError as error:
            raise self._unusable(error) from error
        return path

    def _in_spare(self, key: str) -> Path | None:
        return None if self._spare is None else Cache(Path(self._spare.name)).get(key)

    def _spare_cache(self, reason: OSError) -> Cache:
        with self._choosing:
            if self._spare is None:
                try:
                    self._spare = tempfile.TemporaryDirectory(prefix="tilewright-", ignore_cleanup_errors=True)
                except OSError as error:
                    raise self._unusable(error) from error
                _LOG.warning("the cache in %s cannot be written to (%s): what is compiled now will not be found again",
                             self.root, reason.strerror)  # fmt: skip
            return Cache(Path(self._spare.name))

    def _put(self, key: str, content: Content) -> Path:
        path = self.path_of(key)
        try:
            self._make(path.parent)
        except OSError as error:
            raise self._unusable(error) from error
        self._check_owner(path.parent)
        try:
            with _workplace(path.parent) as folder:
                temporary = folder / f"entry{path.suffix}"
                if callable(content):
                    content(temporary)
                else:
                    temporary.write_bytes(content)
                self._move_in(key, temporary, path)
        except OSError as error:
            raise self._unusable(error) from error
        return path

    def _move_in(self, key: str, made: Path, path: Path) -> None:
        """A file that is complete into its place, with its checksum beside it."""
        with made.open("rb") as file:
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & _FILE_MODE)
            line, made_sum = checksum(file), _sum_path(made)
            made_sum.write_bytes(f"{key} {line}\n".encode())
            made_sum.chmod(made_sum.stat().st_mode & _FILE_MODE)
            os.replace(made, path)
            os.replace(made_sum, _sum_path(path))
            if os.fstat(file.fileno()).st_size >= _AWAITED_FROM_BYTES:
                time.sleep(2e-9 * _SETTLED_NS)
                self.digest(file, "checksum", lambda: line)

    def folder(self, name: str) -> tuple[Path, bool]:
        """A folder beside the entries, for what another program keeps, and whether it is made just now. Clearing the
        cache removes it, too."""
        try:
            self._check_owner(self.root)
            self._make(self.root)
            for place in (self.root / name, *(() if self._spare is None else (Path(self._spare.name) / name,))):
                if place.is_dir() and os.access(place, os.W_OK):
                    return place, False
            (self.root / name).mkdir(mode=_DIRECTORY_MODE)
            return self.root / name, True
        except FileExistsError:
            return self.root / name, False
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise self._unusable(error) from error
            place = self._spare_cache(error).root / name
            place.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
            return place, True

    def lock(self) -> BinaryIO:
        """An open file for processes to take turns by; see `is_lock`."""
        path = self.root / _LOCK
        try:
            self._make(self.root)
            self._check_owner(self.root)
            return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "rb")
        except OSError as error:
            raise self._unusable(error) from error

    def is_lock(self, lock: BinaryIO) -> bool:
        """Whether the file is still the one that others come to; clearing the cache removes it."""
        try:
            return os.path.samestat(os.fstat(lock.fileno()), (self.root / _LOCK).stat(follow_symlinks=False))
        except OSError:
            return False

    def stats(self) -> CacheStats:
        entries = list(self._entries())
        return CacheStats(self.root, len(entries), sum(entry.size for entry in entries), self.limit_bytes)

    def clear(self) -> None:
        """Remove every entry, also those in use: files already opened or mapped stay readable."""
        for folder in (*self._folders(), *(self.root / name for name in _BESIDE)):
            try:
                shutil.rmtree(folder)
            except FileNotFoundError:
                continue  # another process clears it too
            except OSError as error:
                raise self._unusable(error) from error
        try:
            (self.root / _LOCK).unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise self._unusable(error) from error

    def prune(self, *, grace_seconds: float = _GRACE_SECONDS) -> int:
        """When over the limit, remove the entries unused for longest; returns the bytes removed. The largest entry does
        not count where it is more than half of the limit: weights of a large model would push each other out."""
        now = time.time()
        if not os.access(self.root, os.W_OK):
            return 0
        self._remove_stale_temporaries(now)
        entries = sorted(self._entries(), key=lambda entry: entry.last_use)
        largest = max((entry.size for entry in entries), default=0)
        total = sum(entry.size for entry in entries) - (largest if largest > self.limit_bytes // 2 else 0)
        if total <= self.limit_bytes:
            return 0
        removed = 0
        for entry in entries:
            if total - removed <= self.limit_bytes * _PRUNE_TO_FRACTION or entry.last_use > now - grace_seconds:
                break
            # Checksum first: without it the entry is already gone for every reader.
            try:
                _sum_path(entry.path).unlink(missing_ok=True)
                entry.path.unlink(missing_ok=True)
            except OSError as error:
                raise self._unusable(error) from error
            removed += entry.size
        return removed

    def _make(self, folder: Path) -> None:
        for above in reversed(self.root.parents):
            if not above.exists():
                above.mkdir(mode=_FILE_MODE, exist_ok=True)
        for own in dict.fromkeys((self.root, folder)):
            own.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)

    def _folders(self) -> Iterator[Path]:
        try:
            found = list(self.root.iterdir()) if self.root.is_dir() else []
        except OSError as error:
            raise self._unusable(error) from error
        yield from sorted(f for f in found if re.fullmatch("[0-9a-f]{2}", f.name) and f.is_dir())

    def _entries(self) -> Iterator[_Entry]:
        for folder in self._folders():
            try:
                paths = list(folder.iterdir())
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._unusable(error) from error
            for path in paths:
                if not _KEY.fullmatch(path.name) or path.suffix == _SUM_SUFFIX:
                    continue
                try:
                    info = path.stat()
                    with contextlib.suppress(FileNotFoundError):  # without one it is nobody's, and as old as it is
                        yield _Entry(path, info.st_size, _sum_path(path).stat().st_mtime)
                        continue
                except FileNotFoundError:
                    continue
                yield _Entry(path, info.st_size, info.st_mtime)

    def _remove_stale_temporaries(self, now: float) -> None:
        for folder in (self.root, *self._folders()):
            for path in folder.glob(f"{_TEMPORARY_PREFIX}*"):
                with contextlib.suppress(OSError):  # another process removes it too
                    if path.is_dir():
                        _remove_abandoned(path, now)
                    elif path.stat().st_mtime < now - _STALE_TEMPORARY_SECONDS:  # of an earlier release
                        path.unlink(missing_ok=True)

    def _check_owner(self, folder: Path) -> None:
        """Whoever may write here may have this process run any code."""
        try:
            for place in (self.root, folder):
                check(place.stat(), place, f"the cache in {place}")
            check_way(self.root)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unusable(error) from error
        except ForeignError as error:
            raise CacheError(
                f"{error}, and code is loaded from there: remove it, or choose another with TILEWRIGHT_CACHE"
            ) from error

    def _unusable(self, error: OSError) -> CacheError:
        return CacheError(
            f"the cache in {self.root} cannot be used ({error.strerror}); choose another with TILEWRIGHT_CACHE"
        )


@contextlib.contextmanager
def _workplace(parent: Path) -> Iterator[Path]:
    """A folder for what is made here. A lock tells that somebody is at work in it: the system takes it back however the
    process ends, and what is left is removed later."""
    folder, lock = _locked_folder(parent)
    try:
        with lock:
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(parent: Path) -> tuple[Path, IO[str]]:
    """Whoever comes upon a folder before it is locked takes it for abandoned, and its lock while removing it: another
    folder then."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=parent))
        lock = (folder / _AT_WORK).open("w")
        _locks(lock, waits=True)
        if (folder / _AT_WORK).exists():
            return folder, lock
        lock.close()


def _locks(file: IO[str], *, waits: bool = False) -> bool:
    """Whether nobody else holds the lock of this file, now or after a wait; this process does then."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except (AttributeError, OSError):  # somebody has it, or this system, or this file system, has no locks
        return False
    return True


def _remove_abandoned(folder: Path, now: float) -> None:
    """A workplace that nobody is at work in, under its lock; one without a lock may only just have been made."""
    old = folder.stat().st_mtime < now - _STALE_TEMPORARY_SECONDS
    try:
        with (folder / _AT_WORK).open("r+") as lock:
            if _locks(lock) or old:
                shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:
        if old:
            shutil.rmtree(folder, ignore_errors=True)


def _sum_path(path: Path) -> Path:
    return path.with_name(path.name + _SUM_SUFFIX)


def _is_settled(info: os.stat_result) -> bool:
    """Whether another change would show: the last was some time ago, on a system that counts in less than seconds."""
    is_fine = bool(info.st_mtime_ns % 1_000_000_000 or info.st_ctime_ns % 1_000_000_000)
    return is_fine and time.time_ns() - info.st_ctime_ns > _SETTLED_NS


def checksum(file: BinaryIO) -> str:
    """One line that changes when the file does."""
    size = os.fstat(file.fileno()).st_size
    if size > _DIGEST_UP_TO_BYTES:
        return f"{size} sums {_sums(file.fileno(), size)}"
    file.seek(0)
    return f"{size} {hashlib.file_digest(file, 'sha256').hexdigest()}"  # type: ignore[arg-type]


def _sums(descriptor: int, size: int) -> str:
    """A digest of sums over the rows and over the columns of every chunk: damage changes some of them, wherever it is,
    and what lies in another place does too."""

    def part(start: int) -> bytes:
        return _chunk_sums(np.frombuffer(os.pread(descriptor, _CHUNK_BYTES, start), np.uint8))

    digest = hashlib.sha256()
    try:
        with ThreadPoolExecutor(_SUMMING_THREADS) as pool:
            for sums in pool.map(part, range(0, size, _CHUNK_BYTES)):
                digest.update(sums)
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, "the system refuses to start a thread") from error
    return digest.hexdigest()


def _chunk_sums(chunk: np.ndarray) -> bytes:
    whole = chunk.size // (8 * _ROW_WORDS) * 8 * _ROW_WORDS
    rows = chunk[:whole].view(np.uint64).reshape(-1, _ROW_WORDS)
    sums = np.add.reduce(rows, axis=0).tobytes() + np.add.reduce(rows, axis=1).tobytes()
    return sums + chunk[whole:].tobytes()
