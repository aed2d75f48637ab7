"""The meaning of a Program: evaluated whole (`evaluate`) or only where asked (`Sampler`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import numpy as np

from tilewright.errors import InputError, InternalError
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.expr import Load, Symbol
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.machine import BLOCK, TensorValues
from tilewright.ir.meaning.values import Dims, flushed, gather

DENSE = 4  # a Sampler that is asked for one element in four of a tensor computes all of it


def evaluate(
    program: Program,
    inputs: Mapping[str, np.ndarray],
    symbols: Mapping[str, int] | None = None,
    wide: bool = False,
    flush: bool = False,
) -> dict[str, np.ndarray]:
    """The outputs of a Program by tensor name; `wide` computes every float in float64, `flush` takes denormals of the
    tensors' own types as zeros."""
    machine = TensorValues(
        bind_inputs(program, inputs), bind_symbols(program, inputs, symbols or {}), wide, flush=flush
    )
    machine.run(program.computes, keep=frozenset((*program.outputs, *program.constants, *program.inputs)))
    return {t.name: np.array(machine.tensors[t]).astype(machine.working(t.dtype)) for t in program.outputs}


def evaluate_computes(
    computes: Iterable[Compute],
    tensors: dict[Tensor, np.ndarray],
    symbols: Mapping[str, int] | None = None,
    wide: bool = False,
) -> dict[Tensor, np.ndarray]:
    """Run computes in order on `tensors` (which hold what they read) and add their outputs to it."""
    machine = TensorValues(tensors, symbols or {}, wide)
    machine.run(computes)
    return machine.tensors


def bind_inputs(program: Program, inputs: Mapping[str, np.ndarray]) -> dict[Tensor, np.ndarray]:
    """Values of the program's inputs and constants."""
    tensors: dict[Tensor, np.ndarray] = dict(program.constants)
    for tensor, array in _named_inputs(program, inputs):
        value = np.asarray(array)
        if value.ndim != tensor.rank or any(
            isinstance(e, int) and e != n for e, n in zip(tensor.shape, value.shape, strict=True)
        ):
            raise InputError(f"input '{tensor.name}' has shape {list(value.shape)}, expected {list(tensor.shape)}")
        if value.dtype != tensor.dtype.numpy and not (tensor.dtype.is_float and value.dtype == np.float64):
            raise InputError(f"input '{tensor.name}' is {value.dtype}, expected {tensor.dtype.name}")
        tensors[tensor] = value
    return tensors


def bind_symbols(program: Program, inputs: Mapping[str, np.ndarray], given: Mapping[str, int]) -> dict[str, int]:
    """Symbols by name: those given, and those that the input shapes say."""
    found = dict(given)
    for tensor, array in _named_inputs(program, inputs):
        for extent, size in zip(tensor.shape, np.shape(array), strict=True):
            if isinstance(extent, Symbol) and found.setdefault(extent.name, size) != size:
                raise InputError(f"input '{tensor.name}': {extent.name} is {found[extent.name]} and {size} at once")
    return found


def _named_inputs(program: Program, inputs: Mapping[str, np.ndarray]) -> Iterator[tuple[Tensor, np.ndarray]]:
    for position, tensor in enumerate(program.inputs):
        names = (tensor.name, *program.input_names[position : position + 1])
        name = next((n for n in names if n in inputs), None)
        if name is None:
            raise InputError(f"input '{tensor.name}' is missing")
        yield tensor, inputs[name]


class Sampler(TensorValues):
    """A Program evaluated only where asked: `at` computes the elements it needs, and theirs, and keeps them."""

    def __init__(
        self,
        program: Program,
        inputs: Mapping[str, np.ndarray],
        symbols: Mapping[str, int] | None = None,
        wide: bool = False,
        flush: bool = False,
    ) -> None:
        super().__init__(bind_inputs(program, inputs), bind_symbols(program, inputs, symbols or {}), wide, flush=flush)
        self._producers = program.producers()
        self._partial: dict[Tensor, tuple[np.ndarray, np.ndarray]] = {}  # values and which of them are known

    def at(self, tensor: Tensor, indices: Sequence[np.ndarray]) -> np.ndarray:
        """Elements of a tensor at index arrays that broadcast together."""
        arrays = tuple(np.asarray(i, np.int64) for i in indices)
        shape = self.shape(tensor)
        for index, size in zip(arrays, shape, strict=True):
            if index.size and (index.min() < 0 or index.max() >= size):
                raise InputError(f"sample of {tensor.name} is out of range")
        return self.read(tensor, arrays).astype(self.working(tensor.dtype), copy=False)

    def whole(self, tensor: Tensor) -> np.ndarray:
        """All of a tensor, by way of all of what it reads."""
        pending = [tensor]
        while pending:
            current = pending[-1]
            if current in self.tensors:
                pending.pop()
                continue
            missing = [t for t in reads(self._producer(current)) if t not in self.tensors]
            if missing:
                pending.extend(missing)
                continue
            self.compute(self._producer(current))
        return self.tensors[tensor]

    def _producer(self, tensor: Tensor) -> Compute:
        if tensor not in self._producers:
            raise InternalError(f"tensor {tensor.name} is neither given nor computed")
        return self._producers[tensor]

    def _view(self, node: Load, dims: Dims) -> np.ndarray | None:
        return super()._view(node, dims) if node.source in self.tensors else None

    def read(self, tensor: Tensor, indices: tuple[np.ndarray, ...]) -> np.ndarray:
        if tensor in self.tensors:
            return gather(self.tensors[tensor], indices)
        shape = self.shape(tensor)
        producer = self._producer(tensor)
        if prod(shape) == 0 or not isinstance(producer, Map | Reduce):
            return gather(self.whole(tensor), indices)
        flat = np.asarray(0)
        for index, size in zip(indices, shape, strict=True):
            flat = flat * size + np.clip(index, 0, size - 1)
        wanted = np.unique(flat)
        if wanted.size > DENSE and DENSE * wanted.size >= prod(shape):
            return gather(self.whole(tensor), indices)
        if tensor not in self._partial:
            for output in producer.outputs:
                values = np.zeros(prod(shape), self.working(output.dtype))
                self._partial[output] = (values, np.zeros(prod(shape), np.bool_))
        values, known = self._partial[tensor]
        missing = wanted[~known[wanted]]
        reach = 1 if isinstance(producer, Map) else prod(self.extent(a.extent) for a in producer.reduce_axes)
        step = max(1, BLOCK // max(1, reach))
        for start in range(0, missing.size, step):
            self._compute_points(producer, shape, missing[start : start + step])
        return values[flat]

    def _compute_points(self, producer: Map | Reduce, shape: tuple[int, ...], points: np.ndarray) -> None:
        places = np.unravel_index(points, shape)
        axes = dict(zip(producer.axes, places, strict=True))
        if isinstance(producer, Map):
            results = [np.broadcast_to(v, points.shape) for v in self.values((producer.value,), axes)]
        else:
            results = self.fold(producer, axes, points.shape)
        for output, result in zip(producer.outputs, results, strict=True):
            values, known = self._partial[output]
            values[points] = flushed(result, output.dtype) if self.flush and isinstance(producer, Reduce) else result
            known[points] = True
