"""Random modules of what Python does between tensors: values of `and` and `or`, assignments to several targets, names
bound in tests, lists and objects that functions and branches change, types of numbers, `else` of loops, `try`; for
`python -m tests.fuzz.imperative --python`."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.fuzz.idioms import Idioms

_TESTS = (
    "n > {k} and (n := n - 1) >= 0",
    "{v}.sum() > {c} or flips({w})",
    "flips({v}) and {w}[0, 0] < {f}",
    "n in (1, 3, {n})",
    "n % 5 not in {{0, 2}}",
    "-3 < {v}.mean() < (s := {w}.max())",
    "n is not None and n > 2",
    "isinstance(n, int) and n > {k}",
    "not n or {v}.max() > {f}",
    "({v} > {f}).any().item() is True",
    "{v}[{k}].sum() > (s or {c})",
    "type({v}[0, {k}].item()) is float and {v}[0, {k}] > 0",
)
_SIMPLE = (
    "n = int(({v} > {f}).sum()) or {n}",
    "n = n and {k} + 1",
    "s = {v}[{k}].clamp(min=0).sum() or {w}.max()",
    "s = s + n % 3",
    "{v}[i % 3], i = {w}[{k}] * {f}, i + 1",
    "i, {v}[i % 3] = {k}, {w}[{k}] * {f}",
    "{v}, {w} = {w} * {f}, {v} + 1",
    "{v}[i % 3] = i = {n}",
    "{v}[{k}], *rest = {w}[0], 1, 2",
    "kept[n % 3].mul_({f})",
    "kept[n % 3] += {v}[0]",
    "kept[n % 3] = {v}[{k}] * {f}",
    "{v}[{k}] = kept[n % 3]",
    "put(box, {v}[{k}])",
    "emit({v}[{k}] * {f})",
    "bump()",
    "counts['a'] += {n}",
    "recent.append({v}[{k}] * 1)",
    "{v} = {v} * (2 if isinstance(n, int) else 5)",
    "{v} = {v} + (n in (1, 3, {n}, 7))",
    "{v} = {v} * {{k: k * 0.25 for k in range(13)}}[n % 13]",
    "q, r = divmod(n, 3); n = q + r",
    "n = max(n, {k}) - min(n, {n})",
    "n = round({v}[0, {k}].item())",
    "{v}[{k}] += table.get(n, {f})",
    "s = max(s, {v}[0, 0])",
    "{v} = {v} + (m if {w}.sum() > {c} else n)",
    "{v} -= (n := {w}[0].argmax().item())",
    "assert ({v} < 1e30).all() or n",
    "{v} = {v} * 0.5 + {w}",
    "{v}[{v} < 0] *= {f}",
)  # fmt: skip
_HEAD = """
from collections import defaultdict, deque
from types import SimpleNamespace


def flips(x):
    x.neg_()
    return x.sum() > 0


def put(box, row):
    box.h = box.h * 0.5 + row
    box.n += 1


class Drawn(nn.Module):
    def forward(self, x, y):
        a, b, d = x * 1, y + 0.5, x - y
        kept, recent = [x[0] * 2, y[1] * 1, x[2] - y[0]], deque([x[0] * 1, y[0] * 1], maxlen=2)
        s, n, i, m, latest = x.sum() * 0.25, int((x > 0).sum()), 0, 1, [y[0] * 1]
        box, counts, table = SimpleNamespace(h=x[0] * 1, n=0), defaultdict(int), {0: 0.5, 1: 2.0, 3: -1.0}

        def bump():
            nonlocal m
            m += 2

        def emit(row):
            latest[0] = latest[0] * 0.5 + row
"""


@dataclass
class Python(Idioms):
    """A program on its way."""

    def test(self) -> str:
        return self.fill(self.random.choice(_TESTS))

    def simple(self, depth: int) -> None:
        self.add(depth, self.fill(self.random.choice(_SIMPLE)))

    def control(self, depth: int) -> None:
        draw = self.random.choice((self.choice, self.choice, self.choice, self.repeated, self.walked, self.tried))
        draw(depth)

    def repeated(self, depth: int) -> None:
        self.count += 1
        name = f"n{self.count}"
        self.add(depth, f"{name} = 0")
        self.add(depth, f"while {name} < {self.random.randint(1, 3)} and {self.test()}:")
        self.add(depth + 1, f"{name} += 1")
        self.block(depth + 1, self.random.randint(1, 2))
        self.otherwise(depth)

    def walked(self, depth: int) -> None:
        self.count += 1
        name = f"e{self.count}"
        self.add(depth, self.fill(f"for k{name}, {name} in enumerate(zip({{v}}, {{w}})):"))
        if self.random.random() < 0.5:
            self.add(depth + 1, f"if {self.test()}:")
            self.add(depth + 2, self.random.choice(("break", "continue")))
        self.add(depth + 1, self.fill(f"{{v}}[k{name}] -= {name}[0] * {{f}}"))
        self.block(depth + 1, 1)
        self.otherwise(depth)

    def otherwise(self, depth: int) -> None:
        if self.random.random() < 0.5:
            self.add(depth, "else:")
            self.simple(depth + 1)

    def tried(self, depth: int) -> None:
        self.add(depth, "try:")
        self.block(depth + 1, 1)
        if self.random.random() < 0.5:
            self.add(depth + 1, self.fill("{v}[{n}] = s"))
            self.add(depth, "except IndexError:")
        else:
            self.add(depth, "finally:")
        self.simple(depth + 1)


def python(seed: int) -> str:
    """The text of a module of random statements."""
    draw = Python(random.Random(seed))
    for _ in range(draw.random.randint(1, 2)):
        draw.simple(0)
        draw.control(0)
        draw.block(0, draw.random.randint(0, 2))
    draw.add(0, "given = box.h + box.n + m + i + n + counts['a'] + recent[-1] + recent[0] + latest[0]")
    draw.add(0, "return a + s, b + d + torch.stack(kept).sum(0), given")
    return _HEAD.lstrip() + "\n".join([*draw.lines, ""])
