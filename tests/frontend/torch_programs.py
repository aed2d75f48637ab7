"""Random programs of views and changes in place, as PyTorch runs them and compiled: values, what the caller sees
changed, and who shares memory with whom."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tilewright.dynamic.parts import in_parts
from tilewright.errors import CutError, UnsupportedError
from tilewright.frontend.pytorch.tensors import array_of, tensor_of
from tilewright.ir.forms.graph import Graph
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops.lower import lower
from tilewright.options import Options

Tensors = tuple[torch.Tensor, ...]


class Interpreted:
    """A Graph run by the interpreter in the place of a compiled model: aliasing is made around it, whatever it runs."""

    takes_rooms = False

    def __init__(self, graph: Graph) -> None:
        if graph.part is not None and graph.part.rooms and not self.takes_rooms:
            raise UnsupportedError("what is called with tensors has the sizes of these")
        self.program = lower(graph, regions=True)
        self.names = [tensor.name for tensor in self.program.inputs]
        self.outputs: Sequence[Any] = [SimpleNamespace(name=name) for name in self.program.output_names]
        self.calls: Sequence[Any] = ()

    def __call__(self, /, *args: Any) -> list[Any]:
        arrays = [array_of(x) if isinstance(x, torch.Tensor) else x for x in args]
        given = dict(zip(self.names, (np.asarray(a, order="C") for a in arrays), strict=True))
        found = evaluate(self.program, given)
        return [tensor_of(np.array(found[name])) for name in (t.name for t in self.program.outputs)]

    def address_caller(self) -> None:
        return None

    def explain(self) -> str:
        return "interpreted"


class InterpretedPart(Interpreted):
    """The same as a part of a model whose shapes data decide: it gives arrays."""

    takes_rooms = True

    def __call__(self, /, *args: Any) -> list[Any]:
        return [array_of(x) for x in super().__call__(*args)]


def interpreted(graph: Graph) -> Any:
    """A Graph run by the interpreter, in parts where it has to be."""
    try:
        return Interpreted(graph)
    except CutError as error:
        return in_parts(graph, {}, {}, Options(), error, InterpretedPart)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Program:
    """Statements on a list of tensors, which begins with the arguments; the results are some of them at the end."""

    text: str
    run: Callable[..., Tensors]


_VIEWS = (
    "v[{i}][{k}]", "v[{i}][..., {k}:]", "v[{i}][:, {k}]", "v[{i}].t()", "v[{i}].unsqueeze(0)", "v[{i}].reshape(-1)",
    "v[{i}][:, ::2]", "v[{i}].diagonal()", "v[{i}].flatten()", "v[{i}].detach()", "v[{i}].expand(2, *v[{i}].shape)",
    "v[{i}].transpose(0, -1)",
)  # fmt: skip
_NEW = ("v[{i}] * 2", "v[{i}] + v[{i}].sum()", "v[{i}].clone()", "torch.relu(v[{i}])", "v[{i}].sum(-1)")
_CHANGES = ("v[{i}].add_({c})", "v[{i}].mul_(2)", "v[{i}].copy_(v[{j}].sum())", "v[{i}][{k}] = {c}",
            "v[{i}].add_(v[{j}].sum())", "v[{i}].neg_()")  # fmt: skip


def make(seed: int, breaks: bool) -> tuple[Program, Callable[[], Tensors]]:
    """A program with its arguments, which overlap in every other one; seeds whose program PyTorch refuses are passed
    over."""
    draw = random.Random(seed)
    while True:
        program = _drawn(draw, breaks)
        overlap = draw.choice(("apart", "apart", "same", "rows", "view"))

        def arguments(overlap: str = overlap) -> Tensors:
            base = torch.arange(12.0).reshape(4, 3) / 4 - 1
            match overlap:
                case "same":
                    return base, base
                case "rows":
                    return base[:3], base[1:]
                case "view":
                    return base[1:], base.t()
            return base[:3].clone(), base[1:].clone()

        try:
            program.run(*arguments())
        except (RuntimeError, IndexError):
            continue
        return program, arguments


def _drawn(draw: random.Random, breaks: bool) -> Program:
    lines, count = ["v = list(args)"], 2
    for _ in range(draw.randint(3, 8)):
        kind = draw.choice(("view", "view", "new", "change", "change", "break" if breaks else "view"))
        fill = {"i": draw.randrange(count), "j": draw.randrange(count), "k": draw.randrange(2), "c": draw.randint(1, 9)}
        if kind == "break":
            lines.append(draw.choice(("print(end='')", "if v[{i}].sum() > 0: v[{j}].add_({c})")).format(**fill))
            continue
        table = {"view": _VIEWS, "new": _NEW, "change": _CHANGES}[kind]
        line = draw.choice(table).format(**fill)
        lines.append(line if kind == "change" else f"v.append({line})")
        count += kind != "change"
    results = [f"v[{draw.randrange(count)}]" for _ in range(draw.randint(1, 3))] + ["v[-1] * 1"]
    text = "def program(*args):\n    " + "\n    ".join([*lines, f"return {', '.join(results)}"])
    scope: dict[str, Any] = {"torch": torch}
    exec(text, scope)
    return Program(text, scope["program"])


def same(program: Program, fast: Callable[..., Any], arguments: Callable[[], Tensors]) -> str | None:
    """How a compiled program differs from PyTorch; None where it does not. What it gives is changed afterwards, so
    that memory which is shared, or is not, shows."""
    wanted_args, found_args = arguments(), arguments()
    wanted = [*program.run(*wanted_args), *wanted_args]
    found = [*fast(*found_args), *found_args]
    for number in range(-1, len(wanted)):
        if number >= 0:
            try:
                wanted[number].add_(number + 1)
            except RuntimeError:  # one number of memory, many times
                continue
            found[number].add_(number + 1)
        for k, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-5, atol=1e-5):
                return f"tensor {k} after change {number}: {one} instead of {other}\n{program.text}"
    shares = [[one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in tensors]
              for tensors in (found, wanted) for one in tensors]  # fmt: skip
    if shares[: len(found)] != shares[len(found) :]:
        return f"memory is shared otherwise\n{program.text}"
    return None
