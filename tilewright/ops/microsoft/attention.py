"""Contributed attention (com.microsoft): heads split, masked, with past keys and values, and rotary positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, all_of, cast, const, eq, le, load, lt, maximum, minimum, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, clamp, dims, expect
from tilewright.ops.microsoft.fused import DOMAIN
from tilewright.ops.movement.shape import concatenated
from tilewright.ops.reductions.contraction import matrix_product
from tilewright.ops.reductions.reduction import reduce_over
from tilewright.ops.registry import operator

Adjust = Callable[[Expr, tuple[Expr, ...]], Expr]  # a score at [batch, head, query, key], changed


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values as [batch, head, place, element]; query heads share those of keys in groups."""

    query: Tensor
    key: Tensor
    value: Tensor


def attended(
    b: Builder,
    heads: Heads,
    scale: float,
    adjust: Adjust,
    softcap: float = 0.0,
    sink: Callable[[Expr], Expr] | None = None,
) -> Tensor:
    """softmax(adjust(query key^T * scale)) value, as [batch, place, heads * element]."""
    q, k, v = heads.query, heads.key, heads.value
    batch, count, places, size = dims(q)
    if size != dims(k)[3] or count % dims(k)[1] or dims(k)[:3] != dims(v)[:3] or batch != dims(k)[0]:
        raise b.invalid(f"queries {list(dims(q))}, keys {list(dims(k))} and values {list(dims(v))} do not fit")
    group, wide = count // dims(k)[1], dtypes.accumulator(q.dtype)

    def shared(h: Expr) -> Expr:
        return h if group == 1 else h // group

    def term(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        n, h, s, t = i
        return cast(load(q, (n, h, s, r[0])), wide) * cast(load(k, (n, shared(h), t, r[0])), wide)

    shape = (batch, count, places, dims(k)[2])
    raw = b.reduce("raw_scores", shape, (size,), term, "add")

    def score(*i: Expr) -> Expr:
        value = load(raw, i) * scale
        if softcap:
            value = op("tanh", value * (1 / softcap)) * softcap
        return adjust(value, i)

    scores = b.map("scores", shape, score)
    weights = _softmax(b, scores, sink)

    def sum_term(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        n, h, s, d = i
        return load(weights, (n, h, s, r[0])) * cast(load(v, (n, shared(h), r[0], d)), wide)

    result = b.reduce("heads", (batch, count, places, dims(v)[3]), (dims(k)[2],), sum_term, "add")
    width = dims(v)[3]

    def joined(n: Expr, s: Expr, c: Expr) -> Expr:
        return cast(load(result, (n, c // width, s, c % width)), q.dtype)

    return b.map("", (batch, places, count * width), joined)


def _softmax(b: Builder, x: Tensor, sink: Callable[[Expr], Expr] | None) -> Tensor:
    """Over the last axis; a sink is one more score of each head, which takes its share and has no value."""
    top = reduce_over(b, "max", x, [3], False, "max", lambda v, *at: v)

    def highest(n: Expr, h: Expr, s: Expr) -> Expr:
        value = load(top, (n, h, s))
        return value if sink is None else maximum(value, sink(h))

    powers = b.map("exp", dims(x), lambda n, h, s, t: op("exp", load(x, (n, h, s, t)) - highest(n, h, s)))
    total = reduce_over(b, "total", powers, [3], False, "add", lambda v, *at: v)

    def share(n: Expr, h: Expr, s: Expr, t: Expr) -> Expr:
        whole: Expr = load(total, (n, h, s))
        if sink is not None:
            whole = whole + op("exp", sink(h) - highest(n, h, s))
        return load(powers, (n, h, s, t)) * (const(1, whole.dtype) / whole)

    return b.map("weights", dims(x), share)


def _split(b: Builder, hint: str, x: Tensor, heads: int, bias: Tensor | None = None, first: int = 0) -> Tensor:
    """[batch, place, heads * element] as [batch, head, place, element], with its part of a bias, from `first` on."""
    if x.rank == 4:
        return x
    if x.rank != 3 or dims(x)[2] % heads:
        raise b.invalid(f"{list(dims(x))} does not split into {heads} heads")
    size = dims(x)[2] // heads
    if bias is not None and dims(bias)[0] < first + dims(x)[2]:
        raise b.invalid(f"its bias {list(dims(bias))} is too short for {first + dims(x)[2]} columns")

    def element(n: Expr, h: Expr, s: Expr, d: Expr) -> Expr:
        value = b.wide(x, (n, s, h * size + d))
        value = value if bias is None else value + b.wide(bias, (h * size + d + first,))
        return cast(value, x.dtype)

    return b.map(hint, (dims(x)[0], heads, dims(x)[1], size), element)


def _masked(
    b: Builder,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    past: int,
    filler: float,
    total: int,
    batch: int,
    places: int,
) -> Adjust:
    """What masks and biases do to scores: those of masked keys fall by a large number, of later ones to the lowest."""
    if mask is not None and mask.rank == 1 and dims(mask)[0] not in (batch, 2 * batch):
        raise b.unsupported(f"a mask of shape {list(dims(mask))} is not supported; use one of another form")

    extents = {2: (batch, total), 3: (batch, places, total)}
    if mask is not None and mask.rank in extents:
        expect(b, "mask", mask, extents[mask.rank])
    if mask is not None and mask.rank == 4 and (dims(mask)[2] < past + places or dims(mask)[3] < total):
        raise b.invalid(f"its mask {list(dims(mask))} is smaller than {past + places} x {total}")
    if mask is not None and not 1 <= mask.rank <= 4:
        raise b.invalid(f"its mask {list(dims(mask))} has to have 1 to 4 axes")
    if bias is not None and any(n not in (1, m) for n, m in zip(dims(bias)[-2:], (places, total), strict=False)):
        raise b.invalid(f"its attention_bias {list(dims(bias))} does not fit {places} x {total} scores")

    def visible(i: tuple[Expr, ...]) -> Expr:
        assert mask is not None
        n, _, s, t = i
        if mask.rank == 1:  # where sequences end, and perhaps where they begin
            inside = [lt(t, cast(load(mask, (n,)), dtypes.index))]
            if dims(mask)[0] == 2 * batch:
                inside.append(le(cast(load(mask, (n + batch,)), dtypes.index), t))
            return all_of(inside)
        at = {2: (n, t), 3: (n, s, t), 4: (n, const(0), s + past, t)}[mask.rank]
        return op("ne", b.read(mask, at), 0)

    def adjust(value: Expr, i: tuple[Expr, ...]) -> Expr:
        if bias is not None:
            value = value + cast(b.read(bias, i), value.dtype)
        if mask is not None:
            value = value + select(visible(i), const(0.0, value.dtype), const(filler, value.dtype))
        if causal:
            lowest = const(float(np.finfo(np.float32).min), value.dtype)
            value = select(le(i[3], i[2] + past), value, lowest)
        return value

    return adjust


@operator("Attention", domain=DOMAIN)
def attention(
    b: Builder,
    node: Node,
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    past: Tensor | None = None,
    added: Tensor | None = None,
    past_length: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    for name in ("do_rotary", "past_present_share_buffer"):
        if node.attributes.get(name, 0):
            raise b.unsupported(f"{name} is not supported; leave it out")
    count = int(node.attributes["num_heads"])
    width = dims(weights)[1]
    sizes = [int(n) for n in node.attributes.get("qkv_hidden_sizes", [width // 3] * 3)]
    if sum(sizes) != width or len(sizes) != 3 or any(n % count for n in sizes):
        raise b.invalid(f"weights {list(dims(weights))} do not split into {sizes} of {count} heads")
    expect(b, "bias", bias, (width,))
    if past is not None and (past.rank != 5 or dims(past)[:3] != (2, dims(x)[0], count)):
        raise b.invalid(f"its past {list(dims(past))} does not fit {count} heads")
    projected = matrix_product(b, "projected", x, weights)
    batch, places = dims(x)[:2]

    def part(hint: str, first: int, size: int) -> Tensor:
        each = size // count

        def element(n: Expr, h: Expr, s: Expr, d: Expr) -> Expr:
            column = h * each + d + first
            value = load(projected, (n, s, column))
            return cast(value if bias is None else value + b.wide(bias, (column,)), x.dtype)

        return b.map(hint, (batch, count, places, each), element)

    query, key, value = (part(h, sum(sizes[:n]), sizes[n]) for n, h in enumerate(("query", "key", "value")))
    before = 0 if past is None else dims(past)[3]
    if past is not None:
        cache = past
        old = [b.map(f"past{p}", dims(past)[1:], lambda *i, p=p: load(cache, (p, *i))) for p in (0, 1)]
        key, value = concatenated(b, "all_keys", (old[0], key), 2), concatenated(b, "all_values", (old[1], value), 2)
    scale = float(node.attributes.get("scale", 0.0)) or 1 / math.sqrt(sizes[0] // count)
    adjust = _masked(
        b, mask, added, bool(node.attributes.get("unidirectional", 0)), before,
        float(node.attributes.get("mask_filter_value", -10000.0)), before + places, batch, places,
    )  # fmt: skip
    result = attended(b, Heads(query, key, value), scale, adjust)
    if len(node.outputs) < 2 or not node.outputs[1]:
        return result, None
    stack = b.map("present", (2, *dims(key)), lambda p, *i: select(eq(p, 0), load(key, i), load(value, i)))
    return result, stack


@operator("MultiHeadAttention", domain=DOMAIN)
def multi_head_attention(
    b: Builder,
    node: Node,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    added: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_length: Tensor | None = None,
    indirection: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    if past_length is not None or indirection is not None:
        raise b.unsupported("shared cache buffers and beams are not supported; give past keys and values of their own")
    count = int(node.attributes["num_heads"])
    heads = _given_heads(b, count, query, key, value, bias)
    k, v, before = heads.key, heads.value, 0
    if past_key is not None and past_value is not None:
        before = dims(past_key)[2]
        k, v = concatenated(b, "all_keys", (past_key, k), 2), concatenated(b, "all_values", (past_value, v), 2)
    scale = float(node.attributes.get("scale", 0.0)) or 1 / math.sqrt(dims(heads.query)[3])
    adjust = _masked(
        b, mask, added, bool(node.attributes.get("unidirectional", 0)), before,
        float(node.attributes.get("mask_filter_value", -10000.0)), dims(k)[2], dims(query)[0], dims(heads.query)[2],
    )  # fmt: skip
    result = attended(b, Heads(heads.query, k, v), scale, adjust)
    if len(node.outputs) > 3 and node.outputs[3]:
        raise b.unsupported("its output 'qk' is not supported; drop it from the model")
    return result, k, v


def _given_heads(
    b: Builder, count: int, query: Tensor, key: Tensor | None, value: Tensor | None, bias: Tensor | None
) -> Heads:
    """Queries, keys and values given each alone, packed with each other, or as heads already."""

    def packed(hint: str, x: Tensor, part: int, first: int) -> Tensor:
        n, s, h, _, d = dims(x)

        def element(n_: Expr, h_: Expr, s_: Expr, d_: Expr) -> Expr:
            value = b.wide(x, (n_, s_, h_, part, d_))
            value = value if bias is None else value + b.wide(bias, (h_ * d + d_ + first,))
            return cast(value, x.dtype)

        return b.map(hint, (n, h, s, d), element)

    if key is None:
        if query.rank != 5 or dims(query)[2:4] != (count, 3):
            raise b.invalid(f"{list(dims(query))} is not queries, keys and values packed for {count} heads")
        size = count * dims(query)[4]
        return Heads(*(packed(h, query, p, p * size) for p, h in enumerate(("query", "key", "value"))))
    hidden = dims(query)[2]
    q = _split(b, "query", query, count, bias)
    if value is None:
        if key.rank != 5 or dims(key)[2:4] != (count, 2):
            raise b.invalid(f"{list(dims(key))} is not keys and values packed for {count} heads")
        return Heads(q, packed("key", key, 0, hidden), packed("value", key, 1, 2 * hidden))
    return Heads(q, _split(b, "key", key, count, bias, hidden), _split(b, "value", value, count, bias, 2 * hidden))


# rotary positions and grouped queries


def rotated(
    b: Builder,
    hint: str,
    x: Tensor,
    place: Callable[[Expr, Expr], Expr],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    size: int,
) -> Tensor:
    """The first `size` elements of [batch, head, place, element] rotated in pairs by the angles of their places."""
    half = size // 2
    if size % 2 or size > dims(x)[3] or dims(cos)[1] < half or dims(sin) != dims(cos):
        raise b.invalid(f"tables {list(dims(cos))} and {list(dims(sin))} do not turn {size} of {dims(x)[3]} elements")

    def element(n: Expr, h: Expr, s: Expr, d: Expr) -> Expr:
        angle = minimum(d // 2 if interleaved else d % half, half - 1)
        first = eq(d % 2, 0) if interleaved else lt(d, half)
        other = select(first, d + (1 if interleaved else half), d - (1 if interleaved else half))
        at = (clamp(place(n, s), dims(cos)[0]), angle)
        mine, partner = b.wide(x, (n, h, s, d)), b.wide(x, (n, h, s, clamp(other, dims(x)[3])))
        turn = partner * b.wide(sin, at)
        value = mine * b.wide(cos, at) + select(first, -turn, turn)
        return cast(value if size == dims(x)[3] else select(lt(d, size), value, mine), x.dtype)

    return b.map(hint, dims(x), element)


@operator("RotaryEmbedding", domain=DOMAIN)
def rotary_embedding(b: Builder, node: Node, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if node.attributes.get("is_packed_batching", 0):
        raise b.unsupported("packed batches are not supported; pad them")
    size = int(node.attributes.get("rotary_embedding_dim", 0))
    count = int(node.attributes.get("num_heads", 0))
    if x.rank == 3 and not count:
        if size:
            raise b.invalid("rotary_embedding_dim needs num_heads")
        count = dims(x)[2] // (2 * dims(cos)[1])
    heads = _split(b, "heads", x, count) if x.rank == 3 else x

    def place(n: Expr, s: Expr) -> Expr:
        if dims(positions) == (1,):  # one number, where all sequences begin
            return cast(b.read(positions, (0,)), dtypes.index) + s
        return cast(load(positions, (n, s)), dtypes.index)

    expect(b, "position_ids", positions, (1,), (dims(heads)[0], dims(heads)[2]))
    interleaved = bool(node.attributes.get("interleaved", 0))
    rotated_heads = rotated(b, "rotated", heads, place, cos, sin, interleaved, size or dims(heads)[3])
    if x.rank == 4:
        return rotated_heads
    each = dims(rotated_heads)[3]
    return b.map("", dims(x), lambda n, s, c: load(rotated_heads, (n, c // each, s, c % each)))


@operator("GroupQueryAttention", domain=DOMAIN, constants=(6,))
def group_query_attention(
    b: Builder,
    node: Node,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    lengths: Tensor,
    total_length: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    added: Tensor | None = None,
    sink: Tensor | None = None,
    *others: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    quantised = any(node.attributes.get(n, "NONE") != "NONE" for n in ("k_quant_type", "v_quant_type"))
    wanted = bool(node.attributes.get("sliding_window_cache", 0)) or bool(node.attributes.get("qk_output", 0))
    if quantised or wanted or any(t is not None for t in others):
        raise b.unsupported("quantised or windowed caches, norms of its heads and scores as outputs are not supported")
    count, shared = int(node.attributes["num_heads"]), int(node.attributes["kv_num_heads"])
    batch, places = dims(query)[:2]
    q, k, v = _grouped(b, query, key, value, count, shared)
    expect(b, "seqlens_k", lengths, (batch,), (batch, 1))
    expect(b, "position_ids", positions, (batch, places))
    expect(b, "head_sink", sink, (count,))
    for name, old in (("past_key", past_key), ("past_value", past_value)):
        expect(b, name, old, *(() if old is None else ((batch, shared, dims(old)[2], dims(k)[3]),)))
    total = int(b.known(total_length, "total_sequence_length").reshape(-1)[0])
    capacity = max(total, 0 if past_key is None else dims(past_key)[2])
    prompt = places == total  # the first words: nothing is behind them, whatever the lengths say

    def behind(n: Expr) -> Expr:
        """How many places of a sequence are in its past."""
        return const(0) if prompt else cast(load(lengths, (n, 0)[: lengths.rank]), dtypes.index) + (1 - places)

    if node.attributes.get("do_rotary", 0):
        if cos is None or sin is None:
            raise b.invalid("do_rotary needs tables of cosines and sines")

        def place(n: Expr, s: Expr) -> Expr:
            return behind(n) + s if positions is None else cast(load(positions, (n, s)), dtypes.index)

        interleaved = bool(node.attributes.get("rotary_interleaved", 0))
        size = 2 * dims(cos)[1]
        q = rotated(b, "turned_query", q, place, cos, sin, interleaved, size)
        k = rotated(b, "turned_key", k, place, cos, sin, interleaved, size)

    def present(hint: str, new: Tensor, old: Tensor | None) -> Tensor:
        if old is None and capacity == places:
            return new

        def element(n: Expr, h: Expr, t: Expr, d: Expr) -> Expr:
            step = t - behind(n)
            fresh = load(new, (n, h, clamp(step, places), d))
            nothing: Expr = const(0, new.dtype)
            kept = nothing if old is None else load(old, (n, h, clamp(t, dims(old)[2]), d))
            if old is not None and dims(old)[2] < capacity:
                kept = select(lt(t, dims(old)[2]), kept, nothing)
            return select(op("and", le(0, step), lt(step, places)), fresh, kept)

        return b.map(hint, (batch, shared, capacity, dims(new)[3]), element)

    keys, values = present("present_key", k, past_key), present("present_value", v, past_value)
    causal, window = bool(node.attributes.get("causal", 1)), int(node.attributes.get("local_window_size", -1))

    def adjust(score: Expr, i: tuple[Expr, ...]) -> Expr:
        n, _, s, t = i
        if added is not None:
            at = tuple(clamp(a, m) if p == 3 else a for p, (a, m) in enumerate(zip(i, dims(added), strict=True)))
            score = score + cast(b.read(added, at), score.dtype)
        here = behind(n) + s
        seen = [le(t, here)] if causal else [lt(t, cast(load(lengths, (n, 0)[: lengths.rank]), dtypes.index) + 1)]
        if window > 0:
            seen.append(lt(here - window, t))
        return select(all_of(seen), score, const(float(np.finfo(np.float32).min), score.dtype))

    drain: Callable[[Expr], Expr] | None = None
    if sink is not None:
        drain = lambda h: cast(load(sink, (h,)), dtypes.accumulator(query.dtype))  # noqa: E731
    elif node.attributes.get("smooth_softmax", 0):
        drain = lambda h: const(0, dtypes.accumulator(query.dtype))  # noqa: E731
    scale = float(node.attributes.get("scale", 0.0)) or 1 / math.sqrt(dims(q)[3])
    softcap = float(node.attributes.get("softcap", 0.0))
    return attended(b, Heads(q, keys, values), scale, adjust, softcap, drain), keys, values


def _grouped(
    b: Builder, query: Tensor, key: Tensor | None, value: Tensor | None, count: int, shared: int
) -> tuple[Tensor, Tensor, Tensor]:
    if key is not None and value is not None:
        return (
            _split(b, "query", query, count), _split(b, "key", key, shared), _split(b, "value", value, shared)
        )  # fmt: skip
    if dims(query)[2] % (count + 2 * shared):
        raise b.invalid(f"{list(dims(query))} is not {count} heads packed with {shared} of keys and values")
    size = dims(query)[2] // (count + 2 * shared)

    def part(hint: str, first: int, heads: int) -> Tensor:
        shape = (dims(query)[0], heads, dims(query)[1], size)
        return b.map(hint, shape, lambda n, h, s, d: load(query, (n, s, (h + first) * size + d)))

    return part("query", 0, count), part("key", count, shared), part("value", count + shared, shared)
