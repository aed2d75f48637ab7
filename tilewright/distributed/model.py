"""A model of which this process has one rank: its segments compiled, run in order, with exchanges in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.calls.arguments import Array, NotPickled, Port, bind, by_name, convert, random_arrays
from tilewright.compiler.pipeline import Artifact
from tilewright.errors import ToolError
from tilewright.ir.forms.loops import Call
from tilewright.ir.forms.sharded import Sharded
from tilewright.ir.forms.tensor import extents
from tilewright.runtime.ranks import RankError, Ranks
from tilewright.transform.spmd import RankProgram, Transfer


@dataclass(frozen=True)
class Compiled:
    """A segment as machine code: the names of what it takes and of what it gives, with its arrays' forms."""

    artifact: Artifact
    takes: tuple[str, ...]
    gives: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]


class RankedModel(NotPickled):
    """A model that several processes run together. All of them call it; the inputs are rank 0's and so are the results,
    which the others have as None."""

    def __init__(
        self, sharded: Sharded, program: RankProgram, steps: Sequence[Compiled | Transfer], ranks: Ranks
    ) -> None:
        self.sharded, self.program = sharded, program
        self._steps, self._ranks = tuple(steps), ranks
        whole = sharded.program
        names = whole.input_names or ("",) * len(whole.inputs)
        self._inputs = tuple(
            Port(name or t.name, t.dtype.numpy, extents(t)) for t, name in zip(whole.inputs, names, strict=True)
        )
        names = whole.output_names or ("",) * len(whole.outputs)
        self._outputs = tuple(
            Port(name or t.name, t.dtype.numpy, extents(t)) for t, name in zip(whole.outputs, names, strict=True)
        )
        self._last = _last_uses(self._steps, set(program.outputs.values()))

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._ranks.size

    @property
    def inputs(self) -> tuple[Port, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        return self._outputs

    @property
    def can_run(self) -> bool:
        return True

    @property
    def calls(self) -> tuple[Call, ...]:
        """Kernel calls of one run of this rank, in order."""
        return tuple(call for step in self._steps if isinstance(step, Compiled) for call in step.artifact.calls)

    @property
    def weights(self) -> int:
        """Bytes of weights that this rank has."""
        return self.program.weights

    def __call__(self, /, *args: Any, **named: Any) -> list[Array | None]:
        """Run the model on arrays given to rank 0 in order, by name, or as one dict; what other ranks give is left
        aside. The outputs come in order on rank 0."""
        values: dict[str, Array] = {}
        if self.rank == 0:
            arrays = bind([port.name for port in self._inputs], args, named)
            for array, port, tensor in zip(arrays, self._inputs, self.sharded.program.inputs, strict=True):
                values[tensor.name] = np.ascontiguousarray(convert(array, port.name, port.dtype, port.shape))
        try:
            self._ranks.share(values, [(t.name, extents(t), t.dtype.numpy) for t in self.sharded.program.inputs])
            self._run(values)
        except RankError as error:
            raise ToolError(str(error)) from error
        if self.rank:
            return [None] * len(self._outputs)
        given = self.sharded.program.constants
        values.update({t.name: array for t, array in given.items() if t.name in self.program.outputs})
        return [values[self.program.outputs[t.name]] for t in self.sharded.program.outputs]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Array | None]:
        """Run the model on arrays by name; the outputs come by name too."""
        return by_name([port.name for port in self._outputs], self(**inputs) if self.rank else self(inputs))

    def random_inputs(self, seed: int = 0) -> dict[str, Array]:
        """Inputs to try the model on: normal floats, and integers 0 or 1, in range for indices and masks alike."""
        return random_arrays(self._inputs, seed)

    def explain(self) -> str:
        """How the model is shared out: stages, shards, exchanges and their bytes."""
        from tilewright.report.ranks import ranks_text

        return ranks_text(self.sharded)

    def close(self) -> None:
        """Part from the other ranks; the model cannot be called afterwards."""
        self._ranks.leave()

    def _run(self, values: dict[str, Array]) -> None:
        segment = 0
        for number, step in enumerate(self._steps):
            if isinstance(step, Transfer):
                over = f" over {step.axis}" if step.axis else ""
                self._ranks.move(step, values, f"after segment {segment}: {step.kind} of '{step.source}'{over}")
            else:
                segment += 1
                outputs = [np.empty(shape, dtype) for _, shape, dtype in step.gives]
                step.artifact.runner.run([values[name] for name in step.takes], outputs)
                values.update({name: array for (name, _, _), array in zip(step.gives, outputs, strict=True)})
            for name in self._last.get(number, ()):
                values.pop(name, None)


def _last_uses(steps: Sequence[Compiled | Transfer], kept: set[str]) -> dict[int, list[str]]:
    """By step the arrays that nobody reads after it."""
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        read = (step.source, step.target) if isinstance(step, Transfer) else step.takes
        made = () if isinstance(step, Transfer) else tuple(name for name, _, _ in step.gives)
        last.update(dict.fromkeys((*read, *made), number))
    found: dict[int, list[str]] = {}
    for name, number in last.items():
        if name not in kept:
            found.setdefault(number, []).append(name)
    return found
