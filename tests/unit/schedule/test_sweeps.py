"""Models in sweeps: parts with halos give what the whole gives, to the last bit; what is copied is what was planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import model_of
from tilewright.compiler.swept import round_of
from tilewright.errors import ModelError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.swept import Swept
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops import lower
from tilewright.options import Options
from tilewright.runtime.swept import Array, Runner, SweptModel, SweptResult
from tilewright.schedule.sweeps.parts import in_sweeps
from tilewright.schedule.sweeps.search import PartRoom, choose_sweeps
from tilewright.target import machine
from tilewright.transform.clean.fold import fold_constants

RNG = np.random.default_rng(7)
Step = tuple[str, list[str], str, dict[str, object]]
H200 = machine("h200")


def whole_numbers(*shape: int) -> np.ndarray:
    """Sums of which are exact in any order."""
    return RNG.integers(-2, 3, shape).astype(np.float32)


def conv(source: str, target: str, weights: dict[str, np.ndarray], inner: int, outer: int) -> list[Step]:
    weights[f"w_{target}"] = whole_numbers(outer, inner, 3, 3)
    made: Step = ("Conv", [source, f"w_{target}"], f"c_{target}", {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]})
    return [made, ("Relu", [f"c_{target}"], target, {})]


POOL: dict[str, object] = {"kernel_shape": [2, 2], "strides": [2, 2]}
UP: dict[str, object] = {"kernel_shape": [2, 2], "strides": [2, 2]}


def unet(size: tuple[int, int], batch: int = 1, width: int = 4, dtype: type = np.float32) -> ModelProto:
    """Down twice and up again, each level joined to its counterpart."""
    w: dict[str, np.ndarray] = {}
    steps = [*conv("x", "a", w, 3, width), ("MaxPool", ["a"], "p", POOL), *conv("p", "b", w, width, 2 * width)]
    steps += [("MaxPool", ["b"], "q", POOL), *conv("q", "d", w, 2 * width, 2 * width)]
    for source, skip, target, inner in (("d", "b", "e", 2 * width), ("e", "a", "f", 2 * width)):
        w[f"up_{target}"] = whole_numbers(inner, width, 2, 2)
        wide = width + (2 * width if skip == "b" else width)
        steps += [("ConvTranspose", [source, f"up_{target}"], f"u_{target}", UP),
                  ("Concat", [f"u_{target}", skip], f"j_{target}", {"axis": 1}),
                  *conv(f"j_{target}", target, w, wide, 2 * width)]  # fmt: skip
    w["last"] = whole_numbers(1, 2 * width, 1, 1)
    steps.append(("Conv", ["f", "last"], "y", {"kernel_shape": [1, 1]}))
    constants = {name: array.astype(dtype) for name, array in w.items()}
    return model_of(steps, {"x": (batch, 3, *size)}, {"y": (batch, 1, *size)}, constants)


def features(size: tuple[int, int], widths: Sequence[tuple[int, int]], sides: bool = False) -> ModelProto:
    """Convolutions and pools, as VGG has them; with `sides` each level is an output too."""
    w: dict[str, np.ndarray] = {}
    steps: list[Step] = []
    here, inner, outputs = "x", 3, {}
    h, v = size
    for level, (width, count) in enumerate(widths):
        for n in range(count):
            steps += conv(here, f"t{level}_{n}", w, inner, width)
            here, inner = f"t{level}_{n}", width
        steps.append(("MaxPool", [here], f"p{level}", POOL))
        here, h, v = f"p{level}", h // 2, v // 2
        if sides or level == len(widths) - 1:
            outputs[here] = (1, width, h, v)
    return model_of(steps, {"x": (1, 3, *size)}, outputs, w)


def program_of(model: ModelProto) -> Program:
    return fold_constants(lower(load(model)))


@dataclass
class Interpreted:
    """The interpreter in the place of compiled code."""

    program: Program

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        found = evaluate(self.program, {t.name: a for t, a in zip(self.program.inputs, inputs, strict=True)})
        for tensor, output in zip(self.program.outputs, outputs, strict=True):
            output[...] = found[tensor.name]

    def profile(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[int]:
        return []


def interpreted(swept: Swept) -> SweptModel:
    def opened(program: Program) -> nullcontext[Runner]:
        return nullcontext(Interpreted(program))

    rounds = [round_of(sweep, [lambda p=p: opened(p) for p in sweep.programs]) for sweep in swept.sweeps]  # type: ignore[misc]
    program = swept.program
    shapes = {t.name: SweptResult(t.name, tuple(int(e) for e in t.shape), t.dtype.numpy) for t in program.tensors()}  # type: ignore[arg-type]
    taken = {t.name for sweep in swept.sweeps for p in sweep.programs for t in p.inputs}
    constants = {t.name: a for t, a in program.constants.items() if t.name in taken}
    return SweptModel(rounds, [t.name for t in program.inputs], [t.name for t in program.outputs],
                      list(shapes.values()), constants)  # fmt: skip


def check(model: ModelProto, share: float, target: str = "h200", keeps: bool = False) -> Swept:
    """The model in sweeps within a part of what it holds at once, against the interpreter's answer for all of it."""
    program = program_of(model)
    largest = max(2 * t.most_bytes for c in program.computes for t in c.outputs)
    chosen = choose_sweeps(program, PartRoom(largest * share, 2, keeps), machine(target))
    assert chosen is not None
    swept = in_sweeps(program, chosen)
    assert sum(len(sweep.parts) for sweep in swept.sweeps) > len(swept.sweeps)
    inputs = {t.name: whole_numbers(*map(int, t.shape)) for t in program.inputs}  # type: ignore[arg-type]
    right = evaluate(program, inputs)
    found = {t.name: np.empty(t.shape, t.dtype.numpy) for t in program.outputs}  # type: ignore[arg-type]
    copied = interpreted(swept).copied(list(inputs.values()), list(found.values()))
    assert copied == swept.link_bytes
    for name, array in found.items():
        np.testing.assert_array_equal(array, right[name])
    return swept


@pytest.mark.parametrize("size, batch", [((48, 32), 1), ((44, 36), 1), ((24, 24), 3)])
def test_a_unet_in_parts_is_the_whole(size: tuple[int, int], batch: int) -> None:
    swept = check(unet(size, batch), 0.9)
    assert len(swept.sweeps[-1].programs) <= len(swept.sweeps[-1].parts)


@pytest.mark.parametrize("share, sides", [(0.9, False), (0.5, False), (0.7, True)])
def test_features_at_odd_sizes(share: float, sides: bool) -> None:
    check(features((47, 33), ((4, 2), (8, 2), (8, 1)), sides), share)


def test_what_mixes_all_rows_is_a_sweep_of_its_own() -> None:
    """A mean over the image needs all of it; what is before and behind it goes through in parts."""
    w: dict[str, np.ndarray] = {}
    steps = [*conv("x", "a", w, 3, 16), ("MaxPool", ["a"], "s", {"kernel_shape": [8, 8], "strides": [8, 8]}),
             ("GlobalAveragePool", ["s"], "m", {}), ("Resize", ["s", "", "scale"], "r", {"mode": "nearest"}),
             ("Add", ["r", "m"], "z", {}), *conv("z", "y", w, 16, 4)]  # fmt: skip
    w["scale"] = np.array([1, 1, 8, 8], np.float32)
    swept = check(model_of(steps, {"x": (1, 3, 64, 32)}, {"y": (1, 4, 64, 32)}, w), 0.6)
    assert len(swept.sweeps) > 1


def test_equal_parts_are_one_program() -> None:
    """Blocks of whole grains: the parts between the ends of rows and columns are alike."""
    swept = check(unet((96, 32)), 0.5)
    assert any(len(sweep.programs) < len(sweep.parts) for sweep in swept.sweeps)


LARGE = 8192
VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def halves(model: ModelProto) -> Program:
    """With float16 for every float32, as a model is exported."""
    from onnx import TensorProto, numpy_helper

    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for each in model.graph.initializer:
        each.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(each).astype(np.float16), each.name))
    return program_of(model)


@pytest.mark.parametrize("model", [
    lambda: features((LARGE, LARGE), VGG16[:2]),
    pytest.param(lambda: features((LARGE, LARGE), VGG16), marks=pytest.mark.slow),
    pytest.param(lambda: unet((LARGE, LARGE), width=32), marks=pytest.mark.slow),
])  # fmt: skip
def test_large_images_pass_little_more_than_once(model: Callable[[], ModelProto]) -> None:
    """In 4 GiB, by plan alone: what goes over the link against inputs, outputs and weights once."""
    program = halves(model())
    chosen = choose_sweeps(program, PartRoom(4 << 30, 2, False), H200)
    assert chosen is not None
    into, back = in_sweeps(program, chosen).link_bytes
    weights = sum(a.nbytes for a in program.constants.values())
    bound = sum(t.most_bytes for t in (*program.inputs, *program.outputs)) + weights
    assert into + back + weights <= 1.25 * bound


def test_nothing_fits_nowhere() -> None:
    program = program_of(features((16, 16), ((4, 1),)))
    assert choose_sweeps(program, PartRoom(64, 2, False), H200) is None


def in_sweeps_on_a_cpu(options: Options) -> tuple[tilewright.Model, tilewright.Model]:
    """A model as it is, and in half the memory: rows and columns with halos, where there is no batch to cut."""
    model = features((48, 16), ((8, 2),)).SerializeToString()
    free = tilewright.compile(model, options=options.override(effort="fast"))
    held = free.artifact.runner.arena_bytes + free.artifact.runner.scratch_bytes
    return free, tilewright.compile(model, options=options.override(effort="fast", memory=held // 2))


def test_a_run_on_a_cpu_keeps_to_its_memory() -> None:
    """Compiled: the same bits, and what is told of it."""
    free, bound = in_sweeps_on_a_cpu(Options.from_environment(threads=1))
    assert isinstance(bound.artifact.runner, SweptModel)
    inputs = {"x": whole_numbers(1, 3, 48, 16)}
    np.testing.assert_array_equal(bound.run(inputs)["p0"], free.run(inputs)["p0"])
    assert len(bound.profile(repeat=1).calls) == len(bound.calls)
    assert "to keep to its memory it goes through in" in " ".join(bound.explain().split())


@pytest.mark.slow
def test_a_model_in_sweeps_is_saved_with_one_copy_of_its_weights(tmp_path: Path) -> None:
    """And again from there; a damaged byte of a part and a part that is cut from elsewhere are told."""
    free, bound = in_sweeps_on_a_cpu(Options.from_environment(threads=1))
    bound.save(tmp_path / "first")
    loaded = tilewright.load(tmp_path / "first")
    assert isinstance(loaded, tilewright.Model)
    loaded.save(tmp_path / "second")
    inputs = {"x": whole_numbers(1, 3, 48, 16)}
    expected = free.run(inputs)["p0"]
    for again in (loaded, tilewright.load(tmp_path / "second", threads=2)):
        assert isinstance(again, tilewright.Model)
        np.testing.assert_array_equal(again.run(inputs)["p0"], expected)
        assert again.explain() == bound.explain()
        assert len(again.profile(repeat=1).calls) == len(bound.calls)
    weights = sum(file.stat().st_size for file in (tmp_path / "first").rglob("*.weights"))
    assert weights < 2 * free.artifact.runner.weights.nbytes
    for name, change in (("parts/0/libmodel.so", b"x"), ("explain.txt", b"x"), ("manifest.json", b" ")):
        (tmp_path / "third").mkdir(exist_ok=True)
        loaded.save(tmp_path / "third")
        with (tmp_path / "third" / name).open("r+b") as file:
            file.seek(30)
            file.write(change)
        with pytest.raises(ModelError):
            tilewright.load(tmp_path / "third")


@pytest.mark.slow
def test_a_device_with_little_memory_under_the_emulator(tmp_path: Path) -> None:
    model = features((32, 24), ((8, 1), (8, 1))).SerializeToString()
    free = tilewright.compile(model, target="cuda-emulated", effort="fast")
    image = free.artifact.runner.image
    taken = image.arena_bytes + sum(image.input_bytes) + sum(image.output_bytes) + image.resident_bytes
    bound = tilewright.compile(model, target="cuda-emulated", effort="fast", device_memory=taken * 2 // 3)
    assert isinstance(bound.artifact.runner, SweptModel)
    inputs = {"x": whole_numbers(1, 3, 32, 24)}
    expected = free.run(inputs)["p1"]
    np.testing.assert_array_equal(bound.run(inputs)["p1"], expected)
    bound.save(tmp_path)
    loaded = tilewright.load(tmp_path)
    assert isinstance(loaded, tilewright.Model)
    np.testing.assert_array_equal(loaded.run(inputs)["p1"], expected)
