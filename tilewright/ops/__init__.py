"""Operators as tensor expressions: one function an operator, one registry, and the walk that lowers a Graph."""

from tilewright.ops import (  # noqa: F401  (importing a family registers its operators)
    contraction,
    convolution,
    elementwise,
    further,
    indexing,
    normalization,
    pooling,
    quantization,
    recurrent,
    reduction,
    resize,
    sampling,
    shape,
    softmax,
)
from tilewright.ops.lower import lower
from tilewright.ops.registry import find, supported

__all__ = ["find", "lower", "supported"]
