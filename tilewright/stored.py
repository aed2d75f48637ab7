"""Whole compiled models in the cache: the same model, options, machine and compiler give back the same files, and
nothing of the pipeline runs. An entry names the library and the weights, which are entries of their own."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import ModelError, ToolError
from tilewright.ir import dtypes
from tilewright.ir.loops import Call
from tilewright.options import Options
from tilewright.runtime.cache import Cache, CacheError, content_key
from tilewright.runtime.cpu_model import BuiltModel, CpuModel
from tilewright.runtime.toolchain import ToolchainError, find_compiler, this_machine
from tilewright.target import Target

if TYPE_CHECKING:
    from tilewright.compiler import Artifact

Shapes = Mapping[str, int | tuple[int, ...]]
Port = tuple[str, dtypes.DType, tuple[int, ...]]

# Not part of what is compiled: where it is kept, who watches, how many threads run it.
_IRRELEVANT = ("cache_dir", "progress", "threads")
_LIBRARIES = ("numpy", "onnx", "ml_dtypes")
_EXTERNAL = b"location"  # every tensor kept in another file has an entry of this name


@dataclass(frozen=True)
class Source:
    """A model as it was given, and what tells it apart from every other; `stamp` changes when its file does."""

    model: Any
    key: str
    stamp: tuple[int, ...]


@dataclass(frozen=True)
class StoredArtifact:
    """A model from the cache. What the compiler makes on the way is made again when somebody asks for it."""

    target: Target
    runner: CpuModel
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    calls: tuple[Call, ...]
    rebuild: Callable[[], Artifact]

    @cached_property
    def whole(self) -> Artifact:
        return replace(self.rebuild(), runner=self.runner)


def identify(model: Any, shapes: Shapes, target: Target, options: Options) -> Source | None:
    """The model's place in the cache; None where it has none: when stages are looked at, changed or left out, when
    tensors lie in files of their own, and on targets whose code is made elsewhere."""
    if target.kind != "cpu" or options.dump or options.stop_after or options.overrides or options.verify:
        return None
    before = _stamp(model)
    digest = _digest(model)
    if digest is None:
        return None
    chosen = {f.name: repr(getattr(options, f.name)) for f in fields(options) if f.name not in _IRRELEVANT}
    try:
        compiler = find_compiler(options.compiler)
    except ToolchainError:
        return None  # loading what is there needs no compiler, but telling whether it is the right one does
    about = (sorted(shapes.items()), sorted(chosen.items()), target.describe(), this_machine().identity,
             compiler.argv, compiler.version, sys.version, _versions(), _own_code())  # fmt: skip
    return Source(model, content_key("model", digest, json.dumps(about, default=str), suffix=".model"), before)


def find(source: Source, target: Target, options: Options, build: Callable[[], Artifact]) -> StoredArtifact | None:
    """The model, loaded; None where the cache has not all of it. `build` makes again what is not stored."""
    cache = Cache(options.cache_dir)
    try:
        entry = cache.get(source.key)
        if entry is None:
            return None
        row = json.loads(entry.read_text())
        library, weights = cache.get(row["library"]), cache.get(row["weights"])
    except (CacheError, OSError) as error:
        raise ToolError(str(error)) from error
    if library is None or weights is None:
        return None
    runner = CpuModel(BuiltModel(library, weights), options.threads or os.cpu_count() or 1)
    calls = tuple(Call(kernel, tuple(arguments), step) for kernel, arguments, step in row["calls"])
    return StoredArtifact(target, runner, _ports(row["inputs"]), _ports(row["outputs"]), calls,
                          lambda: _rebuild(source, build))  # fmt: skip


def keep(source: Source, artifact: Artifact, options: Options) -> None:
    """Store what was made of the source, unless its file has changed meanwhile."""
    if not isinstance(artifact.runner, CpuModel) or _stamp(source.model) != source.stamp:
        return
    built = artifact.runner.built
    row = {
        "library": built.library.name,
        "weights": built.weights.name,
        "inputs": [(port.name, port.dtype.name, port.shape) for port in artifact.inputs],
        "outputs": [(port.name, port.dtype.name, port.shape) for port in artifact.outputs],
        "calls": [(call.kernel, call.arguments, call.step) for call in artifact.calls],
    }
    try:
        Cache(options.cache_dir).put(source.key, json.dumps(row).encode())
    except CacheError as error:
        raise ToolError(str(error)) from error


def _rebuild(source: Source, build: Callable[[], Artifact]) -> Artifact:
    if _stamp(source.model) != source.stamp:
        raise ModelError(f"'{source.model}' has changed since it was compiled; compile it again")
    return build()


def _ports(rows: Sequence[Any]) -> tuple[Port, ...]:
    return tuple((name, dtypes.by_name(dtype), tuple(shape)) for name, dtype, shape in rows)


def _stamp(model: Any) -> tuple[int, ...]:
    """Changes when the model's file does; models in memory stay as they are."""
    if not isinstance(model, Path):
        return ()
    try:
        info = model.stat()
    except OSError as error:
        raise ModelError(f"model file '{model}' cannot be read: {error.strerror}") from error
    return (info.st_ino, info.st_size, info.st_mtime_ns)


def _digest(model: Any) -> bytes | None:
    """Of the model's bytes; None where they are not all of the model, or cannot be had."""
    if isinstance(model, Path):
        try:
            with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return None if data.find(_EXTERNAL) >= 0 else sha256(data).digest()
        except (OSError, ValueError):  # unreadable or empty: the reader of models says what is wrong
            return None
    if isinstance(model, bytes):
        return None if _EXTERNAL in model else sha256(model).digest()
    return None


def _versions() -> list[str]:
    return [metadata.version(name) for name in _LIBRARIES]


def _own_code() -> str:
    """Of every file of this package: a change anywhere in the compiler may change what it makes."""
    root = Path(__file__).parent
    digest = sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".c", ".h")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
