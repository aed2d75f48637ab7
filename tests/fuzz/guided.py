"""Inputs that lead to new places are kept and changed further: fuzzing guided by coverage, in Python alone.

    python -m tests.fuzz.guided --seconds 600          both loaders, and what was found is kept in the corpus
    python -m tests.fuzz.guided manifest --seconds 60

Lines that run are seen by a trace of the files under test. Two loaders: `manifest`, the text files of a saved directory
(their sums mended after each change, since damage is another test's), and `model`, an ONNX file up to its Graph. A
TilewrightError in one line, or a model that runs, is right; every other exception is a find, and a signal ends it all:
it runs in a process of its own. Its corpus lies beside this file; inputs that lead nowhere new are not in it."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import tilewright
from tilewright import Options, TilewrightError
from tilewright.frontend.onnx.model import load as load_onnx
from tilewright.packages.manifest import _sum
from tilewright.runtime.cache import checksum

CORPUS = Path(__file__).with_name("corpus")
PACKAGE = str(Path(tilewright.__file__).parent)
ROOMS = {
    "manifest": ("packages", "dynamic/saved_", "dynamic/encoding", "runtime/cpu_model", "runtime/weights", "api.py"),
    "model": ("frontend",),
}  # fmt: skip
_NUMBERS = (0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, 10**30, 0.5, 1e308)
_VALUES = (None, True, False, "", "x", "../x", "float32", "int64", [], {}, [0], [[]], {"tuple": []}, *_NUMBERS)


class Coverage:
    """Lines of the files under test that ran, by file and number."""

    def __init__(self, rooms: tuple[str, ...]) -> None:
        self._prefixes = tuple(f"{PACKAGE}/{room}" for room in rooms)
        self.lines: set[tuple[str, int, int]] = set()

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._prefixes):
            return None
        name, last = frame.f_code.co_filename, [frame.f_lineno]

        def local(frame: FrameType, event: str, _argument: Any) -> Any:
            if event == "line":
                self.lines.add((name, last[0], frame.f_lineno))  # from where to where, so that branches count
                last[0] = frame.f_lineno
            return local

        return local

    def of(self, work: Callable[[], None]) -> set[tuple[str, int, int]]:
        self.lines = set()
        sys.settrace(self._trace)
        try:
            work()
        finally:
            sys.settrace(None)
        return self.lines


class Manifests:
    """Saved directories, as the texts in them."""

    def __init__(self, root: Path, cache: Path) -> None:
        from tests.unit.packages.test_saved_parts import first, picking
        from tests.unit.packages.test_stored import X, dense
        from tests.unit.schedule.test_sweeps import in_sweeps_on_a_cpu, whole_numbers

        self._root, options = root, Options(cache_dir=cache, threads=1)
        tilewright.compile(dense(), options=options).save(root / "plain")
        parts = tilewright.compile(picking(), options=options)
        parts(first(3))
        parts.save(root / "parts")
        several = tilewright.compile(_open_relu(), options=options)
        several(np.ones(3, np.float32))
        several.save(root / "shapes")
        in_sweeps_on_a_cpu(options)[1].save(root / "sweeps")
        self._inputs = {"plain": X, "parts": first(3), "shapes": np.ones(3, np.float32),
                        "sweeps": whole_numbers(1, 3, 48, 16)}  # fmt: skip
        texts = {"plain": ("manifest.json",), "parts": ("manifest.json", "plan.json"),
                 "shapes": ("manifest.json", "table.json"), "sweeps": ("manifest.json",)}  # fmt: skip
        self.first = [
            json.dumps([kind, {name: json.loads((root / kind / name).read_text()) for name in names}]).encode()
            for kind, names in texts.items()
        ]
        for data in self.first:
            self.try_it(data)  # as they are, they run

    def try_it(self, data: bytes) -> None:
        try:
            kind, texts = json.loads(data)
            inputs = self._inputs[kind]
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        if not isinstance(texts, dict):
            return
        place = self._root / "tried"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self._root / kind, place)
        manifest = texts.get("manifest.json")
        for name, value in texts.items():
            if name in ("plan.json", "table.json"):
                (place / name).write_text(json.dumps(value))
                if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict):
                    with (place / name).open("rb") as file:
                        manifest["files"][name] = checksum(file)
        if isinstance(manifest, dict):
            manifest = {k: v for k, v in manifest.items() if k != "manifest_sha256"}
            manifest["manifest_sha256"] = _sum(manifest)
        (place / "manifest.json").write_text(json.dumps(manifest))
        model = tilewright.load(place, threads=1)
        repr(model), model.explain()
        model(inputs)

    def changed(self, data: bytes, rng: random.Random) -> bytes:
        value = json.loads(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            _change(value[1], rng)
        return json.dumps(value).encode()


def _open_relu() -> Any:
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "open", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _change(value: Any, rng: random.Random) -> None:
    """One place of a tree of lists and dicts: another value, one less, one more, or one from elsewhere."""
    places = []
    waiting = [value]
    while waiting:
        inside = waiting.pop()
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        places += [(inside, key) for key in keys]
        waiting += [inside[key] for key in keys if isinstance(inside[key], dict | list)]
    if not places:
        return
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, rng.choice(_VALUES))
        case 2:
            other, there = rng.choice(places)
            if json.dumps(other[there]) and len(json.dumps(other[there])) < 4000:
                holder[key] = json.loads(json.dumps(other[there]))
        case 3 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += rng.choice((-1, 1, 64, -64))
        case _:
            holder[key] = rng.choice(_VALUES)


class Models:
    """ONNX files, as bytes."""

    def __init__(self, _root: Path, _cache: Path) -> None:
        from tests.fuzz.mutations import files

        self.first = [data for data in files() if len(data) < 2000]

    def try_it(self, data: bytes) -> None:
        load_onnx(data)

    def changed(self, data: bytes, rng: random.Random) -> bytes:
        made = bytearray(data or b"\0")
        for _ in range(rng.choice((1, 1, 2, 4))):
            place = rng.randrange(len(made) or 1)
            match rng.randrange(5):
                case 0:
                    del made[place : place + rng.randint(1, 8)]
                case 1:
                    made[place:place] = rng.randbytes(rng.randint(1, 8))
                case 2:
                    there = rng.randrange(len(made) or 1)
                    made[place:place] = made[there : there + rng.randint(1, 32)]
                case _ if made:
                    made[min(place, len(made) - 1)] = rng.choice((0, 1, 2, 8, 10, 127, 128, 255, rng.randrange(256)))
        return bytes(made)


LOADERS = {"manifest": Manifests, "model": Models}


def fuzz(
    name: str, seconds: float, seed: int, root: Path, cache: Path, *, keep: bool, count: int = 1 << 60
) -> list[str]:
    """Finds, a line each; `keep` writes inputs that led to new places to the corpus."""
    rng, loader, coverage = random.Random(seed), LOADERS[name](root, cache), Coverage(ROOMS[name])
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    known = [*loader.first, *(path.read_bytes() for path in sorted(folder.iterdir()))]
    seen: set[tuple[str, int, int]] = set()
    finds: dict[str, str] = {}
    tried, start = 0, time.process_time()
    waiting = list(known)
    while (waiting or time.process_time() - start < seconds) and tried < count + len(known):
        data = waiting.pop() if waiting else loader.changed(rng.choice(known), rng)
        tried += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            new = coverage.of(lambda data=data: _judge(loader.try_it, data, finds)) - seen  # type: ignore[misc]
        if new and not any(data is each for each in known):
            known.append(data)
            if keep and len(data) < 4000:
                (folder / f"{len(list(folder.iterdir())):04d}").write_bytes(data)
        seen |= new
    print(f"{name}: {tried} inputs, {len(known)} kept, {len(seen)} ways between lines, {len(finds)} finds", flush=True)
    return list(finds.values())


def _judge(work: Callable[[bytes], None], data: bytes, finds: dict[str, str]) -> None:
    try:
        work(data)
    except TilewrightError as error:
        if "\n" in str(error):
            finds.setdefault(f"lines {type(error)}", f"more than a line: {error!r}")
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
        where = f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno}" if frames else "outside"
        text = " ".join(str(error).split())[:200]
        finds.setdefault(f"{type(error).__name__} {where}", f"{type(error).__name__} at {where}: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loader", nargs="?", choices=tuple(LOADERS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, default=1 << 60, help="so many inputs beside the corpus")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="add inputs that led to new places to the corpus")
    parser.add_argument("--cache", type=Path, help="where kernels are found and kept")
    given = parser.parse_args()
    finds = []
    for name in [given.loader] if given.loader else LOADERS:
        with tempfile.TemporaryDirectory(prefix="guided-") as folder:
            cache = given.cache or Path(folder, "cache")
            finds += fuzz(name, given.seconds, given.seed, Path(folder), cache, keep=given.keep, count=given.count)
    print(*finds, sep="\n")
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
