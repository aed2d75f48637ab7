"""Stacked recurrences as one: a Scan over diagonals, each step of which advances every layer by a step of its own.

Layer by layer, L layers of T steps are L * T steps of one layer each, with the projection of all steps as one product
before each layer. Along diagonals they are T + L - 1 steps, in which layer l does its step s - l: all layers of a step
are independent, so a step is one batched product, and the threads meet L times less often; but every step reads the
weights of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, expressions, reads
from tilewright.ir.forms.expr import Axis, Expr, Load, all_of, le, load, loads, lt, minimum, rewrite, select, var
from tilewright.ir.forms.spilled import spilled
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.transform.recurrence.stacks import Stack, carried, find_stacks, later_than

_HOPELESS = 1.2  # times as long two layers at once may take for more to be worth a look
_WORTH = 0.9  # of the time layer by layer: less is within the error of the prediction

Predict = Callable[[Program], float]
"""The time a Program is predicted to take, in seconds."""


# --- the rewrite


class Wavefront:
    """A stack as one Scan: `computes` give what its Scans gave, reading the `stacked` constants."""

    def __init__(self, stack: Stack, program: Program) -> None:
        self.stack = stack
        self.program = program
        self.names = {t.name for t in _all_tensors(program)}
        self.layers = len(stack.layers)
        first = stack.layers[0].scan
        self.origin = _layers_text(stack)
        self.step = Axis("s", stack.steps + self.layers - 1)
        self.stacked: dict[Tensor, tuple[Tensor, ...]] = {}
        self.owns = {**stack.in_body, **stack.in_between}
        self.merged: dict[Tensor, Tensor] = {}  # of the template's tensors, those with an axis of layers
        self.kept: set[Tensor] = set()  # what is made for one carry: layers that rest keep that
        self.carry = tuple(self._tensor(t, (self.layers, *t.shape)) for t in first.carry)
        self.computes = self._computes()

    def constants(self, arrays: Mapping[Tensor, np.ndarray]) -> dict[Tensor, np.ndarray]:
        return {t: spilled(np.stack([arrays[p] for p in parts])) for t, parts in self.stacked.items()}

    def _computes(self) -> list[Compute]:
        scans = [layer.scan for layer in self.stack.layers]
        for template, owns in self.stack.in_body.items():
            if owns[0] in scans[0].carry:
                self.merged[template] = self.carry[scans[0].carry.index(owns[0])]
        before: list[Compute] = []
        initial = tuple(self._initial(before, [s.initial[i] for s in scans]) for i in range(len(self.carry)))
        body: list[Compute] = []
        for compute in self.stack.between:
            body.append(self._between(compute))
        self._inputs(body)
        template_of = {own: t for t, owns in self.stack.in_body.items() for own in owns}
        nexts = [template_of[t] for t in scans[0].following]
        for compute in self.stack.body:
            body.append(self._layered(compute, self.layers, 0))
        following = tuple(self._masked(body, self.merged[t], carry) for t, carry in zip(nexts, self.carry, strict=True))
        kept = dict(zip(nexts, following, strict=True))
        finals = tuple(
            self._tensor(c, c.shape, "_last") if any(s.finals[i] is not None for s in scans) else None
            for i, c in enumerate(self.carry)
        )
        wanted = dict.fromkeys(template_of[inner] for s in scans for inner, _ in s.stacked)
        inner = {t: kept.get(t, self.merged[t]) for t in wanted}
        stacks = {t: self._tensor(i, (self.step.extent, *i.shape), "_steps") for t, i in inner.items()}
        stacked = tuple((inner[t], stacks[t]) for t in wanted)
        scan = Scan(self.step, initial, self.carry, tuple(body), following, finals, stacked, False, self.origin)
        after: list[Compute] = []
        for number, own in enumerate(scans):
            for final, whole in zip(own.finals, finals, strict=True):
                if final is not None and whole is not None:
                    after.append(_map(final, lambda i, w=whole, n=number: load(w, (n, *i)), own.origin))  # type: ignore[misc]
            for part, output in own.stacked:
                whole = stacks[template_of[part]]
                after.append(
                    _map(output, lambda i, w=whole, n=number: load(w, (i[0] + n, n, *i[1:])), own.origin)  # type: ignore[misc]
                )
        return [*before, scan, *after]

    def _initial(self, before: list[Compute], parts: Sequence[Tensor]) -> Tensor:
        tensor = self._tensor(parts[0], (self.layers, *parts[0].shape))
        if all(p in self.program.constants for p in parts):
            self.stacked[tensor] = tuple(parts)
            return tensor

        def chosen(i: tuple[Expr, ...]) -> Expr:
            value: Expr = load(parts[-1], i[1:])
            for number, part in reversed(list(enumerate(parts[:-1]))):
                value = select(lt(i[0], number + 1), load(part, i[1:]), value)
            return value

        before.append(_map(tensor, chosen, self.origin))
        return tensor

    def _between(self, compute: Map | Reduce) -> Compute:
        """What a layer makes of the one below it: the carry there holds what it gave one step before."""
        for node in loads(*expressions(compute)):
            below = self.stack.in_between[node.source][0]
            carry = carried(self.stack.layers[0].scan, below)
            if carry is not None:
                self.merged[node.source] = self.carry[carry]
        return self._layered(compute, self.layers - 1, 1)

    def _inputs(self, body: list[Compute]) -> None:
        """The first layer reads its input of the step, which after its last step is of no use; the others what is
        made of the layer below."""
        now = minimum(var(self.step), self.stack.steps - 1)
        given = self.stack.layers[0].inputs.items()
        for (template, source), (tensor, dim) in zip(self.stack.inputs, given, strict=True):
            merged = self._tensor(tensor, (self.layers, *template.shape))
            self.merged[template] = merged
            from_below = self.carry[source] if isinstance(source, int) else self.merged[source]

            def chosen(i: tuple[Expr, ...], t: Tensor = tensor, d: int = dim, b: Tensor = from_below) -> Expr:
                outside = load(t, (*i[1 : d + 1], now, *i[d + 1 :]))
                return select(lt(i[0], 1), outside, load(b, (i[0] - 1, *i[1:])))

            body.append(_map(merged, chosen, self.origin))

    def _layered(self, compute: Map | Reduce, count: int, first: int) -> Compute:
        """A compute of the template for all layers from `first` on."""
        layer = Axis("l", count)
        for tensor in compute.outputs:
            self.merged[tensor] = self._tensor(tensor, (count, *tensor.shape))

        def rule(node: Expr) -> Expr | None:
            if not isinstance(node, Load):
                return None
            if node.source not in self.merged:
                owns = self.owns[node.source]
                if all(t is owns[0] for t in owns):
                    return load(owns[0], node.indices)
                self.merged[node.source] = self._tensor(node.source, (count, *node.source.shape))
                self.stacked[self.merged[node.source]] = owns
            return load(self.merged[node.source], (var(layer), *node.indices))

        axes = (layer, *compute.axes)
        values = tuple(rewrite(e, rule) for e in expressions(compute))
        if isinstance(compute, Map):
            return Map(self.merged[compute.output], axes, values[0], self.origin)
        outputs = tuple(self.merged[t] for t in compute.outputs)
        return Reduce(outputs, axes, compute.reduce_axes, values, compute.monoid, self.origin)

    def _masked(self, body: list[Compute], made: Tensor, carry: Tensor) -> Tensor:
        """What is carried on: layers that have not begun, or have ended, keep what they hold."""
        now = var(self.step)

        def kept(i: tuple[Expr, ...], value: Expr) -> Expr:
            return select(all_of((le(i[0], now), lt(now, i[0] + self.stack.steps))), value, load(carry, i))

        place, maker = next((n, c) for n, c in enumerate(body) if made in c.outputs)
        if isinstance(maker, Map) and made not in self.kept:
            # what other computes of the body make of it does not count in layers that rest
            self.kept.add(made)
            body[place] = replace(maker, value=kept(tuple(var(a) for a in maker.axes), maker.value))
            return made
        tensor = self._tensor(carry, carry.shape, "_next")
        body.append(_map(tensor, lambda i: kept(i, load(made, i)), self.origin))
        return tensor

    def _tensor(self, like: Tensor, shape: tuple[object, ...], suffix: str = "_layers") -> Tensor:
        name = like.name + suffix
        while name in self.names:
            name += "_"
        self.names.add(name)
        return Tensor(name, shape, like.dtype)  # type: ignore[arg-type]


def _map(tensor: Tensor, value: Callable[[tuple[Expr, ...]], Expr], origin: str) -> Map:
    axes = tuple(Axis(f"i{d}", extent) for d, extent in enumerate(tensor.shape))
    return Map(tensor, axes, value(tuple(var(a) for a in axes)), origin)


def _all_tensors(program: Program) -> Iterator[Tensor]:
    yield from program.tensors()
    for compute in program.computes:
        if isinstance(compute, Scan):
            yield from compute.carry
            yield from (t for c in compute.body for t in c.outputs)


def as_wavefront(program: Program, stack: Stack, fill: bool = True) -> Program:
    """The Program with the stack as one Scan; without `fill` its constants are zeros, which is enough to predict."""
    made = Wavefront(stack, program)
    scans = {layer.scan for layer in stack.layers}
    later = later_than(program.computes, stack.layers[0].scan)
    rest = [c for c in program.computes if c not in scans]
    first = [c for c in rest if later.isdisjoint(c.outputs)]
    last = [c for c in rest if not later.isdisjoint(c.outputs)]
    arrays = made.constants(program.constants) if fill else {t: _zeros(t) for t in made.stacked}
    computes = (*first, *made.computes, *last)
    return without_dead(replace(program, computes=computes, constants={**program.constants, **arrays}))


def _zeros(tensor: Tensor) -> np.ndarray:
    shape = tuple(int(e) for e in tensor.shape)  # type: ignore[arg-type]
    return np.broadcast_to(np.zeros((), tensor.dtype.numpy), shape)


# --- the choice


@dataclass(frozen=True)
class Order:
    """How many layers of a stack to take at once, 1 for layer by layer; predicted seconds by the numbers considered."""

    width: int
    seconds: Mapping[int, float]

    def __str__(self) -> str:
        others = ", ".join(f"{_ms(t)} {_width_text(w)}" for w, t in self.seconds.items() if w != self.width)
        return f"{_width_text(self.width)}, predicted {_ms(self.seconds[self.width])}; {others}"


def choose_orders(program: Program, predict: Predict) -> Program:
    """The Program with every stack as wavefronts, over as many layers at once as are predicted to be clearly faster
    than layer by layer."""
    decided: set[Scan] = set()
    stacks = find_stacks(program)
    while stacks:
        stack = stacks.pop(0)
        if stack.layers[0].scan in decided:
            continue
        decided.update(layer.scan for layer in stack.layers)
        order = fastest_order(stack, program, predict)
        for part in stack.parts(order.width):
            program = as_wavefront(program, part)
        program = replace(program, remarks=(*program.remarks, f"{_layers_text(stack)}: {order}"))
        if order.width > 1:  # two stacks that wait for each other's results cannot both be one Scan
            stacks = find_stacks(program)
    return program


def fastest_order(stack: Stack, program: Program, predict: Predict) -> Order:
    """The order predicted to be fastest. What is predicted of some layers holds for all."""
    count = len(stack.layers)
    above = (*stack.links[0].computes, stack.layers[1].scan)
    first, other = (predict(_alone(program, part)) for part in ((stack.layers[0].scan,), above))
    known = {1: other}

    def seconds(width: int) -> float:
        """All layers, `width` at once, with the projections of those that begin a wavefront."""
        sizes = [width] * (count // width) + ([count % width] if count % width else [])
        for size in sizes:
            if size not in known:
                part = stack.parts(size)[0]
                wave = predict(as_wavefront(_alone(program, _computes_of(part)), part, fill=False))
                known[size] = wave + other - first
        return sum(known[size] for size in sizes)

    times = {width: seconds(width) for width in (1, 2)}
    if times[2] <= times[1] * _HOPELESS:
        times.update({width: seconds(width) for width in sorted({min(4, count), count})})
    return Order(min(times, key=lambda w: times[w] * (_WORTH if w == 1 else 1.0)), times)


def _layers_text(stack: Stack) -> str:
    return f"{stack.layers[0].scan.origin} to {stack.layers[-1].scan.origin}"


def _width_text(width: int) -> str:
    return "layer by layer" if width == 1 else f"{width} layers at once"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _computes_of(stack: Stack) -> list[Compute]:
    """The stack's Scans with what lies between them."""
    computes: list[Compute] = [stack.layers[0].scan]
    for link, layer in zip(stack.links, stack.layers[1:], strict=True):
        computes += (*link.computes, layer.scan)
    return computes


def _alone(program: Program, computes: Sequence[Compute]) -> Program:
    """A Program of these computes, giving what others want of them."""
    inside = set(computes)
    made = [t for c in computes for t in c.outputs]
    wanted = set(program.outputs)
    for compute in program.computes:
        if compute not in inside:
            wanted.update(reads(compute))
    read = dict.fromkeys(t for c in computes for t in reads(c) if t not in made)
    constants = {t: program.constants[t] for t in read if t in program.constants}
    inputs = tuple(t for t in read if t not in constants)
    return Program(inputs, tuple(t for t in made if t in wanted), tuple(computes), constants)
