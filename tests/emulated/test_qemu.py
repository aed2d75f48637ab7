"""Sample kernels for AVX2 and for NEON under qemu-user, wherever it is: they agree with the interpreter."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.emulated.cases import every_case
from tests.emulated.run import Tools, run_qemu

QEMU = {"avx2": "qemu-x86_64", "neon": "qemu-aarch64"}
WAY_OUT = "install qemu-user 7.2 or later (on Debian: apt install qemu-user) to run these kernels"
NAMES = [(kind, name) for kind in QEMU for name, _ in every_case((kind,))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_emulated_kernels_agree(kind: str, name: str, tmp_path: Path) -> None:
    """Memory that ends at a page which cannot be touched, two runs, two threads: see guest.c."""
    qemu = shutil.which(QEMU[kind]) or shutil.which(f"{QEMU[kind]}-static")
    if qemu is None:
        pytest.skip(f"{QEMU[kind]} is not here: {WAY_OUT}")
    case = dict(every_case((kind,)))[name]()
    is_right, said = run_qemu(qemu, case, Tools("zig", tmp_path))
    assert is_right, said
