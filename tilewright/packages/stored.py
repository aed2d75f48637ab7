"""Whole compiled models in the cache: the same model, options, machine and compiler give back the same files, and
nothing of the pipeline runs. An entry names the library and the weights, which are entries of their own."""

from __future__ import annotations

import json
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from hashlib import blake2b, file_digest, sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tilewright.backend import keeps_models
from tilewright.errors import ModelError, ToolError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.loops import Call
from tilewright.ir.forms.tensor import Layout
from tilewright.options import Options
from tilewright.packages.inspection import EXPLANATION, PLAN
from tilewright.runtime.cache import Cache, CacheError, content_key
from tilewright.runtime.cores import usable_cores
from tilewright.runtime.cpu_model import BuiltModel, CpuModel, fits
from tilewright.runtime.ownership import ForeignError
from tilewright.runtime.permissions import PermissionRefused
from tilewright.runtime.toolchain import ToolchainError, find_compiler, this_machine
from tilewright.target import Target
from tilewright.tile_graph.plan.form import layouts_from_json, layouts_to_json

if TYPE_CHECKING:
    from tilewright.compiler.pipeline import Artifact

Texts = Mapping[str, str]
Shapes = Mapping[str, int | tuple[int, ...]]
Port = tuple[str, dtypes.DType, tuple[int, ...]]

# Not part of what is compiled: where it is kept, who watches, how many threads run it.
_IRRELEVANT = ("cache_dir", "progress", "threads", "tune_watch", "variants")
_LIBRARIES = ("numpy", "onnx", "ml_dtypes")
_HEAVY_BYTES = 32 << 20
_EXTERNAL = b"location"  # every tensor kept in another file has an entry of this name


@dataclass(frozen=True)
class ModelSource:
    """A model as it was given, the files it lies in and what tells it apart from every other; `stamp` changes when the
    files do, or a model in memory."""

    model: Any
    files: tuple[Path, ...]
    key: str
    stamp: tuple[int | bytes, ...]

    @property
    def has_changed(self) -> bool:
        return _stamp(self.model, self.files) != self.stamp


@dataclass(frozen=True)
class StoredArtifact:
    """A model from the cache. What the compiler makes on the way is made again when somebody asks for it."""

    target: Target
    runner: CpuModel
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    calls: tuple[Call, ...]
    packed: tuple[tuple[str, Layout], ...]
    rebuild: Callable[[], Artifact]
    read_texts: Callable[[], Texts | None]

    @cached_property
    def texts(self) -> Texts | None:
        """What a saved model has as text, by file; None where the cache has it no more."""
        return self.read_texts()

    @cached_property
    def whole(self) -> Artifact:
        return replace(self.rebuild(), runner=self.runner)


def identify(
    model: Any, shapes: Shapes, target: Target, options: Options, values: Mapping[str, NDArray[Any]] | None = None
) -> ModelSource | None:
    """The model's place in the cache; None where it has none: when stages are looked at, changed or left out, when
    measuring may go on, and on targets whose code is made elsewhere."""
    if options.is_tuned:
        return None
    if not keeps_models(target) or options.dump or options.stop_after or options.overrides or options.verify:
        return None
    cache = Cache(options.cache_dir)
    files = _files(model, cache)
    before = _stamp(model, files) if isinstance(model, Path) else ()
    digest = _digest(model, files, cache)
    if digest is None:
        return None
    if not isinstance(model, Path | bytes | Graph):
        before = (digest,)
    chosen = {f.name: repr(getattr(options, f.name)) for f in fields(options) if f.name not in _IRRELEVANT}
    try:
        compiler = find_compiler(options.compiler)
    except ToolchainError:
        return None  # loading what is there needs no compiler, but telling whether it is the right one does
    given = sorted((n, a.dtype.name, a.shape, a.tobytes().hex()) for n, a in (values or {}).items())
    about = (sorted(shapes.items()), given, sorted(chosen.items()), target.describe(), this_machine().identity,
             compiler.argv, compiler.version, sys.version, _versions(), own_code())  # fmt: skip
    key = content_key("model", digest, json.dumps(about, default=str), suffix=".model")
    return ModelSource(model, files, key, before)


def unchanged(model: Any, options: Options) -> Callable[[], None]:
    """Complains when the model, in its files or in memory, is no longer what it is now."""
    files = _files(model, Cache(options.cache_dir))
    before = _stamp(model, files)

    def check() -> None:
        if _stamp(model, files) != before:
            raise _changed(model)

    return check


def find(source: ModelSource, target: Target, options: Options, build: Callable[[], Artifact]) -> StoredArtifact | None:
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
    try:
        built = BuiltModel(library, weights, tuple(row["permissions"]))
        runner = CpuModel(built, options.threads or usable_cores())
    except (PermissionRefused, ForeignError) as error:
        raise ToolError(str(error)) from error
    inputs, outputs = _ports(row["inputs"]), _ports(row["outputs"])
    if not fits(runner, inputs, outputs):
        return None
    calls = tuple(Call(kernel, tuple(arguments), step) for kernel, arguments, step in row["calls"])
    return StoredArtifact(target, runner, inputs, outputs, calls, layouts_from_json(row["packed"]),
                          lambda: _rebuild(source, build), partial(_texts, source, target, options))  # fmt: skip


def is_heavy(artifact: Artifact) -> bool:
    """Whether the forms of the model, each of which holds its weights, had better go."""
    return isinstance(artifact.runner, CpuModel) and artifact.runner.weights.nbytes >= _HEAVY_BYTES


def slimmed(source: ModelSource, artifact: Artifact, options: Options, build: Callable[[], Artifact]) -> StoredArtifact:
    """A model as if it came from the cache: without every form of it, each of which holds its weights."""
    inputs, outputs = (tuple((p.name, p.dtype, p.shape) for p in side) for side in (artifact.inputs, artifact.outputs))
    return StoredArtifact(artifact.target, artifact.runner, inputs, outputs, artifact.calls, artifact.packed,
                          lambda: _rebuild(source, build),
                          partial(_texts, source, artifact.target, options))  # fmt: skip


def keep(source: ModelSource, artifact: Artifact, options: Options, texts: Callable[[], Texts]) -> None:
    """Store what was made of the source, and the `texts` about it, unless its file has changed meanwhile."""
    if not isinstance(artifact.runner, CpuModel) or source.has_changed:
        return
    built = artifact.runner.built
    cache = Cache(options.cache_dir)
    if not all(cache.path_of(file.name) == file for file in (built.library, built.weights)):
        return  # there was no room for them
    row = {
        "library": built.library.name,
        "weights": built.weights.name,
        "permissions": built.permissions,
        "inputs": [(port.name, port.dtype.name, port.shape) for port in artifact.inputs],
        "outputs": [(port.name, port.dtype.name, port.shape) for port in artifact.outputs],
        "packed": layouts_to_json(artifact.packed),
        "calls": [(call.kernel, call.arguments, call.step) for call in artifact.calls],
    }
    try:
        cache.put(_texts_key(source), _packed(dict(texts())))
        cache.put(source.key, json.dumps(row).encode())
    except CacheError as error:
        raise ToolError(str(error)) from error


def _texts_key(source: ModelSource, kind: str = "texts") -> str:
    return content_key(kind, source.key, suffix=".texts")


def _packed(texts: Texts) -> bytes:
    return zlib.compress(json.dumps(texts).encode(), 1)


def _texts(source: ModelSource, target: Target, options: Options) -> Texts | None:
    """All of them: the explanation is written when they are first asked for, and kept from then on."""
    from tilewright.packages.explained import FORMS, explanation

    cache = Cache(options.cache_dir)

    def read(kind: str) -> dict[str, str] | None:
        entry = cache.get(_texts_key(source, kind))
        found: dict[str, str] | None = None if entry is None else json.loads(zlib.decompress(entry.read_bytes()))
        return found

    try:
        texts = read("texts")
        if texts is None or FORMS not in texts:
            return texts
        forms = texts.pop(FORMS)
        explained = read("explained")
        if explained is None:
            explained = {EXPLANATION: explanation(forms, texts[PLAN], target)}
            cache.put(_texts_key(source, "explained"), _packed(explained))
        return texts | explained
    except (CacheError, OSError) as error:
        raise ToolError(str(error)) from error


def _rebuild(source: ModelSource, build: Callable[[], Artifact]) -> Artifact:
    if source.has_changed:
        raise _changed(source.model)
    return build()


def _changed(model: Any) -> ModelError:
    what = f"'{model}'" if isinstance(model, Path) else "the model"
    return ModelError(f"{what} has changed since it was compiled; compile it again")


def _ports(rows: Sequence[Any]) -> tuple[Port, ...]:
    return tuple((name, dtypes.by_name(dtype), tuple(shape)) for name, dtype, shape in rows)


def _stamp(model: Any, files: Sequence[Path]) -> tuple[int | bytes, ...]:
    """Changes when the model's files do, or the model itself where a caller may change it in memory."""
    if not isinstance(model, Path):
        return () if isinstance(model, bytes | Graph) else (_memory_digest(model) or b"",)
    found: list[int | bytes] = []
    for file in files:
        try:
            info = file.stat()
        except OSError as error:
            raise ModelError(f"model file '{file}' cannot be read: {error.strerror}") from error
        found += (info.st_ino, info.st_size, info.st_mtime_ns)
    return tuple(found)


def _digest(model: Any, files: Sequence[Path], cache: Cache) -> bytes | None:
    """Of the model's bytes; None where they cannot be had: the reader of models says what is wrong."""
    if isinstance(model, bytes):
        return _blake2b(model).digest()
    if isinstance(model, Graph):
        return _graph_digest(model)
    if not isinstance(model, Path):
        return _memory_digest(model)
    found: list[bytes] = []
    for file in files:
        try:
            with file.open("rb") as opened:
                if not os.fstat(opened.fileno()).st_size:
                    return None
                found.append(bytes.fromhex(_file_digest(opened, cache)))
        except OSError:
            return None
    return found[0] if len(found) == 1 else sha256(b"".join(found)).digest()


_blake2b = partial(blake2b, digest_size=32)  # faster than SHA-256 where processors have no instructions for that


def _file_digest(file: BinaryIO, cache: Cache) -> str:
    try:
        return cache.digest(file, "blake2b", lambda: file_digest(file, _blake2b).hexdigest())  # type: ignore[arg-type]
    except CacheError as error:
        raise ToolError(str(error)) from error


def _graph_digest(graph: Graph) -> bytes:
    """Of a Graph: its nodes, inputs and outputs as text, and the bytes of its constants."""
    digest = sha256(repr((graph.name, graph.inputs, graph.outputs, tuple(graph.values.items()))).encode())
    if graph.part is not None:
        digest.update(repr((sorted(graph.part.sequences.items()), sorted(graph.part.absent), graph.part.asks)).encode())
        forms = (sorted(part.items(), key=repr) for part in (graph.part.forms, graph.part.begins))
        digest.update(repr((graph.part.rooms, *forms)).encode())
        for number, array in sorted(graph.part.decided.items()):
            digest.update(repr(number).encode())
            digest.update(_array_digest(array))
    for node in graph.nodes:
        digest.update(repr((node.op, node.domain, node.version, node.name, node.inputs, node.outputs)).encode())
        for name, value in sorted(node.attributes.items()):
            digest.update(name.encode())
            if isinstance(value, Graph):
                digest.update(_graph_digest(value))
            else:
                digest.update(_array_digest(value) if isinstance(value, np.ndarray) else repr(value).encode())
    for name, array in graph.constants.items():
        digest.update(name.encode())
        digest.update(_array_digest(array))
    return digest.digest()


def _array_digest(array: np.ndarray) -> bytes:
    digest = _blake2b(f"{array.dtype.str}{array.dtype.name}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def _memory_digest(model: Any) -> bytes | None:
    from google.protobuf.message import EncodeError, Message

    if not isinstance(model, Message):
        return None
    try:
        return sha256(model.SerializeToString(deterministic=True)).digest()
    except (EncodeError, ValueError):  # more than the format can write, or not complete
        return None


def _files(model: Any, cache: Cache) -> tuple[Path, ...]:
    """The file of a model, then those that its tensors lie in; their names are kept, since finding them takes a parser
    that takes longer to load than the model."""
    if not isinstance(model, Path):
        return ()
    try:
        with model.open("rb") as file:
            names = json.loads(cache.digest(file, "locations", lambda: json.dumps(_locations(model, file, cache))))
    except (OSError, ValueError):
        return (model,)
    except CacheError as error:
        raise ToolError(str(error)) from error
    beside = (model.parent / name for name in names)
    return (model, *(path for path in beside if path.is_file()))


def _locations(model: Path, file: BinaryIO, cache: Cache) -> list[str]:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(_EXTERNAL) < 0:
            return []
    key = content_key("locations", _file_digest(file, cache), suffix=".files")
    if (entry := cache.get(key)) is not None:
        found: list[str] = json.loads(entry.read_text())
        return found
    from tilewright.frontend.onnx.survey import locations

    names = locations(model)
    cache.put(key, json.dumps(names).encode())
    return names


def _versions() -> list[str]:
    return [metadata.version(name) for name in _LIBRARIES]


def own_code() -> str:
    """Of every file of this package: a change anywhere in the compiler may change what it makes."""
    root = Path(__file__).parents[1]
    digest = sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".c", ".h")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
