"""The interpreter of Loops: lock-step lanes, masks, private memories, faults and traffic."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, const, load, lt, minimum, op, select, symbol, var
from tilewright.ir.forms.loops import (
    Alloc,
    Barrier,
    Buffer,
    Call,
    For,
    ForKind,
    If,
    Instruction,
    Kernel,
    LoopProgram,
    Memory,
    Operand,
    Scope,
    Stmt,
    Storage,
    Store,
)
from tilewright.ir.meaning import loop_facts
from tilewright.ir.meaning.interpret_loops import LoopFault, count_traffic, run_kernel, run_loops

F = dtypes.float32
ZERO = const(0.0, F)


def rand(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tiled_matmul(m: int, n: int, k: int, tile: int = 8, lanes: int = 4) -> Kernel:
    """Tiles of rows in parallel, a vector of accumulators; the last tile of rows is cut short."""
    a, b, c = (Buffer(x, s, F, Memory.GLOBAL) for x, s in (("A", (m, k)), ("B", (k, n)), ("C", (m, n))))
    ti, tj, kk, v = Axis("ti", -(-m // tile)), Axis("tj", n // lanes), Axis("k", k), Axis("v", lanes)
    rows = minimum(const(tile), m - var(ti) * tile)
    r = Axis("r", rows)
    acc = Buffer("acc", (lanes,), F, Memory.REGISTER)
    row, column = var(ti) * tile + var(r), var(tj) * lanes + var(v)
    update = load(acc, (var(v),)) + load(a, (row, var(kk))) * load(b, (var(kk), column))
    body = Alloc(acc, (
        For(v, ForKind.VECTOR, (Store(acc, (var(v),), ZERO),)),
        For(kk, ForKind.SERIAL, (For(v, ForKind.VECTOR, (Store(acc, (var(v),), update),)),)),
        For(v, ForKind.VECTOR, (Store(c, (row, column), load(acc, (var(v),))),)),
    ))  # fmt: skip
    nest = For(ti, ForKind.PARALLEL, (For(r, ForKind.SERIAL, (For(tj, ForKind.SERIAL, (body,)),)),))
    return Kernel("matmul", (a, b, c), (nest,))


@pytest.mark.parametrize("limit", [1 << 19, 2])
def test_tiled_matmul_with_a_short_tile(limit, monkeypatch):
    monkeypatch.setattr(loop_facts, "LANES", limit)
    a, b, c = rand(19, 7), rand(7, 12, seed=1), np.full((19, 12), np.nan, np.float32)
    run_kernel(tiled_matmul(19, 12, 7), {"A": a, "B": b, "C": c})
    np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-6)


def block_sum(n_blocks: int, threads: int, barrier_first: bool = True) -> Kernel:
    """A block reverses its part through shared memory, then sums warps by shuffles."""
    x = Buffer("x", (n_blocks, threads), F, Memory.GLOBAL)
    y = Buffer("y", (n_blocks, threads), F, Memory.GLOBAL)
    s = Buffer("s", (n_blocks, threads // 32), F, Memory.GLOBAL)
    shared = Buffer("shared", (threads,), F, Memory.SHARED)
    own, other = Buffer("own", (), F, Memory.REGISTER), Buffer("other", (), F, Memory.REGISTER)
    b, t = Axis("b", n_blocks), Axis("t", threads)
    steps = []
    for distance in (16, 8, 4, 2, 1):
        steps.append(Instruction("shuffle_xor", (Operand(other, ()), Operand(own, ())), (const(distance),)))
        steps.append(Store(own, (), load(own, ()) + load(other, ())))
    body = (
        Store(shared, (var(t),), load(x, (var(b), var(t)))),
        Barrier(Scope.BLOCK),
        Store(y, (var(b), var(t)), load(shared, (threads - 1 - var(t),))),
        Alloc(own, (Alloc(other, (
            Store(own, (), load(x, (var(b), var(t)))),
            *steps,
            If(op("eq", var(t) % 32, 0), (Store(s, (var(b), var(t) // 32), load(own, ())),)),
        )),)),
    )  # fmt: skip
    return Kernel(
        "block_sum",
        (x, y, s),
        (For(b, ForKind.BLOCK, (Alloc(shared, (For(t, ForKind.THREAD, body),)),)),),
    )


def test_shared_memory_and_shuffles():
    x = rand(3, 64)
    y, s = np.empty_like(x), np.empty((3, 2), np.float32)
    run_kernel(block_sum(3, 64), {"x": x, "y": y, "s": s})
    np.testing.assert_array_equal(y, x[:, ::-1])
    np.testing.assert_allclose(s, x.reshape(3, 2, 32).sum(-1), rtol=1e-5, atol=1e-5)


def test_shuffle_down_keeps_own_value_at_the_end_and_two_thread_loops():
    x, y = (Buffer(n, (2, 4, 8), F, Memory.GLOBAL) for n in "xy")
    own, other = Buffer("own", (), F, Memory.REGISTER), Buffer("other", (), F, Memory.REGISTER)
    b, ty, tx = Axis("b", 2), Axis("ty", 4), Axis("tx", 8)
    place = (var(b), var(ty), var(tx))
    down = Instruction("shuffle_down", (Operand(other, ()), Operand(own, ())), (const(1), const(16)))
    body = Alloc(own, (Alloc(other, (Store(own, (), load(x, place)), down, Store(y, place, load(other, ())))),))
    nest = For(b, ForKind.BLOCK, (For(ty, ForKind.THREAD, (For(tx, ForKind.THREAD, (body,)),)),))
    values, out = rand(2, 4, 8), np.empty((2, 4, 8), np.float32)
    run_kernel(Kernel("down", (x, y), (nest,)), {"x": values, "y": out})
    flat = values.reshape(2, 2, 16)
    expected = np.concatenate([flat[..., 1:], flat[..., -1:]], -1).reshape(2, 4, 8)
    np.testing.assert_array_equal(out, expected)


def copy_kernel(n: int, shift: int = 0, guard: str = "") -> Kernel:
    x, y = (Buffer(name, (n,), F, Memory.GLOBAL) for name in "xy")
    i = Axis("i", n)
    place = var(i) + shift
    if guard == "select":
        body = Store(y, (var(i),), select(lt(place, n), load(x, (place,)), ZERO))
    elif guard == "if":
        body = If(lt(place, const(n)), (Store(y, (var(i),), load(x, (place,))),), (Store(y, (var(i),), ZERO),))
    else:
        body = Store(y, (var(i),), load(x, (place,)))
    return Kernel("copy", (x, y), (For(i, ForKind.PARALLEL, (body,)),))


@pytest.mark.parametrize("guard", ["select", "if"])
def test_guards_make_out_of_range_reads_legal(guard):
    x, y = rand(6), np.empty(6, np.float32)
    run_kernel(copy_kernel(6, 2, guard), {"x": x, "y": y})
    np.testing.assert_array_equal(y, [*x[2:], 0, 0])


def test_out_of_range_names_kernel_and_buffer():
    with pytest.raises(LoopFault, match=r"kernel copy: x is read at 6 on axis 0 of extent 6"):
        run_kernel(copy_kernel(6, 1), {"x": rand(6), "y": np.empty(6, np.float32)})


def scratch_kernel(fill: int) -> Kernel:
    y = Buffer("y", (4, 5), F, Memory.GLOBAL)
    scratch = Buffer("scratch", (5,), F, Memory.SCRATCH)
    i, j, k = Axis("i", 4), Axis("j", fill), Axis("k", 5)
    nest = For(i, ForKind.PARALLEL, (Alloc(scratch, (
        For(j, ForKind.SERIAL, (Store(scratch, (var(j),), const(2.0, F)),)),
        For(k, ForKind.SERIAL, (Store(y, (var(i), var(k)), load(scratch, (var(k),))),)),
    )),))  # fmt: skip
    return Kernel("scratch_kernel", (y,), (nest,))


def test_reading_what_was_never_written():
    y = np.zeros((4, 5), np.float32)
    run_kernel(scratch_kernel(5), {"y": y})
    assert (y == 2).all()
    with pytest.raises(LoopFault, match="scratch is read where nothing was written"):
        run_kernel(scratch_kernel(4), {"y": y})
    run_kernel(scratch_kernel(4), {"y": y}, check=False)


def test_lanes_that_disagree():
    y = Buffer("y", (1,), F, Memory.GLOBAL)
    x = Buffer("x", (4,), F, Memory.GLOBAL)
    v = Axis("v", 4)
    store = Store(y, (const(0),), load(y, (const(0),)) + load(x, (var(v),)))
    kernel = Kernel("race", (x, y), (For(v, ForKind.VECTOR, (store,)),))
    with pytest.raises(LoopFault, match="y: lanes write different values"):
        run_kernel(kernel, {"x": rand(4), "y": np.zeros(1, np.float32)})


def test_wrong_arguments_and_unknown_instruction():
    with pytest.raises(LoopFault, match="parameter y is not given"):
        run_kernel(copy_kernel(4), {"x": rand(4)})
    with pytest.raises(LoopFault, match="parameter x takes float32"):
        run_kernel(copy_kernel(4), {"x": rand(5), "y": rand(4)})
    x = Buffer("x", (1,), F, Memory.GLOBAL)
    odd = Kernel("odd", (x,), (Instruction("frobnicate", (Operand(x, (const(0),)),)),))
    with pytest.raises(LoopFault, match="frobnicate"):
        run_kernel(odd, {"x": rand(1)})


def test_symbols_and_inner_extents_that_differ_by_lane():
    n = symbol("n", 1, 100)
    y = Buffer("y", (n, n), dtypes.int64, Memory.GLOBAL)
    i = Axis("i", n)
    j = Axis("j", var(i) + 1)
    nest = For(i, ForKind.PARALLEL, (For(j, ForKind.SERIAL, (Store(y, (var(i), var(j)), var(i) * 10 + var(j)),)),))
    out = np.full((5, 5), -1, np.int64)
    run_kernel(Kernel("triangle", (y,), (nest,), (n,)), {"y": out}, {"n": 5})
    rows, columns = np.indices((5, 5))
    np.testing.assert_array_equal(out, np.where(columns <= rows, rows * 10 + columns, -1))


def running_sum() -> LoopProgram:
    """carry[0] += x[t]; y[t] = carry: a Scan of five steps, backwards."""
    x, carry, y = (Buffer(n, s, F, Memory.GLOBAL) for n, s in (("x", (5, 3)), ("carry", (3,)), ("y", (5, 3))))
    t, i = Axis("t", 5), Axis("i", 3)
    add = Store(carry, (var(i),), load(carry, (var(i),)) + load(x, (var(t), var(i))))
    step = Kernel("step", (x, carry), (For(i, ForKind.PARALLEL, (add,)),), (), t)
    copy = Store(y, (var(t), var(i)), load(carry, (var(i),)))
    keep = Kernel("keep", (carry, y), (For(i, ForKind.PARALLEL, (copy,)),), (), t)
    tensors = (
        Storage("x", (5, 3), F, "input"), Storage("h", (3,), F, "temporary"), Storage("y", (5, 3), F, "output"),
    )  # fmt: skip
    clear = Kernel("clear", (carry,), (For(i, ForKind.PARALLEL, (Store(carry, (var(i),), ZERO),)),))
    calls = [Call("clear", ("h",))]
    for t in reversed(range(5)):
        calls.extend((Call("step", ("x", "h"), t), Call("keep", ("h", "y"), t)))
    return LoopProgram((clear, step, keep), tuple(calls), tensors)


def test_loop_program_passes_steps():
    x = rand(5, 3)
    result = run_loops(running_sum(), {"x": x})
    np.testing.assert_allclose(result["y"], np.cumsum(x[::-1], 0)[::-1], rtol=1e-5)


def test_traffic_of_a_kernel_counts_exactly():
    traffic = count_traffic(tiled_matmul(19, 12, 7))
    assert traffic.loaded["A"] == 19 * 7 * 3 * 4  # once a vector, not once a lane
    assert traffic.loaded["B"] == 19 * 7 * 12 * 4
    assert traffic.stored["C"] == 19 * 12 * 4
    assert traffic.loaded_by[Memory.REGISTER] == 19 * (7 + 1) * 12 * 4
    assert traffic.total(Memory.GLOBAL) == traffic.loaded["A"] + traffic.loaded["B"] + traffic.stored["C"]


def test_traffic_of_conditions_programs_and_roles():
    traffic = count_traffic(copy_kernel(6, 2, "if"))
    assert (traffic.loaded["x"], traffic.stored["y"]) == (16, 24)
    program = count_traffic(running_sum())
    assert program.stored["h"] == 12 + 5 * 12
    assert program.intermediate == (12 + 5 * 12) + (5 * 12 + 5 * 12)
    assert program.by_role["input"] == 60
    again = count_traffic(LoopProgram((copy_kernel(6, 0),), (Call("copy", ("a", "b")),), (
        Storage("a", (6,), F, "temporary"), Storage("b", (6,), F, "output"),
    )))  # fmt: skip
    assert again.intermediate == 24


def test_traffic_of_deep_nests_takes_little_memory():
    """Each loop is short enough to be looked at whole; all of them together are not."""
    sizes = (3055, 256, 64, 8)
    axes = [Axis(name, n) for name, n in zip("tfsk", sizes, strict=True)]
    y = Buffer("y", sizes, F, Memory.GLOBAL)
    inside = lt(sum((var(a) for a in axes[1:]), var(axes[0])), 2000)
    body: tuple[Stmt, ...] = (If(inside, (Store(y, tuple(var(a) for a in axes), ZERO),)),)
    for axis in reversed(axes):
        body = (For(axis, ForKind.SERIAL, body),)
    exact = 4 * sum(2000 - (f + s + k) for f in range(256) for s in range(64) for k in range(8))
    tracemalloc.start()
    stored = count_traffic(Kernel("deep", (y,), body)).stored["y"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert stored == pytest.approx(exact, rel=0.05) and peak < 1 << 29


def test_traffic_of_long_dynamic_loops_is_close():
    y = Buffer("y", (4000, 4000), F, Memory.GLOBAL)
    i, j = Axis("i", 4000), Axis("j", 4000)
    k = Axis("k", 2 + (var(i) + var(j)) // 2)
    inner = For(k, ForKind.SERIAL, (Store(y, (var(i), var(j)), ZERO),))
    nest = For(i, ForKind.PARALLEL, (For(j, ForKind.SERIAL, (inner,)),))
    exact = 4 * 4000 * 4000 * (2 + 2000 - 0.5)
    assert count_traffic(Kernel("long", (y,), (nest,))).stored["y"] == pytest.approx(exact, rel=0.01)


def prefix_kernel(distance: int) -> Kernel:
    """y[i + distance] += y[i], one after the other: iterations meet unless distance is as long as the loop."""
    y = Buffer("y", (12,), F, Memory.GLOBAL)
    i = Axis("i", 12 - distance)
    add = Store(y, (var(i) + distance,), load(y, (var(i) + distance,)) + load(y, (var(i),)))
    return Kernel("prefix", (y,), (For(i, ForKind.SERIAL, (add,)),))


def test_serial_loops_that_carry_a_value_stay_serial():
    y = np.ones(12, np.float32)
    run_kernel(prefix_kernel(1), {"y": y})
    np.testing.assert_array_equal(y, np.arange(1, 13))
    assert not loop_facts.Facts().lock_step(prefix_kernel(1).body[0])


@pytest.mark.parametrize(
    "build", [lambda: tiled_matmul(19, 12, 7), lambda: copy_kernel(6, 2, "if"), lambda: prefix_kernel(3)]
)
def test_lock_step_changes_nothing(build, monkeypatch):
    kernel = build()

    def run() -> list[np.ndarray]:
        arrays = {p: rand(*p.shape, seed=n) for n, p in enumerate(kernel.params)}
        run_kernel(kernel, arrays)
        return list(arrays.values())

    fast = run()
    monkeypatch.setattr(loop_facts.Facts, "lock_step", lambda self, loop: loop.kind in loop_facts.LOCK_STEP)
    for a, b in zip(fast, run(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_which_loops_are_independent():
    matmul = tiled_matmul(19, 12, 7)
    facts = loop_facts.Facts()
    rows = matmul.body[0].body[0]
    columns = rows.body[0]
    (depth,) = (s for s in columns.body[0].body if s.axis.name == "k")
    assert facts.lock_step(rows) and facts.lock_step(columns) and not facts.lock_step(depth)


def test_a_branch_no_lane_takes_may_be_out_of_range():
    x, y = (Buffer(n, (4,), F, Memory.GLOBAL) for n in "xy")
    i = Axis("i", 4)
    never = select(lt(var(i), 0), load(x, (const(9),)), ZERO)
    out = np.ones(4, np.float32)
    run_kernel(
        Kernel("never", (x, y), (For(i, ForKind.PARALLEL, (Store(y, (var(i),), never),)),)), {"x": rand(4), "y": out}
    )
    assert (out == 0).all()
