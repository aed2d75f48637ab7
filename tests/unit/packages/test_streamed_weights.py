"""Weights that are more than memory should hold: read, made and packed piece by piece, and checked before their use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import tilewright
from tests.cpu_stages import lowered
from tilewright.errors import ModelError, TilewrightError
from tilewright.frontend.onnx import mapped
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms import spilled as spilling
from tilewright.ir.forms.tensor import Layout, StorageAxis
from tilewright.lower.weights import PackedWeights, pack_weights
from tilewright.ops import lower
from tilewright.packages import files
from tilewright.runtime import Cache, store_weights
from tilewright.runtime import weights as runtime_weights

WIDTH = 48


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "MAPPED_FROM_BYTES", 64)
    monkeypatch.setattr(mapped, "_READ_WHOLE", 0)
    monkeypatch.setattr(spilling, "_FROM_BYTES", 1)
    monkeypatch.setattr(runtime_weights, "_STREAMED_FROM_BYTES", 1)
    monkeypatch.setattr(files, "_CHECKED_LATER_FROM_BYTES", 1)


def products(count: int = 3, dtype: type = np.float32) -> onnx.ModelProto:
    generator = np.random.default_rng(3)
    arrays = [generator.standard_normal((WIDTH, WIDTH)).astype(dtype) for _ in range(count)]
    tensors = [numpy_helper.from_array(a, f"w{n}") for n, a in enumerate(arrays)]
    nodes = [helper.make_node("MatMul", [f"x{n}", f"w{n}"], [f"x{n + 1}"]) for n in range(count)]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ports = [helper.make_tensor_value_info(name, kind, [5, WIDTH]) for name in ("x0", f"x{count}")]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def with_data_beside(model: onnx.ModelProto, folder: Path) -> Path:
    own = onnx.ModelProto()
    own.CopyFrom(model)  # which is changed
    onnx.save(own, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    return folder / "m.onnx"


def in_one_file(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("written", [with_data_beside, in_one_file])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_large_tensors_stay_in_their_files(
    written: object, dtype: type, everything_is_large: None, tmp_path: Path
) -> None:
    assert callable(written)
    model = products(dtype=dtype)
    graph = load(written(model, tmp_path))
    for tensor in model.graph.initializer:
        found = graph.constants[tensor.name]
        assert isinstance(found, np.memmap)
        np.testing.assert_array_equal(found, numpy_helper.to_array(tensor))


def test_a_model_without_its_data_is_the_same_model(everything_is_large: None, tmp_path: Path) -> None:
    model = products()
    model.metadata_props.add(key="a", value="b")
    read = onnx.load_model_from_string(mapped.model_bytes(in_one_file(model, tmp_path)))
    assert all(mapped.is_mapped(t) and not t.raw_data for t in read.graph.initializer)
    for tensor, own in zip(read.graph.initializer, model.graph.initializer, strict=True):
        tensor.CopyFrom(own)
    assert read == model


@pytest.mark.parametrize("cut", [1, 40, 3000])
def test_damaged_files_are_told_by_protobuf(cut: int, everything_is_large: None, tmp_path: Path) -> None:
    path = in_one_file(products(), tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ModelError, match="is not an ONNX model, or is damaged"):
        load(path)


@pytest.mark.parametrize("where", ["absolute", "above", "link"])
def test_files_elsewhere_are_not_read(where: str, everything_is_large: None, tmp_path: Path) -> None:
    """Neither by an absolute path, as those have that are written by us, nor around the model's folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    path = with_data_beside(products(), folder)
    (folder / "m.data").rename(tmp_path / "secret")
    model = onnx.load(path, load_external_data=False)
    location = {"absolute": str(tmp_path / "secret"), "above": "../secret", "link": "m.data"}[where]
    if where == "link":
        (folder / "m.data").symlink_to(tmp_path / "secret")
    for tensor in model.graph.initializer:
        next(e for e in tensor.external_data if e.key == "location").value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="external data could not be read"):
        load(path)


@pytest.mark.parametrize("entry", [("length", "64"), ("offset", "100000"), ("offset", "-4"), ("length", "many")])
def test_places_outside_a_file_are_refused(
    entry: tuple[str, str], everything_is_large: None, tmp_path: Path
) -> None:
    path = with_data_beside(products(), tmp_path)
    model = onnx.load(path, load_external_data=False)
    next(e for e in model.graph.initializer[1].external_data if e.key == entry[0]).value = entry[1]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(TilewrightError) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_weights_in_pieces_are_what_they_are_at_once(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    arrays = [generator.standard_normal(shape).astype(np.float32) for shape in ((7, 5), (3,), (16, 16))]
    panels = Layout((StorageAxis(1, 4), StorageAxis(0), StorageAxis(1, 1, 4)))
    layouts = [panels, Layout.natural(1), panels]
    made = PackedWeights(tuple(zip(arrays, layouts, strict=True)), 0)
    whole = b""
    for array, layout in zip(arrays, layouts, strict=True):
        whole += layout.pack(array).tobytes()
        whole += bytes(-len(whole) % 64)
    assert b"".join(made) == whole
    assert b"".join(made) == whole, "they can be walked again"
    cache = Cache(tmp_path)
    pieces = PackedWeights(made.parts, len(whole))
    assert store_weights(pieces, cache).read_bytes() == whole


def test_large_weights_are_written_as_they_are_made(everything_is_large: None, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    pieces = PackedWeights(((np.arange(32, dtype=np.float32), Layout.natural(1)),), 128)
    path = store_weights(pieces, cache)
    assert path.read_bytes() == np.arange(32, dtype=np.float32).tobytes()
    assert store_weights(pieces, cache) == path and cache.get(path.name) == path
    assert not list(tmp_path.glob("tmp*")) and len(list(cache.root.rglob("*.weights"))) == 1


def test_packing_needs_no_second_copy() -> None:
    """In the natural order the array itself is written; a tensor of whole panels is copied once, without padding it."""
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert Layout.natural(2).pack(array) is array
    panels = Layout((StorageAxis(1, 4), StorageAxis(0), StorageAxis(1, 1, 4)))
    np.testing.assert_array_equal(panels.pack(array), array.reshape(8, 2, 4).transpose(1, 0, 2))
    piece = next(iter(PackedWeights(((array, Layout.natural(2)),), array.nbytes)))
    assert np.shares_memory(array, np.frombuffer(piece, np.uint8))


def test_places_and_sizes_of_what_is_packed() -> None:
    """What is said of every constant's place is where its piece begins."""
    program = lower(load(products()))
    made = lowered(program)
    offsets, weights = pack_weights(made.loops, program, made.plan)
    whole = b"".join(weights)
    assert len(whole) == weights.nbytes and sorted(offsets.values()) == list(range(0, len(whole), len(whole) // 3))


def test_arrays_in_files_without_a_name(everything_is_large: None) -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    found = spilling.spilled(array.T)
    assert isinstance(found, np.memmap)
    np.testing.assert_array_equal(found, array.T)


@pytest.mark.host
def test_compiled_piece_by_piece(everything_is_large: None, tmp_path: Path) -> None:
    model = products()
    x = np.random.default_rng(1).standard_normal((5, WIDTH)).astype(np.float32)
    wanted = x
    for tensor in model.graph.initializer:
        wanted = wanted @ numpy_helper.to_array(tensor)
    compiled = tilewright.compile(with_data_beside(model, tmp_path))
    np.testing.assert_allclose(compiled(x)[0], wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.host
@pytest.mark.parametrize("call", ["call", "run", "run_into", "address"])
def test_damaged_weights_are_refused_before_their_first_use(
    call: str, everything_is_large: None, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    model = tilewright.compile(products())
    model.save(saved)
    x, y = np.ones((5, WIDTH), np.float32), np.zeros((5, WIDTH), np.float32)
    wanted = model(x)[0]
    np.testing.assert_array_equal(tilewright.load(saved)(x)[0], wanted)
    data = bytearray((saved / "model.weights").read_bytes())
    data[100] ^= 1
    (saved / "model.weights").write_bytes(data)
    loaded = tilewright.load(saved)
    ways = {
        "call": lambda: loaded(x),
        "run": lambda: loaded.run({"x0": x}),
        "run_into": lambda: loaded.run_into([x], [y]),
        "address": lambda: loaded.address_caller()([x.ctypes.data], [y.ctypes.data]),
    }
    for _ in range(2):
        with pytest.raises(ModelError, match=r"model\.weights is damaged"):
            ways[call]()
    assert not y.any()
