"""Every supported operator against ONNX's own backend suite: its node cases and its stored small models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test
import pytest
from onnx import numpy_helper

from tests.ops.backend_cases import cases
from tests.ops.running import RunModel

_STORED = Path(onnx.backend.test.__file__).parent / "data"
_FOLDERS = sorted(
    p for kind in ("pytorch-converted", "pytorch-operator") for p in (_STORED / kind).glob("*") if p.is_dir()
)


def compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float, atol: float) -> None:
    for name, want in expected.items():
        got = found[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        if want.dtype.kind in "iub":
            np.testing.assert_array_equal(got, want, err_msg=name)
        else:  # bfloat16 has no kind that NumPy's comparison knows
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol, atol, err_msg=name)


@pytest.mark.parametrize("name", sorted(cases()))
def test_node_case(name: str, run_model: RunModel) -> None:
    case = cases()[name]
    compare(run_model(case.model, case.inputs), case.outputs, case.rtol, case.atol)


@pytest.mark.parametrize("folder", _FOLDERS, ids=lambda p: p.name)
def test_stored_model(folder: Path, run_model: RunModel) -> None:
    model = onnx.load(folder / "model.onnx")
    data = folder / "test_data_set_0"
    constants = {t.name for t in model.graph.initializer}
    names = [i.name for i in model.graph.input if i.name not in constants]
    inputs = {n: _tensor(data / f"input_{k}.pb") for k, n in enumerate(names)}
    expected = {o.name: _tensor(data / f"output_{k}.pb") for k, o in enumerate(model.graph.output)}
    compare(run_model(model, inputs), expected, rtol=1e-3, atol=1e-5)


def _tensor(path: Path) -> np.ndarray:
    return numpy_helper.to_array(onnx.load_tensor(str(path)))
