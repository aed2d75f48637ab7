"""Renders and launches Loops kernels under the emulator, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.gpu_kernels import Case
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Expr, Symbol, const, rewrite
from tilewright.ir.forms.loops import Kernel
from tilewright.render.cuda import launch_shape, render_kernel, written_params
from tilewright.runtime.emulator import Contract, EmulatedModule, Fault


def source_of(kernel: Kernel) -> str:
    return render_kernel(kernel, place_shared(kernel).offsets)


def grid_of(kernel: Kernel, symbols: Sequence[int]) -> tuple[int, int, int]:
    values = dict(zip(kernel.symbols, symbols, strict=True))

    def known(node: Expr) -> Expr | None:
        return const(values[node]) if isinstance(node, Symbol) else None

    def count(extent: int | Expr) -> int:
        return extent if isinstance(extent, int) else int(simplify(rewrite(extent, known)).value)  # type: ignore[attr-defined]

    x, y, z = launch_shape(kernel).grid
    return count(x), count(y), count(z)


def strict_contract(kernel: Kernel) -> Contract:
    """What holds for a kernel that reads all of its inputs and writes all of its outputs."""
    written = {b.name for b in written_params(kernel)}
    return Contract(
        writes_all=tuple(p.name for p in kernel.params if p.name in written),
        reads_all=tuple(p.name for p in kernel.params if p.name not in written),
        uses_all=True,
    )


def emulate(
    module: EmulatedModule, case: Case, kernel: Kernel, contract: Contract | None
) -> tuple[np.ndarray, tuple[Fault, ...]]:
    """The output of a kernel that stands for `case`, and the faults found."""
    output = np.full_like(case.expected, np.nan)
    faults = module.inspect(
        kernel.name,
        grid_of(kernel, case.symbols),
        launch_shape(kernel).threads,
        place_shared(kernel).bytes,
        [*case.inputs, output, *case.symbols],
        contract,
    )
    return output, faults
