"""Operators as tensor expressions: one function an operator, one registry, and the walk that lowers a Graph."""

from tilewright.ops import (  # noqa: F401  (importing a family registers its operators)
    bits,
    classical,
    columns,
    contraction,
    convolution,
    elementwise,
    further,
    indexing,
    linear_algebra,
    microsoft,
    microsoft_attention,
    microsoft_quantized,
    normalization,
    optional,
    pooling,
    quantization,
    random,
    recurrent,
    reduction,
    resize,
    running,
    sampling,
    scatter,
    selecting,
    sequence,
    shape,
    signal,
    softmax,
    sorting,
    suppression,
    text,
    types,
)
from tilewright.ops.lower import lower
from tilewright.ops.registry import find, supported

__all__ = ["find", "lower", "supported"]
