"""Text of every form: what it looks like, and that reading it back and writing it again changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from test_interpret import attention, convolution, matmul, online_softmax_monoid, rand, scan_program
from test_interpret_loops import block_sum, copy_kernel, running_sum, tiled_matmul

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Host, Map, Program, Reduce, Region, Scatter, Sort
from tilewright.ir.forms.expr import Axis, cast, const, load, lt, op, symbol, var
from tilewright.ir.forms.graph import Graph, Node, Value
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import Layout, StorageAxis, Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.interpret_loops import run_kernel
from tilewright.ir.text.parse import TextError, parse_loops, parse_program
from tilewright.ir.text.text import expr_text, graph_text, loops_text, program_text

F = dtypes.float32


def everything() -> tuple[Program, dict[str, np.ndarray]]:
    """A Program with every kind of compute, odd names, symbols, layouts and constants."""
    n = symbol("batch size", 1, 64)
    x, c = Tensor("/layer.0/x:0", (n, 6), F), Tensor("cond", (), dtypes.bool_)
    w, index = Tensor("sum", (6,), F), Tensor("index", (6,), dtypes.int64)
    i, j, k = Axis("i", n), Axis("i", 6), Axis("k", 6)
    scaled = Tensor("scaled", (n, 6), F)
    row = Tensor("row", (n,), F)
    lse, mean = Tensor("lse", (n,), F), Tensor("mean", (n,), F)
    spread, ordered, places = Tensor("spread", (6,), F), Tensor("o", (n, 3), F), Tensor("p", (n, 3), dtypes.int64)
    bx, by = Tensor("bx", (6,), F), Tensor("by", (6,), F)
    branch = Program((bx,), (by,), (Map(by, (k,), -load(bx, (var(k),))),))
    chosen, outside = Tensor("chosen", (6,), F), Tensor("outside", (6,), dtypes.float16)
    at = load(scaled, (var(i), var(k)))
    computes = (
        Map(scaled, (i, j), load(x, (var(i), var(j))) * load(w, (var(j),)) + const(float("-inf"), F), "Mul 'a'  # b"),
        Reduce((row,), (i,), (k,), (at,), online_sum()),
        Reduce((mean, lse), (i,), (k,), (at, const(1.0, F), at), online_softmax_monoid(), "softmax"),
        Scatter(spread, w, (k,), (load(index, (var(k),)),), load(row, (const(0),)), "add", True),
        Sort((ordered, places), (i, k), k, at, (at, var(k)), True, "TopK"),
        Region("if", c, (spread,), (branch, branch), (chosen,), 7),
        Host("somewhere", (chosen,), (outside,), (("mode", "fast"), ("n", 3))),
    )
    layout = Layout((StorageAxis(1, 4), StorageAxis(0), StorageAxis(1, 1, 4)), -1.5, 2, 3)
    constants = {w: rand(6), index: np.arange(6)[::-1].copy()}
    outputs = (mean, lse, places, outside)
    program = Program((x, c), outputs, computes, constants, {scaled: layout}, ("x:0", "cond"), ("a", "b", "c", "d"))
    return program, {t.name: a for t, a in constants.items()}


def online_sum():
    from tilewright.ir.forms.compute import plain_monoid

    return plain_monoid("add", F)


@pytest.mark.parametrize(
    "program", [attention(16, 8), scan_program(False), scan_program(True), everything()[0]], ids=["a", "s", "r", "e"]
)
def test_program_round_trip(program):
    text = program_text(program)
    again = parse_program(text, {t.name: a for t, a in program.constants.items()})
    assert program_text(again) == text
    assert [t.name for t in again.tensors()] == [t.name for t in program.tensors()]


def test_program_reads_like_algebra():
    lines = program_text(attention(128, 64)).splitlines()
    assert "scores: float32[i:128, j:128] = sum[d:64] q[i, d] * k[j, d]" in lines
    text = program_text(everything()[0])
    assert 'symbol "batch size" 1 .. 64' in text
    assert '"/layer.0/x:0": float32[?"batch size", 6] = "x:0"' in text
    assert 'scaled: float32[i:?"batch size", i_1:6] = "/layer.0/x:0"[i, i_1] * "sum"[i_1] + -inf' in text
    assert "layout scaled: [1/4, 0, 1%4] -1.5 2" in text
    assert "  # TopK" in text


def test_parsed_program_means_the_same():
    program = attention(16, 8)
    values = {n: rand(16, 8, seed=s) for s, n in enumerate("qkv")}
    again = parse_program(program_text(program))
    np.testing.assert_array_equal(evaluate(again, values)["out"], evaluate(program, values)["out"])


def test_edited_program():
    text = program_text(attention(16, 8)).replace("= exp(scores[i, j] - m[i]) / s[i]", "= scores[i, j]")
    values = {n: rand(16, 8, seed=s) for s, n in enumerate("qkv")}
    out = evaluate(parse_program(text), values)["out"]
    np.testing.assert_allclose(out, values["q"] @ values["k"].T @ values["v"], rtol=1e-4, atol=1e-4)


def test_loops_round_trip_and_run():
    kernels = (block_sum(3, 64), tiled_matmul(19, 12, 7), copy_kernel(5, 1, "if"), copy_kernel(6, 1, "select"))
    loops = running_sum()
    for program in (loops, LoopProgram(kernels, (), ())):
        text = loops_text(program)
        assert loops_text(parse_loops(text)) == text
    again = parse_loops(loops_text(LoopProgram(kernels, (), ()))).kernel("matmul")
    a, b, c = rand(19, 7), rand(7, 12, seed=1), np.empty((19, 12), np.float32)
    run_kernel(again, {"A": a, "B": b, "C": c})
    np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-6)


def test_kernel_with_symbols_round_trips():
    from tilewright.ir.forms.loops import Buffer, For, ForKind, Kernel, Memory, Store

    n = symbol("n", 1, 9)
    y, i, t = Buffer("y", (n,), F, Memory.GLOBAL), Axis("i", n), Axis("i", 3)
    body = Store(y, (var(i),), cast(var(t), F))
    text = loops_text(LoopProgram((Kernel("k", (y,), (For(i, ForKind.PARALLEL, (body,)),), (n,), t),), (), ()))
    assert "kernel k(y: float32[?n]) symbol n 1 .. 9 step i:3 {" in text
    assert "y[i_1] = float32(i)" in text
    assert loops_text(parse_loops(text)) == text


def test_precedence_and_types():
    a, b = var(Axis("a", 4)), var(Axis("b", 4))
    assert expr_text(a - (b - a)) == "a - (b - a)"
    assert expr_text((a + b) * 2 // 3 % 5) == "(a + b) * 2 // 3 % 5"
    assert expr_text(a * (b * 2)) == "a * (b * 2)"
    assert expr_text(op("eq", lt(a, b), lt(b, a))) == "(a < b) == (b < a)"
    assert expr_text(-a + const(-3)) == "neg(a) + -3"
    assert expr_text(cast(a, dtypes.float16) * const(2.0, dtypes.float16)) == "float16(a) * 2.0_f16"


def test_shared_and_deep_expressions_stay_short():
    x = Tensor("x", (4,), F)
    i = Axis("i", 4)
    value = load(x, (var(i),))
    for _ in range(60):  # a tree of 2^60 leaves, a chain of 120 operations
        value = op("tanh", value * value)
    program = Program((x,), (Tensor("y", (4,), F),), (Map(Tensor("y", (4,), F), (i,), value),))
    program = Program((x,), program.computes[0].outputs, program.computes)
    text = program_text(program)
    assert len(text) < 5000
    assert program_text(parse_program(text)) == text
    chain = load(x, (var(i),))
    for _ in range(2000):
        chain = op("abs", chain)
    y = Tensor("y", (4,), F)
    text = program_text(Program((x,), (y,), (Map(y, (i,), chain),)))
    assert program_text(parse_program(text)) == text


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("program\ninput x: float33[2]\nend", "line 2: expected an element type, found 'float33'"),
        ("program\ninput x: float32[2]\ny: float32[i:2] = x[i] +\noutput y\nend", "line 4: expected a name"),
        ("program\ny: float32[i:2] = z[i]\nend", "line 2: tensor 'z' is not known here"),
        ("program\ninput x: float32[2]\ny: float32[i:2] = x[i] + i\nend", "line 3: add of mixed types"),
        ("program\ninput x: float32[2]\ny: float32[i:2] = x[i, i]\nend", "line 3: x has 1 axes"),
        ("program\n\n  §\nend", "line 3: cannot read '§'"),
        ('program\nconstant w: float32[2] "abc"\nend', "constant 'w' is not known here"),
        ("program\nend end", "expected the end"),
    ],
)
def test_errors_name_the_line(broken, message):
    with pytest.raises(TextError) as caught:
        parse_program(broken)
    assert message in str(caught.value)


def test_graph_text():
    inner = Graph("then", (), ("z",), (Node("Identity", "", ("y",), ("z",)),), {})
    graph = Graph(
        "net", (Value("x", F, (1, 3)),), ("y",),
        (
            Node("Gemm", "fc", ("x", "w", ""), ("y",), {"transB": 1}),
            Node("If", "", ("c",), ("q",), {"then_branch": inner}),
        ),
        {"w": np.zeros((2, 3), np.float32)}, {"y": Value("y", F, (1, 2))},
    )  # fmt: skip
    text = graph_text(graph)
    assert 'node Gemm "fc" (x, w, "") -> (y: float32[1, 2])\n  transB = 1' in text
    assert "constant w: float32[2, 3]" in text
    assert "    node Identity (y) -> (z)" in text


def test_same_program_same_text_and_digest_follows_data():
    program, _ = everything()
    assert program_text(program) == program_text(program)
    a, b = Tensor("a", (2, 3), F), Tensor("b", (3, 2), F)
    compute = matmul(a, b)
    one = Program((a,), compute.outputs, (compute,), {b: rand(3, 2)})
    two = Program((a,), compute.outputs, (compute,), {b: rand(3, 2, seed=1)})
    assert program_text(one) != program_text(two)
    x, w, conv = convolution(True)
    text = program_text(Program((x, w), conv.outputs, (conv,)))
    assert program_text(parse_program(text)) == text
