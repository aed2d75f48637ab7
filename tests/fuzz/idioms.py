"""Random modules of what people write: early exits, plain numbers taken out of tensors, masks, lists, loops inside
loops, views of views, functions and methods of their own; for `python -m tests.fuzz.imperative --idioms`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

_TESTS = (
    "{v}.sum() > {c}",
    "bool({v}.max() > {c})",
    "{v}[0, {k}].item() < {f}",
    "({v} > {w}).any()",
    "{v}.mean().item() > 0 and {w}[1, 1] < {c}",
    "torch.all({v}[{k}] < {c})",
    "not {w}[:, {k}].sum() > {f}",
    "float({v}[1:].max()) > {f}",
    "({v} > 0).sum() > {n}",
    "{v}.argmax().item() > {n}",
    "torch.equal(({v} > 0).sum(), ({w} > 0).sum())",
    "len(kept) > {n}",
)
_SIMPLE = (
    "{v} = {v} * 0.5 + {w}",
    "{v} = torch.tanh({w}) - {f}",
    "{v} += {w} * {f}",
    "{v}[{k}] += {c}",
    "{v}[1:][:, {k}] -= {f}",
    "{v}[1:].t()[{k}].mul_({f})",
    "{v}[{v} > {c}] = {f}",
    "{v}[{v} < 0] *= {f}",
    "{v}[{w}[:, {k}] > 0] = {w}[{k}]",
    "{v}.masked_fill_({w} > {c}, {f})",
    "{v}[({w}[:, 0] > {f})] += {w}[0]",
    "{v} = torch.where({v} > {w}, {v}, {w} - {f})",
    "{v}[{w}[:, {k}].argmax()] = {f}",
    "{v}[int({w}[0].argmax())] += {c}",
    "{v}[{w}[:, {k}].argmax().item(), {k}] = {v}.min()",
    "{v} = {v} / ({w}.abs().max().item() + 1)",
    "{v} = {v}.clamp(max={w}.mean().item() + 2)",
    "s = {v}[{w}[:, 0].argmax()].sum()",
    "s = s * 0.5 + {v}.max()",
    "{v} = {v} + s",
    "{v}[{k}] = kept[-1]",
    "kept[{k}] = {v}[{k}] * {f}",
    "kept[0], kept[1] = kept[1], kept[0]",
    "{v} = self.step({v}, {w})",
    "{v} = chosen({v}, {w}, {f})",
    "{v} = torch.stack([row * {f} if row.sum() > {c} else row for row in {v}])",
    "{v}[{w} > {v}] = {w}[{w} > {v}] * {f}",
    "s = {v}[{v} > {f}].sum()",
    "s = s + ({v} > {w}).nonzero().shape[0]",
    "{v}[:, {k}].copy_({w}[:, {k}] + s)",
    "{v} = {v}.view(2, 6).view(4, 3)",
    "p{u} = {v}[1:]; q{u} = p{u}[:, 1:]; q{u} += {f}; {w}[0] = p{u}[0]",
)  # fmt: skip
_NAMES = ("a", "b", "d")
_HEAD = '''
def chosen(x, y, f):
    """Leaves early by what it is given."""
    if x.sum() > y.sum():
        return x * f
    z = x + y
    if z.max() > 2:
        z[1:][0] -= f
        return z
    return y - f


class Drawn(nn.Module):
    def step(self, x, y):
        if (x > 3).any():
            return x / 2
        for i in range(4):
            if y[i].sum() > 1:
                return x + y[i]
        return x + 0.25

    def forward(self, x, y):
'''


@dataclass
class Idioms:
    """A program on its way."""

    random: random.Random
    lines: list[str] = field(default_factory=list)
    count: int = 0

    def fill(self, text: str) -> str:
        pick = self.random
        v, w = pick.sample(_NAMES, 2)
        self.count += 1
        return text.format(v=v, w=w, k=pick.randrange(3), n=pick.randint(1, 6), c=pick.randint(-2, 3),
                           f=pick.choice((-0.75, -0.5, 0.25, 0.5, 1.5)), u=self.count)  # fmt: skip

    def add(self, depth: int, text: str) -> None:
        self.lines.append("    " * (depth + 2) + text)

    def test(self) -> str:
        return self.fill(self.random.choice(_TESTS))

    def simple(self, depth: int) -> None:
        self.add(depth, self.fill(self.random.choice(_SIMPLE)))

    def block(self, depth: int, count: int) -> None:
        for _ in range(count):
            if depth < 3 and self.random.random() < 0.4:
                self.control(depth)
            else:
                self.simple(depth)

    def control(self, depth: int) -> None:
        draw = self.random.choice((self.choice, self.choice, self.counted, self.repeated, self.listed, self.over_list))
        draw(depth)

    def choice(self, depth: int) -> None:
        self.add(depth, f"if {self.test()}:")
        self.block(depth + 1, self.random.randint(1, 2))
        if self.random.random() < 0.3:
            self.add(depth, f"elif {self.test()}:")
            self.block(depth + 1, 1)
        if self.random.random() < 0.4:
            self.add(depth, "else:")
            self.block(depth + 1, 1)

    def leave(self, depth: int) -> None:
        """An exit that data decide, in a loop."""
        self.add(depth, f"if {self.test()}:")
        self.block(depth + 1, self.random.randint(0, 1))
        self.add(depth + 1, self.random.choice(("break", "break", "continue", "continue", "return {0}, {1}")).format(
            *self.random.sample(_NAMES, 2)))  # fmt: skip

    def inside(self, depth: int) -> None:
        for _ in range(self.random.randint(1, 3)):
            if self.random.random() < 0.4:
                self.leave(depth)
            else:
                self.block(depth, 1)
        self.simple(depth)

    def counted(self, depth: int) -> None:
        name = f"i{self.count}"
        number = self.random.choice(("3", "4", "int(({v} > 0).sum()) % 4", "{v}[0].argmax().item() + 1"))
        self.add(depth, f"for {name} in range({self.fill(number)}):")
        self.add(depth + 1, self.fill(f"{{v}}[{name}] = {{w}}[{name} - 1] * {{f}}"))
        self.inside(depth + 1)

    def repeated(self, depth: int) -> None:
        self.count += 1
        name = f"n{self.count}"
        self.add(depth, f"{name} = 0")
        if self.random.random() < 0.4:
            self.add(depth, "while True:")
            self.add(depth + 1, f"{name} += 1")
            self.add(depth + 1, f"if {name} > {self.random.randint(1, 4)} or {self.test()}:")
            self.add(depth + 2, "break")
        else:
            self.add(depth, f"while {name} < {self.random.randint(1, 4)} and {self.test()}:")
            self.add(depth + 1, f"{name} += 1")
        self.inside(depth + 1)

    def listed(self, depth: int) -> None:
        """A list that grows by the steps of a loop over numbers."""
        self.count += 1
        name, step = f"l{self.count}", f"j{self.count}"
        self.add(depth, f"{name} = []")
        self.add(depth, f"for {step} in range({self.random.randint(2, 4)}):")
        self.block(depth + 1, self.random.randint(0, 1))
        self.add(depth + 1, self.fill(f"{name}.append({{v}}[{step} % 3] + {{w}}[0])"))
        self.add(depth, self.fill(f"{{v}}[1] = torch.stack({name}).sum(0)"))

    def over_list(self, depth: int) -> None:
        self.count += 1
        name = f"e{self.count}"
        head = self.random.choice(("for {n}, {e} in enumerate(kept):", "for {n}, {e} in zip(range(3), {{v}}):"))
        self.add(depth, self.fill(head.format(n=f"m{self.count}", e=name)))
        if self.random.random() < 0.5:
            self.leave(depth + 1)
        self.add(depth + 1, self.fill(f"{{v}}[m{name[1:]}] -= {name} * {{f}}"))
        self.block(depth + 1, 1)


def idioms(seed: int) -> str:
    """The text of a module of random statements."""
    draw = Idioms(random.Random(seed))
    for name, text in zip(_NAMES, ("x * 1", "y + 0.5", "x - y"), strict=True):
        draw.add(0, f"{name} = {text}")
    draw.add(0, "kept = [x[0] * 2, y[1], x[2] - y[0]]")
    draw.add(0, "s = x.sum() * 0.25")
    if draw.random.random() < 0.3:
        draw.add(0, f"if {draw.test()}:")
        draw.add(1, "return a, b * 2")
    for _ in range(draw.random.randint(1, 2)):
        draw.control(0)
        draw.block(0, draw.random.randint(0, 2))
    draw.add(0, "return a + s, b + d + torch.stack(kept).sum(0)")
    return _HEAD.lstrip() + "\n".join([*draw.lines, ""])
