"""Bits of integers and storage types in the forms: text, folding, intervals, meaning and grammar."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.analysis.verify_loops import check_types
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bits import bitcast
from tilewright.ir.forms.bounds import bounds
from tilewright.ir.forms.compute import Map, Program
from tilewright.ir.forms.expr import Axis, _make_op, cast, const, is_op, load, op, select, var
from tilewright.ir.forms.scalar import OPS
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.text.parse import parse_program
from tilewright.ir.text.text import program_text

i = Axis("i", 5)


def program(x: Tensor, value) -> Program:
    y = Tensor("y", (5,), value.dtype)
    return Program((x,), (y,), (Map(y, (i,), value),))


def test_shifts_and_reinterpretations_read_back() -> None:
    x = Tensor("x", (5,), dtypes.int32)
    element = load(x, (var(i),))
    value = bitcast(op("bitxor", op("shl", element, 3), op("shr", op("bitand", element, 255), 1)), dtypes.float32)
    made = program(x, value)
    verify_program(made)
    text = program_text(made)
    assert "bits_float32(" in text
    assert program_text(parse_program(text, {})) == text


def test_constants_of_storage_types_read_back_as_bits() -> None:
    x = Tensor("x", (5,), dtypes.float8e4m3fn)
    made = program(x, select(op("lt", var(i), 2), load(x, (var(i),)), const(0x38, dtypes.float8e4m3fn)))
    text = program_text(made)
    assert program_text(parse_program(text, {})) == text
    given = np.array([2, 3, 4, 5, 6], np.float32).astype(dtypes.float8e4m3fn.numpy)
    np.testing.assert_array_equal(evaluate(made, {"x": given})["y"].astype(np.float32), [2, 3, 1, 1, 1])


def test_known_bits_fold() -> None:
    one = const(0x3F800000, dtypes.uint32)
    assert simplify(bitcast(one, dtypes.float32)) is const(1.0, dtypes.float32)
    assert simplify(op("shl", const(3, dtypes.int32), 33)) is const(6, dtypes.int32)  # the low bits of the count
    assert simplify(op("shr", const(-8, dtypes.int8), 1)) is const(-4, dtypes.int8)
    storage = bitcast(const(0x38, dtypes.uint8), dtypes.float8e4m3fn)
    assert is_op(simplify(storage), "bitcast")


def test_a_mask_bounds_what_it_lets_through() -> None:
    x = Tensor("x", (5,), dtypes.uint8)
    low = op("bitand", cast(load(x, (var(i),)), dtypes.int32), 15)
    assert bounds(low) == (0, 15)
    signed = load(Tensor("z", (5,), dtypes.int32), (var(i),))
    assert bounds(op("bitand", signed, -2)) == dtypes.int32.limits


def test_the_number_of_bits_stays() -> None:
    x = load(Tensor("x", (5,), dtypes.int32), (var(i),))
    with pytest.raises(TypeError, match="bits of int32 are not as many as those of int8"):
        bitcast(x, dtypes.int8)
    assert "number of bits" in str(check_types(_make_op(OPS["bitcast"], (x,), dtypes.int8)))
    assert check_types(bitcast(x, dtypes.float32)) is None


@pytest.mark.parametrize("name", ["add", "lt", "max"])
def test_storage_types_are_never_computed_with(name: str) -> None:
    x = load(Tensor("x", (5,), dtypes.int4), (var(i),))
    with pytest.raises(TypeError, match=f"{name} is not defined on int4"):
        op(name, x, x)


def test_element_types_of_another_process_are_those_of_this_one() -> None:
    """They are told apart by identity."""
    for dtype in dtypes.EVERY:
        assert pickle.loads(pickle.dumps(dtype)) is dtype and copy.deepcopy(dtype) is dtype
