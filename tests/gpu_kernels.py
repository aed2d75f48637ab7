"""Hand-written GPU kernels in Loops, for tests of what stands below the Loops: renderer, emulator, launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Expr, const, eq, load, lt, maximum, op, select, symbol, var
from tilewright.ir.forms.loops import (
    Alloc,
    Barrier,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Kernel,
    Memory,
    Operand,
    Scope,
    Stmt,
    Store,
)

SYNC = Barrier(Scope.BLOCK)
F32 = dtypes.float32


@dataclass(frozen=True)
class Case:
    """A kernel, inputs for it and the right answer; outputs come last among the parameters."""

    kernel: Kernel
    inputs: tuple[np.ndarray, ...]
    expected: np.ndarray
    symbols: tuple[int, ...] = ()


def tensor(name: str, *shape: int | Expr, dtype: DType = F32) -> Buffer:
    return Buffer(name, shape, dtype, Memory.GLOBAL)


def shared(name: str, *shape: int, dtype: DType = F32) -> Buffer:
    return Buffer(name, shape, dtype, Memory.SHARED)


def register(name: str, *shape: int, dtype: DType = F32) -> Buffer:
    return Buffer(name, shape, dtype, Memory.REGISTER)


def loop(name: str, extent: int | Expr, body: Callable[[Expr], list[Stmt]], kind: ForKind = ForKind.SERIAL) -> For:
    axis = Axis(name, extent)
    return For(axis, kind, tuple(body(var(axis))))


def within(buffers: list[Buffer], body: list[Stmt]) -> list[Stmt]:
    for buffer in reversed(buffers):
        body = [Alloc(buffer, tuple(body))]
    return body


def at(buffer: Buffer, *indices: Expr | int) -> Operand:
    return Operand(buffer, tuple(i if isinstance(i, Expr) else const(i) for i in indices))


def put(buffer: Buffer, indices: tuple[Expr | int, ...], value: Expr) -> Store:
    return Store(buffer, tuple(i if isinstance(i, Expr) else const(i) for i in indices), value)


def f32(value: float) -> Expr:
    return const(value, F32)


def matmul(m: int = 32, n: int = 32, k: int = 24, tile: int = 16, depth: int = 8, name: str = "matmul") -> Case:
    """C = A B: tiles of A and B through shared memory, 2 x 2 results a thread."""
    a, b, c = tensor("a", m, k), tensor("b", k, n), tensor("c", m, n)
    at_, bt = shared("a_tile", tile, depth), shared("b_tile", depth, tile)
    acc = register("acc", 2, 2)
    side = tile // 2
    threads = side * side

    def thread(bi: Expr, bj: Expr, t: Expr) -> list[Stmt]:
        ti, tj = t // side, t % side

        def results(make: Callable[[Expr, Expr], list[Stmt]]) -> Stmt:
            return loop("i", 2, lambda i: [loop("j", 2, lambda j: make(i, j), ForKind.UNROLL)], ForKind.UNROLL)

        def fill(k0: Expr) -> list[Stmt]:
            def one(r: Expr) -> list[Stmt]:
                flat = r * threads + t
                row, column = flat // depth, flat % depth
                brow, bcolumn = flat // tile, flat % tile
                return [
                    put(at_, (row, column), load(a, (bi * tile + row, k0 * depth + column))),
                    put(bt, (brow, bcolumn), load(b, (k0 * depth + brow, bj * tile + bcolumn))),
                ]

            return [loop("r", tile * depth // threads, one)]

        def step(k0: Expr) -> list[Stmt]:
            def product(kk: Expr) -> list[Stmt]:
                def fma(i: Expr, j: Expr) -> list[Stmt]:
                    value = load(acc, (i, j)) + load(at_, (ti * 2 + i, kk)) * load(bt, (kk, tj * 2 + j))
                    return [put(acc, (i, j), value)]

                return [results(fma)]

            return [*fill(k0), SYNC, loop("kk", depth, product), SYNC]

        def save(i: Expr, j: Expr) -> list[Stmt]:
            return [put(c, (bi * tile + ti * 2 + i, bj * tile + tj * 2 + j), load(acc, (i, j)))]

        return within(
            [acc], [results(lambda i, j: [put(acc, (i, j), f32(0))]), loop("k0", k // depth, step), results(save)]
        )

    def block(bi: Expr, bj: Expr) -> list[Stmt]:
        return within([at_, bt], [loop("t", threads, lambda t: thread(bi, bj, t), ForKind.THREAD)])

    body = loop(
        "bi", m // tile, lambda bi: [loop("bj", n // tile, lambda bj: block(bi, bj), ForKind.BLOCK)], ForKind.BLOCK
    )
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    return Case(Kernel(name, (a, b, c), (body,)), (x, y), x @ y)


def softmax(rows: int = 6, columns: int = 96, name: str = "softmax") -> Case:
    """A warp a row: maximum and sum by shuffles, values kept in registers. Two rows a block."""
    x, y = tensor("x", rows, columns), tensor("y", rows, columns)
    per = columns // 32
    kept, best, total, other = register("kept", per), register("best", 1), register("total", 1), register("other", 1)

    def reduce(value: Buffer, combine: Callable[[Expr, Expr], Expr]) -> list[Stmt]:
        steps: list[Stmt] = []
        for mask in (16, 8, 4, 2, 1):
            steps.append(Instruction("shuffle_xor", (at(other, 0), at(value, 0)), (const(mask),)))
            steps.append(put(value, (0,), combine(load(value, (0,)), load(other, (0,)))))
        return steps

    def thread(block: Expr, t: Expr) -> list[Stmt]:
        row, lane = block * 2 + t // 32, t % 32
        return within(
            [kept, best, total, other],
            [
                put(best, (0,), f32(-np.inf)),
                loop(
                    "p",
                    per,
                    lambda p: [
                        put(kept, (p,), load(x, (row, p * 32 + lane))),
                        put(best, (0,), maximum(load(best, (0,)), load(kept, (p,)))),
                    ],
                ),
                *reduce(best, maximum),
                put(total, (0,), f32(0)),
                loop(
                    "q",
                    per,
                    lambda q: [
                        put(kept, (q,), op("exp", load(kept, (q,)) - load(best, (0,)))),
                        put(total, (0,), load(total, (0,)) + load(kept, (q,))),
                    ],
                ),
                *reduce(total, lambda a, b: a + b),
                loop("s", per, lambda s: [put(y, (row, s * 32 + lane), load(kept, (s,)) / load(total, (0,)))]),
            ],
        )

    body = loop("block", rows // 2, lambda b: [loop("t", 64, lambda t: thread(b, t), ForKind.THREAD)], ForKind.BLOCK)
    data = np.random.default_rng(1).standard_normal((rows, columns), np.float32)
    powers = np.exp(data - data.max(axis=1, keepdims=True))
    return Case(Kernel(name, (x, y), (body,)), (data,), powers / powers.sum(axis=1, keepdims=True))


def transpose(m: int = 32, n: int = 48, tile: int = 16, name: str = "transpose") -> Case:
    """Through a padded tile of shared memory, so that reads and writes are both contiguous."""
    x, y = tensor("x", m, n), tensor("y", n, m)
    buffer = shared("tile", tile, tile + 1)
    rows = 4

    def thread(bi: Expr, bj: Expr, t: Expr) -> list[Stmt]:
        r, c = t // tile, t % tile
        return [
            loop(
                "p", tile // rows, lambda p: [
                    put(buffer, (p * rows + r, c), load(x, (bi * tile + p * rows + r, bj * tile + c)))
                ]
            ),
            SYNC,
            loop(
                "q", tile // rows, lambda q: [
                    put(y, (bj * tile + q * rows + r, bi * tile + c), load(buffer, (c, q * rows + r)))
                ]
            ),
        ]  # fmt: skip

    def block(bi: Expr, bj: Expr) -> list[Stmt]:
        return within([buffer], [loop("t", rows * tile, lambda t: thread(bi, bj, t), ForKind.THREAD)])

    body = loop(
        "bi", m // tile, lambda bi: [loop("bj", n // tile, lambda bj: block(bi, bj), ForKind.BLOCK)], ForKind.BLOCK
    )
    data = np.random.default_rng(2).standard_normal((m, n), np.float32)
    return Case(Kernel(name, (x, y), (body,)), (data,), np.ascontiguousarray(data.T))


def row_sums(rows: int = 5, columns: int = 200, name: str = "row_sums") -> Case:
    """Two stages: within each warp by shuffles, then the warps' sums through shared memory. Columns need no tile."""
    x, y = tensor("x", rows, columns), tensor("y", rows)
    warps = 4
    parts, total, other = shared("parts", warps), register("total", 1), register("other", 1)

    def halve(distance: int) -> list[Stmt]:
        return [
            Instruction("shuffle_down", (at(other, 0), at(total, 0)), (const(distance),)),
            put(total, (0,), load(total, (0,)) + load(other, (0,))),
        ]

    def thread(row: Expr, t: Expr) -> list[Stmt]:
        def gather(p: Expr) -> list[Stmt]:
            column = p * (warps * 32) + t
            value = select(lt(column, columns), load(x, (row, column)), f32(0))
            return [put(total, (0,), load(total, (0,)) + value)]

        def last(w: Expr) -> list[Stmt]:
            return [put(total, (0,), load(total, (0,)) + load(parts, (w,)))]

        return within(
            [total, other],
            [
                put(total, (0,), f32(0)),
                loop("p", -(-columns // (warps * 32)), gather),
                *[s for d in (16, 8, 4, 2, 1) for s in halve(d)],
                If(eq(t % 32, 0), (put(parts, (t // 32,), load(total, (0,))),)),
                SYNC,
                If(
                    eq(t, 0),
                    (put(total, (0,), f32(0)), loop("w", warps, last), put(y, (row,), load(total, (0,)))),
                ),
            ],
        )

    body = loop(
        "row",
        rows,
        lambda r: within([parts], [loop("t", warps * 32, lambda t: thread(r, t), ForKind.THREAD)]),
        ForKind.BLOCK,
    )
    data = np.random.default_rng(3).standard_normal((rows, columns), np.float32)
    return Case(Kernel(name, (x, y), (body,)), (data,), data.sum(axis=1))


def scale(name: str = "scale", length: int = 77) -> Case:
    """y = 2 x over an extent given at the call."""
    n = symbol("n", 1, 1 << 20)
    x, y = tensor("x", n), tensor("y", n)

    def thread(block: Expr, t: Expr) -> list[Stmt]:
        i = block * 32 + t
        return [If(lt(i, n), (put(y, (i,), load(x, (i,)) * f32(2)),))]

    body = loop(
        "block", (n + 31) // 32, lambda b: [loop("t", 32, lambda t: thread(b, t), ForKind.THREAD)], ForKind.BLOCK
    )
    data = np.random.default_rng(4).standard_normal(length).astype(np.float32)
    return Case(Kernel(name, (x, y), (body,), symbols=(n,)), (data,), data * 2, (length,))


def all_cases() -> list[Case]:
    return [matmul(), softmax(), transpose(), row_sums(), scale()]
