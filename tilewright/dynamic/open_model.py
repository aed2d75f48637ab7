"""A model whose shapes its inputs decide: compiled at a call for what it is given, and kept for the next such call."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.calls.arguments import Array, as_array, bind
from tilewright.calls.progress import log_compiled
from tilewright.dynamic.model import Compiled, LateModel, share_weights
from tilewright.dynamic.saved_shapes import save
from tilewright.dynamic.variants import Extents, KeptVariant, OpenPort, Shapes, Values, Variant
from tilewright.errors import InputError, OptionError, TilewrightError, UndecidedError

if TYPE_CHECKING:
    from tilewright.calls.profiles import Profile

_QUIET = 4  # so many compilations are to be expected; every later one is worth a warning
MOST_ELEMENTS = 256  # of an input whose values become part of the code; a part of its own looks at larger ones


@dataclass(frozen=True)
class _Locks:
    """Looking things up never waits for a compilation."""

    process: int
    table: Lock
    compiling: Lock


class OpenModel(LateModel[OpenPort]):
    """A model with open dimensions, or with inputs whose values decide shapes (axes, repeats, a target shape).

    It is called like a `Model`. The first call with new shapes, or with new values of inputs that decide shapes,
    compiles it for them; later ones find that again. So many are kept as `Options.variants` says, those used last.
    Calls from several threads at once are safe.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[OpenPort],
        outputs: Sequence[OpenPort],
        build: Callable[[Shapes, Values], Compiled],
        keep: int,
        reason: TilewrightError,
        kept: Mapping[Any, KeptVariant] | None = None,
        deciding: tuple[str, ...] = (),
    ) -> None:
        """`reason` says what is open, to whoever asks for what only a compiled model has; `kept` is compiled already,
        with inputs that are `deciding` shapes."""
        super().__init__(name, inputs, outputs)
        self._build = build
        self._keep = keep
        self._reason = reason
        self._deciding: tuple[str, ...] = reason.inputs if isinstance(reason, UndecidedError) else deciding
        self._kept: OrderedDict[Any, KeptVariant] = OrderedDict(kept or {})
        self._locks = _Locks(os.getpid(), Lock(), Lock())

    @property
    def kept(self) -> dict[Any, KeptVariant]:
        """What is compiled and kept now, by shapes and values of inputs."""
        with self._own_locks().table:
            return dict(self._kept)

    @property
    def deciding(self) -> tuple[str, ...]:
        """Inputs whose values decide shapes."""
        return self._deciding

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What is compiled and kept now, the one used last at the end."""
        return tuple(kept.variant for kept in self._all())

    def run_into(self, inputs: Sequence[Any], outputs: Sequence[Any], *, stream: Any = None) -> None:
        """Run the model on arrays in order and fill arrays of the caller."""
        model, rest = self._for(bind(self._names, inputs, {}))
        model.run_into(rest, outputs, stream=stream)

    def prepare(self, /, *args: Any, **named: Any) -> Compiled:
        """The model compiled for inputs like these. It takes those that are left once values that decide shapes are
        part of it."""
        return self._for(bind(self._names, args, named))[0]

    def profile(self, /, *args: Any, repeat: int = 20, **named: Any) -> Profile:
        """Time each kernel call: the median over `repeat` runs."""
        if not args and not named:
            raise InputError(f"a profile needs inputs here: {self._reason}")
        model, rest = self._for(bind(self._names, args, named))
        return model.profile(*rest, repeat=repeat)

    def random_inputs(self, seed: int = 0) -> dict[str, Array]:
        """There are none: what is open is the caller's to say."""
        if self._deciding:
            names = ", ".join(f"'{name}'" for name in self._deciding)
            raise InputError(f"shapes depend on the values of {names}, which cannot be random: give the inputs")
        raise self._reason

    def explain(self) -> str:
        """What is kept, and what became of the model in the variant used last."""
        last = self._ran()[0].explain()
        kept = [f"  {kept.variant} ({kept.variant.compile_seconds:.2f} s)" for kept in self._all()]
        head = f"{self._name}: compiled at a call, {self._compiled} times so far; at most {self._keep} are kept"
        return "\n".join([head, *kept, "", last])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write what is compiled now to a directory that `tilewright.load` starts from, for these shapes alone
        (docs/shipping.md)."""
        if not self._all():
            raise OptionError(
                "nothing is compiled yet that a directory could hold: call the model with the shapes to save, or "
                "compile it with shapes="
            )
        save(self, Path(folder))

    def _results(self, values: list[Any]) -> list[Any]:
        model, rest = self._for(values)
        return model(*rest)

    def _held(self) -> Sequence[Compiled]:
        return [kept.model for kept in self._all()]

    def _ran(self) -> Sequence[Compiled]:
        kept = self._all()
        if not kept:
            raise self._reason
        return [kept[-1].model]

    def _all(self) -> list[KeptVariant]:
        return list(self.kept.values())

    def _own_locks(self) -> _Locks:
        """A child process must not wait for a thread that it has no copy of."""
        if os.getpid() != self._locks.process:
            self._locks = _Locks(os.getpid(), Lock(), Lock())
        return self._locks

    def _for(self, values: list[Any]) -> tuple[Compiled, list[Any]]:
        """The variant for these inputs, and what is left to call it with."""
        kept = self._found(values)
        if kept is None:
            with self._own_locks().compiling:
                kept = self._found(values) or self._compile(values)  # another thread may have been first
        fixed = kept.variant.values
        if not fixed:
            return kept.model, values
        return kept.model, [v for name, v in zip(self._names, values, strict=True) if name not in fixed]

    def _found(self, values: list[Any]) -> KeptVariant | None:
        key = self._key(values, self._deciding)
        with self._own_locks().table:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
            return kept

    def _key(self, values: list[Any], deciding: tuple[str, ...]) -> tuple[Any, ...]:
        parts: list[Any] = []
        for port, value in zip(self._inputs, values, strict=True):
            parts.append(_shape_of(value, port.name))
            if port.name in deciding:
                array = as_array(value, port.name)
                parts += (array.dtype.str, array.tobytes())
        return tuple(parts)

    def _compile(self, values: list[Any]) -> KeptVariant:
        shapes = self._checked_shapes(values)
        start = time.perf_counter()
        while True:
            fixed = {p.name: self._fixed(p, v) for p, v in zip(self._inputs, values, strict=True)
                     if p.name in self._deciding and prod(shapes[p.name]) <= MOST_ELEMENTS}  # fmt: skip
            free = {n: shape for n, shape in shapes.items() if n not in fixed}
            try:
                model = self._build(free, fixed)
                break
            except UndecidedError as error:
                more = [name for name in error.inputs if name not in self._deciding]
                if not more:
                    raise
                # what was kept is found by fewer values than decide: it is compiled again, or found on disk
                with self._own_locks().table:
                    self._deciding = (*self._deciding, *more)
                    self._kept.clear()
        share_weights([model], self._held())
        made = KeptVariant(Variant(free, fixed, time.perf_counter() - start), model)
        with self._own_locks().table:
            self._kept[self._key(values, self._deciding)] = made
            self._compiled += 1
            dropped = self._kept.popitem(last=False)[1] if len(self._kept) > self._keep else None
        self._tell(made.variant, dropped)
        return made

    def _tell(self, variant: Variant, dropped: KeptVariant | None) -> None:
        gone = "" if dropped is None else f"; dropped what was unused for longest ({dropped.variant})"
        text = f"compiled {self._name} for {variant} in {variant.compile_seconds:.2f} s, number {self._compiled}{gone}"
        log_compiled(text, variant.compile_seconds, self._compiled <= _QUIET)

    def _fixed(self, port: OpenPort, value: Any) -> Array:
        """The values of an input that decides shapes, as a constant of the compiled code."""
        array = as_array(value, port.name)
        if port.dtype is not None and array.dtype.newbyteorder("=") != port.dtype:
            raise InputError(f"input {port.name!r} must be {port.dtype.name}, not {array.dtype.name}")
        return np.array(array, dtype=port.dtype, order="C", copy=True)

    def _checked_shapes(self, values: list[Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs, which fit what the model declares; dimensions of one name are equal."""
        sizes: dict[str, tuple[int, str]] = {}
        found: dict[str, tuple[int, ...]] = {}
        for port, value in zip(self._inputs, values, strict=True):
            shape = _shape_of(value, port.name)
            found[port.name] = shape
            if port.shape is None:
                continue
            if len(shape) != len(port.shape) or any(
                isinstance(n, int) and n != m for n, m in zip(port.shape, shape, strict=True)
            ):
                raise InputError(f"input {port.name!r} must have shape {_spelled(port.shape)}, not {shape}")
            for name, extent in zip(port.shape, shape, strict=True):
                if not isinstance(name, str):
                    continue
                size, where = sizes.setdefault(name, (extent, port.name))
                if size != extent:
                    raise InputError(
                        f"dimension {name!r} is {size} in input {where!r} and {extent} in input {port.name!r}"
                    )
        return found


def _shape_of(value: Any, name: str) -> tuple[int, ...]:
    """Also of an array that lies on a GPU."""
    shape = getattr(value, "shape", None)
    return tuple(map(int, as_array(value, name).shape if shape is None else shape))


def _spelled(shape: Extents) -> str:
    inside = ", ".join("?" if n is None else str(n) for n in shape)
    return f"({inside},)" if len(shape) == 1 else f"({inside})"
