"""The cache of the CPU runtime: damage, limits, several processes, and weights kept once."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
import pytest

from tilewright.runtime import Cache, CacheError, CompileError, content_key, default_root, store_weights
from tilewright.runtime import cache as cache_module


def test_default_root_prefers_the_users_choice() -> None:
    assert default_root({"TILEWRIGHT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert default_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/tilewright")
    assert default_root({}) == Path.home() / ".cache" / "tilewright"


def test_keys_keep_their_parts_apart() -> None:
    assert content_key("ab", "c") != content_key("a", "bc")
    assert content_key("a", suffix=".o").endswith(".o")


@pytest.mark.parametrize("damage", ["truncate", "flip", "no sum", "bad sum", "no file"])
def test_damaged_entries_read_as_missing_and_heal(tmp_path: Path, damage: str) -> None:
    cache, key = Cache(tmp_path), content_key("x", suffix=".o")
    path = cache.put(key, b"0123456789")
    checksum = path.with_name(path.name + ".sum")
    assert cache.get(key) == path
    match damage:
        case "truncate":
            path.write_bytes(b"01234")
        case "flip":
            path.write_bytes(b"0123456788")
        case "no sum":
            checksum.unlink()
        case "bad sum":
            checksum.write_bytes(b"\xff\xfe")
        case "no file":
            path.unlink()
    assert cache.get(key) is None
    cache.put(key, b"0123456789")
    assert cache.get(key) == path


@pytest.mark.sample(2)
@pytest.mark.parametrize("damage", ["flip", "swap", "tail"])
def test_damage_to_large_files_is_noticed(tmp_path: Path, damage: str) -> None:
    cache, key = Cache(tmp_path), content_key("weights")
    data = np.random.default_rng(0).integers(0, 256, (64 << 20) + 5000, np.uint8)
    path = cache.put(key, data.tobytes())
    assert cache.get(key) == path
    page = slice(33 << 20, (33 << 20) + 4096)
    match damage:
        case "flip":
            data[page] ^= 255
        case "swap":
            data[: 2 * 4096] = np.roll(data[: 2 * 4096], 4096)
        case "tail":
            data[-1] ^= 1
    path.write_bytes(data.tobytes())
    assert cache.get(key) is None


def test_large_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing has changed; a byte that has, by whatever way, is noticed before its first use."""
    cache, key = Cache(tmp_path), content_key("weights")
    path = cache.put(key, bytes(17 << 20))
    read: list[Path] = []
    real = cache_module.checksum

    def checksum(file: BinaryIO) -> str:
        if os.fstat(file.fileno()).st_size > 1 << 20:
            read.append(path)
        return real(file)

    monkeypatch.setattr(cache_module, "checksum", checksum)
    for _ in range(3):
        assert cache.get(key) == path
    assert not read  # it was, when it was written
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache.get(key) is None and read
    cache.put(key, bytes(17 << 20))
    assert cache.get(key) == path
    os.replace(shutil.copy2(path, tmp_path / "copy"), path)  # another file with the same content
    read.clear()
    assert cache.get(key) == path and read


@pytest.mark.parametrize("mode", [0o777, 0o757])
@pytest.mark.parametrize("place", ["root", "folder"])
def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path, mode: int, place: str) -> None:
    root = tmp_path / "cache"
    cache, key = Cache(root), content_key("x")
    path = cache.put(key, b"code")
    assert root.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0
    (root if place == "root" else path.parent).chmod(mode)
    for use in (lambda: cache.get(key), lambda: cache.put(key, b"code")):
        with pytest.raises(CacheError, match="the cache in .* can be written to by others.*: remove it"):
            use()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    cache, key = Cache(tmp_path / "cache"), content_key("x")
    path = cache.put(key, b"code")
    os.chown(path.parent, 12345, 12345)
    with pytest.raises(CacheError, match="belongs to another user, and code is loaded from there"):
        cache.get(key)


def test_a_failing_writer_leaves_nothing(tmp_path: Path) -> None:
    cache, key = Cache(tmp_path), content_key("x")

    def write(out: Path) -> None:
        out.write_bytes(b"half")
        raise CompileError("no")

    with pytest.raises(CompileError):
        cache.put(key, write)
    assert cache.get(key) is None
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_prune_removes_what_was_unused_for_longest(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=1000)
    keys = [content_key(str(i)) for i in range(4)]
    for age, key in enumerate(keys):
        stamp = time.time() - 10_000 + age
        os.utime(f"{cache.put(key, bytes(300))}.sum", (stamp, stamp))
    assert cache.get(keys[0]) is not None
    assert cache.prune() == 600
    assert [cache.get(key) is not None for key in keys] == [True, False, False, True]
    assert (cache.stats().entries, cache.stats().total_bytes) == (2, 600)
    cache.clear()
    assert cache.stats().entries == 0
    assert cache.get(keys[3]) is None


def test_an_unusable_root_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be used.*TILEWRIGHT_CACHE"):
        Cache(tmp_path / "file").put(content_key("x"), b"1")
    with pytest.raises(CacheError, match="not a cache key"):
        Cache(tmp_path).get("../../etc/passwd")


def _fill(root: str, seed: int, wrong: multiprocessing.Queue[int]) -> None:
    cache = Cache(Path(root))
    order = np.random.default_rng(seed).permutation(np.tile(np.arange(20), 15))
    for i in order.tolist():
        content = bytes([i]) * (1000 + i)
        key = content_key(str(i))
        found = cache.get(key) or cache.put(key, content)
        if found.read_bytes() != content:
            wrong.put(i)


def test_two_processes_fill_one_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    wrong = context.Queue()
    fillers = [context.Process(target=_fill, args=(str(tmp_path), seed, wrong)) for seed in range(2)]
    for filler in fillers:
        filler.start()
    for filler in fillers:
        filler.join(timeout=60)
    assert [filler.exitcode for filler in fillers] == [0, 0]
    assert wrong.empty()
    cache = Cache(tmp_path)
    assert all(cache.get(content_key(str(i))) is not None for i in range(20))
    assert cache.stats().entries == 20


def test_weights_are_stored_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert store_weights(b"abc", cache) == store_weights(bytearray(b"abc"), cache)
    assert store_weights(b"", cache).read_bytes() == b""
    assert cache.stats().entries == 2


@pytest.mark.host
def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    """Whoever is at work holds a lock, which ends with the process; the others' places stay."""
    code = f"""
import os, signal, sys
from pathlib import Path
from tilewright.runtime.cache import Cache
def write(out):
    out.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
Cache(Path({str(tmp_path)!r})).put("{"a" * 16}", write)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert len(list(tmp_path.rglob("tmp-*"))) == 1

    def write(out: Path) -> None:
        Cache(tmp_path).prune()
        assert list(tmp_path.rglob("tmp-*")) == [out.parent]
        out.write_bytes(b"whole")

    Cache(tmp_path).put("b" * 16, write)
    assert list(tmp_path.rglob("tmp-*")) == []
    assert Cache(tmp_path).get("a" * 16) is None


def test_a_place_that_another_process_took_for_abandoned_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come by after the place is made and before it is locked."""
    locks, came = cache_module._locks, []

    def late(file: IO[str], *, waits: bool = False) -> bool:
        if waits and not came:
            came.append(file.name)
            Cache(tmp_path).prune()
            assert not Path(file.name).exists()
        return locks(file, waits=waits)

    monkeypatch.setattr(cache_module, "_locks", late)
    assert Cache(tmp_path).put("a" * 16, b"whole").read_bytes() == b"whole"
    assert came and list(tmp_path.rglob("tmp-*")) == []


def test_an_entry_larger_than_the_limit_stays(tmp_path: Path) -> None:
    """The weights of a large model: they would be gone before the model is used again."""
    cache = Cache(tmp_path, limit_bytes=1000)
    key = content_key("large")
    for number, (name, size) in enumerate((("large", 5000), ("small", 300), ("other", 300))):
        stamp = time.time() - 10_000 + number
        os.utime(f"{cache.put(content_key(name), bytes(size))}.sum", (stamp, stamp))
    assert cache.prune() == 0 and cache.get(key) is not None
