"""Stacked recurrences found in a Program: Scans of equal structure, each reading at its step what the one below gave
at the same step.

Whether layers are alike is decided on their expressions: written over shared axes and tensors, equal ones are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, expressions, reads
from tilewright.ir.forms.expr import Axis, Expr, Load, Var, load, loads, rewrite, var
from tilewright.ir.forms.tensor import Tensor

# --- recognition


@dataclass(frozen=True)
class LayerLink:
    """How a layer gets its input: from which Scan, by which computes that look at no other time."""

    below: Scan
    computes: tuple[Map | Reduce, ...]  # each after what it reads
    when: Mapping[Tensor, int]  # the axis that is the time, of every tensor on the way


@dataclass(frozen=True)
class StackedLayer:
    """A Scan that may be a layer of a stack: what its body reads at the step, and on which axis of it."""

    scan: Scan
    inputs: dict[Tensor, int]


@dataclass(frozen=True)
class Stack:
    """Layers of equal structure, the lowest first. `body` and `between` are computes that stand for those of every
    layer: they have no axis of time and read tensors of their own, for which there is one of each layer."""

    layers: tuple[StackedLayer, ...]
    links: tuple[LayerLink, ...]
    body: tuple[Map | Reduce, ...]
    between: tuple[Map | Reduce, ...]  # from one layer to the next
    in_body: Mapping[Tensor, tuple[Tensor, ...]]
    in_between: Mapping[Tensor, tuple[Tensor, ...]]  # from the second layer on
    inputs: tuple[tuple[Tensor, Tensor | int], ...]  # of the body: what is between that gives it, or which carry below

    @property
    def steps(self) -> int:
        return steps_of(self.layers[0].scan)

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
    layers: dict[Scan, StackedLayer] = {}
    links: dict[Scan, LayerLink] = {}
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
        chain = [scan]
        while chain[-1] in above and above[chain[-1]] not in used:
            chain.append(above[chain[-1]])
        if scan in used or len(chain) == 1:
            continue
        stack = _stack([layers[s] for s in chain], [links[s] for s in chain[1:]], program)
        if stack is not None:
            found.append(stack)
            used.update(layer.scan for layer in stack.layers)
    return found


def steps_of(scan: Scan) -> int:
    assert isinstance(scan.axis.extent, int)
    return scan.axis.extent


def _layer(scan: Scan, program: Program) -> StackedLayer | None:
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
    return StackedLayer(scan, inputs) if inputs else None


def _link(layer: StackedLayer, program: Program, producers: Mapping[Tensor, Compute]) -> LayerLink | None:
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
            if when[tensor] != 0 or carried(producer, tensor) is None:
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
    return LayerLink(next(iter(below)), computes, when)


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


def carried(scan: Scan, output: Tensor) -> int | None:
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


def _body_form(template: _Template, layer: StackedLayer) -> _Form | None:
    scan = layer.scan
    kinds = {t: f"input {dim}" for t, dim in layer.inputs.items()}
    kinds.update({t: f"carry {i}" for i, t in enumerate(scan.carry)})
    kinds.update({t: "made" for c in scan.body for t in c.outputs})
    return _form(template, scan.body, kinds, layer.inputs, (scan.axis,))


def _between_form(template: _Template, link: LayerLink) -> _Form | None:
    kinds = {t: "made" for c in link.computes for t in c.outputs}
    for tensor in link.when:
        if tensor not in kinds:
            kinds[tensor] = f"below {carried(link.below, tensor)}"
    times = [c.axes[link.when[c.outputs[0]]] for c in link.computes]
    return _form(template, link.computes, kinds, link.when, times)


def _stack(layers: Sequence[StackedLayer], links: Sequence[LayerLink], program: Program) -> Stack | None:
    """The layers from the lowest on as a stack, as far as they are alike and nothing else ties them together."""
    own, way = _Template(), _Template()
    later = later_than(program.computes, layers[0].scan)
    bodies: list[_Form] = []
    between: list[_Form] = []
    sources: list[Tensor | int] = []
    for number, layer in enumerate(layers):
        body = _body_form(own, layer)
        if body is None or not later.isdisjoint(layer.scan.initial):
            break
        if number:
            passed = _between_form(way, links[number - 1])
            if passed is None or not _same_layer(layer, body, layers[0], bodies[0]):
                break
            given = _sources(way, passed, layer, links[number - 1])
            if between and (not _same(passed, between[0]) or given != sources):
                break
            sources = given
            between.append(passed)
        bodies.append(body)
    if not between:
        return None
    in_body = dict(zip(own.tensors, zip(*(f.own for f in bodies), strict=True), strict=False))
    in_between = dict(zip(way.tensors, zip(*(f.own for f in between), strict=True), strict=False))
    read = [own.tensors[bodies[0].own.index(t)] for t in layers[0].inputs]
    inputs = tuple(zip(read, sources, strict=True))
    chosen = tuple(layers[: len(bodies)])
    return Stack(
        chosen, tuple(links[: len(between)]), bodies[0].computes, between[0].computes, in_body, in_between, inputs
    )


def _same_layer(layer: StackedLayer, form: _Form, first: StackedLayer, known: _Form) -> bool:
    """Whether a layer carries what the first carries, and computes it in the same way."""
    one, other = layer.scan, first.scan
    if steps_of(one) != steps_of(other) or len(one.carry) != len(other.carry) or not _same(form, known):
        return False
    if any(a.shape != b.shape or a.dtype is not b.dtype for a, b in zip(one.carry, other.carry, strict=True)):
        return False
    return [form.own.index(t) for t in one.following] == [known.own.index(t) for t in other.following]


def _sources(template: _Template, form: _Form, layer: StackedLayer, link: LayerLink) -> list[Tensor | int]:
    """Where each input of a layer comes from: a tensor made between the layers, or a carry of the layer below."""
    found: list[Tensor | int] = []
    for tensor in layer.inputs:
        carry = carried(link.below, tensor)
        found.append(template.tensors[form.own.index(tensor)] if carry is None else carry)
    return found


def later_than(computes: Iterable[Compute], first: Scan) -> set[Tensor]:
    """Every tensor that depends on the Scan's results."""
    later = set(first.outputs)
    for compute in computes:
        if not later.isdisjoint(reads(compute)):
            later.update(compute.outputs)
    return later
