"""The Emitter: rows of the ATen table say which operators stand for a call, it names them and keeps their constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from tilewright import ops
from tilewright.errors import UnsupportedError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.graph import Node
from tilewright.ops.steps.control import NAMES as CONTROL

Number = bool | int | float
Shape = tuple[Any, ...]  # of ints; a Size where only data tell the extent


@dataclass(frozen=True)
class Size:
    """An extent that only data tell, by what PyTorch knows of it: a sum, a product, ... of such and of numbers."""

    text: str  # equal for what PyTorch knows to be equal
    expression: Any = field(compare=False)


@dataclass(frozen=True)
class Emitted:
    """A tensor of the module: its name in the Graph, and the element type and shape that PyTorch gives it."""

    name: str
    dtype: DType
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    def axis(self, dim: int) -> int:
        return dim % self.rank if self.rank else 0


Operand = Emitted | Number
Input = str | Emitted | np.ndarray | None
Results = str | tuple[str | None, ...]
Row = Callable[..., Results]


class Emitter:
    """Collects the nodes and constants of a Graph."""

    def __init__(self, is_trial: bool = False) -> None:
        """A trial is of single calls, to see whether they are covered: sizes are known to it."""
        self._is_trial = is_trial
        self._sizes: dict[str, str | tuple[str, int]] = {}  # a number's name, or a tensor's with the axis
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}
        self._names: set[str] = set()
        self._small: dict[tuple[Any, ...], str] = {}
        self._label = ""
        self._base = ""
        self._outer: Emitter | None = None

    def inside(self) -> Emitter:
        """For a body inside this Graph, which may read what is made around it: no name is used in both."""
        inner = Emitter(self._is_trial)
        inner._names, inner._outer, inner._sizes = self._names, self, dict(self._sizes)
        return inner

    def enter(self, label: str, base: str) -> None:
        """All that follows belongs to this call; `label` is what messages name, `base` what tensors are named by."""
        self._label, self._base = label, base

    def refuse(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{self._label}: {what}" if self._label else what)

    def unique(self, text: str) -> str:
        name, count = text, 1
        while name in self._names:
            count += 1
            name = f"{text}_{count}"
        self._names.add(name)
        return name

    # nodes

    def new(self, op: str, *inputs: Input, domain: str = "", **attributes: Any) -> str:
        """The one output of a new node."""
        return self.several(op, 1, *inputs, domain=domain, **attributes)[0]

    def several(self, op: str, count: int, *inputs: Input, domain: str = "", **attributes: Any) -> tuple[str, ...]:
        """The first outputs of a new node."""
        if ops.find(op, domain) is None and op not in CONTROL:
            raise self.refuse(f"operator {op} is not supported")
        names = tuple(self._named(value) for value in inputs)
        while names and not names[-1]:
            names = names[:-1]
        outputs = tuple(self.unique(self._base if k == 0 else f"{self._base}_{k}") for k in range(count))
        self.nodes.append(Node(op, self._label, names, outputs, attributes, domain))
        return outputs

    def _named(self, value: Input) -> str:
        if value is None:
            return ""
        if isinstance(value, np.ndarray):
            return self.constant(value)
        return value if isinstance(value, str) else value.name

    # constants

    def known(self, name: str) -> np.ndarray | None:
        """The value of a constant, of a Graph around this one too; None of what is no constant."""
        if name in self.constants:
            return self.constants[name]
        return self._outer.known(name) if self._outer is not None else None

    def constant(self, array: np.ndarray, name: str | None = None) -> str:
        key = None if name is not None or array.size > 64 else (array.dtype.str, array.shape, array.tobytes())
        if key is not None and key in self._small:
            return self._small[key]
        made = self.unique(name or f"{self._base}_constant")
        self.constants[made] = array
        if key is not None:
            self._small[key] = made
        return made

    def number(self, value: Number, dtype: DType) -> str:
        """A scalar of an element type; an integer that does not fit wraps around, as a cast does."""
        if dtype.is_int and not isinstance(value, float):
            low, _ = dtype.limits
            value = (int(value) - low) % (1 << dtype.bits) + low
        return self.constant(np.asarray(value).astype(dtype.numpy))

    def integers(self, values: Sequence[Any]) -> str:
        """A list of whole numbers, some of which may be told by data: a Size, or an Emitted that holds one."""
        if all(isinstance(v, int | np.integer) for v in values):
            return self.constant(np.asarray(values, np.int64))
        return self.new("Concat", *(self._listed(v) for v in values), axis=0)

    def _listed(self, value: Any) -> str:
        if isinstance(value, Size | Emitted):
            name = self.size(value) if isinstance(value, Size) else self.typed(value, dtypes.int64)
            return self.new("Reshape", name, self.integers([1]))
        return self.integers([value])

    # sizes that data tell

    def knows(self, size: Size, source: str | tuple[str, int]) -> None:
        """Where a size is found: in a number, or as the extent of a tensor's axis."""
        self._sizes.setdefault(size.text, source)

    def size(self, size: Any) -> str:
        """A whole number by its name."""
        if not isinstance(size, Size):
            return self.number(int(size), dtypes.int64)
        found = self._sizes.get(size.text)
        if found is None:
            found = self._computed(size)
        elif isinstance(found, tuple):
            found = self.new("Gather", self.new("Shape", found[0]), self.number(found[1], dtypes.int64), axis=0)
        self._sizes[size.text] = found
        return found

    def _computed(self, size: Size) -> str:
        """A size that is made of others."""
        if self._is_trial:
            return self.number(2, dtypes.int64)
        op = _ARITHMETIC.get(type(size.expression).__name__)
        parts = [size_of(part) for part in size.expression.args]
        if op is None or not parts:
            raise self.refuse(f"a shape that data decide ({size.text}) is not supported")
        result = self.size(parts[0])
        for part in parts[1:]:
            result = self.new(op, result, self.size(part))
        return result

    # what many rows need

    def cast(self, x: str, dtype: DType) -> str:
        return self.new("Cast", x, to=dtype.onnx)

    def typed(self, x: Operand, dtype: DType) -> str:
        """An operand in an element type."""
        if not isinstance(x, Emitted):
            return self.number(x, dtype)
        return x.name if x.dtype is dtype else self.cast(x.name, dtype)

    def reshaped(self, x: Emitted, shape: Sequence[Any]) -> str:
        return x.name if x.shape == tuple(shape) else self.reshape(x.name, shape)

    def reshape(self, x: str, shape: Sequence[Any]) -> str:
        opened = [k for k, n in enumerate(shape) if isinstance(n, Size)]
        if len(opened) == 1 and all(n != 0 for n in shape):
            shape = [-1 if k == opened[0] else n for k, n in enumerate(shape)]
        return self.new("Reshape", x, self.integers(shape), allowzero=1)

    def transposed(self, x: str, order: Sequence[int]) -> str:
        return x if list(order) == list(range(len(order))) else self.new("Transpose", x, perm=list(order))

    def sliced(self, x: str, axis: int, start: Any, end: Any, step: int = 1) -> str:
        return self.new("Slice", x, *(self.integers([v]) for v in (start, end, axis, step)))

    def expanded(self, x: Emitted, shape: Sequence[Any]) -> str:
        return x.name if x.shape == tuple(shape) else self.new("Expand", x, self.integers(shape))

    def filled(self, shape: Sequence[Any], value: Number, dtype: DType) -> str:
        """A tensor of one value."""
        one = np.asarray([value]).astype(dtype.numpy)
        if not any(isinstance(n, Size) for n in shape) and prod(shape) <= 64:
            return self.constant(np.full(tuple(shape), one[0], dtype.numpy))
        return self.new("ConstantOfShape", self.integers(shape), value=one)


# PyTorch's own expressions, by the name of their kind.
_ARITHMETIC = {"Add": "Add", "Mul": "Mul", "Max": "Max", "Min": "Min", "FloorDiv": "Div", "CleanDiv": "Div",
               "PythonMod": "Mod", "Mod": "Mod"}  # fmt: skip


def size_of(expression: Any) -> Any:
    """An extent as PyTorch has it: a number, or a Size."""
    try:
        return int(expression)
    except TypeError:
        return Size(str(expression), expression)


_TABLE: dict[str, Row] = {}  # filled while the tables are imported, then only read


def row(*names: str) -> Callable[[Row], Row]:
    """Register a function for calls of these names: `aten.add`, or `aten.max.dim` where overloads differ.

    It is called with the Emitter, what the call gives (an Emitted, or a tuple of them) and the call's own arguments,
    tensors as Emitted; it gives the names of the outputs.
    """

    def register(function: Row) -> Row:
        for name in names:
            if name in _TABLE:
                raise ValueError(f"{name} has two rows")
            _TABLE[name] = function
        return function

    return register


def find_row(name: str) -> Row | None:
    """The row of an overload's full name, `aten.add.Tensor`: its own, or the one of all overloads."""
    return _TABLE.get(name) or _TABLE.get(name.rpartition(".")[0])


def rows() -> list[str]:
    """Every name that has a row."""
    return sorted(_TABLE)


def floating(dtype: DType) -> DType:
    """The type in which a function with real results computes: float32 where it is given integers."""
    return dtype if dtype.is_float else dtypes.float32
