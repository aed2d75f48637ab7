"""One folder a kind of machine: how a leaf is planned, priced and lowered; how tiles are handed out and run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.target import Target

if TYPE_CHECKING:
    from tilewright.backend.protocol import Backend
    from tilewright.ir.forms.loops import LoopProgram


def backend_for(target: Target) -> Backend:
    """The backend of a target's kind; the other one's modules are not even imported."""
    if target.kind == "cpu":
        from tilewright.backend.cpu.backend import CpuBackend

        return CpuBackend()
    from tilewright.backend.gpu.backend import GpuBackend

    return GpuBackend()


def renderable(loops: LoopProgram, target: Target) -> LoopProgram:
    """Loops as the last stages before the source text leave them."""
    backend = backend_for(target)
    return backend.join_calls(backend.unroll(loops), target)


def keeps_models(target: Target) -> bool:
    """Whether whole compiled models are kept in the cache: where the code of one is a library. Asked before anything is
    compiled, so that no backend is imported for it."""
    return target.kind == "cpu"
