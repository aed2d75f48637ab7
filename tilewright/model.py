"""What a user holds: a compiled model, called like a function on arrays."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import empty

from tilewright.calls.arguments import (
    NotPickled,
    Port,
    bind,
    by_name,
    check_apart,
    check_output,
    convert,
    count_inputs,
    on_host,
    random_arrays,
)
from tilewright.calls.background import Background
from tilewright.calls.profiles import KernelTime, Profile
from tilewright.errors import InputError, InternalError, OptionError, TilewrightError, ToolError, printable
from tilewright.options import Options, check_whole_number
from tilewright.packages import stored
from tilewright.runtime.cpu_model import CpuModel
from tilewright.runtime.outputs import output_memory

if TYPE_CHECKING:
    from tilewright.compiler.pipeline import Artifact
    from tilewright.ir.forms.loops import Call
    from tilewright.ir.forms.tensor import Layout
    from tilewright.packages.files import ShippedArtifact

Array = np.ndarray[Any, Any]
_LOG = logging.getLogger("tilewright")


class Model(NotPickled):
    """A compiled model. Calls from several threads at once are safe: a call keeps nothing in this object."""

    def __init__(
        self, artifact: Artifact | stored.StoredArtifact | ShippedArtifact, options: Options | None = None
    ) -> None:
        self._options = options if options is not None else Options()
        self._inputs = tuple(Port(name, dtype.numpy, tuple(shape)) for name, dtype, shape in artifact.inputs)
        self._outputs = tuple(Port(name, dtype.numpy, tuple(shape)) for name, dtype, shape in artifact.outputs)
        # Plain tuples for the call path: a field of a dataclass costs as much as the comparison it serves.
        self._expected = tuple((port.name, port.dtype, port.shape) for port in self._inputs)
        self._names = tuple(port.name for port in self._inputs)
        self._name_set = frozenset(self._names)
        self._output_names = tuple(port.name for port in self._outputs)
        self._results = tuple((port.shape, port.dtype) for port in self._outputs)
        self._shapes = tuple(port.shape for port in self._outputs)
        self._types = tuple(port.dtype for port in self._outputs)
        self._memory = output_memory(self._results)
        self._background: Background | None = None
        self._take(artifact)
        self._device_call, self._device_fill = self._device_callers(artifact.runner)

    def _take(self, artifact: Artifact | stored.StoredArtifact | ShippedArtifact) -> None:
        """Run this from the next call on. A call takes one of these and keeps to it, whatever is put in their place."""
        runner = artifact.runner
        quick = self._quick_caller(runner)
        by_address = runner.address_caller() if isinstance(runner, CpuModel) else None
        self._artifact, self._runner, self._quick, self._by_address = artifact, runner, quick, by_address

    def replace_when(
        self, begin: Callable[[Callable[[bool], None]], Background], find: Callable[[], stored.StoredArtifact | None]
    ) -> None:
        """Go over to what `find` gives when work that `begin` starts is done; the work is given up with this model."""
        model, started, name = weakref.ref(self), time.perf_counter(), self._options.effort

        def finished(well: bool) -> None:
            try:
                found = find() if well else None
            except TilewrightError:  # it cannot be loaded here
                found = None
            here = model()
            if here is None:
                return
            if found is None:
                _LOG.warning("the full code could not be compiled in the background: the %s code stays", name)
                return
            here._take(found)
            here._options = here._options.override(effort="full")
            seconds = time.perf_counter() - started
            _LOG.info("full code after %.1f s: from here on results may differ in their last bits", seconds)

        self._background = begin(finished)

    @property
    def effort(self) -> str:
        """What made the code that runs now: "full" or "fast"."""
        return self._options.effort

    def settle(self, seconds: float | None = None) -> bool:
        """Wait, at most so long, for the code that stays; whether it is there. Only `effort="adaptive"` has another
        before."""
        return self._background is None or self._background.wait(seconds)

    @property
    def packed(self) -> tuple[tuple[str, Layout], ...]:
        """How constants lie that are packed, by name; of a saved model it is not known."""
        return getattr(self._artifact, "packed", ())

    @property
    def artifact(self) -> Artifact:
        """Everything the compiler makes on the way: program, plan, loops, sources. A model from the cache goes that
        way again when this is asked for; one from a directory cannot."""
        from tilewright.packages.files import ShippedArtifact

        kept = self._artifact
        return kept.whole if isinstance(kept, stored.StoredArtifact | ShippedArtifact) else kept

    @property
    def runners(self) -> tuple[Any, ...]:
        """What runs its kernels."""
        return () if self._runner is None else (self._runner,)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Kernel calls of one run, in order."""
        return self._artifact.calls

    @property
    def can_run(self) -> bool:
        """Whether compilation went as far as machine code."""
        return self._artifact.runner is not None

    @property
    def inputs(self) -> tuple[Port, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        return self._outputs

    def __call__(self, /, *args: Any, **named: Any) -> list[Array]:
        """Run the model on arrays given in order, by name, or as one dict; the outputs come in order.

        An array is a NumPy array, or anything with DLPack or `__array__`, of exactly the input's type and shape. On a
        GPU, arrays that lie there already are read where they are, on their library's current stream, and the outputs
        are arrays of the same library.
        """
        if self._device_call is not None:
            bound = self._in_order(args, named) if named else args
            results = self._device_call(bound) if len(bound) == len(self._names) else None
            if results is not None:
                return results
        outputs = self._quickly(self._in_order(args, named) if named else args)
        if outputs is not None:
            return outputs
        if named or len(args) != len(self._expected):
            return self._run(self._bind(args, named))
        if len(args) == 1 and type(args[0]) is not np.ndarray:
            return self._run(self._bind(args, named))  # perhaps the dict of a model with one input
        return self._run(args)

    def run_into(self, inputs: Sequence[Any], outputs: Sequence[Any], *, stream: Any = None) -> None:
        """Run the model on arrays in order and fill arrays of the caller, for loops that want no allocation.

        An output needs memory of its own: a state that goes in and comes out takes two arrays, used in turn. Where the
        outputs lie on a GPU the run is only started, on `stream` (a stream of cuda-core, torch or CuPy, or a handle)
        or on their library's current one.
        """
        if len(inputs) != len(self._inputs) or len(outputs) != len(self._outputs):
            takes = f"{count_inputs(self._names)} and {len(self._outputs)} outputs"
            raise InputError(f"the model takes {takes}, but {len(inputs)} and {len(outputs)} were given")
        if self._quick is not None and self._quick((*inputs, *outputs)):
            return
        if self._device_fill is not None and self._device_fill(inputs, outputs, stream):
            return
        if stream is not None:
            raise InputError("a stream is for outputs that lie on a GPU")
        for array, port in zip(outputs, self._outputs, strict=True):
            check_output(array, port)
        ready = self._ready(inputs)
        check_apart(ready, self._names, outputs, self._output_names)
        self._checked_runner().run(ready, outputs)

    def cancel(self) -> None:
        """End the run in progress, from another thread: it raises a `CancelledError` there, between two kernels, and
        the model can be called again. Where none is in progress nothing happens. Ctrl-C ends a run in the same way."""
        if not hasattr(self._runner, "cancel"):
            raise OptionError("a run on a GPU goes to its end; cancel is for models on the CPU")
        self._runner.cancel()

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Run the model on arrays by name; the outputs come by name too."""
        bound = self._in_order((), inputs) if type(inputs) is dict else ()
        results = self._device_call(bound) if self._device_call is not None and bound else None
        if results is None:
            results = self._quickly(bound) if type(inputs) is dict else None
        if results is None:
            results = self._run(self._bind((inputs,), {}))
        return by_name(self._output_names, results)

    def address_caller(self) -> Callable[[Sequence[int], Sequence[int]], None] | None:
        """The runner's way to run on memory given by address, for other libraries' arrays; None where it has none, or
        where large outputs had better use memory again."""
        if self._by_address is None or self._memory is not None:
            return None
        if self._background is None or self._background.wait(0):
            return self._by_address
        return lambda inputs, outputs: self._by_address(inputs, outputs)  # type: ignore[misc]

    def explain(self) -> str:
        """What became of the model: its kernels, the memory level of each edge, the traffic, and why."""
        from tilewright.packages.inspection import EXPLANATION
        from tilewright.report.explain import explain_text

        kept: str | None = getattr(self._artifact, "explanation", None)
        texts: Mapping[str, str] | None = getattr(self._artifact, "texts", None)
        if texts is not None:
            kept = texts[EXPLANATION]
        return printable(explain_text(self.artifact) if kept is None else kept, keep="\n")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model to a directory that `tilewright.load` and a C program start from without compiling
        (docs/shipping.md). It is written whole or not at all; an earlier saved model there gives way, other files
        do not."""
        from tilewright.packages.files import ShippedArtifact, save

        kept = self._artifact
        texts: Mapping[str, str] | None = getattr(kept, "texts", None)
        from_elsewhere = isinstance(kept, ShippedArtifact) or texts is not None
        save(kept if from_elsewhere else self.artifact, Path(folder), self._options, texts)  # type: ignore[arg-type]

    def profile(self, /, *args: Any, repeat: int = 20, **named: Any) -> Profile:
        """Time each kernel call: the median over `repeat` runs. Without inputs, on random ones; inputs that lie on a
        device are copied from it first."""
        if not isinstance(repeat, int) or repeat < 1:
            raise OptionError(f"repeat cannot be {repeat!r}: it is a whole number, 1 or more")
        arrays = self._bind(args, named) if args or named else list(self.random_inputs().values())
        ready = self._ready(list(map(on_host, arrays)))
        outputs = self._new_outputs()
        self._checked_runner()
        kept = self._artifact
        runner, names = kept.runner, [call.kernel for call in kept.calls]
        runner.run(ready, outputs)
        runs = [list(runner.profile(ready, outputs)) for _ in range(repeat)]
        if any(len(run) != len(names) for run in runs):
            raise InternalError(f"a profile of {len(runs[0])} times for {len(names)} kernel calls")
        times = [int(median(column)) for column in zip(*runs, strict=True)]
        calls = (KernelTime(i, name, time) for i, (name, time) in enumerate(zip(names, times, strict=True)))
        return Profile(tuple(calls), repeat)

    def random_inputs(self, seed: int = 0) -> dict[str, Array]:
        """Inputs to try the model on: normal floats, and integers 0 or 1, in range for indices and masks alike."""
        check_whole_number("seed", seed, least=0)
        return random_arrays(self._inputs, seed)

    def __repr__(self) -> str:
        takes = ", ".join(str(port) for port in self._inputs)
        gives = ", ".join(str(port) for port in self._outputs)
        return f"<tilewright.Model ({takes}) -> ({gives})>"

    def _quick_caller(self, runner: Any) -> Callable[[tuple[Any, ...]], bool] | None:
        """The runner's way to check arrays and run in native code, where it has one."""
        if not isinstance(runner, CpuModel):
            return None
        return runner.quick_caller([(port.shape, port.dtype) for port in (*self._inputs, *self._outputs)])

    def _device_callers(self, runner: Any) -> tuple[Any, Any]:
        """The runner's ways to take arrays that lie on a GPU, where it has them."""
        if not hasattr(runner, "device_caller"):
            return None, None
        from tilewright.runtime.device_arrays import expected

        inputs = [expected(f"input {port.name!r}", port.dtype, port.shape) for port in self._inputs]
        outputs = [expected(f"output {port.name!r}", port.dtype, port.shape) for port in self._outputs]

        def to_host(value: Any, place: int) -> Array:
            return convert(value, *self._expected[place])

        return runner.device_caller(inputs, outputs, to_host), runner.device_filler(inputs, outputs, to_host)

    def _quickly(self, values: tuple[Any, ...]) -> list[Array] | None:
        """The outputs; None where the values are not, as they are, what the kernels read."""
        if self._quick is None:
            return None
        outputs = self._new_outputs()
        return outputs if self._quick((*values, *outputs)) else None

    def _new_outputs(self) -> list[Array]:
        try:
            return list(map(empty if self._memory is None else self._memory.empty, self._shapes, self._types))
        except MemoryError as error:
            raise ToolError(f"there is no memory for the outputs: {', '.join(map(str, self._outputs))}") from error

    def _in_order(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values given by name in the order of the inputs; nothing where they are not exactly the inputs."""
        if args or len(named) != len(self._names):
            return ()
        try:
            return tuple(map(named.__getitem__, self._names))
        except KeyError:
            return ()

    def _run(self, arrays: Sequence[Any]) -> list[Array]:
        ready = self._ready(arrays)
        outputs = self._new_outputs()
        runner = self._runner if self._runner is not None else self._checked_runner()
        runner.run(ready, outputs)
        return outputs

    def _ready(self, arrays: Sequence[Any]) -> list[Array]:
        """The arrays as the kernels read them; the ones that are right already pass untouched."""
        ready: list[Array] = []
        for array, (name, dtype, shape) in zip(arrays, self._expected, strict=True):
            if type(array) is np.ndarray and array.dtype is dtype and array.shape == shape:
                flags = array.flags
                if flags.c_contiguous and flags.aligned:
                    ready.append(array)
                    continue
            ready.append(convert(array, name, dtype, shape))
        return ready

    def _bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """The values in the order of the inputs, whichever way they were given."""
        if not args and named.keys() == self._name_set:
            return [named[name] for name in self._names]
        self._checked_runner()
        return bind(self._names, args, named)

    def _checked_runner(self) -> Any:
        if self._runner is None:
            raise OptionError("compilation was stopped before there was code to run; leave out stop_after to run it")
        return self._runner
