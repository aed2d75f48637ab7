"""Random imperative modules of PyTorch: views, views of views and changes in place, in straight code and inside
branches and loops that data decide; whole and through dynamo, against PyTorch itself.

    python -m tests.fuzz.imperative --programs 1000       by the interpreter
    python -m tests.fuzz.imperative --native 200          as machine code
    ... --aliases                                         with several names for one tensor: more is rightly refused
    ... --idioms                                          of early exits, items, masks, lists (tests/fuzz/idioms.py)
    ... --python                                          of what Python does between tensors (tests/fuzz/python.py)
"""

from __future__ import annotations

import argparse
import linecache
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

import tilewright
from tests.frontend.torch_programs import interpreted
from tests.fuzz.idioms import idioms
from tests.fuzz.python import python
from tilewright.errors import TilewrightError
from tilewright.integrations.torch_backend import tilewright as dynamo_backend
from tilewright.pytorch.backend import compile_for_dynamo
from tilewright.pytorch.module import compile_module

_PARTS = ("[1:]", "[:3]", "[0]", "[2]", "[:, 1]", "[:, ::2]", ".t()", ".diagonal()", "[1:, 1:]", "[::2]", "[..., 2]")
_NEW = ("{v} * 2", "{v} + {w}.sum()", "torch.tanh({v})", "{v}.clone()", "{v} - {w}.mean() * 0.5", "torch.relu({v}) + 1",
        "torch.where({v} > 0, {v}, {w})", "({v} * {w}).clamp(-3, 3)")  # fmt: skip
_SAME = ("{w}", "{w}[:]", "{w}.view(4, 3)")
_CHANGES = ("{p}.add_({c})", "{p}.mul_(0.5)", "{v}[{k}] = {w}.sum() * 0.25", "{v}[:, {k}] += {c}",
            "{p}.copy_({w}.max())", "{v}[{v} > 2] = {c}", "{v} += {w} * 0.125", "{v}[{w}[0].argmax()] = {c}",
            "{v}[{w}[:, 0].argmax(), {k}] -= 1", "{p}.neg_()", "{v}[{w}[:, 1] > 0] = {w}[0]",
            "{p}.fill_({w}[{v}[0].argmax(), 1])")  # fmt: skip
_TESTS = ("{v}.sum() > {c}", "({v} > 0).any()", "{v}[0, 1] < {w}[1, 0]", "not ({v}.max() > {c})",
          "{v}.sum() > 0 and {w}.sum() < {c}", "{v}.abs().max() > 1 or {w}[0].sum() > {c}")  # fmt: skip
_NAMES = ("a", "b", "d", "e")  # all of 4 x 3, so that any program of them runs


@dataclass
class Draw:
    """A program on its way: its lines, and numbers that make it another one than those before."""

    random: random.Random
    new: tuple[str, ...] = _NEW
    lines: list[str] = field(default_factory=list)
    loops: int = 0

    def fill(self, text: str) -> str:
        pick = self.random
        v, w = pick.choice(_NAMES), pick.choice(_NAMES)
        part = f"{v}{pick.choice(_PARTS)}"
        if pick.random() < 0.5:  # a view of a view
            part = f"{v}[1:]{pick.choice(('[0]', '[:, 1]', '.t()[0]', '[1:]', '[:, 1:]', '.t()[1:]'))}"
        return text.format(v=v, w=w, p=part, k=pick.randrange(3), c=pick.randint(-3, 3))

    def add(self, depth: int, text: str) -> None:
        self.lines.append("    " * (depth + 2) + text)

    def block(self, depth: int, count: int) -> None:
        for _ in range(count):
            self.statement(depth)

    def statement(self, depth: int) -> None:
        kinds = ["new", "change", "change", "held"] + (["if", "while", "for"] if depth < 2 else [])
        kind = self.random.choice(kinds)
        if kind == "new":
            self.add(depth, f"{self.random.choice(_NAMES)} = {self.fill(self.random.choice(self.new))}")
        elif kind == "change":
            self.add(depth, self.fill(self.random.choice(_CHANGES)))
        elif kind == "held":  # a view under a name, changed later
            name = f"v{len(self.lines)}"
            self.add(depth, f"{name} = {self.fill('{p}')}")
            self.block(depth, self.random.randint(0, 1))
            self.add(depth, f"{name}.add_({self.random.randint(1, 3)})")
        else:
            self.control(depth, kind)

    def control(self, depth: int, kind: str) -> None:
        if kind == "if":
            self.add(depth, f"if {self.fill(self.random.choice(_TESTS))}:")
            self.block(depth + 1, self.random.randint(1, 2))
            if self.random.random() < 0.5:
                self.add(depth, "else:")
                self.block(depth + 1, self.random.randint(1, 2))
            return
        self.loops += 1
        if kind == "for":
            self.add(depth, f"for t{self.loops} in range({self.random.randint(2, 3)}):")
            self.add(depth + 1, self.fill(f"{{v}}[t{self.loops}] = {{w}}[t{self.loops} - 1] * 0.5"))
            self.block(depth + 1, self.random.randint(0, 2))
            return
        number = f"n{self.loops}"
        is_tensor = self.random.random() < 0.7
        self.add(depth, f"{number} = torch.zeros((), dtype=torch.int64)" if is_tensor else f"{number} = 0")
        test = self.fill(self.random.choice(_TESTS))
        self.add(depth, f"while ({test}) and {number} < {self.random.randint(1, 4)}:")
        self.block(depth + 1, self.random.randint(1, 2))
        self.add(depth + 1, f"{number} = {number} + 1")


def statements(seed: int, aliases: bool = False) -> str:
    """The text of a module of so many random statements; every other one has control that data decide."""
    draw = Draw(random.Random(seed), _NEW + _SAME if aliases else _NEW)
    for name, text in zip(_NAMES, ("x * 1", "y + 0.5", "torch.tanh(x) * 2", "x - y"), strict=True):
        draw.add(0, f"{name} = {text}")
    if draw.random.random() < 0.3:
        draw.add(0, "x[1:][0].add_(1)")
    if seed % 2:
        draw.control(0, draw.random.choice(("if", "while")))
    draw.block(0, draw.random.randint(2, 5))
    chosen = draw.random.sample(_NAMES, 2)
    draw.add(0, f"return {chosen[0]}, {chosen[1]} * 1, {chosen[0]}.sum() + {_NAMES[0]}[1:][0]")
    return "\n".join(["class Drawn(nn.Module):", "    def forward(self, x, y):", *draw.lines, ""])


def module_of(text: str, seed: int) -> type[nn.Module]:
    """The module of a text, with its source where Python looks for it."""
    file = f"program_{seed}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made = ModuleType("drawn")
    made.__dict__.update(torch=torch, nn=nn, __file__=file)
    sys.modules["drawn"] = made
    exec(compile(text, file, "exec"), made.__dict__)
    drawn: type[nn.Module] = made.__dict__["Drawn"]
    return drawn


def arguments(seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + number)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 3, generator=generator) * 2


def judge(text: str, seed: int, compiled: Callable[[nn.Module, Any], Any]) -> tuple[str, str]:
    """Whether it is right, refused, wrong or broken, and why."""
    kind = module_of(text, seed)
    plain = kind().eval()
    try:
        for number in range(4):
            plain(*arguments(seed, number))
    except (RuntimeError, IndexError):
        return "passed over", ""  # by PyTorch itself
    try:
        fast = compiled(kind().eval(), arguments(seed, 0))
        for number in range(4):
            wanted_of, found_of = arguments(seed, number), arguments(seed, number)
            wanted, found = [*plain(*wanted_of), *wanted_of], [*fast(*found_of), *found_of]
            for k, (one, other) in enumerate(zip(found, wanted, strict=True)):
                if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True):
                    return "wrong", f"call {number}, tensor {k}: {one} instead of {other}\n{text}"
    except TilewrightError as error:
        return "refused", str(error)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        return "broken", f"{type(error).__name__}: {str(error)[:300]}\n{text}"
    return "right", ""


def by_dynamo(backend: Any, module: nn.Module, _: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend=backend)


BY_PYTORCH = partial(by_dynamo, "eager")
_FAULTS = ("wrong", "broken")

WAYS: dict[bool, dict[str, Callable[[nn.Module, Any], Any]]] = {
    False: {
        "compile": lambda module, args: compile_module(module, args, interpreted),
        "torch.compile": partial(by_dynamo, partial(compile_for_dynamo, build=interpreted)),
    },
    True: {
        "compile": lambda module, args: tilewright.compile(module, args, threads=1),
        "torch.compile": partial(by_dynamo, dynamo_backend),
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=0, help="so many by the interpreter")
    parser.add_argument("--native", type=int, default=0, help="so many as machine code")
    parser.add_argument("--seed", type=int, default=0, help="the first one's")
    parser.add_argument("--way", choices=["compile", "torch.compile"], help="one of the two")
    parser.add_argument("--aliases", action="store_true", help="with several names for one tensor")
    parser.add_argument("--idioms", action="store_true", help="of early exits, items, masks, lists")
    parser.add_argument("--python", action="store_true", help="of what Python does between tensors")
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    failures = 0
    for is_native, count in ((False, given.programs), (True, given.native)):
        for way, compiled in WAYS[is_native].items():
            if not count or (given.way and way != given.way):
                continue
            found: Counter[str] = Counter()
            for seed in range(given.seed, given.seed + count):
                text = python(seed) if given.python else None
                text = text or (idioms(seed) if given.idioms else statements(seed, given.aliases))
                with torch.no_grad():
                    verdict, why = judge(text, seed, compiled)
                    if verdict in _FAULTS and way != "compile" and judge(text, seed, BY_PYTORCH)[0] in _FAULTS:
                        verdict = "wrong by PyTorch's own backend too"
                found[verdict] += 1
                if why:
                    print(f"{seed}: {verdict}: {why}", flush=True)
            kind = "machine code" if is_native else "the interpreter"
            always = ("right", "refused", *_FAULTS)
            told = ", ".join(f"{found[v]} {v}" for v in (*always, *sorted(found.keys() - {*always})))
            print(f"{way} by {kind}: {told}", flush=True)
            failures += sum(found[v] for v in _FAULTS)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
