"""Tokens and expressions of the text forms: the lower half of the parser, whose grammar stands in `parse.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tilewright.errors import TilewrightError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bits import bitcast
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Const, Expr, Extent, State, Symbol, _make_op, const, load, op, symbol, var
from tilewright.ir.forms.scalar import OPS
from tilewright.ir.forms.spelling import BITS, KEYWORDS, PRECEDENCE, SUFFIX
from tilewright.ir.forms.tensor import Tensor

T = TypeVar("T")
_TOKEN = re.compile(
    r"""\s*(?:(?P<comment>\#[^\n]*)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?(?:_[a-z]+\d+)?)
    |(?P<word>[A-Za-z_][A-Za-z0-9_.]*)|(?P<sign>//|==|!=|<=|\.\.|[-+*/%<=()\[\]{}:;,?$@]))""",
    re.VERBOSE,
)
_INFIX = {OPS[name].symbol: name for name in PRECEDENCE}
_BY_SUFFIX = {suffix: dtypes.by_name(name) for name, suffix in SUFFIX.items() if suffix}


class TextError(TilewrightError):
    """A text that does not follow the grammar; names the line."""


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    place, line = 0, 1
    end = len(text.rstrip())
    while place < end:
        match = _TOKEN.match(text, place)
        if match is None:
            line += text[place:].count("\n") - text[place:].lstrip().count("\n")
            raise TextError(f"line {line}: cannot read {text[place:].split()[0]!r}")
        kind = match.lastgroup or ""
        line += text.count("\n", place, match.start(kind))
        found.append(Token(kind, match.group(kind), line))
        place = match.end()
    return found


class Reader:
    """Recursive descent over the tokens, with the names that are in scope."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._place = 0
        self._sources: dict[str, Any] = {}  # tensors of a Program, buffers of a kernel
        self._axes: dict[str, Axis] = {}
        self._symbols: dict[str, Symbol] = {}
        self._states: dict[str, State] = {}
        self._lets: dict[str, Expr] = {}

    # Tokens

    def _peek(self, ahead: int = 0) -> Token:
        place = self._place
        while place < len(self._tokens):
            if self._tokens[place].kind != "comment":
                if not ahead:
                    return self._tokens[place]
                ahead -= 1
            place += 1
        return Token("end", "", self._tokens[-1].line if self._tokens else 1)

    def _next(self) -> Token:
        while self._place < len(self._tokens) and self._tokens[self._place].kind == "comment":
            self._place += 1
        token = self._peek()
        self._place += 1
        return token

    def fail(self, what: str) -> TextError:
        token = self._peek()
        return TextError(f"line {token.line}: {what}, found {token.text or 'the end'!r}")

    def _accept(self, text: str) -> bool:
        token = self._peek()
        if token.kind in ("word", "sign") and token.text == text:
            self._next()
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self.fail(f"expected {text!r}")

    def finish(self) -> None:
        if self._peek().kind != "end":
            raise self.fail("expected the end")

    def _name(self) -> str:
        token = self._peek()
        if token.kind == "string":
            self._next()
            return str(json.loads(token.text))
        if token.kind == "word" and token.text not in KEYWORDS:
            return self._next().text
        raise self.fail("expected a name")

    def _word(self) -> str:
        if self._peek().kind != "word":
            raise self.fail("expected a word")
        return self._next().text

    def _string(self) -> str:
        if self._peek().kind != "string":
            raise self.fail("expected a quoted text")
        return str(json.loads(self._next().text))

    def _integer(self) -> int:
        negative = self._accept("-")
        token = self._peek()
        if token.kind != "number" or not token.text.isdigit():
            raise self.fail("expected an integer")
        return -int(self._next().text) if negative else int(self._next().text)

    def _list(self, item: Callable[[], T], close: str) -> tuple[T, ...]:
        """Items separated by commas up to `close`, which is taken."""
        items: list[T] = []
        if not self._accept(close):
            items.append(item())
            while self._accept(","):
                items.append(item())
            self._expect(close)
        return tuple(items)

    def _origin(self) -> str:
        """The comment that follows on the line just read."""
        if 0 < self._place < len(self._tokens):
            token, before = self._tokens[self._place], self._tokens[self._place - 1]
            if token.kind == "comment" and token.line == before.line:
                return token.text[1:].strip()
        return ""

    @contextmanager
    def _scope(self) -> Iterator[None]:
        before = dict(self._axes), dict(self._sources)
        yield
        self._axes, self._sources = before

    # Expressions

    def expr(self) -> Expr:
        if not self._accept("let"):
            return self._infix(1)
        before = dict(self._lets)
        while self._accept("@"):
            number = self._next().text
            self._expect("=")
            self._lets[number] = self._infix(1)
            if not self._accept(","):
                break
        self._expect("in")
        value = self._infix(1)
        self._lets = before
        return value

    def _infix(self, level: int) -> Expr:
        left = self._atom()
        while True:
            token = self._peek()
            name = _INFIX.get(token.text) if token.kind in ("sign", "word") else None
            if name is None or PRECEDENCE[name] < level:
                return left
            self._next()
            right = self._infix(PRECEDENCE[name] + 1)
            left = self._apply(token, name, (left, right))

    def _apply(self, token: Token, name: str, args: tuple[Expr, ...]) -> Expr:
        try:
            return op(name, *args)
        except (TypeError, ValueError) as error:
            raise TextError(f"line {token.line}: {error}") from error

    def _atom(self) -> Expr:
        token = self._peek()
        if token.kind == "number" or token.text == "-" or token.text.split("_")[0] in ("inf", "nan"):
            return self._number()
        if self._accept("("):
            value = self.expr()
            self._expect(")")
            return value
        if self._accept("?"):
            return self._known(self._symbols, self._name(), "symbol")
        if self._accept("$"):
            return self._known(self._states, self._name(), "state")
        if self._accept("@"):
            return self._known(self._lets, self._next().text, "let")
        if token.kind == "word" and token.text in ("true", "false"):
            return const(self._next().text == "true", dtypes.bool_)
        if token.kind == "word" and self._peek(1).text == "(":
            return self._call()
        name = self._name()
        if self._peek().text == "[":
            return self._load(name, token)
        return var(self._known(self._axes, name, "axis"))

    def _known(self, table: Mapping[str, T], name: str, what: str) -> T:
        if name not in table:
            line = self._tokens[min(self._place, len(self._tokens)) - 1].line
            raise TextError(f"line {line}: {what} {name!r} is not known here")
        return table[name]

    def _load(self, name: str, token: Token) -> Expr:
        source = self._known(self._sources, name, "tensor")
        self._expect("[")
        indices = self._list(self.expr, "]")
        try:
            return load(source, indices)
        except ValueError as error:
            raise TextError(f"line {token.line}: {error}") from error

    def _call(self) -> Expr:
        token = self._next()
        self._expect("(")
        args = self._list(self.expr, ")")
        if token.text in {d.name for d in dtypes.EVERY}:
            if len(args) != 1:
                raise TextError(f"line {token.line}: a cast takes one operand")
            return _make_op(OPS["cast"], args, dtypes.by_name(token.text))
        if token.text.removeprefix(BITS) in {d.name for d in dtypes.EVERY}:
            if len(args) != 1:
                raise TextError(f"line {token.line}: {token.text} takes one operand")
            return bitcast(args[0], dtypes.by_name(token.text.removeprefix(BITS)))
        if token.text not in OPS:
            raise TextError(f"line {token.line}: no operation {token.text!r}")
        return self._apply(token, token.text, args)

    def _number(self) -> Const:
        sign = "-" if self._accept("-") else ""
        token = self._peek()
        body, _, suffix = token.text.partition("_")
        if token.kind != "number" and body not in ("inf", "nan"):
            raise self.fail("expected a number")
        dtype = _BY_SUFFIX.get(f"_{suffix}") if suffix else (dtypes.index if body.isdigit() else dtypes.float32)
        if dtype is None:
            raise self.fail("expected a number of a known type")
        self._next()
        return const(float(sign + body) if dtype.is_float else int(sign + body), dtype)

    def _plain_number(self) -> float:
        return float(self._number().value)

    # Shared pieces

    def _dtype(self) -> DType:
        token = self._peek()
        if token.text not in {d.name for d in dtypes.EVERY}:
            raise self.fail("expected an element type")
        return dtypes.by_name(self._next().text)

    def _extent(self) -> Extent:
        value = self.expr()
        return int(value.value) if isinstance(value, Const) else value

    def _shape(self) -> tuple[Extent, ...]:
        self._expect("[")
        return self._list(self._extent, "]")

    def _tensor(self) -> Tensor:
        name = self._name()
        self._expect(":")
        dtype = self._dtype()
        return self._declare(Tensor(name, self._shape(), dtype))

    def _declare(self, tensor: Tensor) -> Tensor:
        self._sources[tensor.name] = tensor
        return tensor

    def _tensor_name(self) -> Tensor:
        return self._known(self._sources, self._name(), "tensor")

    def _tensors(self) -> tuple[Tensor, ...]:
        self._expect("(")
        return self._list(self._tensor_name, ")")

    def _new_tensors(self) -> tuple[Tensor, ...]:
        self._expect("give")
        self._expect("(")
        return self._list(self._tensor, ")")

    def _tuple(self) -> tuple[Expr, ...]:
        self._expect("(")
        return self._list(self.expr, ")")

    def _axis(self) -> Axis:
        name = self._name()
        self._expect(":")
        axis = Axis(name, self._extent())
        self._axes[name] = axis
        return axis

    def _axis_list(self) -> tuple[Axis, ...]:
        self._expect("[")
        return self._list(self._axis, "]")

    def _symbol(self) -> Symbol:
        name, low = self._name(), self._integer()
        self._expect("..")
        self._symbols[name] = symbol(name, low, self._integer())
        return self._symbols[name]
