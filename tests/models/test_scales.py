"""Rows of very different scales: by default the error of each is bounded by what it depends on, as in other runtimes.

A row is a token or a pixel, over its channels. Whatever else is in the tensor (a neighbour a million times as large,
an infinity), its relative error is at most ten times that of ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

import tilewright
from tests.cpu_stages import Step, evaluated, model_of, programs
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.options import Options
from tilewright.target import machine

onnxruntime = pytest.importorskip("onnxruntime", reason="a second runtime to compare with")

CPUS = ("neoverse_n1", "emerald_rapids", "emerald_rapids_avx512", "avx2_desktop", "apple_arm")
ROUNDING = 3e-7  # of a sum of hundreds of terms in float32: less is luck
WORSE = 10


def _weights(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    sums = {name: int(np.prod(s[1:] if len(s) == 4 else s[:1])) for name, s in shapes.items()}
    return {n: (rng.standard_normal(s) / np.sqrt(sums[n])).astype(np.float32) for n, s in shapes.items()}


def _gelu(given: str, out: str) -> list[Step]:
    return [
        ("Mul", [given, "root"], f"{out}_s", {}), ("Erf", [f"{out}_s"], f"{out}_e", {}),
        ("Add", [f"{out}_e", "one"], f"{out}_o", {}), ("Mul", [given, f"{out}_o"], f"{out}_t", {}),
        ("Mul", [f"{out}_t", "half"], out, {}),
    ]  # fmt: skip


_NUMBERS = {n: np.array(v, np.float32) for n, v in (("root", 0.5**0.5), ("one", 1.0), ("half", 0.5))}


def layers(tokens: int, width: int) -> ModelProto:
    """The two products of a transformer's block that see every token by itself, and their residual."""
    constants = _weights(np.random.default_rng(0), u=(width, 4 * width), v=(4 * width, width), b=(4 * width,))
    steps: list[Step] = [
        ("MatMul", ["x", "u"], "h", {}), ("Add", ["h", "b"], "i", {}), *_gelu("i", "g"),
        ("MatMul", ["g", "v"], "j", {}), ("Add", ["j", "x"], "y", {}),
    ]  # fmt: skip
    shape = (1, tokens, width)
    return model_of(steps, {"x": shape}, {"y": shape}, {**constants, **_NUMBERS})


def transformer(tokens: int, width: int) -> ModelProto:
    """A block as BERT has it: tokens are multiplied as they come and normalised behind the residuals."""
    heads, wide = width // 32, 4 * width
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("wq", "wk", "wv", "wo"), (width, width))
    constants = _weights(np.random.default_rng(0), **shapes, u=(width, wide), v=(wide, width))
    constants |= {n: np.ones(width, np.float32) for n in ("n1", "n2")} | _NUMBERS
    constants |= {"split": np.array([0, 0, heads, 32]), "whole": np.array([0, 0, width])}
    constants["scale"] = np.array(32**-0.5, np.float32)
    steps: list[Step] = []
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        steps += [
            ("MatMul", ["x", f"w{name}"], f"p{name}", {}), ("Reshape", [f"p{name}", "split"], f"r{name}", {}),
            ("Transpose", [f"r{name}"], f"t{name}", {"perm": order}),
        ]  # fmt: skip
    steps += [
        ("MatMul", ["tq", "tk"], "s", {}), ("Mul", ["s", "scale"], "a", {}), ("Softmax", ["a"], "p", {"axis": -1}),
        ("MatMul", ["p", "tv"], "c", {}), ("Transpose", ["c"], "d", {"perm": [0, 2, 1, 3]}),
        ("Reshape", ["d", "whole"], "e", {}), ("MatMul", ["e", "wo"], "o", {}), ("Add", ["o", "x"], "f", {}),
        ("LayerNormalization", ["f", "n1"], "l", {"axis": -1}), ("MatMul", ["l", "u"], "h", {}), *_gelu("h", "g"),
        ("MatMul", ["g", "v"], "j", {}), ("Add", ["j", "l"], "m", {}),
        ("LayerNormalization", ["m", "n2"], "y", {"axis": -1}),
    ]  # fmt: skip
    shape = (1, tokens, width)
    return model_of(steps, {"x": shape}, {"y": shape}, constants)


def convolutional(size: int, channels: int) -> ModelProto:
    """Two windows of three with a residual, as ResNets have them, and a window of one."""
    window = (channels, channels, 3, 3)
    constants = _weights(np.random.default_rng(0), u=window, v=window, w=(channels, channels, 1, 1))
    steps: list[Step] = [
        ("Conv", ["x", "u"], "c", {"pads": [1] * 4}), ("Relu", ["c"], "r", {}),
        ("Conv", ["r", "v"], "d", {"pads": [1] * 4}), ("Add", ["d", "x"], "s", {}), ("Relu", ["s"], "t", {}),
        ("Conv", ["t", "w"], "y", {}),
    ]  # fmt: skip
    shape = (1, channels, size, size)
    return model_of(steps, {"x": shape}, {"y": shape}, constants)


BLOCKS: dict[str, tuple[Callable[[int, int], ModelProto], tuple[int, int], tuple[int, int]]] = {
    "layers": (layers, (64, 256), (128, 768)),
    "transformer": (transformer, (32, 64), (128, 768)),
    "convolutional": (convolutional, (14, 32), (28, 128)),
}


@cache
def block(name: str, full: bool) -> ModelProto:
    made, small, large = BLOCKS[name]
    return made(*(large if full else small))


def scaled(model: ModelProto, scale: str) -> np.ndarray:
    """The input of a block, its rows on scales that are far apart."""
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    rows = np.moveaxis(x, 1, -1) if x.ndim == 4 else x  # a view: channels last
    middle = tuple(n // 2 for n in rows.shape[1:-1])
    match scale:
        case "alternating":
            rows[:, ::2] *= np.float32(1e4)
            rows[:, 1::2] *= np.float32(1e-4)
        case "halves":
            rows[:, : middle[0]] *= np.float32(1e4)
            rows[:, middle[0] :] *= np.float32(1e-4)
        case "one x 1000":
            rows[(0, *middle)] *= np.float32(1e3)
        case "one x 1e6":
            rows[(0, *middle)] *= np.float32(1e6)
        case "infinite":
            rows[(0, *middle, 1)] = np.inf
        case "no number":
            rows[(0, *(m + 1 for m in middle), 0)] = np.nan
    return x


SCALES = ("alternating", "halves", "one x 1000", "one x 1e6", "infinite", "no number")


def errors(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Of every row: how far it is off by its own size; infinite where it is no number and should be one."""
    axis = 1 if wanted.ndim == 4 else -1
    with np.errstate(invalid="ignore"):
        differences = np.linalg.norm(found.astype(np.float64) - wanted, axis=axis)
        relative = differences / np.linalg.norm(wanted, axis=axis)
    fine = np.isfinite(wanted).all(axis=axis)
    return np.where(fine & np.isnan(relative), np.inf, np.where(fine, relative, 0.0))


@cache
def _folded(name: str, full: bool) -> Program:
    return programs(block(name, full), machine("neoverse_n1"))["fold"]


@cache
def expected(name: str, full: bool, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """The exact result, and how far off every row may be."""
    model = block(name, full)
    x = scaled(model, scale)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = evaluated(_folded(name, full), {"x": x}, wide=True)["y"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    theirs = errors(session.run(None, {"x": x})[0], wanted)
    return wanted, WORSE * np.maximum(theirs, ROUNDING)


def check(found: np.ndarray, name: str, full: bool, scale: str) -> None:
    wanted, allowed = expected(name, full, scale)
    over = errors(found, wanted) / allowed
    assert over.max() <= 1, f"a row of {name} is {WORSE * over.max():.3g} times as far off as in ONNX Runtime"


def _options(cache_dir: Path, precision: str | None = None) -> Options:
    return Options(cache_dir=cache_dir, threads=2, precision=precision)


QUICK = "convolutional"
NATIVELY = [
    pytest.param(name, full, marks=[pytest.mark.slow] if full or name != QUICK else [])
    for name in BLOCKS
    for full in (False, True)
]


@pytest.mark.parametrize(("name", "full"), NATIVELY)
def test_code_keeps_rows_apart(name: str, full: bool, kernel_cache: Path) -> None:
    made = tilewright.compile(block(name, full), options=_options(kernel_cache))
    for scale in SCALES:
        check(made(scaled(block(name, full), scale))[0], name, full, scale)


def _chosen(name: str, full: bool, target: str, precision: str | None = None) -> Program:
    options = Options(stop_after="layout", target=target, precision=precision)
    made = build(load(block(name, full), {}), machine(target), options).program
    assert made is not None
    return made


EVERYWHERE = [
    pytest.param(name, full, cpu, marks=[pytest.mark.slow] if full or cpu != "neoverse_n1" or name == QUICK else [])
    for name in BLOCKS
    for full in (False, True)
    for cpu in CPUS
]


@pytest.mark.parametrize(("name", "full", "cpu"), EVERYWHERE)
def test_what_is_chosen_for_any_machine_keeps_rows_apart(name: str, full: bool, cpu: str) -> None:
    program = _chosen(name, full, cpu)
    for scale in SCALES:
        with np.errstate(all="ignore"):
            check(evaluated(program, {"x": scaled(block(name, full), scale)})["y"], name, full, scale)


# what one rounding of an operand is off by, and how many of them a block has one behind the other
NARROW = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "tf32": 2.0**-12}
DEPTH = 16
MACHINES = [
    *(pytest.param(cpu, "bfloat16", marks=() if cpu == "emerald_rapids" else pytest.mark.slow) for cpu in CPUS),
    *(pytest.param("h200", kind, marks=() if kind == "float16" else pytest.mark.slow) for kind in NARROW),
]


def check_narrow(found: np.ndarray, name: str, scale: str, precision: str) -> None:
    wanted, _ = expected(name, False, scale)
    assert errors(found, wanted).max() <= DEPTH * NARROW[precision]


@pytest.mark.parametrize(("target", "precision"), MACHINES)
@pytest.mark.parametrize("name", ["layers", "convolutional"])
def test_narrow_operands_keep_rows_apart(name: str, target: str, precision: str) -> None:
    """As far as the narrow type reaches: float16 ends at 65504."""
    program = _chosen(name, False, target, precision)
    for scale in ("one x 1000", "infinite", "no number", *(["alternating"] if precision == "bfloat16" else [])):
        with np.errstate(all="ignore"):
            found = evaluated(program, {"x": scaled(block(name, False), scale)})["y"]
        check_narrow(found, name, scale, precision)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layers", "convolutional"])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_code_for_gpus_keeps_rows_apart(name: str, precision: str, kernel_cache: Path) -> None:
    options = Options(cache_dir=kernel_cache, target="cuda-emulated", precision=precision)
    made = tilewright.compile(block(name, False), options=options)
    for scale in ("one x 1000", "infinite"):
        found = made(scaled(block(name, False), scale))[0]
        if precision == "float32":
            check(found, name, False, scale)
        else:
            check_narrow(found, name, scale, precision)
