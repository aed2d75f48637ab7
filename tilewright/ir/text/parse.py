"""Reads the text of a Program or of Loops back, so that an edited dump can stand in for a stage.

The grammar (a name is a plain word or a quoted string; a comment after `#` becomes the compute's origin):

    program   = "program" {symbol} {input} {constant} {monoid} {compute} {layout} {staged} {output} "end"
    symbol    = "symbol" name low ".." high
    input     = "input" typed ["=" string]             output = "output" name ["=" string]
    constant  = "constant" typed string                typed  = name ":" dtype "[" {expr ","} "]"
    monoid    = "monoid" name "(" states ";" states ")" "identity" tuple "combine" tuple "final" tuple
    states    = {"$" name ":" dtype ","}               tuple  = "(" {expr ","} ")"
    layout    = "layout" name ":" "[" {axis ["/" step] ["%" size] ","} "]" fill swizzle ["gap" gap]
    compute   = lefts "=" (expr | reduction axes expr | "reduce" name axes tuple
                | "scatter" axes name "at" tuple "put" [operator] "(" expr ")" ["unique"]
                | "sort" axes "along" name "by" "(" expr ")" "give" tuple ["descending"])
              | "scan" axes ["reverse"] {"carry" typed "=" name "then" name ["give" typed]}
                {"stack" typed "=" name} "do" {compute} "end"
              | "region" kind name "(" names ")" "give" "(" {typed ","} ")" ["limit" n] {program} "end"
              | "host" string "(" names ")" "give" "(" {typed ","} ")" string
    lefts     = {name ":" dtype (axes | "[" {expr ","} "]") ","}     axes = "[" {name ":" expr ","} "]"

    loops     = "loops" {"tensor" typed role position} {kernel} {"call" name "(" names ")" ["step" n]}
    kernel    = "kernel" name "(" {buffer ","} ")" {symbol} ["step" name ":" expr] block
    buffer    = name ":" [memory] dtype "[" {expr ","} "]"           block = "{" {stmt} "}"
    stmt      = kind name ":" expr block | "alloc" buffer block | "if" expr block ["else" block]
              | "barrier" scope | "do" name "(" {place ","} ";" {expr ","} ")" | place "=" expr
    place     = name "[" {expr ","} "]"

    expr      = "let" {"@" n "=" expr ","} "in" expr | infix of: or; and; == != < <=; + -; * / // %; atom
    atom      = number | "?" name | "$" name | "@" n | name | place | function tuple | dtype "(" expr ")" | "(" expr ")"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np

from tilewright.ir.forms.compute import (
    Compute,
    Host,
    Map,
    Monoid,
    Program,
    Reduce,
    Region,
    Scan,
    Scatter,
    Sort,
    plain_monoid,
)
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Extent, State, Symbol, state
from tilewright.ir.forms.graph import Form
from tilewright.ir.forms.loops import (
    Alloc,
    Barrier,
    Buffer,
    Call,
    For,
    ForKind,
    If,
    Instruction,
    Jump,
    Kernel,
    LoopProgram,
    Memory,
    Operand,
    Scope,
    Stmt,
    Storage,
    Store,
)
from tilewright.ir.forms.tensor import Layout, StorageAxis, Tensor
from tilewright.ir.text.reader import Reader, TextError
from tilewright.ir.text.text import REDUCTIONS

__all__ = ["TextError", "parse_loops", "parse_program"]

_OPERATORS = {word: name for name, word in REDUCTIONS.items()}


def parse_program(text: str, constants: Mapping[str, np.ndarray] | None = None) -> Program:
    """The Program of a `program_text`; constants' data come by name."""
    parser = _ProgramReader(text, constants or {})
    program = parser.program()
    parser.finish()
    return program


def parse_loops(text: str) -> LoopProgram:
    parser = _LoopsReader(text)
    loops = parser.loops()
    parser.finish()
    return loops


class _ProgramReader(Reader):
    def __init__(self, text: str, constants: Mapping[str, np.ndarray]) -> None:
        super().__init__(text)
        self._constants = constants
        self._monoids: dict[str, Monoid] = {}

    def program(self) -> Program:
        self._expect("program")
        while self._accept("symbol"):
            self._symbol()
        inputs, input_names = self._aliased("input", self._tensor)
        constants: dict[Tensor, np.ndarray] = {}
        while self._accept("constant"):
            tensor = self._tensor()
            constants[tensor] = self._known(self._constants, tensor.name, "constant")
            self._string()
        while self._accept("monoid"):
            self._monoid()
        computes = self._computes()
        layouts: dict[Tensor, Layout] = {}
        while self._accept("layout"):
            tensor = self._tensor_name()
            layouts[tensor] = self._layout()
        staged = []
        while self._accept("staged"):
            staged.append(self._tensor_name())
        outputs, output_names = self._aliased("output", self._tensor_name)
        ends: list[tuple[Form, ...]] = []
        while self._accept("ends"):
            ends.append(self._forms())
        self._expect("end")
        return Program(inputs, outputs, computes, constants, layouts, input_names, output_names, tuple(staged),
                       ends=tuple(ends))  # fmt: skip

    def _forms(self) -> tuple[Form, ...]:
        found = []
        while self._accept("("):
            constant, *factors = self._list(self._integer, ")")
            found.append(Form(constant, tuple(factors)))
        return tuple(found)

    def _aliased(self, word: str, item: Callable[[], Tensor]) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
        tensors: list[Tensor] = []
        names: list[str] = []
        while self._accept(word):
            tensors.append(item())
            if self._accept("="):
                names.append(self._string())
        return tuple(tensors), tuple(names)

    def _monoid(self) -> None:
        name = self._name()
        self._states = {}
        self._expect("(")
        left = self._list(self._state, ";")
        right = self._list(self._state, ")")
        parts = []
        for word in ("identity", "combine", "final"):
            self._expect(word)
            parts.append(self._tuple())
        self._monoids[name] = Monoid(left, right, parts[0], parts[1], parts[2])
        self._states = {}

    def _state(self) -> State:
        self._expect("$")
        name = self._name()
        self._expect(":")
        self._states[name] = state(name, self._dtype())
        return self._states[name]

    def _layout(self) -> Layout:
        self._expect(":")
        self._expect("[")
        order = self._list(self._storage_axis, "]")
        fill, swizzle = self._plain_number(), self._integer()
        return Layout(order, fill, swizzle, self._integer() if self._accept("gap") else 0)

    def _storage_axis(self) -> StorageAxis:
        axis = self._integer()
        step = self._integer() if self._accept("/") else 1
        return StorageAxis(axis, step, self._integer() if self._accept("%") else None)

    def _computes(self) -> tuple[Compute, ...]:
        computes: list[Compute] = []
        while self._peek().text not in ("end", "layout", "staged", "output", ""):
            computes.append(self._compute())
        return tuple(computes)

    def _compute(self) -> Compute:
        if self._accept("scan"):
            return self._scan()
        if self._accept("region"):
            return self._region()
        if self._accept("host"):
            return self._host()
        before = dict(self._axes)
        lefts = [self._left()]
        while self._accept(","):
            lefts.append(self._left())
        self._expect("=")
        compute = self._right([t for t, _ in lefts], lefts[0][1])
        self._axes = before
        for tensor, _ in lefts:
            self._declare(tensor)
        return compute

    def _left(self) -> tuple[Tensor, tuple[Axis, ...]]:
        """An output: `name: dtype[axes]` or `name: dtype[extents]`; a second output repeats the axes of the first."""
        name = self._name()
        self._expect(":")
        dtype = self._dtype()
        if self._peek(2).text == ":":
            axes = self._axis_list()
            return Tensor(name, tuple(a.extent for a in axes), dtype), axes
        return Tensor(name, self._shape(), dtype), ()

    def _right(self, outputs: list[Tensor], axes: tuple[Axis, ...]) -> Compute:
        for axis in axes:  # the first output's axes are the compute's
            self._axes[axis.name] = axis
        if self._accept("scatter"):
            axes = self._axis_list()
            initial = self._tensor_name()
            self._expect("at")
            indices = self._tuple()
            self._expect("put")
            operator = None if self._peek().text == "(" else self._word()
            (value,) = self._tuple()
            unique = self._accept("unique")
            return Scatter(outputs[0], initial, axes, indices, value, operator, unique, self._origin())
        if self._accept("sort"):
            axes = self._axis_list()
            self._expect("along")
            along = self._known(self._axes, self._name(), "axis")
            self._expect("by")
            (key,) = self._tuple()
            self._expect("give")
            payloads = self._tuple()
            down = self._accept("descending")
            return Sort(tuple(outputs), axes, along, key, payloads, down, self._origin())
        if self._accept("reduce"):
            monoid = self._known(self._monoids, self._name(), "monoid")
            over = self._axis_list()
            return Reduce(tuple(outputs), axes, over, self._tuple(), monoid, self._origin())
        token = self._peek()
        if token.kind == "word" and token.text in _OPERATORS:
            self._next()
            over = self._axis_list()
            element = self.expr()
            monoid = plain_monoid(_OPERATORS[token.text], element.dtype)
            return Reduce(tuple(outputs), axes, over, (element,), monoid, self._origin())
        return Map(outputs[0], axes, self.expr(), self._origin())

    def _scan(self) -> Scan:
        before = dict(self._axes)
        (axis,) = self._axis_list()
        reverse = self._accept("reverse")
        origin = self._origin()
        carry, initial, following, finals, stacked = [], [], [], [], []
        while self._accept("carry"):
            name = self._name()
            self._expect(":")
            dtype = self._dtype()
            carry.append(Tensor(name, self._shape(), dtype))
            self._expect("=")
            initial.append(self._tensor_name())
            self._expect("then")
            following.append(self._name())
            finals.append(self._tensor() if self._accept("give") else None)
        while self._accept("stack"):
            output = self._tensor()
            self._expect("=")
            stacked.append((self._name(), output))
        for tensor in carry:
            self._declare(tensor)
        self._expect("do")
        body = self._computes()
        self._expect("end")
        self._axes = before
        ahead = tuple(self._known(self._sources, n, "tensor") for n in following)
        kept = tuple((self._known(self._sources, n, "tensor"), o) for n, o in stacked)
        return Scan(axis, tuple(initial), tuple(carry), body, ahead, tuple(finals), kept, reverse, origin)

    def _region(self) -> Region:
        kind = self._word()
        condition = self._tensor_name()
        captures = self._tensors()
        outputs = self._new_tensors()
        limit = self._integer() if self._accept("limit") else None
        origin = self._origin()
        branches: list[Program] = []
        around = self._sources, self._symbols, self._monoids
        while self._peek().text == "program":
            self._sources, self._symbols, self._monoids = {}, {}, {}
            branches.append(self.program())
        self._sources, self._symbols, self._monoids = around
        self._expect("end")
        return Region(kind, condition, captures, tuple(branches), outputs, limit, origin)

    def _host(self) -> Host:
        function = self._string()
        inputs = self._tensors()
        outputs = self._new_tensors()
        attributes = tuple(json.loads(self._string()).items())
        return Host(function, inputs, outputs, attributes, self._origin())


class _LoopsReader(Reader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._buffers: dict[tuple[str, tuple[Extent, ...], DType, Memory], Buffer] = {}  # of a kernel

    def loops(self) -> LoopProgram:
        self._expect("loops")
        tensors: list[Storage] = []
        while self._accept("tensor"):
            tensor = self._tensor()
            shape = tuple(e for e in tensor.shape if isinstance(e, int))
            if len(shape) != tensor.rank:
                raise self.fail(f"tensor {tensor.name} has a symbolic shape")
            role = self._next().text
            tensors.append(Storage(tensor.name, shape, tensor.dtype, role, self._integer()))
        kernels: list[Kernel] = []
        while self._accept("kernel"):
            kernels.append(self._kernel())
        calls: list[Call] = []
        while self._accept("call"):
            name = self._name()
            self._expect("(")
            arguments = self._list(self._name, ")")
            calls.append(Call(name, arguments, self._integer() if self._accept("step") else 0))
        jumps: list[Jump] = []
        while self._accept("jump"):
            at = self._integer()
            self._expect("to")
            target = self._integer()
            passed = self._integer() if self._accept("past") else 0
            jumps.append(Jump(at, target, passed, self._name() if self._accept("unless") else None))
        return LoopProgram(tuple(kernels), tuple(calls), tuple(tensors), tuple(jumps))

    def _kernel(self) -> Kernel:
        self._sources, self._symbols, self._axes = {}, {}, {}
        self._buffers.clear()
        name = self._name()
        # symbols stand behind the parameters whose shapes use them: read the parameters again once they are known
        start = self._place
        self._skip_parameters()
        symbols: list[Symbol] = []
        while self._accept("symbol"):
            symbols.append(self._symbol())
        behind = self._place
        self._place = start
        self._expect("(")
        params = self._list(self._buffer, ")")
        self._place = behind
        step = self._axis() if self._accept("step") else None
        return Kernel(name, params, self._block(), tuple(symbols), step)

    def _skip_parameters(self) -> None:
        depth = 0
        while True:
            token = self._next()
            depth += {"(": 1, ")": -1}.get(token.text, 0)
            if depth == 0 or token.kind == "end":
                return

    def _buffer(self) -> Buffer:
        name = self._name()
        self._expect(":")
        word = self._peek().text
        memory = Memory(self._next().text) if word in {m.value for m in Memory} else Memory.GLOBAL
        dtype = self._dtype()
        found = (name, self._shape(), dtype, memory)
        # one that is alike is the same again: copies of a loop that is written out share it
        self._sources[name] = self._buffers.setdefault(found, Buffer(*found))
        return self._buffers[found]

    def _block(self) -> tuple[Stmt, ...]:
        self._expect("{")
        body: list[Stmt] = []
        while not self._accept("}"):
            body.append(self._stmt())
        return tuple(body)

    def _stmt(self) -> Stmt:
        token = self._peek()
        if token.kind == "word" and token.text in {k.value for k in ForKind}:
            self._next()
            with self._scope():
                return For(self._axis(), ForKind(token.text), self._block())
        if self._accept("alloc"):
            with self._scope():
                return Alloc(self._buffer(), self._block())
        if self._accept("if"):
            condition, then = self.expr(), self._block()
            return If(condition, then, self._block() if self._accept("else") else ())
        if self._accept("barrier"):
            word = self._word()
            return Barrier(self._known({s.value: s for s in Scope}, word, "scope"))
        if self._accept("do"):
            name = self._name()
            self._expect("(")
            operands = self._list(self._operand, ";")
            return Instruction(name, operands, self._list(self.expr, ")"))
        place = self._operand()
        self._expect("=")
        return Store(place.buffer, place.origin, self.expr())

    def _operand(self) -> Operand:
        buffer = self._known(self._sources, self._name(), "buffer")
        self._expect("[")
        return Operand(buffer, self._list(self.expr, "]"))
