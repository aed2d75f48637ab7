"""Steps that an exporter wrote out: found again as Scans where they repeat, left alone where they almost do, with the
same meaning either way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Program, Reduce, Scan, plain_monoid
from tilewright.ir.forms.expr import Axis, Expr, const, load, lt, op, select, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.transform.recurrence.repeats import Nodes, find_chains
from tilewright.transform.recurrence.reroll import reroll

F32 = dtypes.float32


class Writer:
    """A Program written out compute by compute."""

    def __init__(self) -> None:
        self.computes: list[Map | Reduce] = []
        self.constants: dict[Tensor, np.ndarray] = {}
        self.inputs: list[Tensor] = []

    def input(self, name: str, *shape: int) -> Tensor:
        self.inputs.append(Tensor(name, shape, F32))
        return self.inputs[-1]

    def constant(self, name: str, array: np.ndarray) -> Tensor:
        tensor = Tensor(name, array.shape, F32)
        self.constants[tensor] = array.astype(np.float32)
        return tensor

    def map(self, shape: tuple[int, ...], value: Callable[..., Expr]) -> Tensor:
        axes = tuple(Axis(f"i{d}", n) for d, n in enumerate(shape))
        tensor = Tensor(f"m{len(self.computes)}", shape, F32)
        self.computes.append(Map(tensor, axes, value(*map(var, axes))))
        return tensor

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        """x w for a vector x."""
        (k, n) = w.shape
        i, r = Axis("i", n), Axis("r", k)
        tensor = Tensor(f"p{len(self.computes)}", (n,), F32)
        value = load(x, (var(r),)) * load(w, (var(r), var(i)))
        self.computes.append(Reduce((tensor,), (i,), (r,), (value,), plain_monoid("add", F32)))
        return tensor

    def stacked(self, parts: list[Tensor]) -> Tensor:
        """One behind the other, as a concatenation is written."""
        n = parts[0].shape[0]

        def value(t: Expr, i: Expr) -> Expr:
            result: Expr = load(parts[-1], (i,))
            for place in range(len(parts) - 2, -1, -1):
                result = select(lt(t, place + 1), load(parts[place], (i,)), result)
            return result

        return self.map((len(parts), n), value)

    def program(self, *outputs: Tensor) -> Program:
        program = Program(tuple(self.inputs), outputs, tuple(self.computes), dict(self.constants))
        verify_program(program)
        return program


def tanh(value: Expr) -> Expr:
    return op("tanh", value)


def cell(w: Writer, x: Tensor, at: int, h: Tensor, u: Tensor, factor: float = 1.0) -> Tensor:
    """tanh(x[at] + h u) by a slice, a product and a map."""
    n = u.shape[1]
    now = w.map((n,), lambda i: load(x, (const(at), i)))
    sums = w.product(h, u)
    return w.map((n,), lambda i: tanh(load(now, (i,)) + load(sums, (i,)) * const(factor, F32)))


def recurrence(
    steps: int, at: Callable[[int], int] = lambda t: t, factor: Callable[[int], float] = lambda t: 1.0, rows: int = 0
) -> tuple[Writer, list[Tensor]]:
    rng = np.random.default_rng(steps)
    w = Writer()
    x = w.input("x", rows or steps, 6)
    u = w.constant("u", rng.standard_normal((6, 6)) / 3)
    h = w.input("start", 6)
    states = []
    for t in range(steps):
        h = cell(w, x, at(t), h, u, factor(t))
        states.append(h)
    return w, states


def scans(program: Program) -> list[Scan]:
    return [c for c in program.computes if isinstance(c, Scan)]


def agrees(program: Program) -> Program:
    """The rerolled Program, checked: the same grammar and the same values."""
    made = reroll(program)
    verify_program(made)
    rng = np.random.default_rng(3)
    given = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in program.inputs}
    before, after = evaluate(program, given), evaluate(made, given)
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array, rtol=1e-5, atol=1e-30, err_msg=name)
    return made


def test_a_recurrence_written_out_is_one_scan() -> None:
    w, states = recurrence(9)
    made = agrees(w.program(states[-1]))
    (scan,) = scans(made)
    assert scan.axis.extent == 9
    assert made.computes == (scan,)
    assert scan.finals[0] is states[-1]  # only the last state is wanted: nothing is stacked
    assert not scan.stacked


def test_all_states_stacked_are_read_as_they_were_kept() -> None:
    w, states = recurrence(7)
    made = agrees(w.program(w.stacked(states)))
    (scan,) = scans(made)
    assert len(made.computes) == 2  # the choice between seven tensors is one read
    assert len(scan.stacked) == 1


def test_an_intermediate_of_a_middle_step_may_be_wanted() -> None:
    w, states = recurrence(8)
    extra = w.map((6,), lambda i: load(states[3], (i,)) * const(2.0, F32))
    made = agrees(w.program(states[-1], extra, states[5]))
    assert len(scans(made)) == 1


@pytest.mark.parametrize("of_steps", [0.5, 2.0])
def test_few_steps_become_a_scan_where_that_is_predicted_to_be_faster(of_steps: float) -> None:
    w, states = recurrence(9)
    extra = w.map((6,), lambda i: load(states[3], (i,)) * const(2.0, F32))
    program = w.program(states[-1], extra)
    asked: list[Program] = []

    def predict(part: Program) -> float:
        verify_program(part)
        asked.append(part)
        return of_steps if scans(part) else 1.0

    made = reroll(program, predict)
    assert bool(scans(made)) == (of_steps < 1.0) and (made is program) == (of_steps > 1.0)
    apart, rolled = asked[:2]
    assert {t.name for t in apart.outputs} == {states[3].name, states[-1].name}  # what is made of them is none of it
    assert not scans(apart) and len(scans(rolled)) == 1


def test_many_steps_are_a_scan_unasked() -> None:
    w, states = recurrence(70)

    def never(_: Program) -> float:
        raise AssertionError("they are too many for one kernel")

    assert len(scans(reroll(w.program(states[-1]), never))) == 1


@pytest.mark.parametrize("stride", [2, 3, -1])
def test_steps_may_read_with_a_stride(stride: int) -> None:
    first = 7 if stride < 0 else 1
    w, states = recurrence(8, at=lambda t: first + stride * t, rows=30)
    assert len(scans(agrees(w.program(states[-1])))) == 1


def test_a_step_with_another_constant_ends_a_chain() -> None:
    w, states = recurrence(12, factor=lambda t: 0.5 if t == 6 else 1.0)
    made = agrees(w.program(states[-1]))
    assert sorted(s.axis.extent for s in scans(made)) == [5, 6]


def test_an_index_that_is_not_affine_is_no_chain() -> None:
    w, states = recurrence(8, at=lambda t: t * t % 11, rows=12)
    program = w.program(states[-1])
    assert agrees(program) is program


def test_too_few_steps_stay() -> None:
    w, states = recurrence(3)
    program = w.program(states[-1])
    assert agrees(program) is program


def test_layers_with_weights_of_their_own_are_no_steps() -> None:
    rng = np.random.default_rng(0)
    w = Writer()
    h = w.input("x", 64)
    for layer in range(6):
        weight = w.constant(f"w{layer}", rng.standard_normal((64, 64)) / 8)
        sums = w.product(h, weight)
        h = w.map((64,), lambda i, s=sums: tanh(load(s, (i,))))
    program = w.program(h)
    assert agrees(program) is program


def test_small_constants_that_differ_become_a_table() -> None:
    rng = np.random.default_rng(0)
    w, u = Writer(), rng.standard_normal((6, 6)) / 3
    weight, h = w.constant("u", u), w.input("x", 6)
    for step in range(6):
        bias = w.constant(f"b{step}", rng.standard_normal(6))
        sums = w.product(h, weight)
        h = w.map((6,), lambda i, s=sums, b=bias: tanh(load(s, (i,)) + load(b, (i,))))
    made = agrees(w.program(h))
    assert len(scans(made)) == 1
    assert [t.shape for t in made.constants if t.name.endswith("_table")] == [(6, 6)]


def test_maps_that_read_point_for_point_stay_one_kernel() -> None:
    w = Writer()
    h = w.input("x", 50)
    for _ in range(20):
        h = w.map((50,), lambda i, x=h: tanh(load(x, (i,)) + const(1.0, F32)))
    program = w.program(h)
    assert agrees(program) is program


def test_products_that_need_no_state_are_made_at_once() -> None:
    """x[t] w before the steps and h[t] v after them: one product each."""
    rng = np.random.default_rng(1)
    w = Writer()
    x, h = w.input("x", 8, 5), w.input("start", 6)
    into, u, v = (w.constant(n, rng.standard_normal(s) / 3) for n, s in (("w", (5, 6)), ("u", (6, 6)), ("v", (6, 4))))
    outs = []
    for t in range(8):
        now = w.map((5,), lambda i, t=t: load(x, (const(t), i)))
        given, sums = w.product(now, into), w.product(h, u)
        h = w.map((6,), lambda i, a=given, b=sums: tanh(load(a, (i,)) + load(b, (i,))))
        outs.append(w.product(h, v))
    made = agrees(w.program(w.stacked(outs)))
    (scan,) = scans(made)
    assert sum(isinstance(c, Reduce) for c in scan.body) == 1
    assert [c.outputs[0].shape for c in made.computes if isinstance(c, Reduce)] == [(8, 6), (8, 4)]


def test_layers_of_steps_are_one_scan_each() -> None:
    rng = np.random.default_rng(1)
    w = Writer()
    x = w.input("x", 7, 6)
    below = [w.map((6,), lambda i, t=t: load(x, (const(t), i))) for t in range(7)]
    for layer in range(3):
        u, h = w.constant(f"u{layer}", rng.standard_normal((6, 6)) / 3), w.input(f"start{layer}", 6)
        states = []
        for now in below:
            sums = w.product(h, u)
            h = w.map((6,), lambda i, a=now, b=sums: tanh(load(a, (i,)) + load(b, (i,))))
            states.append(h)
        below = states
    made = agrees(w.program(below[-1]))
    assert [s.axis.extent for s in scans(made)] == [7, 7, 7]


@pytest.mark.parametrize("seed", range(30))
def test_random_steps(seed: int) -> None:
    """Random steps with one or two states, some of them spoiled in one place: the meaning stays whatever is found."""
    rng = np.random.default_rng(seed)
    w = Writer()
    steps, size = int(rng.integers(4, 9)), int(rng.integers(2, 6))
    x = w.input("x", 40, size)
    weights = [w.constant(f"w{n}", rng.standard_normal((size, size)) / size) for n in range(2)]
    states = [w.input(f"s{n}", size) for n in range(int(rng.integers(1, 3)))]
    recipe = [(int(rng.integers(4)), *map(int, rng.integers(0, 1 << 30, 2))) for _ in range(int(rng.integers(2, 6)))]
    stride, spoiled = int(rng.integers(0, 4)), int(rng.integers(0, 2 * steps))
    kept: list[Tensor] = []
    for t in range(steps):
        at = t * stride + (1 if t == spoiled else 0)
        pool = [w.map((size,), lambda i, at=at: load(x, (const(at), i))), *states]
        for kind, a, b in recipe:
            one, other = pool[a % len(pool)], pool[b % len(pool)]
            if kind == 0:
                pool.append(w.product(one, weights[b % 2]))
            elif kind == 1:
                pool.append(w.map((size,), lambda i, p=one, q=other: load(p, (i,)) - tanh(load(q, (i,)))))
            elif kind == 2:
                pool.append(w.map((size,), lambda i, p=one: load(p, (const(size - 1) - i,))))
            else:
                pool.append(w.map((size,), lambda i, p=one, q=other: tanh(load(p, (i,)) * load(q, (i,)))))
        states = pool[-len(states) :]
        if rng.integers(3) == 0:
            kept.append(pool[int(rng.integers(1 + len(states), len(pool)))])
    w.stacked(kept or states)
    last = w.computes[-1].outputs[0]
    outputs = dict.fromkeys((last, *(s for s in states if s not in w.inputs)))
    agrees(w.program(*outputs))


def test_the_search_grows_with_the_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the steps, twice the computes walked."""
    from tilewright.transform.recurrence import repeats

    counts = []
    for steps in (50, 100):
        met = 0
        original = repeats._Walk._new

        def counted(self: repeats._Walk, anchor: repeats.RepeatNode, turn: int, original: object = original) -> object:
            nonlocal met
            found = original(self, anchor, turn)  # type: ignore[operator]
            met += len(found)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(repeats._Walk, "_new", counted)
            w, states = recurrence(steps)
            assert len(find_chains(Nodes(w.program(states[-1])))) == 1
        counts.append(met)
    assert counts[1] <= 2 * counts[0] + 10
