"""Operators as tensor expressions: one function an operator, one registry, and the walk that lowers a Graph."""

# importing a family registers its operators
from tilewright.ops.lower import lower
from tilewright.ops.maps import bits, classical, elementwise, further, types  # noqa: F401
from tilewright.ops.microsoft import attention, fused, quantized  # noqa: F401
from tilewright.ops.movement import indexing, optional, sequence, shape  # noqa: F401
from tilewright.ops.quantised import quantization  # noqa: F401
from tilewright.ops.reductions import (  # noqa: F401
    contraction,
    linear_algebra,
    normalization,
    random,
    reduction,
    signal,
    softmax,
    text,
)
from tilewright.ops.registry import find, supported
from tilewright.ops.sorting import scatter, selecting, sorting  # noqa: F401
from tilewright.ops.steps import recurrent, running, suppression  # noqa: F401
from tilewright.ops.windows import columns, convolution, pooling, resize, sampling  # noqa: F401

__all__ = ["find", "lower", "supported"]
