"""Parts of sweeps beside their copies: results and bytes are the interpreter's, every event is needed, one that is left
out is found, and a device is told the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.gpu.test_cuda_calls import Driver, driver  # noqa: F401
from tests.unit.schedule.test_sweeps import Interpreted, features, interpreted, program_of, unet, whole_numbers
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.swept import Swept
from tilewright.ir.meaning.interpret import evaluate
from tilewright.runtime.cuda_sweeps import CudaSweeps, _boxes
from tilewright.runtime.gpu_model import EmulatedSweeps
from tilewright.runtime.sweep_order import OrderFault, Passage, Queue, SweepStep, check_order, early, steps_of
from tilewright.runtime.swept import Course, SweptModel, SweptResult, copy_together
from tilewright.schedule.sweeps.parts import in_sweeps
from tilewright.schedule.sweeps.search import PartRoom, choose_sweeps
from tilewright.target import machine


def random_passages(rng: np.random.Generator) -> list[Passage]:
    """Rounds of parts over rows of one array after the other, with halos."""
    found = []
    for number in range(int(rng.integers(1, 4))):
        parts = int(rng.integers(1, 6))
        bounds = np.linspace(0, 60, parts + 1).astype(int)
        halo = int(rng.integers(0, 4))
        for a, b in pairwise(bounds):
            taken = slice(max(0, a - halo), min(60, b + halo))
            found.append(Passage(number, ((f"t{number}", (taken,)),), ((f"t{number + 1}", (slice(a, b),)),)))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_every_event_is_needed_and_none_is_missing(seed: int) -> None:
    passages = random_passages(np.random.default_rng([seed, 30]))
    steps = steps_of(passages)
    assert len(steps) == 5 * len(passages)
    check_order(steps, passages)
    done: list[SweepStep] = []
    early(steps, done.append)
    assert sorted(map(id, done)) == sorted(map(id, steps))
    for number, step in enumerate(steps):
        assert all(each < number and steps[each].queue is not step.queue for each in step.waits)
        for each in step.waits:
            fewer = replace(step, waits=tuple(n for n in step.waits if n != each))
            with pytest.raises(OrderFault, match="nothing keeps"):
                check_order([*steps[:number], fewer, *steps[number + 1 :]], passages)


def test_copies_go_on_beside_kernels() -> None:
    """When the first part is computed the second may be there already, and the third packed."""
    passages = [Passage(0, (("x", (slice(n, n + 1),)),), (("y", (slice(n, n + 1),)),)) for n in range(4)]
    steps = steps_of(passages)
    order: list[tuple[Queue, int]] = []
    early(steps, lambda step: order.append((step.queue, step.part)))
    first = order.index((Queue.RUN, 0))
    assert {(Queue.UP, 1), (Queue.PACK, 2), (Queue.PACK, 3)} <= set(order[:first])
    assert (Queue.UP, 2) not in order[:first]


@dataclass
class OnBytes:
    """The interpreter in the place of an emulated model."""

    program: Program

    @property
    def image(self) -> Any:
        sides = [tuple(t.most_bytes for t in side) for side in (self.program.inputs, self.program.outputs)]
        return SimpleNamespace(input_bytes=sides[0], output_bytes=sides[1])

    def run(self, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        def typed(arrays: list[np.ndarray], side: Any) -> list[np.ndarray]:
            return [a.view(t.dtype.numpy).reshape(t.shape) for a, t in zip(arrays, side, strict=True)]

        own = Interpreted(self.program)
        own.run(typed(inputs, self.program.inputs), typed(outputs, self.program.outputs))


def beside_copies(model: Any, share: float) -> tuple[Swept, SweptModel]:
    program = program_of(model)
    largest = max(2 * t.most_bytes for c in program.computes for t in c.outputs)
    chosen = choose_sweeps(program, PartRoom(largest * share, 2, False), machine("h200"))
    assert chosen is not None
    swept = in_sweeps(program, chosen)
    made = interpreted(swept)
    made.device = EmulatedSweeps([OnBytes(p) for sweep in swept.sweeps for p in sweep.programs])  # type: ignore[misc]
    return swept, made


@pytest.mark.parametrize("model, share", [
    (lambda: unet((48, 32)), 0.9), (lambda: features((47, 33), ((4, 2), (8, 2), (8, 1)), True), 0.5),
])  # fmt: skip
def test_parts_beside_copies_are_the_whole(model: Any, share: float) -> None:
    """Bytes and bits are the interpreter's; of every event that is left out the emulator tells."""
    swept, made = beside_copies(model(), share)
    program = swept.program
    inputs = {t.name: whole_numbers(*map(int, t.shape)) for t in program.inputs}  # type: ignore[arg-type]
    right = evaluate(program, inputs)
    found = {t.name: np.empty(t.shape, t.dtype.numpy) for t in program.outputs}  # type: ignore[arg-type]
    copied = made.copied(list(inputs.values()), list(found.values()))
    assert copied == swept.link_bytes == interpreted(swept).copied(list(inputs.values()), list(found.values()))
    for name, array in found.items():
        np.testing.assert_array_equal(array, right[name])
    course = made.course()
    number = next(n for n, step in enumerate(course.steps) if step.queue is Queue.UP and len(step.waits) > 1)
    late = replace(course.steps[number], waits=course.steps[number].waits[1:])
    made._course = replace(course, steps=(*course.steps[:number], late, *course.steps[number + 1 :]))
    with pytest.raises(OrderFault, match="nothing keeps up of part"):
        made.run(list(inputs.values()), list(found.values()))


@pytest.mark.parametrize("shape, own", [
    ((6, 5, 4), ((0, 6), (0, 5), (0, 4))), ((6, 5, 4), ((1, 3), (0, 5), (0, 4))), ((6, 5, 4), ((1, 3), (2, 5), (1, 3))),
    ((2, 3, 5, 6, 7), ((1, 2), (0, 2), (1, 4), (0, 6), (2, 5))),
    ((3, 2, 4, 5, 6), ((0, 3), (1, 2), (1, 3), (2, 4), (0, 5))),
    ((), ()), ((7,), ((2, 2),)),
])  # fmt: skip
def test_a_part_of_a_result_is_boxes(shape: tuple[int, ...], own: tuple[tuple[int, int], ...]) -> None:
    result = SweptResult("y", shape, np.dtype(np.int16))
    array = np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape)
    part = tuple(slice(a, b) for a, b in own)
    right = np.ascontiguousarray(array[part]).tobytes()
    data, found = array.tobytes(), bytearray(len(right))
    for begin, to, (width, height, depth, pitch, rows) in _boxes(result, part):
        for z in range(depth):
            for y in range(height):
                row, at = begin + pitch * (y + rows * z), to + width * (y + height * z)
                found[at : at + width] = data[row : row + width]
    assert bytes(found) == right


def test_a_large_array_is_copied_whole() -> None:
    source = np.random.default_rng(0).integers(0, 1 << 16, (3, 700, 900), np.uint16)[:, 5:, 3:]
    target = np.zeros(source.shape, np.uint16)
    copy_together(target, source)
    np.testing.assert_array_equal(target, source)


def test_a_device_is_told_who_waits_for_whom(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Three streams; a stream waits for events that were recorded before, on others, and host threads too."""
    monkeypatch.setattr("tilewright.runtime.cuda_sweeps.require_memory", lambda *_: None)
    launched: list[tuple[int, tuple[int, ...]]] = []
    lane = SimpleNamespace(graph=SimpleNamespace(launch=lambda stream, pointers: launched.append((stream, pointers))))
    image = SimpleNamespace(arena_bytes=64, input_bytes=(24, 8), output_bytes=(40,))
    model: Any = SimpleNamespace(context=1, image=image, lane_in=lambda arena: lane)
    passages = [Passage(0, (("x", (slice(n, n + 1),)),), (("y", (slice(n, n + 1),)),)) for n in range(5)]
    results = ((SweptResult("y", (4, 5), np.dtype(np.int16)), (slice(0, 4), slice(1, 4))),)
    packed: list[int] = []
    course = Course(tuple(passages), (results,) * 5, steps_of(passages))
    CudaSweeps([model]).sweep(course, lambda part, slots: packed.append(sum(map(len, slots))), lambda *_: None)
    assert packed == [32] * 5 and len(launched) == 5 and launched[0] == launched[2] != launched[1]
    fetched = [given[0] for name, given in driver.said if name == "cuMemcpy3DAsync"]
    assert [(c.WidthInBytes, c.Height, c.srcPitch) for c in fetched] == [(6, 4, 10)] * 5
    recorded: set[Any] = set()
    waits = 0
    for name, given in driver.said:
        if name == "cuEventRecord":
            recorded.add(given[0])
        if name in ("cuStreamWaitEvent", "cuEventSynchronize"):
            assert given[1 if name == "cuStreamWaitEvent" else 0] in recorded
            waits += 1
    steps = course.steps
    hosts = (Queue.PACK, Queue.UNPACK)
    assert waits == sum(steps[each].queue not in hosts for step in steps for each in step.waits)
