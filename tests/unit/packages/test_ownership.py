"""Code of others does not run: files and folders that another user has, or may write to, in the cache and beside it."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tilewright
from tests.unit.packages.test_shipping import expected, rewritten
from tests.unit.packages.test_stored import X, dense
from tilewright import ModelError, Options, ToolError
from tilewright.cli.main import main
from tilewright.runtime import Cache, CacheError, content_key, find_compiler
from tilewright.runtime.cpu_model import BuiltModel, CpuModel
from tilewright.runtime.ownership import ForeignError, complaint, load_library

pytestmark = pytest.mark.host
SOMEBODY = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def give_away(path: Path) -> None:
    os.chown(path, SOMEBODY, SOMEBODY)


def open_up(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


FOREIGN = [pytest.param(give_away, marks=as_root), open_up]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, fresh_cache: Callable[[Path], Path]) -> Path:
    root = tmp_path_factory.mktemp("ownership")
    fresh_cache(root / "cache")
    tilewright.compile(dense(), options=Options(cache_dir=root / "cache", threads=1)).save(root / "dense")
    return root / "dense"


@pytest.fixture
def own_cache(saved: Path, tmp_path: Path) -> Path:
    """A cache that knows the machine and the kernels of `saved`."""
    return Path(shutil.copytree(saved.with_name("cache"), tmp_path / "own cache"))


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def at_load(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is handed to the system's loader."""
    loaded: list[str] = []
    before = ctypes.CDLL.__init__

    def init(self: ctypes.CDLL, name: str, *rest: object, **more: object) -> None:
        loaded.append(name)
        before(self, name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ctypes.CDLL, "__init__", init)
    return loaded


# ---- the cache


@pytest.mark.parametrize("change", FOREIGN)
@pytest.mark.parametrize("which", ["", ".sum"])
def test_a_planted_entry_reads_as_missing_and_heals(
    tmp_path: Path, change: Callable[[Path], None], which: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache, key = Cache(tmp_path / "cache"), content_key("x", suffix=".so")
    path = cache.put(key, b"code")
    change(Path(f"{path}{which}"))
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert cache.get(key) is None
    assert "a file in the cache is not used" in caplog.text
    assert cache.get(content_key("y")) is None
    assert cache.put(key, b"code") == cache.get(key) == path
    assert path.stat().st_uid == os.geteuid() and not path.stat().st_mode & 0o022


def test_an_entry_moved_to_another_key_is_not_that_ones(tmp_path: Path) -> None:
    cache, one, other = Cache(tmp_path / "cache"), content_key("1"), content_key("2")
    path = cache.put(one, b"one")
    to = cache.put(other, b"two")
    for end in ("", ".sum"):
        os.replace(f"{path}{end}", f"{to}{end}")
    assert cache.get(other) is None


def test_what_is_written_is_nobody_elses(tmp_path: Path, own_cache: Path) -> None:
    before = os.umask(0)
    try:
        path = Cache(tmp_path / "deep" / "cache").put(content_key("x"), lambda out: out.write_bytes(b"1") and None)
        tilewright.compile(dense(3.0), options=Options(cache_dir=own_cache, threads=1)).save(tmp_path / "saved")
    finally:
        os.umask(before)
    folders = (own_cache, tmp_path / "saved")
    for made in (path, *path.parents[:3], *folders, *(file for folder in folders for file in folder.rglob("*"))):
        assert not made.stat().st_mode & 0o022, made
    tilewright.load(tmp_path / "saved")


def test_a_cache_that_others_may_replace_is_refused(tmp_path: Path) -> None:
    cache, key = Cache(tmp_path / "open" / "cache"), content_key("x")
    cache.put(key, b"code")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(CacheError, match="can be replaced by others, who may write to .*/open, and code is loaded"):
        cache.get(key)
    (tmp_path / "open").chmod(0o1777)  # as /tmp is: only an owner replaces what is there
    assert cache.get(key) is not None


@pytest.mark.parametrize("change", FOREIGN)
@pytest.mark.parametrize("what", ["library", "weights"])
def test_the_file_that_is_loaded_is_the_one_looked_at(
    own_cache: Path, change: Callable[[Path], None], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it comes into its place after the cache was asked."""
    row = json.loads(next(own_cache.rglob("*.model")).read_text())
    cache = Cache(own_cache)
    files = {name: cache.path_of(row[name]) for name in ("library", "weights")}
    built = BuiltModel(**files)
    planted = Path(shutil.copy(files[what], own_cache / "planted"))
    change(planted)
    os.replace(planted, files[what])
    loaded = at_load(monkeypatch)
    with pytest.raises(ForeignError, match="belongs to another user|can be written to by others"):
        CpuModel(built, 1)
    assert len(loaded) == (what == "weights")


def test_loading_runs_what_was_opened(tmp_path: Path) -> None:
    """Two libraries of one name, one after the other, are two; no name is looked up twice."""
    for value in (1, 2):
        (tmp_path / "f.c").write_text(f"int f(void) {{ return {value}; }}")
        command = [*find_compiler().argv, "-shared", "-fPIC", str(tmp_path / "f.c"), "-o", str(tmp_path / "new.so")]
        assert os.spawnvp(os.P_WAIT, command[0], command) == 0
        os.replace(tmp_path / "new.so", tmp_path / "f.so")
        assert load_library(tmp_path / "f.so", ctypes.CDLL).f() == value


def test_files_of_root_and_of_ones_own_group_are_fine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def says(uid: int, mode: int, gid: int = os.getegid()) -> str | None:
        info = (tmp_path / "file").stat()
        return complaint(os.stat_result((0o100000 | mode, *info[1:4], uid, gid, *info[6:])), tmp_path / "file")

    assert says(0, 0o644) is None and says(os.geteuid(), 0o664) is None
    assert says(SOMEBODY, 0o600) == "belongs to another user"
    assert says(os.geteuid(), 0o646) == "can be written to by others"
    assert says(os.geteuid(), 0o664, SOMEBODY) == "can be written to by others of its group"


# ---- saved models


@pytest.mark.parametrize("change", FOREIGN)
@pytest.mark.parametrize("name", [".", "manifest.json", "libmodel.so", "model.weights", "source", "source/tw_team.c"])
def test_a_directory_of_others_needs_trust(
    copy: Path, name: str, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(copy / name)
    loaded = at_load(monkeypatch)
    with pytest.raises(ModelError, match="a saved model is code.*give trust=True"):
        tilewright.load(copy)
    assert not loaded
    np.testing.assert_allclose(tilewright.load(copy, trust=True)(X)[0], expected(), rtol=1e-6)


def test_a_directory_that_others_may_replace_needs_trust(copy: Path) -> None:
    copy.parent.chmod(0o777)
    with pytest.raises(ModelError, match="can be replaced by others.*trust=True"):
        tilewright.load(copy)
    copy.parent.chmod(0o700)
    tilewright.load(copy)


def test_the_commands_take_trust(copy: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    open_up(copy / "libmodel.so")
    assert main(["run", str(copy)]) == 2
    assert "libmodel.so can be written to by others, and a saved model is code" in capsys.readouterr().err
    assert main(["run", str(copy), "--trust"]) == 0
    assert main(["compile", str(copy), "-o", str(tmp_path / "own"), "--trust"]) == 0
    assert main(["run", str(tmp_path / "own")]) == 0


@pytest.mark.parametrize("change", FOREIGN)
def test_an_inspection_runs_nothing(
    copy: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tilewright.load(copy).explain()
    change(copy)
    (copy / "libmodel.so").unlink()  # a new file: the old one is mapped
    (copy / "libmodel.so").write_bytes(b"anything")
    loaded = at_load(monkeypatch)
    assert main(["explain", str(copy)]) == 0
    assert capsys.readouterr().out == told
    assert not loaded
    assert main(["explain", str(copy), "--measure"]) == 2
    assert "a saved model is code" in capsys.readouterr().err
    assert main(["explain", str(copy), "--json"]) == 2
    (copy / "explain.txt").write_text("lies")
    assert main(["explain", str(copy)]) == 2
    assert not loaded


def test_inspecting_a_model_of_several(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.packages.test_saved_parts import first, picking
    from tilewright.packages.inspection import explain

    model = tilewright.compile(picking(), options=Options(cache_dir=own_cache, threads=1))
    model(first(3))
    model.save(tmp_path / "saved")
    loaded = at_load(monkeypatch)
    told = explain(tmp_path / "saved")
    assert "parts/0" in told and "parts/1" in told and told.count("became") == 2
    assert not loaded


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize("shape", [[3, 400], [3, 3], []])
def test_shapes_that_the_library_does_not_have_are_refused(copy: Path, side: str, shape: list[int]) -> None:
    rewritten(copy, lambda row: row[side][0].update(shape=shape))
    with pytest.raises(ModelError, match="manifest.json and its libmodel.so are not of one model"):
        tilewright.load(copy)


def test_shapes_that_a_cached_library_does_not_have_are_not_used(own_cache: Path) -> None:
    options = Options(cache_dir=own_cache, threads=1)
    (entry,) = own_cache.rglob("*.model")
    row = json.loads(entry.read_text())
    row["inputs"][0][2] = [300, 400]
    Cache(own_cache).put(entry.name, json.dumps(row).encode())
    assert tilewright.compile(dense(), options=options).inputs[0].shape == (3, 4)


def test_a_lock_is_no_way_to_another_file(tmp_path: Path) -> None:
    """Whoever may write to the folder of a cache could have files emptied by its user."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    (tmp_path / "thesis").write_text("years of work")
    (tmp_path / "cache" / "machine.lock").symlink_to(tmp_path / "thesis")
    with pytest.raises(ToolError):
        tilewright.compile(dense(), options=Options(cache_dir=tmp_path / "cache", threads=1))
    assert (tmp_path / "thesis").read_text() == "years of work"
