"""Memory that a run may allocate: plans that keep to it, the batch in parts where none does, and what an error says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import tilewright
from tests.cpu_stages import model_of
from tilewright.errors import OptionError
from tilewright.options import checked_size

BATCH, ROWS, WIDTH = 8, 64, 96


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each result is read by all that follow, so that much is alive at a time."""
    rng = np.random.default_rng(0)
    names = [f"x{n}" for n in range(4)]
    steps: list[tuple[str, list[str], str, dict[str, object]]] = []
    for n in range(3):
        steps += [("MatMul", [names[n], f"w{n}"], f"h{n}", {}), ("Softmax", [f"h{n}"], names[n + 1], {"axis": 1})]
    steps.append(("Sum", names[1:], "y", {}))
    constants = {f"w{n}": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) for n in range(3)}
    path = tmp_path_factory.mktemp("within") / "layers.onnx"
    onnx.save(model_of(steps, {"x0": (BATCH, ROWS, WIDTH)}, {"y": (BATCH, ROWS, WIDTH)}, constants), path)
    return path


def test_a_run_allocates_no_more_than_it_may(layers: Path, tmp_path: Path) -> None:
    """The batch goes through in parts, with the same results to the last bit; also from a saved directory."""
    free = tilewright.compile(layers, threads=1, effort="fast")
    runner = free.artifact.runner
    taken = runner.arena_bytes + runner.scratch_bytes
    assert taken > BATCH * ROWS * WIDTH * 4
    bound = tilewright.compile(layers, threads=1, effort="fast", memory=taken // 3)
    small = bound.artifact.runner
    assert small.arena_bytes + small.scratch_bytes <= taken // 3
    assert bound.artifact.batches in (4, 8) and bound.inputs == free.inputs and bound.outputs == free.outputs
    inputs = free.random_inputs(1)
    right = free.run(inputs)["y"]
    np.testing.assert_array_equal(bound.run(inputs)["y"], right)
    assert len(bound.profile(repeat=1).calls) == len(bound.calls)
    assert f"in {bound.artifact.batches} parts" in bound.explain()
    bound.save(tmp_path / "saved")
    again = tilewright.load(tmp_path / "saved")
    np.testing.assert_array_equal(again.run(inputs)["y"], right)


def test_more_than_there_is_changes_nothing(layers: Path) -> None:
    model = tilewright.compile(layers, threads=1, effort="fast", memory="1GiB")
    assert model.artifact.batches == 1


def test_what_cannot_be_met_says_what_it_takes(layers: Path) -> None:
    with pytest.raises(OptionError) as error:
        tilewright.compile(layers, threads=1, effort="fast", memory="1KiB")
    told = str(error.value)
    assert told.startswith("memory=1024 is not enough: a run allocates ") and "give it 1MiB" in told
    least = int(told.split("allocates ")[1].split()[0])
    model = tilewright.compile(layers, threads=1, effort="fast", memory=least)
    assert model.artifact.batches == BATCH
    with pytest.raises(OptionError, match=f"allocates {least} bytes at the least"):
        tilewright.compile(layers, threads=1, effort="fast", memory=least - 1)


def test_other_targets_are_refused(layers: Path) -> None:
    with pytest.raises(OptionError, match="memory is what a run on a CPU may allocate"):
        tilewright.compile(layers, target="cuda-emulated", effort="fast", memory="1GiB")


@pytest.mark.parametrize("text, size", [("4GiB", 4 << 30), ("1.5 MiB", 3 << 19), ("2KB", 2000), ("64", 64), (7, 7)])
def test_sizes(text: str | int, size: int) -> None:
    assert checked_size("memory", text) == size


@pytest.mark.parametrize("text", ["", "4 gigs", "0", 0, -1, True, 1.5, None])
def test_no_sizes(text: object) -> None:
    with pytest.raises(OptionError, match="it is a size, as '4GiB', '512MiB' or 1048576"):
        checked_size("memory", text)
