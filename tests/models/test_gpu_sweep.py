"""Every kernel planned for a model can be started on the GPU it is planned for: the zoo and shapes beside it at batches
of 1 to 128, in three precisions, for every description of a GPU. All of them are hours of one core: with --all there is
a GPU and a precision for each model and batch, in turn, with --every-seed all; `test_gpu_limits.py` has the sample that
is run each time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # exporters warn about themselves

pytest.importorskip("torch", reason="the zoo needs torch, a development extra")

from tests import gpu_sweep  # noqa: E402
from tilewright.target import by_hand  # noqa: E402


def test_all_descriptions_of_gpus_are_swept() -> None:
    folder = Path(by_hand.__file__).parent / "machines"
    described = {by_hand.from_json(path.read_text()).name for path in folder.glob("*.json")
                 if by_hand.from_json(path.read_text()).kind == "gpu"}  # fmt: skip
    assert described == set(gpu_sweep.GPUS)


def cases() -> Iterator[object]:
    targets = list(product(gpu_sweep.GPUS, gpu_sweep.PRECISIONS))
    for turn, (model, batch) in enumerate(product(gpu_sweep.MODELS, gpu_sweep.BATCHES)):
        for place, (gpu, precision) in enumerate(targets):
            marks = () if place == turn % len(targets) else pytest.mark.every_seed
            yield pytest.param(model, batch, gpu, precision, marks=marks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("swept")


@pytest.mark.part(3)
@pytest.mark.parametrize(("model", "batch", "gpu", "precision"), cases())
def test_all_kernels_can_be_started(model: str, batch: int, gpu: str, precision: str, folder: Path) -> None:
    path = gpu_sweep.exported(model, folder)
    (row,) = gpu_sweep.swept(path, model, [batch], [gpu], [precision])
    assert not row.refused, row.text()
