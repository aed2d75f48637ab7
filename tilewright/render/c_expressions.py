"""Expressions of Loops as C: vectors of GNU C where a VECTOR loop is around, scalars elsewhere.

Contiguous reads are vector loads, values that are the same on every lane are broadcast, anything else is put together
lane by lane.
"""

from __future__ import annotations

from math import prod

from tilewright.errors import InternalError
from tilewright.ir.analysis.simplify import Linear, linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds, exceeds
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, Var, const, loads, substitute, var
from tilewright.ir.forms.loops import Buffer, Memory
from tilewright.render import c_bytes, c_convert, c_guarded, c_math, c_part, c_transpose
from tilewright.render.c_address import (
    compares_places,
    constants,
    element_name,
    flat,
    lane_stride,
    whole_vector,
)
from tilewright.render.c_guarded import LaneRun, rest_of, run_of
from tilewright.render.c_long import ExprParts, is_harmless, is_short
from tilewright.render.c_scalars import CScalars
from tilewright.render.c_text import (
    INFIX,
    MASK_INFIX,
    SHIFTS,
    TYPES,
    WRAPPING,
    mask_dtype,
    vector_name,
    vector_shift,
)

_NARROW = (dtypes.bfloat16.name, dtypes.float16.name)


class CExpressions(CScalars):
    """Writes the expressions of one kernel."""

    def packed(self, packing: c_bytes.Packing, texts: list[str], added: int) -> str:
        self.used_packings.add(packing)
        text = f"{c_bytes.name(packing)}({', '.join(texts)})"
        dtype, lanes, count = packing
        # bytes wrap around, so that either reading of them may be added
        more = (added + 128) % 256 - 128 if dtype is dtypes.int8 else added % 256
        kind = vector_name(dtype, lanes * count)
        return f"({text} + ({kind}){{{', '.join([str(more)] * (lanes * count))}}})" if more else text

    def lane_offsets(self, offset: Linear, stride: int | None, count: int, lane: Axis | None = None) -> list[str]:
        """Texts of the offset on the first `count` lanes."""
        lane = lane or self.lane
        assert lane is not None
        if stride is not None:
            still = Linear({t: c for t, c in offset.terms.items() if t is not var(lane)}, offset.constant)
            return [self.scopes.offset(still, stride * i) for i in range(count)]
        whole = offset.expr()
        return [self.scopes.offset(linear(simplify(substitute(whole, {lane: const(i)})))) for i in range(count)]

    def vector(self, value: Expr, hold: bool = False) -> str | None:
        """The value on all lanes: a scalar text when it is the same on every lane, None when it has no vector form.

        `hold` gives names to what is read from memory, for the statements that follow.
        """
        assert self.lane is not None
        done: dict[Expr, str | None] = {}
        certain = self.always_evaluated(value) if hold else set()
        self.parts = parts = ExprParts(value, self.computes_both)
        long = False
        stack = [value]
        while stack:
            node = stack[-1]
            if node not in done:
                waiting = [a for a in self.vector_operands(node) if a not in done]
                if waiting:
                    stack.extend(reversed(waiting))
                    continue
                held = node in certain and self.holdable(node)
                text = self.hold(node) if held else self.vector_node(node, done)
                if not long and parts.is_long(text):
                    long, done, stack = True, {}, [value]  # from the start, with names for what is written twice
                    continue
                if text is not None and parts.is_worth_a_name(node, text, long):
                    text = self.named(text, self.kind_of(node))
                done[node] = text
            stack.pop()
        return done[value]

    def computes_both(self, choice: Op) -> bool:
        """Whether a vector has both sides of a choice computed, on all lanes."""
        return self.depends(choice) and not self.lanes_only(choice) and self.depends(choice.args[0])

    def kind_of(self, node: Expr) -> str:
        if not self.depends(node):
            return TYPES[node.dtype.name]
        if node.dtype.kind == "b":
            return "__auto_type"
        self.used_vectors.add((node.dtype, self.width))
        return vector_name(node.dtype, self.width)

    @property
    def count(self) -> int:
        """Lanes in use."""
        assert self.lane is not None
        return int(self.lane.extent)  # type: ignore[arg-type]

    @property
    def width(self) -> int:
        """Lanes of the registers: a partly filled vector takes the next power of two."""
        return whole_vector(self.count)

    def depends(self, node: Expr) -> bool:
        return self.lane in node.axes

    def vector_operands(self, node: Expr) -> tuple[Expr, ...]:
        """The operands that need a vector form before the node can have one."""
        if not isinstance(node, Op) or not self.depends(node) or self.lanes_only(node):
            return ()
        return node.args

    def lanes_only(self, node: Op) -> bool:
        """Operations without a vector form: on narrow floats, between masks and numbers, on indices; guarded reads."""
        operand = node.args[-1].dtype
        name = node.op.name
        if name == "cast" and c_convert.needs_function(operand, node.dtype):
            return False
        if name == "select" and operand is dtypes.bfloat16:
            return self.depends(node.args[0])
        if operand.name in _NARROW:
            return True
        if name in ("cast", "bitcast"):
            return node.dtype.kind == "b" or operand.kind == "b" or node.dtype.name in _NARROW
        if name == "select":
            return self.depends(node.args[0]) and self.guards_reads(node)
        return node.dtype is dtypes.index and operand is dtypes.index

    def guards_reads(self, node: Op) -> bool:
        condition, then, otherwise = node.args
        width = self.mask_width(condition)
        if node.dtype is dtypes.float64 or (width != node.dtype.bits and (width != 8 or node.dtype.bits != 32)):
            return True
        reads_memory = any(x.source.memory is not Memory.REGISTER for x in loads(then, otherwise))
        return reads_memory and compares_places(condition)

    def always_evaluated(self, value: Expr) -> set[Expr]:
        """Nodes that no condition keeps from being evaluated."""
        found: set[Expr] = set()
        stack = [value]
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found.add(node)
            operands = self.vector_operands(node)
            stack.extend(operands[:1] if isinstance(node, Op) and node.op.name == "select" else operands)
        return found

    def holdable(self, node: Expr) -> bool:
        """Plain reads of memory: the same until the next store to memory."""
        if self.is_widened(node):
            node = node.args[0]
        if not isinstance(node, Load) or node.source.memory is Memory.REGISTER or node.dtype.kind == "b":
            return False
        return not any(i.reads for i in node.indices)

    def is_widened(self, node: Expr) -> bool:
        """A read that is converted on the way: kept in the type that is computed with."""
        if not isinstance(node, Op) or node.op.name != "cast" or not isinstance(node.args[0], Load):
            return False
        return c_convert.needs_function(node.args[0].dtype, node.dtype) and node.dtype.bits > node.args[0].dtype.bits

    def hold(self, node: Expr) -> str | None:
        assert self.lane is not None
        lanes = self.width
        if (node, lanes) not in self.held:
            text: str | None
            if not self.depends(node):
                text = self.splat(node, self.scalar(node), lanes)
            elif isinstance(node, Load):
                text = self.vector_load(node, lanes)
            else:
                text = self.vector_node(node, {a: self.hold(a) for a in node.args})
            if text is None:
                return None
            self.used_vectors.add((node.dtype, lanes))
            name = self.held[node, lanes] = self.fresh("x")
            self.emit(f"const {vector_name(node.dtype, lanes)} {name} = {text};")
        return self.held[node, lanes]

    def vector_node(self, node: Expr, done: dict[Expr, str | None]) -> str | None:
        assert self.lane is not None
        if not self.depends(node):
            return self.value(node, self.parts, node) if self.live is None or is_harmless(node) else None
        lanes = self.width
        if isinstance(node, Var):
            return None
        if isinstance(node, Load):
            return self.vector_load(node, lanes)
        assert isinstance(node, Op)
        name = node.op.name
        operand = node.args[-1].dtype
        if self.lanes_only(node):
            plain_index = node.dtype is dtypes.index and name not in ("select", "cast")
            return None if node.dtype.kind == "b" or plain_index else self.guarded(node) or self.apart(node)
        if name == "cast" and operand is dtypes.index and node.dtype is dtypes.int32:
            return self.ramp(node, lanes)
        args = [done[a] for a in node.args]
        if any(a is None for a in args):
            return self.apart(node) if node.dtype.kind != "b" else None
        if name == "select" and not self.depends(node.args[0]):
            a, b = (self.splat(e, t, lanes) for e, t in zip(node.args[1:], args[1:], strict=True))
            # an unaligned read has a type of its own, and both arms need the same
            kind = vector_name(node.dtype, lanes)
            return f"({args[0]} ? ({kind}){a} : ({kind}){b})"
        texts = [self.splat(a, t, lanes) for a, t in zip(node.args, args, strict=True)]
        if name == "select":
            self.used_math.setdefault((node.dtype.name, lanes), set()).add("select")
            if self.mask_width(node.args[0]) != node.dtype.bits:
                whole = mask_dtype(node.dtype)
                self.used_vectors.add((whole, lanes))
                texts[0] = f"__builtin_convertvector({texts[0]}, {vector_name(whole, lanes)})"
            return f"tw_select_{vector_name(node.dtype, lanes)}({', '.join(texts)})"
        if name == "cast":
            self.used_vectors.add((node.dtype, lanes))
            bytes_of = c_bytes.rounded(node)
            if bytes_of is not None and done.get(bytes_of.value) is not None:
                value = self.splat(bytes_of.value, done[bytes_of.value], lanes)
                return self.packed((node.dtype, lanes, 1), [value], bytes_of.added)
            if c_convert.needs_function(operand, node.dtype):
                self.used_conversions.add((operand, node.dtype, lanes))
                return f"{c_convert.name((operand, node.dtype, lanes))}({texts[0]})"
            return f"__builtin_convertvector({texts[0]}, {vector_name(node.dtype, lanes)})"
        if name == "bitcast":
            self.used_vectors.add((node.dtype, lanes))
            return f"(({vector_name(node.dtype, lanes)}){texts[0]})"
        if name in SHIFTS:
            self.used_vectors |= {(dtypes.by_name(f"uint{node.dtype.bits}"), lanes), (node.dtype, lanes)}
            return vector_shift(name, texts, node.dtype, lanes)
        if operand.kind == "b":
            if name in MASK_INFIX and self.mask_width(node) is not None:
                return f"({texts[0]} {MASK_INFIX[name]} {texts[1]})"
            return f"(~{texts[0]})" if name == "not" else None
        if name == "div" and operand.is_int and (self.count < lanes or self.live is not None):
            return self.apart(node)  # the lanes not in use hold zeros
        if name in INFIX:
            return self.wrapped(node, f"{{0}} {INFIX[name]} {{1}}", texts, lanes)
        if name == "neg":
            return self.wrapped(node, "-{0}", texts, lanes)
        if name == "isnan":
            return f"({texts[0]} != {texts[0]})"
        if name == "round" and operand is dtypes.float32 and c_bytes.is_small(node.args[0]):
            return c_bytes.rounding(texts[0])
        if name in ("min", "max") and isinstance(node.args[1], Const) and node.args[1].value == node.args[1].value:
            name = f"{name}_constant" if operand is dtypes.float32 else name
        if name in c_math.FUNCTIONS and operand is dtypes.float32:
            self.used_math.setdefault((operand.name, lanes), set()).add(name)
            return f"tw_{name}_{vector_name(operand, lanes)}({', '.join(t for t in texts if t)})"
        if name in ("min", "max") and operand.is_int and operand.bits <= 32:
            self.used_math.setdefault((operand.name, lanes), set()).add(f"whole_{name}")
            return f"tw_whole_{name}_{vector_name(operand, lanes)}({', '.join(t for t in texts if t)})"
        return self.apart(node) if node.dtype.kind != "b" else None

    def wrapped(self, node: Op, form: str, texts: list[str], lanes: int) -> str:
        """Vector arithmetic, among unsigned numbers where integers may leave their type: those wrap around in C."""
        if node.op.name not in WRAPPING or not exceeds(node):
            return f"({form.format(*texts)})"
        whole = dtypes.by_name(f"uint{node.dtype.bits}")
        self.used_vectors |= {(whole, lanes), (node.dtype, lanes)}
        kind, unsigned = vector_name(node.dtype, lanes), vector_name(whole, lanes)
        return f"(({kind})({form.format(*(f'({unsigned}){t}' for t in texts))}))"

    def ramp(self, node: Op, lanes: int) -> str | None:
        """An index as a number on every lane: the first lane's, and steps from there."""
        assert self.lane is not None
        total = linear(simplify(node.args[0]))
        stride = lane_stride(total, self.lane)
        if stride is None:
            return self.apart(node)
        self.used_vectors.add((node.dtype, lanes))
        still = Linear({t: c for t, c in total.terms.items() if t is not var(self.lane)}, total.constant)
        kind = vector_name(node.dtype, lanes)
        steps = ", ".join(str(stride * i) for i in range(lanes))
        return f"(((int32_t)({self.scopes.offset(still)}) - ({kind}){{}}) + ({kind}){{{steps}}})"

    def vector_load(self, node: Load, lanes: int) -> str | None:
        assert self.lane is not None
        if node.source.memory is Memory.REGISTER:
            if not self.depends(node.indices[-1]):
                return self.column(node, lanes)
            name = element_name(node.source, constants(node.indices[:-1]))
            if node.indices[-1] is var(self.lane) and self.lane_buffers.get(node.source, lanes) == lanes:
                return name
            # a part of a longer vector, which compilers know by its places
            start = linear(node.indices[-1]).constant
            self.used_vectors.add((node.dtype, lanes))
            whole = self.lane_buffers.get(node.source, 0)
            if whole > lanes == self.count:
                self.used_slices.add((node.dtype, whole, lanes, start))
                return f"{c_part.slice_name(vector_name(node.dtype, whole), lanes, start)}({name})"
            parts = ", ".join(f"{name}[{start + i}]" for i in range(self.count))
            return f"(({vector_name(node.dtype, lanes)}){{{parts}}})"
        offset = flat(node.source, node.indices)
        stride = lane_stride(offset, self.lane)
        if node.dtype.kind == "b":
            if not self.is_mask(node):
                return None
            self.used_vectors.add((dtypes.uint8, lanes))
            place = f"{node.source.name} + {self.lane_offsets(offset, 1, 1)[0]}"
            return f"(*(const {vector_name(dtypes.uint8, lanes)}u *)({place}) != 0)"
        if self.live is not None and not is_harmless(node):
            if stride is None or not c_guarded.has_runs(node.dtype, lanes):
                return None
            return self.run(node.source, offset, stride, lanes)
        self.used_vectors.add((node.dtype, lanes))
        kind = vector_name(node.dtype, lanes)
        if stride == 1 and (self.count == lanes or self.is_readable_past(node.source, offset, lanes)):
            return f"(*(const {kind}u *)({node.source.name} + {self.lane_offsets(offset, 1, 1)[0]}))"
        if stride == 2 and self.count == lanes and self.is_readable_past(node.source, offset, 2 * lanes):
            self.used_squares.add((node.dtype, lanes))
            first, *_, second = self.lane_offsets(offset, 2, lanes // 2 + 1)
            halves = (f"*(const {kind}u *)({node.source.name} + {at})" for at in (first, second))
            return f"tw_even_{kind}({', '.join(halves)})"
        if stride in (1, 2) and self.count > 2 and c_part.is_maskable(node.dtype, lanes):
            return self.part(node, offset, stride, lanes)
        reads = [f"{node.source.name}[{at}]{self.bits(node)}" for at in self.lane_offsets(offset, stride, self.count)]
        return f"(({kind}){{{', '.join(reads)}}})"

    def guarded(self, node: Op) -> str | None:
        """A choice by place, where the lanes of each side are a run: what memory holds elsewhere is not read."""
        assert self.lane is not None
        if node.op.name != "select" or node.dtype is dtypes.float64 or not c_guarded.has_runs(node.dtype, self.width):
            return None
        if self.live is None and not c_guarded.is_short_chain(node, self.width):
            return None
        condition, then, otherwise = node.args
        inside = run_of(condition, self.lane)
        if inside is None:
            return None
        taken, left = self.side(then, inside), self.side(otherwise, rest_of(condition, self.lane))
        if taken is None or left is None:
            return None
        lanes = self.width
        whole = mask_dtype(node.dtype)
        self.used_vectors |= {(node.dtype, lanes), (whole, lanes)}
        self.used_insides.add((whole, lanes))
        self.used_math.setdefault((node.dtype.name, lanes), set()).add("select")
        mask = f"{c_guarded.inside_name(vector_name(whole, lanes))}({', '.join(self.ends(inside))})"
        return f"tw_select_{vector_name(node.dtype, lanes)}({mask}, {taken}, {left})"

    def side(self, value: Expr, run: LaneRun | None) -> str | None:
        """One side of a choice, right on the lanes of its run; without a run only what may be computed anywhere."""
        free = is_harmless(value)
        if not free and (run is None or not self.depends(value)):
            return None
        around = self.live, self.parts
        if run is not None:
            self.live = run.within(self.live)
        text = self.vector(value)
        self.live, self.parts = around
        if text is None:
            return None
        whole = self.splat(value, text, self.width)
        if is_short(whole):
            return whole
        # a name, or a chain of choices would be written again for every choice that it is inside of
        self.used_vectors.add((value.dtype, self.width))
        return self.named(whole, vector_name(value.dtype, self.width))

    def ends(self, run: LaneRun) -> tuple[str, str]:
        first, last = (self.value(end) for end in run.ends(self.count))
        given = " && ".join(self.value(each) for each in run.given)
        return first, f"(({given}) ? ({last}) : 0)" if given else last

    def run(self, source: Buffer, offset: Linear, stride: int, lanes: int) -> str:
        """What memory holds on the lanes that are in use."""
        assert self.live is not None
        kind, whole = (source.dtype, lanes), (mask_dtype(source.dtype), lanes)
        self.used_vectors |= {kind, whole}
        self.used_insides.add(whole)
        self.used_runs.add(kind)
        place = f"{source.name} + {self.lane_offsets(offset, stride, 1)[0]}"
        return f"{c_guarded.run_name(vector_name(*kind))}({', '.join((place, str(stride), *self.ends(self.live)))})"

    def part(self, node: Load, offset: Linear, stride: int, lanes: int) -> str:
        """Neighbours, or every other element, of what memory holds up to the last one that is used."""
        kind, reach = vector_name(node.dtype, lanes), (self.count - 1) * stride + 1
        self.used_parts.add((node.dtype, lanes))
        texts = []
        for start in range(0, reach, lanes):
            at = self.lane_offsets(Linear(offset.terms, offset.constant + start), stride, 1)[0]
            place = f"{node.source.name} + {at}"
            held = min(lanes, reach - start)
            texts.append(f"tw_first_{kind}({place}, {held})" if held < lanes else f"*(const {kind}u *)({place})")
        if stride == 1:
            return texts[0]
        self.used_squares.add((node.dtype, lanes))
        return f"tw_even_{kind}({', '.join(texts if len(texts) == 2 else (*texts, f'({kind}){{}}'))})"

    def column(self, node: Load, lanes: int) -> str:
        """A column of a square of vectors: lane i is from row i."""
        if node.indices[-2] is not var(self.lane) or node.source.shape[-2:] != (lanes, lanes):  # type: ignore[arg-type]
            raise InternalError(f"{self.kernel.name}: {node} is no column of a square")
        *lead, number = constants((*node.indices[:-2], node.indices[-1]))
        kind = vector_name(node.dtype, lanes)
        self.used_squares.add((node.dtype, lanes))
        rows = [element_name(node.source, (*lead, row)) for row in range(lanes)]
        return c_transpose.column(rows, number, kind)

    def is_readable_past(self, buffer: Buffer, offset: Linear, lanes: int) -> bool:
        """Whether a whole vector from the first lane's offset stays inside the buffer; the surplus is never used."""
        if not all(isinstance(e, int) for e in buffer.shape):
            return False
        still = Linear({t: c for t, c in offset.terms.items() if t is not var(self.lane)}, offset.constant)  # type: ignore[arg-type]
        return bool(bounds(still.expr())[1] + lanes <= prod(buffer.shape))  # type: ignore[operator]

    def is_mask(self, node: Load) -> bool:
        """Whether a read of truth values is a vector of bytes, which compared with nothing are a mask."""
        assert self.lane is not None
        if node.dtype.kind != "b" or node.source.memory is Memory.REGISTER or self.live is not None:
            return False
        offset = flat(node.source, node.indices)
        is_whole = self.count == self.width or self.is_readable_past(node.source, offset, self.width)
        return lane_stride(offset, self.lane) == 1 and is_whole

    def mask_width(self, condition: Expr) -> int | None:
        """Bits of the elements of a mask, when all its comparisons agree."""
        widths: set[int | None] = set()
        stack = [condition]
        while stack:
            node = stack.pop()
            if isinstance(node, Op) and node.op.name in ("and", "or", "not"):
                stack.extend(node.args)
            elif isinstance(node, Op) and self.depends(node):
                widths.add(node.args[0].dtype.bits if node.args[0].dtype.kind != "b" else None)
            elif isinstance(node, Load) and self.depends(node) and self.is_mask(node):
                widths.add(8)
            else:
                widths.add(None)
        return widths.pop() if len(widths) == 1 else None

    def splat(self, value: Expr, text: str | None, lanes: int) -> str:
        assert text is not None
        if self.depends(value) or text == self.held.get((value, lanes)):
            return text
        self.used_vectors.add((value.dtype, lanes))
        kind = vector_name(value.dtype, lanes)
        if isinstance(value, Const) and value.dtype is dtypes.float32:
            # the same constant as one with all its lanes spelled, which were a third of the text
            return f"(({kind}){{}})" if text == "0.0f" else f"({text} - ({kind}){{}})"
        if isinstance(value, Const):
            return f"(({kind}){{{', '.join([text + self.bits(value)] * lanes)}}})"
        if value.dtype is dtypes.float16:
            # as an operand it would be a float where the processor has no such arithmetic, which no lane takes
            scalar = f"const {TYPES[value.dtype.name]} tw_lane = {text}"
            return f"({{ {scalar}; ({kind}){{{', '.join(['tw_lane'] * lanes)}}}; }})"
        # C computes with int: what is computed goes back to its type, or it is not of a lane's
        back = f"({TYPES[value.dtype.name]})" if value.dtype.bits < 32 and value.dtype.kind in "iu" else ""
        back = "" if isinstance(value, Load) else back
        return f"({back}({text}){self.bits(value)} - ({kind}){{}})"

    def bits(self, value: Expr) -> str:
        """Behind a scalar that goes into a lane: a bfloat16 is a struct outside of vectors."""
        return ".bits" if value.dtype is dtypes.bfloat16 else ""

    def apart(self, node: Expr) -> str | None:
        """By lanes, unless some of them may not be computed."""
        return None if self.live is not None and not is_harmless(node) else self.by_lanes(node)

    def by_lanes(self, node: Expr) -> str:
        """A vector put together from scalars."""
        texts = self.lane_texts(node)
        self.used_vectors.add((node.dtype, self.width))
        return f"(({vector_name(node.dtype, self.width)}){{{', '.join(t + self.bits(node) for t in texts)}}})"

    def lane_texts(self, node: Expr) -> list[str]:
        """The scalar on every lane."""
        assert self.lane is not None
        lane, self.lane = self.lane, None
        lanes = range(int(lane.extent))  # type: ignore[arg-type]
        texts = [self.value(simplify(substitute(node, {lane: const(i)})), self.parts, node) for i in lanes]
        self.lane = lane
        return texts
