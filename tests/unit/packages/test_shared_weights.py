"""Weights that several compiled forms of a model have in common: once in memory, once in a saved directory, for Python
and for C."""

from __future__ import annotations

import shutil
import subprocess
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tilewright.errors import ModelError
from tilewright.packages.shared import _placed
from tilewright.runtime.toolchain import find_compiler
from tilewright.runtime.weights import MappedWeights, WeightPiece, WeightsError, map_weights, shared_table

ROWS = (2, 3)
WIDTH = 96
SHARED = "shared.weights"


def scaled() -> onnx.ModelProto:
    """A table that every number of rows reads as it is, and a short one."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    bias = rng.standard_normal(WIDTH).astype(np.float32)
    nodes = [helper.make_node("Mul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH, WIDTH]) for name in ("x", "y"))
    constants = [numpy_helper.from_array(table, "w"), numpy_helper.from_array(bias, "b")]
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture(scope="module")
def model(kernel_cache: Path) -> Any:
    """Compiled for two numbers of rows."""
    made = tilewright.compile(scaled(), options=tilewright.Options(cache_dir=kernel_cache, threads=1, effort="fast"))
    for rows in ROWS:
        made(np.ones((rows, WIDTH, WIDTH), np.float32))
    return made


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    model.save(tmp_path / "saved")
    return tmp_path / "saved"


def large(weights: MappedWeights) -> set[int]:
    """Where pieces lie that are worth sharing."""
    return {piece.data.ctypes.data for piece in weights.pieces if piece.data.size >= 4096}


def test_shapes_that_come_later_read_the_weights_of_those_before(model: Any) -> None:
    first, second = model.runners
    found = large(second.weights)
    assert found and found <= large(first.weights.cut(first.weight_begins))


def test_a_directory_has_them_once(model: Any, saved: Path) -> None:
    bytes_of = [sum(map(len, runner.weights)) for runner in model.runners]
    tables = [saved / "variants" / str(k) / "model.weights" for k in range(2)]
    assert (saved / SHARED).stat().st_size < 1.1 * max(bytes_of)
    assert all(table.stat().st_size < 400 for table in tables)
    loaded: Any = tilewright.load(saved)
    for rows in ROWS:
        x = np.random.default_rng(rows).standard_normal((rows, WIDTH, WIDTH)).astype(np.float32)
        np.testing.assert_array_equal(loaded(x)[0], model(x)[0])


def test_a_loaded_model_is_saved_again_whole(saved: Path, tmp_path: Path) -> None:
    loaded: Any = tilewright.load(saved)
    loaded.save(tmp_path / "again")
    one = next(iter(loaded.kept.values())).model
    one.save(tmp_path / "one")
    shutil.rmtree(saved)
    x = np.ones((2, WIDTH, WIDTH), np.float32)
    expected = loaded(x)[0]
    for folder in ("again", "one"):
        np.testing.assert_array_equal(tilewright.load(tmp_path / folder)(x)[0], expected)
    assert (tmp_path / "again" / SHARED).is_file()


@pytest.mark.parametrize("large_from", [0, 1 << 40])
def test_damage_is_refused(saved: Path, monkeypatch: Any, large_from: int) -> None:
    """Large files are looked at before the first call, others when the model is loaded."""
    monkeypatch.setattr("tilewright.packages.files._CHECKED_LATER_FROM_BYTES", large_from)
    data = bytearray((saved / SHARED).read_bytes())
    data[4000] ^= 1
    (saved / SHARED).write_bytes(data)
    with pytest.raises(ModelError, match=r"shared\.weights is damaged"):
        loaded: Any = tilewright.load(saved)
        assert large_from == 0
        loaded(np.ones((2, WIDTH, WIDTH), np.float32))


PROGRAM = """#include "model.h"
#include <stdio.h>
int main(int count, char **arguments)
{
    static float x[2 * 96 * 96], y[2 * 96 * 96];
    for (int i = 0; i < 2 * 96 * 96; i++) x[i] = 1;
    void *inputs[] = {x}, *outputs[] = {y};
    tw_model *model = tw_open(arguments[count - 1], 1);
    if (!model) return 3;
    if (tw_run(model, inputs, outputs) != TW_OK) return 4;
    printf("%.9g %.9g", y[0], y[95]);
    tw_destroy(model);
    return 0;
}
"""


def test_c_programs_find_them(model: Any, saved: Path, tmp_path: Path) -> None:
    folder = saved / "variants" / "0"
    (tmp_path / "main.c").write_text(PROGRAM)
    program = str(tmp_path / "main")
    command = [*find_compiler().argv, str(tmp_path / "main.c"), f"-I{folder}", f"-L{folder}", "-lmodel"]
    subprocess.run([*command, f"-Wl,-rpath,{folder}", "-o", program], check=True)

    def run(weights: str) -> tuple[int, str]:
        done = subprocess.run([program, weights], cwd=folder, capture_output=True, text=True, timeout=20, check=False)
        return done.returncode, done.stdout

    y = model(np.ones((2, WIDTH, WIDTH), np.float32))[0]
    assert run(str(folder / "model.weights")) == run("model.weights") == (0, f"{y[0, 0, 0]:.9g} {y[0, 0, 95]:.9g}")
    table = (folder / "model.weights").read_bytes()
    for spoiled in (b"TWSHARED", table[:-1], table[:40], table.replace(b"shared", b"beside"), table[:24] + table[:16]):
        (folder / "model.weights").write_bytes(spoiled)
        assert run("model.weights") == (3, "")
    (folder / "model.weights").write_bytes(table)
    (saved / SHARED).write_bytes((saved / SHARED).read_bytes() + b"1")
    assert run("model.weights") == (3, "")


def test_what_a_table_tells_is_checked(tmp_path: Path) -> None:
    data = np.arange(256, dtype=np.uint8)
    (tmp_path / "all").write_bytes(data.tobytes())

    def mapped(*places: tuple[int, int], name: str = "all", size: int = 256) -> bytes:
        (tmp_path / "table").write_bytes(shared_table(places, size, name, 192))
        return b"".join(map_weights(tmp_path / "table", 192))

    assert mapped((0, 128), (64, 64), (128, 0)) == b"".join(data[a : a + 64].tobytes() for a in (128, 64, 0))
    for wrong in ([(0, 65)], [(0, 128)], [(64, 0)], [(0, 0), (0, 0)], [(0, -64)], []):
        with pytest.raises(WeightsError, match="does not tell where the weights of this model lie"):
            mapped(*wrong)
    with pytest.raises(WeightsError, match="does not tell"):
        mapped((0, 0), size=320)
    with pytest.raises(WeightsError, match="cannot read"):
        mapped((0, 0), name="none")
    # no table is as large as the weights that it tells of
    assert len(shared_table([(0, 0)], 256, "all", 44)) != 44


def test_only_equal_pieces_are_shared() -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 256, 8192, np.uint8) for _ in range(2))
    almost = second.copy()
    almost[5000] ^= 1  # neither at the begin nor at the end
    theirs = MappedWeights((WeightPiece(0, np.concatenate([first, second, first[:64]])),)).cut([8192, 16384])
    own = MappedWeights(
        (WeightPiece(0, first.copy()), WeightPiece(8192, almost), WeightPiece(16384, first[:64].copy()))
    )
    found = own.shared([theirs])
    assert found.pieces[0].data is theirs.pieces[0].data
    assert found.pieces[1:] == own.pieces[1:] and b"".join(found) == b"".join(own)


def test_weights_that_another_form_has_joined_are_parts_of_its() -> None:
    length = 1 << 14
    joined = np.random.default_rng(0).integers(0, 256, 3 * length, np.uint8)
    apart = [joined[k * length : (k + 1) * length].copy() for k in range(3)]
    other = np.random.default_rng(1).integers(0, 256, length, np.uint8)
    own = MappedWeights(tuple(WeightPiece(k * length, data) for k, data in enumerate([*apart, other])))
    found = own.shared([MappedWeights((WeightPiece(0, joined),))])
    begin = joined.ctypes.data
    assert [p.data.ctypes.data - begin for p in found.pieces[:3]] == [0, length, 2 * length]
    assert found.pieces[3].data is other
    digests = [blake2b(data.data, digest_size=32).digest() for data in (*apart, joined, other)]
    places, written = _placed(dict(zip(digests, (*apart, joined, other), strict=True)))
    assert written == digests[3:] and [places[d] for d in digests] == [0, length, 2 * length, 0, 3 * length]
