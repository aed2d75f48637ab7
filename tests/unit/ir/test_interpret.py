"""The Program interpreter against NumPy, one kind of compute at a time."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tilewright.errors import InputError, UnsupportedError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import (
    Host,
    Map,
    Monoid,
    Program,
    Reduce,
    Region,
    Scan,
    Scatter,
    Sort,
    neutral,
    plain_monoid,
)
from tilewright.ir.forms.expr import (
    Axis,
    cast,
    const,
    eq,
    load,
    lt,
    maximum,
    minimum,
    op,
    select,
    state,
    symbol,
    var,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning import machine as machine_module
from tilewright.ir.meaning.interpret import Sampler, evaluate, evaluate_computes

F = dtypes.float32


def axes(*pairs):
    return tuple(Axis(n, e) for n, e in pairs)


def matmul(a: Tensor, b: Tensor, name="C", dtype=F) -> Reduce:
    i, j, k = axes(("i", a.shape[0]), ("j", b.shape[1]), ("k", a.shape[1]))
    element = load(a, (var(i), var(k))) * load(b, (var(k), var(j)))
    return Reduce((Tensor(name, (i.extent, j.extent), dtype),), (i, j), (k,), (element,), plain_monoid("add", dtype))


def run(inputs, computes, values, outputs=None, **kwargs):
    outputs = outputs or computes[-1].outputs
    return evaluate(Program(tuple(inputs), tuple(outputs), tuple(computes)), values, **kwargs)


def rand(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_map_with_mask_and_gather():
    x = Tensor("x", (5, 7), F)
    index = Tensor("index", (4,), dtypes.int64)
    i, j = axes(("i", 4), ("j", 9))
    # padded by one on both sides along j: out of range lanes are discarded by the select
    inside = op("and", op("le", const(1), var(j)), lt(var(j), const(8)))
    value = select(inside, load(x, (load(index, (var(i),)), var(j) - 1)), const(-3.0, F))
    a, n = rand(5, 7), np.array([3, 0, 4, 4])
    out = run((x, index), [Map(Tensor("y", (4, 9), F), (i, j), value)], {"x": a, "index": n})["y"]
    expected = np.pad(a[n], ((0, 0), (1, 1)), constant_values=-3)
    np.testing.assert_array_equal(out, expected)
    assert out.dtype == np.float32


@pytest.mark.parametrize("dtype", [F, dtypes.float16, dtypes.bfloat16, dtypes.int32, dtypes.float64])
def test_matmul_types(dtype):
    a, b = Tensor("a", (33, 20), dtype), Tensor("b", (20, 17), dtype)
    values = {"a": (rand(33, 20) * 4).astype(dtype.numpy), "b": (rand(20, 17, seed=1) * 4).astype(dtype.numpy)}
    out = run((a, b), [matmul(a, b, dtype=dtype)], values)["C"]
    expected = values["a"].astype(np.float64) @ values["b"].astype(np.float64)
    assert out.dtype == dtype.numpy
    tolerance = {16: 0.02, 32: 1e-4, 64: 1e-12}[dtype.bits] if dtype.is_float else 0
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


def convolution(padded: bool):
    x, w = Tensor("x", (2, 3, 9, 8), F), Tensor("w", (4, 3, 3, 3), F)
    n, o, h, v, c, r, s = axes(("n", 2), ("o", 4), ("h", 5), ("v", 4), ("c", 3), ("r", 3), ("s", 3))
    row, column = var(h) * 2 + var(r) - 1, var(v) * 2 + var(s) - 1
    inside = op("and", op("and", op("le", 0, row), lt(row, 9)), op("and", op("le", 0, column), lt(column, 8)))
    pixel = select(inside, load(x, (var(n), var(c), row, column)), const(0.0, F))
    element = pixel * load(w, (var(o), var(c), var(r), var(s)))
    if padded:  # a form the matrix product does not take
        element = element + const(0.0, F)
    return x, w, Reduce((Tensor("y", (2, 4, 5, 4), F),), (n, o, h, v), (c, r, s), (element,), plain_monoid("add", F))


def test_convolution_by_product_and_by_blocks(monkeypatch):
    torch = pytest.importorskip("torch")
    a, b = rand(2, 3, 9, 8), rand(4, 3, 3, 3, seed=1)
    expected = torch.nn.functional.conv2d(torch.tensor(a), torch.tensor(b), stride=2, padding=1).numpy()
    for padded in (False, True):
        for limit in (machine_module.BLOCK, 50):
            monkeypatch.setattr(machine_module, "BLOCK", limit)
            x, w, conv = convolution(padded)
            out = run((x, w), [conv], {"x": a, "w": b})["y"]
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_product_with_batch_broadcast_and_lonely_axes():
    a, b, scale = Tensor("a", (3, 4, 5), F), Tensor("b", (3, 5, 6), F), Tensor("scale", (6,), F)
    p, i, j, k, lone, twice, extra = axes(
        ("p", 3), ("i", 4), ("j", 6), ("k", 5), ("lone", 3), ("twice", 2), ("extra", 2)
    )
    # sums over k, over an axis of one factor alone, and over an axis of no factor; one output axis is in no factor
    element = load(a, (var(p), var(i), var(k))) * load(b, (var(lone), var(k), var(j))) * load(scale, (var(j),))
    out = Tensor("y", (2, 6, 4, 3), F)
    reduce = Reduce((out,), (extra, j, i, p), (k, lone, twice), (element,), plain_monoid("add", F))
    va, vb, vs = rand(3, 4, 5), rand(3, 5, 6, seed=1), rand(6, seed=2)
    expected = 2 * np.einsum("pik,lkj,j->jip", va, vb, vs)
    y = run((a, b, scale), [reduce], {"a": va, "b": vb, "scale": vs})["y"]
    np.testing.assert_allclose(y, np.broadcast_to(expected, (2, 6, 4, 3)), rtol=1e-4, atol=1e-5)


def online_softmax_monoid() -> Monoid:
    """(maximum, sum of exponentials relative to it, weighted sum)."""
    m0, s0, w0, m1, s1, w1 = (state(n, F) for n in ("m0", "s0", "w0", "m1", "s1", "w1"))
    m = maximum(m0, m1)
    e0, e1 = op("exp", m0 - m), op("exp", m1 - m)
    low = const(-1e30, F)
    zero = const(0.0, F)
    return Monoid(
        (m0, s0, w0), (m1, s1, w1), (low, zero, zero),
        (m, s0 * e0 + s1 * e1, w0 * e0 + w1 * e1),
        (w0 / s0, m0 + op("log", s0)),
    )  # fmt: skip


@pytest.mark.parametrize("length", [1, 2, 13, 64])
def test_tuple_monoid_streams_softmax(length, monkeypatch):
    x, v = Tensor("x", (6, length), F), Tensor("v", (length,), F)
    i, k = axes(("i", 6), ("k", length))
    outs = (Tensor("mean", (6,), F), Tensor("lse", (6,), F))
    elements = (load(x, (var(i), var(k))), const(1.0, F), load(v, (var(k),)))
    reduce = Reduce(outs, (i,), (k,), elements, online_softmax_monoid())
    vx, vv = rand(6, length), rand(length, seed=1)
    p = np.exp(vx - vx.max(1, keepdims=True))
    expected = (p * vv).sum(1) / p.sum(1)
    for limit in (1 << 20, 16):
        monkeypatch.setattr(machine_module, "BLOCK", limit)
        y = run((x, v), [reduce], {"x": vx, "v": vv})
        np.testing.assert_allclose(y["mean"], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(y["lse"], np.log(p.sum(1)) + vx.max(1), rtol=1e-5, atol=1e-6)


def test_argmax_keeps_the_first_of_equals():
    x = Tensor("x", (3, 9), F)
    i, k = axes(("i", 3), ("k", 9))
    v0, v1 = state("v0", F), state("v1", F)
    n0, n1 = state("n0", dtypes.index), state("n1", dtypes.index)
    later = lt(v0, v1)
    monoid = Monoid(
        (v0, n0), (v1, n1), (neutral("max", F), const(0)),
        (select(later, v1, v0), select(later, n1, n0)), (n0,),
    )  # fmt: skip
    reduce = Reduce((Tensor("y", (3,), dtypes.int64),), (i,), (k,), (load(x, (var(i), var(k))), var(k)), monoid)
    values = np.array([[1, 5, 2, 5, 5, 0, 1, 2, 3], [0] * 9, [9, 1, 1, 1, 1, 1, 1, 1, 9]], np.float32)
    np.testing.assert_array_equal(run((x,), [reduce], {"x": values})["y"], values.argmax(1))


def test_mean_final_and_empty_reduction():
    x = Tensor("x", (4, 0), F)
    i, k = axes(("i", 4), ("k", 0))
    monoid = plain_monoid("max", F)
    out = run((x,), [Reduce((Tensor("y", (4,), F),), (i,), (k,), (load(x, (var(i), var(k))),), monoid)],
              {"x": np.zeros((4, 0), np.float32)})["y"]  # fmt: skip
    assert np.all(out == -np.inf)


def scan_program(reverse: bool):
    x, h0 = Tensor("x", (5, 3), F), Tensor("h0", (3,), F)
    t = Axis("t", 5)
    (i,) = axes(("i", 3))
    h = Tensor("h", (3,), F)
    following = Tensor("next", (3,), F)
    body = (Map(following, (i,), load(h, (var(i),)) * const(0.5, F) + load(x, (var(t), var(i)))),)
    final, stack = Tensor("final", (3,), F), Tensor("stack", (5, 3), F)
    scan = Scan(t, (h0,), (h,), body, (following,), (final,), ((following, stack),), reverse)
    return Program((x, h0), (final, stack), (scan,))


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse):
    x, h = rand(5, 3), rand(3, seed=1)
    out = evaluate(scan_program(reverse), {"x": x, "h0": h})
    expected = np.empty_like(x)
    for t in reversed(range(5)) if reverse else range(5):
        h = h * np.float32(0.5) + x[t]
        expected[t] = h
    np.testing.assert_array_equal(out["stack"], expected)
    np.testing.assert_array_equal(out["final"], h)


@pytest.mark.parametrize("operator", [None, "add", "max"])
def test_scatter_with_repeated_indices(operator):
    base, index, update = Tensor("base", (4, 3), F), Tensor("index", (6,), dtypes.int64), Tensor("u", (6, 3), F)
    i, j = axes(("i", 6), ("j", 3))
    scatter = Scatter(
        Tensor("y", (4, 3), F), base, (i, j), (load(index, (var(i),)), var(j)), load(update, (var(i), var(j))), operator
    )
    b, n, u = rand(4, 3), np.array([1, 3, 1, 0, 3, 1]), rand(6, 3, seed=1)
    expected = b.copy()
    for k in range(6):
        old = expected[n[k]]
        expected[n[k]] = u[k] if operator is None else old + u[k] if operator == "add" else np.maximum(old, u[k])
    y = run((base, index, update), [scatter], {"base": b, "index": n, "u": u})["y"]
    np.testing.assert_allclose(y, expected, rtol=1e-6)


@pytest.mark.parametrize("descending", [False, True])
def test_sort_is_stable_and_keeps_the_first(descending):
    x = Tensor("x", (2, 8, 3), F)
    a = axes(("i", 2), ("k", 8), ("j", 3))
    key = load(x, tuple(var(n) for n in a))
    outs = (Tensor("values", (2, 5, 3), F), Tensor("places", (2, 5, 3), dtypes.int64))
    values = np.random.default_rng(3).integers(0, 3, (2, 8, 3)).astype(np.float32)
    y = run((x,), [Sort(outs, a, a[1], key, (key, var(a[1])), descending)], {"x": values})
    order = np.argsort(-values if descending else values, 1, kind="stable")[:, :5]
    np.testing.assert_array_equal(y["places"], order)
    np.testing.assert_array_equal(y["values"], np.take_along_axis(values, order, 1))


def branch(factor: float) -> Program:
    x, y = Tensor("bx", (3,), F), Tensor("by", (3,), F)
    (i,) = axes(("i", 3))
    return Program((x,), (y,), (Map(y, (i,), load(x, (var(i),)) * const(factor, F)),))


def test_region_if_and_loop():
    c, x, y = Tensor("c", (), dtypes.bool_), Tensor("x", (3,), F), Tensor("y", (3,), F)
    region = Region("if", c, (x,), (branch(2.0), branch(-1.0)), (y,))
    v = rand(3)
    np.testing.assert_array_equal(run((c, x), [region], {"c": np.array(True), "x": v})["y"], v * 2)
    np.testing.assert_array_equal(run((c, x), [region], {"c": np.array(False), "x": v})["y"], -v)

    bc, bn = Tensor("bc", (), dtypes.bool_), Tensor("bn", (), dtypes.int64)
    nc, nn = Tensor("nc", (), dtypes.bool_), Tensor("nn", (), dtypes.int64)
    count = load(bn, ()) + 3
    body = Program((bc, bn), (nc, nn), (Map(nn, (), count), Map(nc, (), lt(count, const(10)))))
    n, out_c, out_n = Tensor("n", (), dtypes.int64), Tensor("oc", (), dtypes.bool_), Tensor("on", (), dtypes.int64)
    loop = Region("loop", c, (c, n), (body,), (out_c, out_n))
    assert run((c, n), [loop], {"c": np.array(True), "n": np.array(0)})["on"] == 12


def test_host_is_refused():
    x, y = Tensor("x", (1,), F), Tensor("y", (1,), F)
    with pytest.raises(UnsupportedError, match="host call"):
        run((x,), [Host("mystery", (x,), (y,))], {"x": np.zeros(1, np.float32)})


def test_symbols_come_from_shapes():
    n = symbol("n", 1, 100)
    x = Tensor("x", (n, 2), F)
    i, j = axes(("i", n), ("j", 2))
    y = Tensor("y", (n, 2), F)
    out = run((x,), [Map(y, (i, j), load(x, (n - 1 - var(i), var(j))))], {"x": rand(7, 2)})["y"]
    np.testing.assert_array_equal(out, rand(7, 2)[::-1])


def test_bad_inputs_are_named():
    program = scan_program(False)
    with pytest.raises(InputError, match="'h0' is missing"):
        evaluate(program, {"x": rand(5, 3)})
    with pytest.raises(InputError, match="'x' has shape"):
        evaluate(program, {"x": rand(5, 4), "h0": rand(3)})
    with pytest.raises(InputError, match="'x' is int64"):
        evaluate(program, {"x": np.zeros((5, 3), np.int64), "h0": rand(3)})


def test_wide_is_more_exact():
    a, b = Tensor("a", (8, 4000), F), Tensor("b", (4000, 8), F)
    values = {"a": rand(8, 4000), "b": rand(4000, 8, seed=1)}
    exact = values["a"].astype(np.float64) @ values["b"].astype(np.float64)
    wide = run((a, b), [matmul(a, b)], values, wide=True)["C"]
    assert wide.dtype == np.float64
    np.testing.assert_allclose(wide, exact, rtol=1e-12)


def test_casts():
    x = Tensor("x", (4,), F)
    (i,) = axes(("i", 4))
    v = np.array([-1.7, 0.0, 2.9, 300.0], np.float32)
    e = load(x, (var(i),))
    for dtype, expected in ((dtypes.int32, [-1, 0, 2, 300]), (dtypes.bool_, [True, False, True, True]),
                            (dtypes.uint8, [255, 0, 2, 44])):  # fmt: skip
        y = run((x,), [Map(Tensor("y", (4,), dtype), (i,), cast(e, dtype))], {"x": v})["y"]
        np.testing.assert_array_equal(y, np.array(expected, dtype.numpy))
    half = run((x,), [Map(Tensor("y", (4,), dtypes.bfloat16), (i,), cast(e, dtypes.bfloat16))], {"x": v})["y"]
    assert half.dtype == ml_dtypes.bfloat16


def test_computes_on_given_tensors():
    a, b = Tensor("a", (3, 4), F), Tensor("b", (4, 5), F)
    compute = matmul(a, b)
    tensors = {a: rand(3, 4), b: rand(4, 5, seed=1)}
    result = evaluate_computes([compute], tensors)
    np.testing.assert_allclose(result[compute.outputs[0]], tensors[a] @ tensors[b], rtol=1e-5)


def attention(length: int, width: int) -> Program:
    q, k, v = (Tensor(n, (length, width), F) for n in "qkv")
    i, j, d = axes(("i", length), ("j", length), ("d", width))
    scores = Tensor("scores", (length, length), F)
    score = load(q, (var(i), var(d))) * load(k, (var(j), var(d)))
    largest, total, weights = Tensor("m", (length,), F), Tensor("s", (length,), F), Tensor("p", scores.shape, F)
    shifted = op("exp", load(scores, (var(i), var(j))) - load(largest, (var(i),)))
    out = Tensor("out", (length, width), F)
    return Program(
        (q, k, v), (out,),
        (
            Reduce((scores,), (i, j), (d,), (score,), plain_monoid("add", F)),
            Reduce((largest,), (i,), (j,), (load(scores, (var(i), var(j))),), plain_monoid("max", F)),
            Reduce((total,), (i,), (j,), (shifted,), plain_monoid("add", F)),
            Map(weights, (i, j), shifted / load(total, (var(i),))),
            Reduce((out,), (i, d), (j,), (load(weights, (var(i), var(j))) * load(v, (var(j), var(d))),),
                   plain_monoid("add", F)),
        ),
    )  # fmt: skip


def test_sampler_agrees_and_computes_only_what_is_needed():
    program = attention(300, 24)
    values = {n: rand(300, 24, seed=s) for s, n in enumerate("qkv")}
    whole = evaluate(program, values)["out"]
    sampler = Sampler(program, values)
    rows, columns = np.array([0, 299, 17]), np.array([23, 0, 5])
    np.testing.assert_allclose(sampler.at(program.outputs[0], (rows, columns)), whole[rows, columns], rtol=1e-4)
    scores = program.computes[0].outputs[0]
    assert scores not in sampler.tensors  # three rows of 300 were needed
    known = sampler._partial[scores][1].reshape(300, 300)
    assert known[rows].all() and known.sum() == 3 * 300
    with pytest.raises(InputError, match="out of range"):
        sampler.at(program.outputs[0], (np.array([300]), np.array([0])))


def test_sampler_takes_scans_whole():
    program = scan_program(False)
    values = {"x": rand(5, 3), "h0": rand(3)}
    whole = evaluate(program, values)
    sampler = Sampler(program, values)
    np.testing.assert_array_equal(sampler.at(program.outputs[1], (np.array([4, 2]), np.array([1, 0]))),
                                  whole["stack"][[4, 2], [1, 0]])  # fmt: skip


def test_clamped_index_and_comparison():
    x = Tensor("x", (4,), F)
    (i,) = axes(("i", 6))
    value = select(eq(var(i), 0), const(9.0, F), load(x, (minimum(var(i), const(3)),)))
    out = run((x,), [Map(Tensor("y", (6,), F), (i,), value)], {"x": np.arange(4, dtype=np.float32)})["y"]
    np.testing.assert_array_equal(out, [9, 1, 2, 3, 3, 3])
