"""Mutated model files through the whole compiler: an answer or one clean line, in bounded time and memory.

    python -m tests.fuzz.mutations --count 20000 --jobs 4

Each mutation is compiled as far as source text; of every RUN_EVERY that get so far one also becomes machine code and
runs. A mutation is a number: `--first N --count 1` does that one again."""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

import tilewright
from tests.errors.test_bad_models import CASES, IMAGE, WEIGHTS, F, integers, model, one, pool
from tilewright import Model, Options, TilewrightError
from tilewright.integrations.onnx_suite import CaseResult, _run_all
from tilewright.target import machine

SECONDS = 120.0  # on a machine that is shared; each takes a fraction of one
MEMORY = 6 << 30
RUN_EVERY = 25
_BITS = [0, 1, 2, 3, 127, 128, 255]
_KINDS = {FieldDescriptor.TYPE_INT32: "int32"}
_OPERATORS = sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain})


@cache
def files() -> tuple[bytes, ...]:
    """Good models of every kind, and the bad ones of the tests of errors."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    product = {"x": (F, [2, 3]), "z": (F, [3, 4])}

    def port(name: str, kind: int = F, shape: Any = None) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    whole, flag = TensorProto.INT64, TensorProto.BOOL
    branch = helper.make_graph([helper.make_node("Neg", ["x"], ["t"])], "then", [], [port("t")])
    other = helper.make_graph([helper.make_node("Abs", ["x"], ["e"])], "else", [], [port("e")])
    steps = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["co"]), helper.make_node("Add", ["s", "s"], ["so"])], "body",
        [port("i", whole, []), port("c", flag, []), port("s", F, [2, 3])],
        [port("co", flag, []), port("so", F, [2, 3])],
    )  # fmt: skip
    chain = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1] * 4), helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("GlobalAveragePool", ["b"], ["c"]), helper.make_node("Flatten", ["c"], ["d"]),
        helper.make_node("Gemm", ["d", "v", "u"], ["e"], transB=1), helper.make_node("Softmax", ["e"], ["y"], axis=-1),
    ]  # fmt: skip
    attention = [
        helper.make_node("MatMul", ["x", "w"], ["q"]), helper.make_node("Transpose", ["q"], ["k"], perm=[1, 0]),
        helper.make_node("MatMul", ["q", "k"], ["s"]), helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "q"], ["y"]),
    ]  # fmt: skip
    recurrent = {"w": floats(1, 12, 2), "r": floats(1, 12, 3)}
    good = [
        one("Conv", IMAGE, ["x", "w"], WEIGHTS, pads=[1] * 4),
        pool(),
        one("Softmax", axis=1),
        one("Einsum", product, ["x", "z"], equation="ij,jk->ik"),
        one("Slice", given=["x", "a", "b"], constants={"a": integers(0), "b": integers(1)}),
        one("Resize", IMAGE, ["x", "", "s"], {"s": np.array([1, 1, 2, 2], np.float32)}),
        one("LayerNormalization", given=["x", "s"], constants={"s": np.ones(3, np.float32)}),
        one("CumSum", given=["x", "k"], constants={"k": integers(1)}),
        one("Gather", given=["x", "k"], constants={"k": integers(1, 0)}),
        one("Pad", given=["x", "k"], constants={"k": integers(1, 0, 0, 2)}),
        one("Relu", {"x": (F, ["batch", 3])}),
        one("Reshape", {"x": (F, [2, 3]), "s": (whole, [2])}, ["x", "s"]),
        one("If", {"x": (F, [2, 3]), "flag": (flag, [])}, ["flag"], then_branch=branch, else_branch=other),
        one("Loop", given=["n", "", "x"], constants={"n": np.array(3, np.int64)}, body=steps),
        one("LSTM", {"x": (F, [3, 1, 2])}, ["x", "w", "r"], recurrent, hidden_size=3),
        model(chain, IMAGE, constants={**WEIGHTS, "v": floats(3, 2), "u": floats(3)}),
        model(attention, {"x": (F, [4, 3])}, constants={"w": floats(3, 5)}),
    ]
    bad = [case for case, _ in CASES.values()]
    # the good ones oftener: a mutation of a bad one seldom gets beyond its error
    return tuple(m if isinstance(m, bytes) else m.SerializeToString() for m in (*good * 8, *bad))


def mutation(number: int) -> bytes:
    """The same file for the same number: of every four one has bytes changed, the others fields."""
    rng = random.Random(number)
    data = rng.choice(files())
    return with_other_bytes(data, rng) if number % 4 == 0 else with_other_fields(data, rng)


def with_other_fields(data: bytes, rng: random.Random) -> bytes:
    """Numbers, names and types changed; parts taken out, repeated or exchanged. What stays is a message."""
    try:
        changed = ModelProto.FromString(data)
    except DecodeError:
        return with_other_bytes(data, rng)
    for _ in range(rng.randint(1, 3)):
        places = list(_fields(changed))
        message, about = rng.choice(places)
        if about.is_repeated:
            _change_list(getattr(message, about.name), about, rng, places)
        elif about.message_type is None:
            setattr(message, about.name, _other(getattr(message, about.name), about, rng, places))
        else:
            message.ClearField(about.name)
    return changed.SerializeToString()


def _fields(message: Any) -> Iterator[tuple[Any, Any]]:
    """Every field that is set, with the message it is in."""
    for about, value in message.ListFields():
        yield message, about
        if about.message_type is not None:
            for part in value if about.is_repeated else (value,):
                yield from _fields(part)


def _change_list(values: Any, about: Any, rng: random.Random, places: list[tuple[Any, Any]]) -> None:
    place = rng.randrange(len(values))
    match rng.randrange(4):
        case 0:
            del values[place]
        case 1:
            values.append(values[place])
        case 2 if len(values) > 1:
            items = list(values)
            rng.shuffle(items)
            copies = [type(i).FromString(i.SerializeToString()) if about.message_type else i for i in items]
            del values[:]
            values.extend(copies)
        case _:
            if about.message_type is None:
                values[place] = _other(values[place], about, rng, places)


def _other(value: Any, about: Any, rng: random.Random, places: list[tuple[Any, Any]]) -> Any:
    """Another value of a field: an interesting one, or that of a field of its kind elsewhere."""
    if isinstance(value, float):
        return rng.choice([0.0, -1.0, 0.5, 1e30, float("inf"), float("nan"), value * 2])
    if about.enum_type is not None:
        return rng.choice([v.number for v in about.enum_type.values])
    if isinstance(value, int):
        bits = 31 if "32" in _KINDS.get(about.type, "") else 63
        return rng.choice([0, 1, 2, 3, 7, 16, -1, -2, 1000, (1 << bits) - 1, -(1 << bits), value + 1, value - 1])
    if isinstance(value, bytes):
        return value[: rng.randrange(len(value) + 1)] + rng.randbytes(rng.randrange(3))
    texts = [t for m, f in places if f.type == about.type and not f.is_repeated for t in [getattr(m, f.name)]]
    return rng.choice([*texts, "", rng.choice(_OPERATORS), "x", "y"])


def with_other_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(changed))
        match rng.randrange(7):
            case 0:
                del changed[place : place + rng.randint(1, 3)]
            case 1:
                changed[place:place] = rng.randbytes(rng.randint(1, 3))
            case 2:
                source = rng.randrange(len(changed))
                changed[place : place + 4] = changed[source : source + 4]
            case _:
                changed[place] = rng.choice([*_BITS, rng.randrange(256)])
        if not changed:
            break
    return bytes(changed)


@dataclass
class Mutations:
    """Runs a mutation by its number; `how` is what became of it."""

    folder: Path
    is_limited: bool = field(default=False)

    def run(self, name: str) -> CaseResult:
        if not self.is_limited:
            self.is_limited = True
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return CaseResult(name, self.attempt(int(name)))
        except TilewrightError as error:
            return (
                CaseResult(name, "refused") if "\n" not in str(error) else CaseResult(name, reason=f"lines: {error!r}")
            )
        except BaseException as error:  # whatever it is, it is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            first = str(error).splitlines()[:1]
            return CaseResult(
                name, reason=f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {first}"
            )

    def attempt(self, number: int) -> str:
        options = Options(cache_dir=self.folder, threads=1)
        data = mutation(number)
        tilewright.compile(data, options=options.override(stop_after="source"))
        if number % RUN_EVERY:
            return "compiled"
        made: Any = tilewright.compile(data, options=options)
        if isinstance(made, Model):
            made(**made.random_inputs())
        return "ran"


def run_mutations(first: int, count: int, jobs: int, folder: Path, tell: Any = None) -> list[CaseResult]:
    machine("cpu", cache_dir=folder)  # measured once, before time is limited
    names = [str(number) for number in range(first, first + count)]
    found = _run_all(Mutations(folder), names, jobs, SECONDS, tell)  # type: ignore[arg-type]
    return [found[name] for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = run_mutations(arguments.first, arguments.count, arguments.jobs, Path(folder))
    counts = {how: sum(r.how == how for r in results) for how in ("refused", "compiled", "ran", "")}
    for result in results:
        if result.reason:
            print(f"mutation {result.name}: {result.reason}")
    print(f"{len(results)} mutations: {counts['refused']} refused in one line, {counts['compiled']} compiled, "
          f"{counts['ran']} ran, {counts['']} failed")  # fmt: skip
    return 1 if counts[""] else 0


if __name__ == "__main__":
    sys.exit(main())
