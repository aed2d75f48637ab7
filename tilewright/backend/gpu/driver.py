"""What keeps this computer from running CUDA code, by its driver and packages; its code can be compiled anyway."""

from __future__ import annotations

import ctypes
import importlib.util

from tilewright.target import GPUS, Target


def why_not_here(target: Target) -> str | None:
    """None where nothing does: an emulated GPU runs anywhere."""
    if target.name not in GPUS:
        return "it is a description to plan for"
    return missing_for_cuda() if target.name == "cuda" else None


def missing_for_cuda() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver finds no GPU"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "cuda-core is not installed; run: pip install 'tilewright[cuda]'"
    return None
