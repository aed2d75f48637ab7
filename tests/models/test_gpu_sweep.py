"""Every kernel planned for a model can be started on the GPU it is planned for: the zoo and shapes beside it at batches
of 1 to 128, in three precisions, for every description of a GPU. Hours of one core in all; `test_gpu_limits.py` has the
sample that is run each time."""

from __future__ import annotations

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


@pytest.mark.parametrize("batch", gpu_sweep.BATCHES)
@pytest.mark.parametrize("model", gpu_sweep.MODELS)
def test_all_kernels_can_be_started(model: str, batch: int, tmp_path: Path) -> None:
    path = gpu_sweep.exported(model, tmp_path)
    rows = list(gpu_sweep.swept(path, model, [batch]))
    assert len(rows) == len(gpu_sweep.GPUS) * len(gpu_sweep.PRECISIONS)
    assert [row.text() for row in rows if row.refused] == []
