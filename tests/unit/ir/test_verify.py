"""Every rule of the grammars: sound forms pass, each broken one is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_interpret import attention, convolution, matmul, online_softmax_monoid, rand, scan_program
from test_interpret_loops import block_sum, copy_kernel, running_sum, tiled_matmul
from test_text import everything

from tilewright.errors import InternalError
from tilewright.ir.analysis.verify import verify_graph, verify_kernel, verify_loops, verify_program
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Program, Reduce, Region, Scatter, Sort, plain_monoid
from tilewright.ir.forms.expr import Axis, _make_op, cast, const, load, lt, state, symbol, var
from tilewright.ir.forms.graph import Graph, Node, Value
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
    Memory,
    Operand,
    Scope,
    Storage,
    Store,
)
from tilewright.ir.forms.scalar import OPS
from tilewright.ir.forms.tensor import Layout, StorageAxis, Tensor

F = dtypes.float32
I64 = dtypes.int64
X = Tensor("x", (4, 6), F)
Y = Tensor("y", (4, 6), F)
M, J, K = Axis("i", 4), Axis("j", 6), Axis("k", 6)
READ = load(X, (var(M), var(J)))


def test_sound_programs_pass():
    x, w, conv = convolution(False)
    for program in (
        attention(16, 8), scan_program(True), everything()[0], Program((x, w), conv.outputs, (conv,)),
    ):  # fmt: skip
        verify_program(program)


def program(*computes, inputs=(X,), outputs=None, **more) -> Program:
    return Program(tuple(inputs), tuple(outputs if outputs is not None else computes[-1].outputs), computes, **more)


def reduce_with(monoid, elements=(READ,), outputs=None) -> Reduce:
    return Reduce(outputs or (Tensor("r", (4,), F),), (M,), (J,), elements, monoid)


ADD = plain_monoid("add", F)
BASE, FLAG = Tensor("b", (6,), F), Tensor("c", (), dtypes.bool_)
SCANNED = scan_program(False)
SCAN = SCANNED.computes[0]
LOOSE = state("loose", F)
N4, N5 = symbol("n", 1, 4), symbol("n", 1, 5)
BROKEN_PROGRAMS = {
    "computed before": program(Map(Y, (M, J), load(Tensor("ghost", (4, 6), F), (var(M), var(J))))),
    "computed twice": program(Map(Y, (M, J), READ), Map(Y, (M, J), READ)),
    "name 'x' is used twice": program(Map(Tensor("x", (4, 6), F), (M, J), READ)),
    "axis k is used but not bound": program(Map(Y, (M, J), load(X, (var(M), var(K))))),
    "value is float32, expected float16": program(Map(Tensor("y", (4, 6), dtypes.float16), (M, J), READ)),
    "does not have the extents of its axes": program(Map(Tensor("y", (6, 4), F), (M, J), READ)),
    "bound twice": program(Map(Y, (M, M), READ)),
    "not made of symbols": program(Map(Tensor("y", (4,), F), (Axis("a", var(M)),), const(0.0, F))),
    "two ranges": program(Map(Tensor("y", (N4, N5), F), (Axis("a", N4), Axis("b", N5)), const(0.0, F))),
    "state loose is used": program(Map(Y, (M, J), READ + LOOSE)),
    "an index that is not int64": program(Map(Y, (M, J), load(X, (cast(var(M), dtypes.int32), var(J))))),
    "add of ['float32', 'int64']": program(Map(Y, (M, J), _make_op(OPS["add"], (READ, var(M)), F))),
    "but [3, 3, 3, 1] parts": program(
        reduce_with(online_softmax_monoid(), outputs=(Tensor("r", (4,), F), Tensor("q", (4,), F)))
    ),
    "1 results for 2 outputs": program(reduce_with(ADD, outputs=(Tensor("r", (4,), F), Tensor("q", (4,), F)))),
    "element 0 of the monoid is int64": program(reduce_with(ADD, (var(J),))),
    "final of the monoid is float32": program(reduce_with(ADD, outputs=(Tensor("r", (4,), I64),))),
    "combine of the monoid may not use": program(reduce_with(replace(ADD, combine=(ADD.left[0] + LOOSE,)))),
    "final of the monoid may not use": program(reduce_with(replace(ADD, final=(ADD.right[0],)))),
    "2 indices for 1 axes": program(
        Scatter(Tensor("s", (6,), F), BASE, (K,), (var(K), var(K)), const(0.0, F)), inputs=(X, BASE)
    ),
    "names an axis it does not have": program(
        Map(Y, (M, J), READ), layouts={X: Layout((StorageAxis(0), StorageAxis(1), StorageAxis(2)))}
    ),
    "does not cover axis 1": program(
        Map(Y, (M, J), READ), layouts={X: Layout((StorageAxis(0), StorageAxis(1, 8), StorageAxis(1, 1, 4)))}
    ),
    "not one of its axes": program(Sort((Y,), (M, J), K, READ, (READ,))),
    "keeps more than the 6": program(Sort((Tensor("y", (4, 7), F),), (M, J), J, READ, (READ,))),
    "holds float64[4, 6]": Program((), (X,), (), {X: np.zeros((4, 6))}),
    "carried as": replace(SCANNED, computes=(replace(SCAN, finals=(Tensor("final", (4,), F),)),)),
    "1 carried tensors": replace(SCANNED, computes=(replace(SCAN, finals=()),)),
    "with 1 branches": program(Region("if", FLAG, (), (program(Map(Y, (M, J), READ)),), (Y,)), inputs=(FLAG,)),
    "1 names for 2": Program((X, Tensor("b", (1,), F)), (X,), (), input_names=("x",)),
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN_PROGRAMS)
def test_broken_program(message):
    with pytest.raises(InternalError) as caught:
        verify_program(BROKEN_PROGRAMS[message])
    assert message in str(caught.value)


def test_messages_name_compute_and_origin():
    with pytest.raises(InternalError, match=r"Map y \(Conv node 'c1'\): axis k is used"):
        verify_program(program(Map(Y, (M, J), load(X, (var(M), var(K))), "Conv node 'c1'")))
    a, b = Tensor("a", (2, 3), F), Tensor("b", (3, 2), F)
    compute = matmul(a, b)
    with pytest.raises(InternalError, match="Reduce C: reads b, which is not computed before"):
        verify_program(Program((a,), compute.outputs, (compute,), {}))
    verify_program(Program((a,), compute.outputs, (compute,), {b: rand(3, 2)}))


def test_graph():
    graph = Graph(
        "net", (Value("x", F, (1,)),), ("y",),
        (Node("Relu", "a", ("x",), ("h",)), Node("Add", "b", ("h", "w", ""), ("y",))), {"w": np.zeros(1, np.float32)},
    )  # fmt: skip
    verify_graph(graph)
    swapped = replace(graph, nodes=graph.nodes[::-1])
    with pytest.raises(InternalError, match="Add node 'b': input 'h' is not computed before it"):
        verify_graph(swapped)
    with pytest.raises(InternalError, match="output 'z' is not computed"):
        verify_graph(replace(graph, outputs=("z",)))
    with pytest.raises(InternalError, match="'w' is used twice"):
        verify_graph(replace(graph, nodes=(Node("Relu", "a", ("x",), ("w",)),)))


def test_sound_loops_pass():
    verify_loops(running_sum())
    for kernel in (block_sum(2, 64), tiled_matmul(19, 12, 7), copy_kernel(6, 2, "if"), copy_kernel(6, 2, "select")):
        verify_kernel(kernel)


G = Buffer("g", (8,), F, Memory.GLOBAL)
R = Buffer("r", (8,), F, Memory.REGISTER)
S = Buffer("s", (8,), F, Memory.SHARED)
A, B = Axis("a", 8), Axis("b", 8)
ZERO = const(0.0, F)


def kernel(*body, params=(G,)) -> Kernel:
    return Kernel("k", params, body)


def loop(kind: ForKind, *body, axis=A) -> For:
    return For(axis, kind, body)


PUT = Store(G, (var(A),), ZERO)
V, W = Buffer("v", (2, 8), F, Memory.REGISTER), Buffer("w", (8, 8), F, Memory.REGISTER)
L3, L5, L8, L16 = Axis("l", 3), Axis("l", 5), Axis("l", 8), Axis("l", 16)


def vectors(lane: Axis, *body) -> Kernel:
    """A vector loop that sees a register of two vectors of eight lanes, and one of eight."""
    return kernel(Alloc(V, (Alloc(W, (For(lane, ForKind.VECTOR, body),)),)))


BROKEN_KERNELS = {
    "buffer r is used outside": kernel(Store(R, (const(0),), ZERO)),
    "used with 2 indices": kernel(Store(G, (const(0), const(0)), ZERO)),
    "axis a is used outside its loop": kernel(PUT),
    "stored is int64": kernel(Store(G, (const(0),), const(0))),
    "index of type float32": kernel(Store(G, (ZERO,), ZERO)),
    "parameter r is register": kernel(params=(R,)),
    "name g is used twice": kernel(params=(G, Buffer("g", (1,), F, Memory.GLOBAL))),
    "is global and cannot be allocated": kernel(Alloc(G, ()), params=()),
    "loop b is inside a vector loop": kernel(loop(ForKind.VECTOR, loop(ForKind.SERIAL, axis=B))),
    "parallel loop b is inside a serial loop": kernel(loop(ForKind.SERIAL, loop(ForKind.PARALLEL, axis=B))),
    "block loop b is inside a thread": kernel(
        loop(ForKind.BLOCK, For(Axis("t", 4), ForKind.THREAD, (loop(ForKind.BLOCK, axis=B),)))
    ),
    "not inside a block loop": kernel(loop(ForKind.THREAD)),
    "not a constant": kernel(loop(ForKind.SERIAL, For(Axis("v", var(A)), ForKind.VECTOR, ()))),
    "bound by two loops": kernel(loop(ForKind.SERIAL, loop(ForKind.SERIAL))),
    "neither constant nor a lane": kernel(Alloc(R, (loop(ForKind.SERIAL, Store(R, (var(A),), ZERO)),))),
    "register buffer q has the extent": kernel(
        loop(ForKind.SERIAL, Alloc(Buffer("q", (var(A) + 1,), F, Memory.REGISTER), ()))
    ),
    "threads may not share": kernel(
        loop(ForKind.BLOCK, loop(ForKind.THREAD, If(lt(var(B), 3), (Barrier(Scope.BLOCK),)), axis=B))
    ),
    "barrier is not inside a block": kernel(Barrier(Scope.BLOCK)),
    "symbol n is not one": kernel(For(Axis("c", symbol("n")), ForKind.SERIAL, ())),
    "state loose cannot": kernel(Store(G, (const(0),), LOOSE)),
    "a vector of 3 lanes is stored to v, which has 8": vectors(L3, Store(V, (const(0), var(L3)), ZERO)),
    "a vector of 16 lanes is stored to v, which has 8": vectors(L16, Store(V, (const(0), var(L16)), ZERO)),
    "lanes of l are not those of register v": vectors(L8, Store(V, (const(0), var(L8) + 1), ZERO)),
    "lanes of l are not those of register w": vectors(L8, Store(W, (var(L8), const(0)), ZERO)),
    "l reads 16 lanes of v, which has 8": vectors(L16, Store(G, (var(L16),), load(V, (const(0), var(L16))))),
    "l reads 5 lanes of v, which has 8": vectors(L5, Store(G, (var(L5),), load(V, (const(0), var(L5) + 4)))),
    "neither neighbours nor a column": vectors(L8, Store(G, (var(L8),), load(V, (const(0), var(L8) * 2)))),
    "different values to one element of g": vectors(L8, Store(G, (const(0),), load(V, (const(0), var(L8))))),
    "s is used outside its allocation": kernel(Instruction("copy", (Operand(S, (const(0),)),))),
}


@pytest.mark.parametrize("message", BROKEN_KERNELS)
def test_broken_kernel(message):
    with pytest.raises(InternalError) as caught:
        verify_kernel(BROKEN_KERNELS[message])
    assert message in str(caught.value) and str(caught.value).startswith("kernel k: ")


def test_barrier_under_a_uniform_condition_and_unrolled_registers():
    uniform = If(lt(var(A), 3), (Barrier(Scope.BLOCK),))
    verify_kernel(kernel(loop(ForKind.BLOCK, loop(ForKind.THREAD, uniform, axis=B))))
    verify_kernel(kernel(Alloc(R, (loop(ForKind.UNROLL, Store(R, (var(A),), ZERO)),))))


def test_parts_and_columns_of_vectors():
    """A shorter vector may be read out of a longer one, and a column out of a square; registers are stored whole."""
    verify_kernel(vectors(L5, Store(G, (var(L5),), load(V, (const(1), var(L5) + 3)))))
    verify_kernel(vectors(L8, Store(V, (const(1), var(L8)), load(W, (var(L8), const(3))))))
    verify_kernel(vectors(L8, Store(G, (const(0),), load(V, (const(1), const(3))))))


def test_calls():
    loops = running_sum()
    for change, message in (
        ({"calls": (Call("clear", ("x", "h")),)}, "2 arguments for 1"),
        ({"calls": (Call("nothing", ()),)}, "nothing, which is not defined"),
        ({"calls": (Call("clear", ("ghost",)),)}, "ghost is not a tensor"),
        ({"calls": (Call("clear", ("x",)),)}, "x has 15 elements, parameter carry 3"),
        ({"tensors": (*loops.tensors[1:], Storage("x", (5, 3), I64, "input"))}, "x is int64, parameter x is float32"),
        ({"tensors": (*loops.tensors, Storage("q", (1,), F, "magic"))}, "the role magic"),
        ({"kernels": (*loops.kernels, loops.kernels[0])}, "defined twice"),
    ):
        with pytest.raises(InternalError) as caught:
            verify_loops(replace(loops, **change))
        assert message in str(caught.value)


def test_what_a_stage_leaves_alone_is_checked_for_where_it_stands() -> None:
    i, j = Axis("i", 4), Axis("j", 6)
    middle, end = Tensor("middle", (4, 6), F), Tensor("end", (4, 6), F)
    first = Map(middle, (i, j), load(X, (var(i), var(j))) + 1.0)
    second = Map(end, (i, j), load(middle, (var(i), var(j))) * 2.0)
    before = Program((X,), (end,), (first, second), {})
    verify_program(before)
    with pytest.raises(InternalError, match="not computed before"):
        verify_program(replace(before, computes=(second, first)), before)
    broken = replace(second, axes=(i,))
    with pytest.raises(InternalError):
        verify_program(replace(before, computes=(first, broken)), before)
