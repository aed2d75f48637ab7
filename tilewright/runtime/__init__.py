"""Runs what the compiler produced on the CPU: compiler discovery, cache on disk, worker team, loaded models."""

from tilewright.runtime.cache import Cache, CacheError, CacheStats, content_key, default_root
from tilewright.runtime.cpu_model import (
    BufferRef,
    BuiltModel,
    CpuModel,
    KeptWeights,
    ModelImage,
    ModelImageError,
    ModelRunError,
    Stage,
    build,
)
from tilewright.runtime.toolchain import (
    CompileError,
    Compiler,
    Machine,
    ToolchainError,
    compile_objects,
    compile_shared,
    default_flags,
    find_compiler,
    link,
    this_machine,
)
from tilewright.runtime.weights import WeightsError, aligned_copy, map_weights, store_weights

__all__ = [
    "BufferRef",
    "BuiltModel",
    "Cache",
    "CacheError",
    "CacheStats",
    "CompileError",
    "Compiler",
    "CpuModel",
    "KeptWeights",
    "Machine",
    "ModelImage",
    "ModelImageError",
    "ModelRunError",
    "Stage",
    "ToolchainError",
    "WeightsError",
    "aligned_copy",
    "build",
    "compile_objects",
    "compile_shared",
    "content_key",
    "default_flags",
    "default_root",
    "find_compiler",
    "link",
    "map_weights",
    "store_weights",
    "this_machine",
]
