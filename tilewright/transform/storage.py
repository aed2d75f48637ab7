"""Gives tensors another element type in memory: producers encode as they store, readers decode as they load.

Pure movement (transposes, slices, joins) and the choice of the largest (pooling) are done on encoded values, so that a
change reaches the compute that makes the numbers, where it costs nothing. What must keep its type (inputs, outputs,
constants) gets an encoded twin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.compute import Compute, Host, Map, Program, Reduce, Region, Scan, Scatter, Sort, reads
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, cast, is_op, load, rewrite, select, var
from tilewright.ir.forms.tensor import Tensor


@dataclass(frozen=True)
class Encoding:
    """Another form of a tensor's elements; readers see decode(encode(x)) where they saw x."""

    dtype: DType
    encode: Callable[[Expr], Expr]
    decode: Callable[[Expr], Expr]


def converted(dtype: DType, own: DType) -> Encoding:
    """Elements kept in another type by plain conversion."""
    return Encoding(dtype, lambda x: cast(x, dtype), lambda x: cast(x, own))


def change_storage(
    program: Program, wanted: Mapping[Tensor, Encoding], direct: Collection[Tensor]
) -> tuple[Program, dict[Tensor, Tensor]]:
    """The Program with the wanted tensors encoded, and the encoded tensor of each.

    Of a tensor that must keep its type only the computes that make a tensor of `direct` read the twin.
    """
    if not wanted:
        return program, {}
    change = _Change(program, dict(wanted), set(direct))
    return change.apply(), change.renamed


def moved(value: Expr) -> list[Load] | None:
    """What a value picks its result from when it only moves data; None when it computes."""
    found: list[Load] = []
    seen: set[Expr] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Load):
            found.append(node)
        elif isinstance(node, Op) and node.op.name == "select":
            stack.extend(node.args[1:])
        elif not isinstance(node, Const):
            return None
    return found


def _picked(compute: Compute | None) -> list[Load]:
    """What a compute picks its results from: elements that are moved, and the largest or smallest of some."""
    if isinstance(compute, Map):
        return moved(compute.value) or []
    if isinstance(compute, Reduce) and compute.monoid.operator in ("max", "min") and len(compute.elements) == 1:
        return moved(compute.elements[0]) or []
    return []


def all_computes(program: Program) -> Iterator[Compute]:
    """The computes of a Program and of the bodies of its Scans."""
    for compute in program.computes:
        yield compute
        if isinstance(compute, Scan):
            yield from compute.body


def unique_name(wish: str, taken: set[str]) -> str:
    """`wish`, with a number behind it where that name is taken; taken from now on."""
    name, count = wish, 1
    while name in taken:
        count += 1
        name = f"{wish}_{count}"
    taken.add(name)
    return name


def names_of(program: Program) -> set[str]:
    carried = {t.name for c in program.computes if isinstance(c, Scan) for t in c.carry}
    return carried | {t.name for t in program.tensors()} | {t.name for c in all_computes(program) for t in c.outputs}


@dataclass
class _Change:
    program: Program
    wanted: dict[Tensor, Encoding]
    direct: set[Tensor]
    renamed: dict[Tensor, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producers = {t: c for c in all_computes(self.program) for t in c.outputs}
        self.scans = [c for c in self.program.computes if isinstance(c, Scan)]
        self.carried = {t: s for s in self.scans for t in s.carry}
        self.pinned = {*self.program.inputs, *self.program.outputs, *self.program.constants}
        for compute in all_computes(self.program):
            if isinstance(compute, Scatter):
                self.pinned.add(compute.initial)
            elif isinstance(compute, Region | Host):
                self.pinned.update(reads(compute))
        self.replaced: set[Tensor] = set()  # no longer made in their own type
        self._close()
        taken = names_of(self.program)
        for tensor, encoding in self.wanted.items():
            if self._vanishes(tensor):
                self.replaced.add(tensor)
                self.renamed[tensor] = Tensor(tensor.name, tensor.shape, encoding.dtype)
            else:
                name = unique_name(f"{tensor.name}_{encoding.dtype.name}", taken)
                self.renamed[tensor] = Tensor(name, tensor.shape, encoding.dtype)

    # --- which tensors

    def _close(self) -> None:
        """Follow moved data back to what computes it, and recurrences around."""
        waiting = list(self.wanted)
        while waiting:
            tensor = waiting.pop()
            encoding = self.wanted[tensor]
            group = self._with(tensor)
            if group is None:
                del self.wanted[tensor]
                continue
            for other in group:
                if other not in self.wanted and other.dtype is tensor.dtype:
                    self.wanted[other] = encoding
                    waiting.append(other)

    def _with(self, tensor: Tensor) -> list[Tensor] | None:
        """Tensors that change along with this one; None when it cannot change."""
        found: list[Tensor] = []
        producer = self.producers.get(tensor)
        if tensor not in self.pinned:
            found.extend(n.source for n in _picked(producer))
        for scan in self.scans:
            for initial, carry, following, final in zip(
                scan.initial, scan.carry, scan.following, scan.finals, strict=True
            ):
                if tensor in (carry, following, final):
                    if not self._made_inside(following, scan):
                        return None
                    found.extend((initial, carry, following, *((final,) if final is not None else ())))
            for inner, output in scan.stacked:
                if tensor in (inner, output):
                    if not self._made_inside(inner, scan):
                        return None
                    found.extend((inner, output))
        return found

    def _made_inside(self, tensor: Tensor, scan: Scan) -> bool:
        maker = self.producers.get(tensor)
        return tensor not in self.pinned and isinstance(maker, Map | Reduce) and maker in scan.body

    def _vanishes(self, tensor: Tensor) -> bool:
        if tensor in self.carried:
            return True
        return tensor not in self.pinned and isinstance(self.producers.get(tensor), Map | Scan)

    # --- the new computes

    def apply(self) -> Program:
        given = [t for t in self.wanted if t not in self.producers and t not in self.carried]
        computes: list[Compute] = [self._twin(t) for t in given]
        for compute in self.program.computes:
            computes.extend(self._new(compute))
        return replace(self.program, computes=tuple(computes))

    def _new(self, compute: Compute) -> list[Compute]:
        """The compute with its reads decoded and its results encoded, and the twins of what stays."""
        made: list[Compute] = [self._rewritten(compute)]
        for tensor in compute.outputs:
            if tensor not in self.renamed or tensor in self.replaced:
                continue
            if isinstance(compute, Scan):  # it makes the encoded form; the model wants its own
                made.append(self._copied(tensor, self.renamed[tensor], self.wanted[tensor].decode))
            else:
                made.append(self._twin(tensor))
        return made

    def _twin(self, tensor: Tensor) -> Map:
        return self._copied(self.renamed[tensor], tensor, self.wanted[tensor].encode)

    def _copied(self, output: Tensor, source: Tensor, convert: Callable[[Expr], Expr]) -> Map:
        axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(source.shape))
        return Map(output, axes, convert(load(source, [var(a) for a in axes])))

    def _rewritten(self, compute: Compute) -> Compute:
        if isinstance(compute, Map):
            if compute.output in self.replaced:
                return replace(compute, output=self.renamed[compute.output], value=self._encoded(compute))
            return replace(compute, value=self._decoded(compute.value, compute))
        if isinstance(compute, Reduce):
            return replace(compute, elements=tuple(self._decoded(e, compute) for e in compute.elements))
        if isinstance(compute, Scatter):
            indices = tuple(self._decoded(i, compute) for i in compute.indices)
            return replace(compute, indices=indices, value=self._decoded(compute.value, compute))
        if isinstance(compute, Sort):
            payloads = tuple(self._decoded(p, compute) for p in compute.payloads)
            return replace(compute, key=self._decoded(compute.key, compute), payloads=payloads)
        return self._scan(compute) if isinstance(compute, Scan) else compute

    def _scan(self, scan: Scan) -> Scan:
        new = self.renamed

        def with_carry(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            pairs = zip(scan.carry, tensors, strict=True)
            return tuple(new.get(t, t) if c in new else t for c, t in pairs)

        return replace(
            scan,
            initial=with_carry(scan.initial),
            carry=with_carry(scan.carry),
            body=tuple(made for part in scan.body for made in self._new(part)),
            following=with_carry(scan.following),
            finals=tuple(new.get(t, t) if t is not None else None for t in scan.finals),
            stacked=tuple((new.get(a, a), new.get(b, b)) for a, b in scan.stacked),
        )

    def _encoded(self, compute: Map) -> Expr:
        encode = self.wanted[compute.output].encode
        if moved(compute.value) is None:
            return simplify(encode(self._decoded(compute.value, compute)))

        def follow(node: Expr) -> Expr:
            if is_op(node, "select"):
                condition = self._decoded(node.args[0], compute)
                return select(condition, follow(node.args[1]), follow(node.args[2]))
            if isinstance(node, Load) and node.source in self.renamed:
                return load(self.renamed[node.source], [self._decoded(i, compute) for i in node.indices])
            return simplify(encode(self._decoded(node, compute)))

        return follow(compute.value)

    def _decoded(self, value: Expr, reader: Compute) -> Expr:
        is_direct = not self.direct.isdisjoint(reader.outputs) or not self.replaced.isdisjoint(reader.outputs)

        decoded: set[Expr] = set()

        def rule(node: Expr) -> Expr | None:
            if is_op(node, "cast") and node.args[0] in decoded and is_op(node.args[0], "cast"):
                exact = node.args[0].args[
                    0
                ]  # a decoded element is in its type's range: converting there and on is idle
                return exact if exact.dtype is node.dtype else None
            if not isinstance(node, Load) or node.source not in self.renamed:
                return None
            if node.source in self.pinned and not is_direct:
                return None
            plain = self.wanted[node.source].decode(load(self.renamed[node.source], node.indices))
            decoded.add(plain)
            return plain

        return rewrite(value, rule)
