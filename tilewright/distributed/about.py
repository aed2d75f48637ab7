"""What a rank has of a model: segments as code, what goes in and out, in how many parts, and where its results are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.calls.arguments import Array, Port
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.packages.files import ShippedArtifact
from tilewright.transform.spmd import RankProgram, When

if TYPE_CHECKING:
    from tilewright.compiler.pipeline import Artifact
    from tilewright.schedule.batches import Batches

Form = tuple[str, tuple[int, ...], np.dtype[Any]]  # of an array: name, shape and type


@dataclass(frozen=True)
class CompiledRank:
    """A segment as machine code: the names of what it takes and of what it gives, with its arrays' forms."""

    artifact: Artifact | ShippedArtifact
    takes: tuple[str, ...]
    gives: tuple[Form, ...]


@dataclass(frozen=True)
class ModelPort:
    """An input or an output of the whole model: what it is called by ranks, on rank 0 for an output, and along which
    dimension a part of the batch has a block of it."""

    port: Port
    array: str
    dim: int | None

    def to_row(self) -> list[Any]:
        return [self.port.name, type_name(self.port.dtype), list(self.port.shape), self.array, self.dim]

    @staticmethod
    def from_row(row: list[Any]) -> ModelPort:
        name, dtype, shape, array, dim = row
        return ModelPort(Port(name, dtypes.by_name(dtype).numpy, tuple(shape)), array, dim)


@dataclass(frozen=True)
class About:
    inputs: tuple[ModelPort, ...]
    outputs: tuple[ModelPort, ...]
    parts: int  # of a batch
    weights: int  # bytes on this rank
    digest: str  # of all that ranks must agree about
    explanation: str
    when: tuple[When, ...]  # by step
    fixed: Mapping[str, Array] = field(default_factory=dict)  # outputs that the model has as constants

    @property
    def results(self) -> frozenset[str]:
        """Arrays that are kept for the caller."""
        return frozenset(each.array for each in self.outputs if each.array)


def about(whole: Program, batches: Batches, mine: RankProgram, digest: str, explanation: str) -> About:
    """Of one rank of a model that was shared out."""
    inputs = tuple(ModelPort(port, t.name, batches.inputs.get(t.name))
                   for t, port in _ports(whole.inputs, whole.input_names))  # fmt: skip
    outputs = tuple(ModelPort(port, mine.outputs.get(t.name, ""), batches.outputs.get(t.name))
                    for t, port in _ports(whole.outputs, whole.output_names))  # fmt: skip
    fixed = {t.name: array for t, array in batches.program.constants.items() if t.name in mine.outputs}
    return About(inputs, outputs, batches.parts, mine.weights, digest, explanation, mine.when, fixed)


def type_name(dtype: np.dtype[Any]) -> str:
    """By which a directory names the type of an array."""
    found = dtypes.by_numpy(dtype)
    assert found is not None, f"no type of ours is {dtype}"
    return found.name


def _ports(tensors: tuple[Tensor, ...], names: tuple[str, ...]) -> list[tuple[Tensor, Port]]:
    told = names or ("",) * len(tensors)
    return [(t, Port(name or t.name, t.dtype.numpy, extents(t))) for t, name in zip(tensors, told, strict=True)]
