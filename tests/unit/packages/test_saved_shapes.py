"""Saved models with open shapes: the sets of shapes that were compiled, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import tilewright
from tests.unit.packages.test_saved_parts import model_of, port
from tilewright import InputError, ModelError, OpenModel, OptionError, Options

pytestmark = pytest.mark.host  # what is saved is for this computer
F = TensorProto.FLOAT


@pytest.fixture
def options(kernel_cache: Path) -> Options:
    return Options(cache_dir=kernel_cache, threads=2)


def tiled() -> ModelProto:
    """Shapes by a dimension and by the values of an input; how many are not zero, by the data."""
    nodes = [helper.make_node("Tile", ["x", "r"], ["y"]), helper.make_node("NonZero", ["y"], ["i"])]
    inputs = [port("x", F, ["n", 2]), port("r", TensorProto.INT64, [2])]
    return model_of(nodes, inputs, [port("y", F, None), port("i", TensorProto.INT64, None)])


@pytest.mark.slow
def test_each_set_of_shapes_is_found_again(options: Options, tmp_path: Path) -> None:
    model: Any = tilewright.compile(tiled(), options=options)
    calls = [(np.ones((n, 2), np.float32), np.array([1, k])) for n, k in ((1, 2), (3, 2), (3, 1))]
    wanted = [model(*values) for values in calls]
    model.save(tmp_path / "saved")
    loaded = tilewright.load(tmp_path / "saved", threads=1)
    assert isinstance(loaded, OpenModel) and repr(loaded) == repr(model) and loaded.variants[0].shapes == {"x": (1, 2)}
    for values, results in zip(calls, wanted, strict=True):
        for found, want in zip(loaded(*values), results, strict=True):
            np.testing.assert_array_equal(found, want)
    assert loaded.compilations == 0 and "r = [1, 1]" in loaded.explain()
    with pytest.raises(InputError, match="has this model for x 1x2, r = .*; compile the model file for other inputs"):
        loaded(np.ones((4, 2), np.float32), np.array([1, 1]))
    with pytest.raises(InputError, match="must have shape"):
        loaded(np.ones((4, 3), np.float32), np.array([1, 1]))
    loaded.save(tmp_path / "again")
    np.testing.assert_array_equal(tilewright.load(tmp_path / "again")(*calls[0])[0], wanted[0][0])


def test_a_model_that_was_not_called_says_what_to_do(options: Options, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"call the model with the shapes to save, or compile it with shapes="):
        tilewright.compile(tiled(), options=options).save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["table.json", "table.data", "variants/0/manifest.json"])
def test_a_damaged_file_is_named(options: Options, tmp_path: Path, name: str) -> None:
    model: Any = tilewright.compile(tiled(), options=options)
    model(np.ones((1, 2), np.float32), np.array([1, 2]))
    model.save(tmp_path / "saved")
    path = tmp_path / "saved" / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ModelError, match=f"the file {name} is damaged"):
        tilewright.load(tmp_path / "saved")
