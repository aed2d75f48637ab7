"""The quick way into a model: native code looks at the arrays; whatever is not just right takes the slow way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewright
from tests.cpu_stages import model_of
from tilewright import InputError, Model, Options
from tilewright.runtime import ModelRunError

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.full((2, 3), 10, np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    added = model_of([("Add", ["a", "b"], "c", {})], {"a": (2, 3), "b": (2, 3)}, {"c": (2, 3)})
    return tilewright.compile(added, options=Options(cache_dir=tmp_path_factory.mktemp("cache"), threads=2))


def quick(model: Model, *arrays: object) -> bool:
    assert model._quick is not None
    return model._quick(arrays)


def test_arrays_that_are_right_take_the_quick_way(model: Model) -> None:
    out = np.empty_like(A)
    frozen = A.copy()
    frozen.flags.writeable = False
    for first in (A, frozen, np.stack([A, A])[1]):
        out[:] = -1
        assert quick(model, first, B, out)
        np.testing.assert_array_equal(out, A + B)


class Special(np.ndarray):
    pass


def misaligned() -> np.ndarray:
    room = np.zeros(A.nbytes + 1, np.uint8)
    view = room[1:].view(np.float32).reshape(A.shape)
    view[:] = A
    return view


WRONG = {
    "list": A.tolist(),
    "none": None,
    "subclass": A.view(Special),
    "columns first": np.asfortranarray(A),
    "strided": np.repeat(A, 2, axis=1)[:, ::2],
    "misaligned": misaligned(),
    "double": A.astype(np.float64),
    "big-endian": A.astype(">f4"),
    "rank": A.reshape(2, 3, 1),
    "shape": A.reshape(3, 2),
}


@pytest.mark.parametrize("name", WRONG)
def test_others_do_not(model: Model, name: str) -> None:
    out = np.full_like(A, -1)
    assert not quick(model, WRONG[name], B, out)
    assert not quick(model, A, B, WRONG[name])
    np.testing.assert_array_equal(out, -1)


def test_a_wrong_number_is_seen(model: Model) -> None:
    out = np.empty_like(A)
    assert not quick(model)
    assert not quick(model, A, out)
    assert not quick(model, A, B, B, out)


@pytest.mark.parametrize("name", ["subclass", "columns first", "strided", "misaligned", "big-endian"])
def test_what_can_be_read_is_taken_the_slow_way(model: Model, name: str) -> None:
    np.testing.assert_array_equal(model(WRONG[name], B)[0], A + B)
    np.testing.assert_array_equal(model.run({"b": B, "a": WRONG[name]})["c"], A + B)


def test_all_ways_to_give_inputs(model: Model) -> None:
    for result in (model(A, B), model(b=B, a=A), model({"a": A, "b": B}), model(A, b=B)):
        np.testing.assert_array_equal(result[0], A + B)


def test_outputs_are_new_at_every_call(model: Model) -> None:
    first, second = model(A, B)[0], model(A, B)[0]
    assert not np.shares_memory(first, second)


def test_run_into_fills_the_callers_array(model: Model) -> None:
    out = np.empty_like(A)
    model.run_into((A, B), (out,))
    np.testing.assert_array_equal(out, A + B)
    model.run_into((np.asfortranarray(A), A), (out,))
    np.testing.assert_array_equal(out, A + A)


def test_run_into_refuses_what_it_cannot_fill(model: Model) -> None:
    must = "output 'c' must be a writable C-contiguous float32 array of shape (2, 3)"
    frozen = np.empty_like(A)
    frozen.flags.writeable = False
    for out, text in ((frozen, must), (np.empty((3, 2), np.float32).T, must), ([0.0], f"{must}, not a list"),
                      (np.empty((2, 3)), f"{must}, not float64 of shape (2, 3)")):  # fmt: skip
        with pytest.raises(InputError) as caught:
            model.run_into((A, B), (out,))  # type: ignore[arg-type]
        assert str(caught.value) == text
    with pytest.raises(InputError, match="the model takes 2 inputs"):
        model.run_into((A,), ())


def test_an_output_needs_memory_of_its_own(model: Model) -> None:
    """A kernel may compute an element twice, from inputs that must still be there."""
    room = np.concatenate([A.ravel(), np.zeros(6, np.float32)])
    first, beside, across = room[:6].reshape(2, 3), room[6:].reshape(2, 3), room[5:11].reshape(2, 3)
    assert quick(model, first, B, beside) and quick(model, first, first, beside)
    for inputs, name in (((first, B), "a"), ((B, first), "b"), ((np.asfortranarray(A), first), "b")):
        for out in (first, across):
            assert not quick(model, *inputs, out)
            with pytest.raises(InputError) as caught:
                model.run_into(inputs, (out,))
            assert str(caught.value) == f"output 'c' lies in the memory of input '{name}'; give it an array of its own"
    np.testing.assert_array_equal(first, A)


def test_outputs_need_memory_apart_from_each_other(kernel_cache: Path) -> None:
    both = model_of([("Neg", ["a"], "c", {}), ("Abs", ["a"], "d", {})], {"a": (2, 3)}, {"c": (2, 3), "d": (2, 3)})
    out = np.zeros_like(A)
    with pytest.raises(InputError, match="^output 'd' lies in the memory of output 'c'; give it an array of its own$"):
        tilewright.compile(both, options=Options(cache_dir=kernel_cache, threads=1)).run_into((A,), (out, out))


def test_a_closed_model_says_so(kernel_cache: Path) -> None:
    negated = model_of([("Neg", ["a"], "c", {})], {"a": (2, 3)}, {"c": (2, 3)})
    closed = tilewright.compile(negated, options=Options(cache_dir=kernel_cache, threads=1))
    np.testing.assert_array_equal(closed(A)[0], -A)
    closed.artifact.runner.close()
    with pytest.raises(ModelRunError, match="closed"):
        closed(A)
