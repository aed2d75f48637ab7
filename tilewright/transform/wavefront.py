"""Stacked recurrences as one: a Scan over diagonals, each step of which advances every layer by a step of its own.

Layer by layer, L layers of T steps are L * T steps of one layer each, with the projection of all steps as one product
before each layer. Along diagonals they are T + L - 1 steps, in which layer l does its step s - l: all layers of a step
are independent, so a step is one batched product, and the threads meet L times less often; but every step reads the
weights of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tilewright.ir.compute import Compute, Map, Program, Reduce, Scan, expressions, reads
from tilewright.ir.expr import Axis, Expr, Load, Var, all_of, le, load, loads, lt, minimum, rewrite, select, var
from tilewright.ir.folding import without_dead
from tilewright.ir.tensor import Tensor

_WIDTHS = (3, 4, 6, 8)  # layers of a wavefront worth a look besides two and all, where one of these pays
_WORTH = 0.9  # of the time layer by layer: less is within the error of the prediction

Predict = Callable[[Program], float]
"""The time a Program is predicted to take, in seconds."""


# --- recognition


@dataclass(frozen=True)
class Link:
    """How a layer gets its input: from which Scan, by which computes that look at no other time."""

    below: Scan
    computes: tuple[Map | Reduce, ...]  # each after what it reads
    when: Mapping[Tensor, int]  # the axis that is the time, of every tensor on the way


@dataclass(frozen=True)
class Layer:
    """A Scan that may be a layer of a stack: what its body reads at the step, and on which axis of it."""

    scan: Scan
    inputs: dict[Tensor, int]


@dataclass(frozen=True)
class Stack:
    """Layers of equal structure, the lowest first. `body` and `between` are computes that stand for those of every
    layer: they have no axis of time and read tensors of their own, for which there is one of each layer."""

    layers: tuple[Layer, ...]
    links: tuple[Link, ...]
    body: tuple[Map | Reduce, ...]
    between: tuple[Map | Reduce, ...]  # from one layer to the next
    in_body: Mapping[Tensor, tuple[Tensor, ...]]
    in_between: Mapping[Tensor, tuple[Tensor, ...]]  # from the second layer on
    inputs: tuple[tuple[Tensor, Tensor | int], ...]  # of the body: what is between that gives it, or which carry below

    @property
    def steps(self) -> int:
        return _steps(self.layers[0].scan)

    def parts(self, size: int) -> list[Stack]:
        """Its layers in groups of `size`; one that is left over is in none."""
        starts = range(0, len(self.layers) - 1, size) if size > 1 else ()
        return [self._part(slice(start, start + size), slice(start, start + size - 1)) for start in starts]

    def _part(self, own: slice, above: slice) -> Stack:
        body = {t: owns[own] for t, owns in self.in_body.items()}
        between = {t: owns[above] for t, owns in self.in_between.items()}
        return replace(self, layers=self.layers[own], links=self.links[above], in_body=body, in_between=between)


def find_stacks(program: Program) -> list[Stack]:
    """Every chain of two Scans or more that may run as a wavefront."""
    producers = program.producers()
    layers: dict[Scan, Layer] = {}
    links: dict[Scan, Link] = {}
    for compute in program.computes:
        layer = _layer(compute, program) if isinstance(compute, Scan) else None
        if layer is None:
            continue
        layers[layer.scan] = layer
        link = _link(layer, program, producers)
        if link is not None and link.below in layers:
            links[layer.scan] = link
    above: dict[Scan, Scan] = {}
    for scan, link in links.items():
        above.setdefault(link.below, scan)
    found: list[Stack] = []
    used: set[Scan] = set()
    for scan in layers:
        if scan in used:
            continue
        stack: Stack | None = None
        chain = [scan]
        while chain[-1] in above and above[chain[-1]] not in used:
            chain.append(above[chain[-1]])
            longer = _stack([layers[s] for s in chain], [links[s] for s in chain[1:]], program)
            if longer is None:
                break
            stack = longer
        if stack is not None:
            found.append(stack)
            used.update(layer.scan for layer in stack.layers)
    return found


def _steps(scan: Scan) -> int:
    assert isinstance(scan.axis.extent, int)
    return scan.axis.extent


def _layer(scan: Scan, program: Program) -> Layer | None:
    made = {t for c in scan.body for t in c.outputs}
    if scan.reverse or not isinstance(scan.axis.extent, int) or scan.axis.extent < 2:
        return None
    if any(not isinstance(c, Map | Reduce) for c in scan.body) or any(t not in made for t in scan.following):
        return None
    inner = {*made, *scan.carry}
    inputs: dict[Tensor, int] = {}
    for compute in scan.body:
        found = _read_at(compute, scan.axis)
        if found is None or not inner.isdisjoint(found) or not _agrees(found, inputs):
            return None
        inputs.update(found)
    read = [n for c in scan.body for n in loads(*expressions(c)) if n.source not in inner]
    if any((n.source in inputs) != (scan.axis in n.axes) for n in read):
        return None
    if any(n.source not in inputs and n.source not in program.constants for n in read):
        return None
    return Layer(scan, inputs) if inputs else None


def _link(layer: Layer, program: Program, producers: Mapping[Tensor, Compute]) -> Link | None:
    when = dict(layer.inputs)
    below: dict[Scan, None] = {}
    done: dict[Tensor, Map | Reduce | None] = {}
    stack = [(t, False) for t in reversed(layer.inputs)]
    while stack:
        tensor, ready = stack.pop()
        if tensor in done:
            continue
        producer = producers.get(tensor)
        if isinstance(producer, Scan):
            if when[tensor] != 0 or _carried(producer, tensor) is None:
                return None
            below[producer] = None
            done[tensor] = None
        elif not isinstance(producer, Map | Reduce) or len(producer.outputs) != 1:
            return None
        elif ready:
            done[tensor] = producer
        else:
            found = _read_at(producer, producer.axes[when[tensor]])
            if found is None or not found or not _agrees(found, when):
                return None
            if any(t not in found and t not in program.constants for t in reads(producer)):
                return None
            when.update(found)
            stack.append((tensor, True))
            stack.extend((t, False) for t in reversed(found))
    if len(below) != 1:
        return None
    computes = tuple(c for c in done.values() if c is not None)
    return Link(next(iter(below)), computes, when)


def _read_at(compute: Compute, time: Axis) -> dict[Tensor, int] | None:
    """Tensors read at the time, and on which axis; None where time is used in any other way."""
    found: dict[Tensor, int] = {}
    read = loads(*expressions(compute))
    for node in read:
        places = [d for d, index in enumerate(node.indices) if time in index.axes]
        if not places:
            continue
        if len(places) != 1 or node.indices[places[0]] is not var(time):
            return None
        if found.setdefault(node.source, places[0]) != places[0]:
            return None
    if any(n.source in found and time not in n.axes for n in read):
        return None
    return None if any(time in _without(e, found).axes for e in expressions(compute)) else found


def _agrees(found: Mapping[Tensor, int], known: Mapping[Tensor, int]) -> bool:
    return all(known.get(t, dim) == dim for t, dim in found.items())


def _without(root: Expr, when: Mapping[Tensor, int]) -> Expr:
    """The expression with zero for the time at which tensors are read."""

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or node.source not in when:
            return None
        dim = when[node.source]
        return load(node.source, (*node.indices[:dim], 0, *node.indices[dim + 1 :]))

    return rewrite(root, rule)


def _carried(scan: Scan, output: Tensor) -> int | None:
    """Which carry a stacked output holds for every step; None where it is none."""
    for inner, stacked in scan.stacked:
        if stacked is output and inner in scan.following:
            return scan.following.index(inner)
    return None


# --- equal structure


@dataclass
class _Template:
    """Computes written over axes and tensors that all layers share; comparing them is comparing identities."""

    axes: dict[tuple[int, int, object], Axis] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    def tensor(self, number: int, like: Tensor, shape: tuple[object, ...]) -> Tensor | None:
        """The shared tensor met as the `number`-th; None where an earlier layer met another kind there."""
        if number == len(self.tensors):
            self.tensors.append(Tensor(like.name, shape, like.dtype))  # type: ignore[arg-type]
        kept = self.tensors[number]
        return kept if kept.shape == shape and kept.dtype is like.dtype else None


@dataclass(frozen=True)
class _Form:
    """One layer's computes over the template's tensors, and which own tensor each of these is, in the order met."""

    computes: tuple[Map | Reduce, ...]
    own: tuple[Tensor, ...]
    kinds: tuple[str, ...]


def _form(
    template: _Template, computes: Sequence[Compute], kinds: Mapping[Tensor, str], when: Mapping[Tensor, int],
    times: Sequence[Axis],
) -> _Form | None:  # fmt: skip
    """`kinds` tells the tensors that are not constants; `when` which of them have time on which axis."""
    met: dict[Tensor, Tensor] = {}

    def shared(tensor: Tensor) -> Tensor | None:
        if tensor not in met:
            dim = when.get(tensor)
            shape = tensor.shape if dim is None else (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
            found = template.tensor(len(met), tensor, shape)
            if found is None:
                return None
            met[tensor] = found
        return met[tensor]

    def renamed(root: Expr, axes: Mapping[Axis, Axis]) -> Expr:
        def rule(node: Expr) -> Expr | None:
            if isinstance(node, Var):
                return var(axes[node.axis]) if node.axis in axes else None
            if not isinstance(node, Load):
                return None
            dim = when.get(node.source)
            return load(met[node.source], [i for d, i in enumerate(node.indices) if d != dim])

        return rewrite(root, rule)

    made: list[Map | Reduce] = []
    for number, compute in enumerate(computes):
        assert isinstance(compute, Map | Reduce)
        if any(shared(t) is None for t in (*reads(compute), *compute.outputs)):
            return None
        kept = [a for a in compute.axes if a not in times]
        summed = compute.reduce_axes if isinstance(compute, Reduce) else ()
        axes = {
            a: template.axes.setdefault((number, place, a.extent), Axis(a.name, a.extent))
            for place, a in enumerate((*kept, *summed))
        }
        places = tuple(axes[a] for a in kept)
        values = [renamed(e, axes) for e in expressions(compute)]
        if isinstance(compute, Map):
            made.append(Map(met[compute.output], places, values[0], compute.origin))
        else:
            outputs = tuple(met[t] for t in compute.outputs)
            over = tuple(axes[a] for a in summed)
            made.append(Reduce(outputs, places, over, tuple(values), compute.monoid, compute.origin))
    return _Form(tuple(made), tuple(met), tuple(kinds.get(t, "constant") for t in met))


def _same(a: _Form, b: _Form) -> bool:
    return a.kinds == b.kinds and len(a.computes) == len(b.computes) and all(map(_equal, a.computes, b.computes))


def _equal(a: Map | Reduce, b: Map | Reduce) -> bool:
    if isinstance(a, Reduce) != isinstance(b, Reduce) or a.outputs != b.outputs or a.axes != b.axes:
        return False
    if isinstance(a, Reduce) and isinstance(b, Reduce) and (a.reduce_axes != b.reduce_axes or a.monoid != b.monoid):
        return False
    return all(x is y for x, y in zip(expressions(a), expressions(b), strict=True))


def _body_form(template: _Template, layer: Layer) -> _Form | None:
    scan = layer.scan
    kinds = {t: f"input {dim}" for t, dim in layer.inputs.items()}
    kinds.update({t: f"carry {i}" for i, t in enumerate(scan.carry)})
    kinds.update({t: "made" for c in scan.body for t in c.outputs})
    return _form(template, scan.body, kinds, layer.inputs, (scan.axis,))


def _between_form(template: _Template, link: Link) -> _Form | None:
    kinds = {t: "made" for c in link.computes for t in c.outputs}
    for tensor in link.when:
        if tensor not in kinds:
            kinds[tensor] = f"below {_carried(link.below, tensor)}"
    times = [c.axes[link.when[c.outputs[0]]] for c in link.computes]
    return _form(template, link.computes, kinds, link.when, times)


def _stack(layers: Sequence[Layer], links: Sequence[Link], program: Program) -> Stack | None:
    """The layers as a stack, where they are alike and nothing else ties them together."""
    first = layers[0].scan
    carried = [[(t.shape, t.dtype.name) for t in layer.scan.carry] for layer in layers]
    if any(_steps(layer.scan) != _steps(first) for layer in layers) or any(c != carried[0] for c in carried):
        return None
    later = _later(program.computes, first)
    if any(t in later for layer in layers for t in layer.scan.initial):
        return None
    own, way = _Template(), _Template()
    bodies = [f for layer in layers if (f := _body_form(own, layer)) is not None]
    between = [f for link in links if (f := _between_form(way, link)) is not None]
    if len(bodies) != len(layers) or len(between) != len(links):
        return None
    if not all(_same(f, bodies[0]) for f in bodies) or not all(_same(f, between[0]) for f in between):
        return None
    nexts = [[f.own.index(t) for t in layer.scan.following] for f, layer in zip(bodies, layers, strict=True)]
    sources = [_sources(way, *each) for each in zip(between, layers[1:], links, strict=True)]
    if any(n != nexts[0] for n in nexts) or any(s != sources[0] for s in sources):
        return None
    in_body = dict(zip(own.tensors, zip(*(f.own for f in bodies), strict=True), strict=True))
    in_between = dict(zip(way.tensors, zip(*(f.own for f in between), strict=True), strict=True))
    read = [own.tensors[bodies[0].own.index(t)] for t in layers[0].inputs]
    inputs = tuple(zip(read, sources[0], strict=True))
    return Stack(tuple(layers), tuple(links), bodies[0].computes, between[0].computes, in_body, in_between, inputs)


def _sources(template: _Template, form: _Form, layer: Layer, link: Link) -> list[Tensor | int]:
    """Where each input of a layer comes from: a tensor made between the layers, or a carry of the layer below."""
    found: list[Tensor | int] = []
    for tensor in layer.inputs:
        carry = _carried(link.below, tensor)
        found.append(template.tensors[form.own.index(tensor)] if carry is None else carry)
    return found


def _later(computes: Iterable[Compute], first: Scan) -> set[Tensor]:
    """Every tensor that depends on the Scan's results."""
    later = set(first.outputs)
    for compute in computes:
        if not later.isdisjoint(reads(compute)):
            later.update(compute.outputs)
    return later


# --- the rewrite


class Wavefront:
    """A stack as one Scan: `computes` give what its Scans gave, reading the `stacked` constants."""

    def __init__(self, stack: Stack, program: Program) -> None:
        self.stack = stack
        self.program = program
        self.names = {t.name for t in _all_tensors(program)}
        self.layers = len(stack.layers)
        first, last = stack.layers[0].scan, stack.layers[-1].scan
        self.origin = f"{first.origin} to {last.origin}"
        self.step = Axis("s", stack.steps + self.layers - 1)
        self.stacked: dict[Tensor, tuple[Tensor, ...]] = {}
        self.owns = {**stack.in_body, **stack.in_between}
        self.merged: dict[Tensor, Tensor] = {}  # of the template's tensors, those with an axis of layers
        self.kept: set[Tensor] = set()  # what is made for one carry: layers that rest keep that
        self.carry = tuple(self._tensor(t, (self.layers, *t.shape)) for t in first.carry)
        self.computes = self._computes()

    def constants(self, arrays: Mapping[Tensor, np.ndarray]) -> dict[Tensor, np.ndarray]:
        return {t: np.stack([arrays[p] for p in parts]) for t, parts in self.stacked.items()}

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
            carry = _carried(self.stack.layers[0].scan, below)
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
    later = _later(program.computes, stack.layers[0].scan)
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


def choose_orders(program: Program, predict: Predict) -> Program:
    """The Program with every stack as wavefronts, over as many layers at once as are predicted to be clearly faster
    than layer by layer."""
    decided: set[Scan] = set()
    while True:
        # found anew each time: two stacks that wait for each other's results cannot both be one Scan
        stack = next((s for s in find_stacks(program) if s.layers[0].scan not in decided), None)
        if stack is None:
            return program
        decided.update(layer.scan for layer in stack.layers)
        for part in stack.parts(fastest_width(stack, program, predict)):
            program = as_wavefront(program, part)


def fastest_width(stack: Stack, program: Program, predict: Predict) -> int:
    """How many layers to take at once; 1 is layer by layer. Layers are alike: what is predicted of some holds for all."""
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

    best, width = seconds(1) * _WORTH, 1
    few_and_all = sorted({2, count})
    for size in (*few_and_all, *(w for w in _WIDTHS if w < count)):
        if size in _WIDTHS and width == 1:
            break  # neither few nor all layers at once are faster: nor is any number between
        if (found := seconds(size)) < best:
            best, width = found, size
    return width


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
