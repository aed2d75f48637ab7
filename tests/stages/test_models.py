"""The zoo's small models after every stage, on the interpreter and natively, against their float64 references."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the zoo needs torch, a development extra")

from bench import zoo
from tests.cpu_stages import Lowered, evaluated, lowered, programs
from tilewright.ir.forms.compute import Program
from tilewright.ir.meaning.traffic import count_traffic

QUICK = ("mobilenet_v2", "bert_base", "lstm", "mmoe")
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in zoo.MODELS]
SCHEDULES = ("none", "connected")
# The newer exporter takes long: here one of its models, and all with --all; tests/ops has them on the interpreter.
QUICK_EXPORTS = {*((n, "torchscript") for n in QUICK), ("mmoe", "dynamo")}
EXPORTS = [
    pytest.param(n, e, marks=() if (n, e) in QUICK_EXPORTS else pytest.mark.slow)
    for e in zoo.EXPORTERS
    for n in zoo.MODELS
]
LIMIT = 1e-5  # what the full models must hold; the small ones stay far below

pytestmark = pytest.mark.filterwarnings("ignore")  # exporters warn about themselves


@dataclass(frozen=True)
class Export:
    path: Path
    inputs: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]
    torch_error: float
    stages: dict[str, Program]

    @cache  # noqa: B019 (an export lives as long as the session)
    def lowered(self, schedule: str) -> Lowered:
        return lowered(self.stages["layout"], schedule)

    __hash__ = object.__hash__


@pytest.fixture(scope="session")
def export(zoo_file):
    @cache
    def make(name: str, exporter: str = "torchscript") -> Export:
        path = zoo_file(name, exporter)
        module, inputs = zoo.build(name, "small")
        reference = zoo.reference(module, inputs)
        own = zoo.relative_error(zoo.float32_outputs(module, inputs), reference)
        return Export(path, inputs, reference, own, programs(path))

    return make


@pytest.mark.parametrize(("name", "exporter"), EXPORTS)
def test_programs(export, name: str, exporter: str) -> None:
    """After lowering, folding and layouts the interpreter gives the same answers, in float32 and in float64."""
    made = export(name, exporter)
    for stage, program in made.stages.items():
        assert zoo.relative_error(evaluated(program, made.inputs), made.reference) < LIMIT, stage
    wide = evaluated(made.stages["layout"], made.inputs, wide=True)
    assert zoo.relative_error(wide, evaluated(made.stages["program"], made.inputs, wide=True)) < 5e-7
    # exporters fold batch norms in float32, which is as far from the model as PyTorch's own answer is
    assert zoo.relative_error(wide, made.reference) < max(5e-7, 2 * made.torch_error)


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "exporter"), EXPORTS)
def test_loops(export, name: str, exporter: str, schedule: str) -> None:
    made = export(name, exporter)
    assert zoo.relative_error(made.lowered(schedule).on_loops(made.inputs), made.reference) < LIMIT


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "exporter"), EXPORTS)
def test_machine_code(export, name: str, exporter: str, schedule: str, kernel_cache: Path) -> None:
    made = export(name, exporter)
    found = made.lowered(schedule).natively(made.inputs, kernel_cache)
    assert zoo.relative_error(found, made.reference) < LIMIT
    for output, array in made.reference.items():
        assert found[output].shape == array.shape


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_connecting_moves_less(export, name: str) -> None:
    """Fewer kernels, and fewer bytes of intermediates counted from the Loops."""
    plain, connected = (export(name).lowered(s) for s in SCHEDULES)
    assert len(connected.plan.kernels) < len(plain.plan.kernels)
    assert len(connected.loops.calls) < len(plain.loops.calls)
    assert count_traffic(connected.loops).intermediate < count_traffic(plain.loops).intermediate


@pytest.mark.parametrize("name", NAMES)
def test_unfused_is_one_kernel_a_compute(export, name: str) -> None:
    plain = export(name).lowered("none").plan
    assert all(len(k.leaves) == 1 and not k.held for k in plain.kernels)
    assert not any(leaf.epilogue or leaf.composed for k in plain.kernels for leaf in k.leaves)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_a_bit(export, name: str, kernel_cache: Path) -> None:
    made = export(name)
    low = made.lowered("connected")
    runs = [low.natively(made.inputs, kernel_cache, threads) for threads in (1, 2, 3)]
    for output, array in runs[0].items():
        for other in runs[1:]:
            assert array.tobytes() == other[output].tobytes(), output
