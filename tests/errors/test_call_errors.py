"""Exact messages for calls with wrong inputs, and that right ones of every kind are taken."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright import InputError, Model, OptionError

X = np.arange(6, dtype=np.float32).reshape(2, 3)
Y = np.full((2, 3), 10, np.float32)


def message(model: Model, *args: object, **named: object) -> str:
    with pytest.raises(InputError) as caught:
        model(*args, **named)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_wrong_name_suggests_the_nearest(stub_model: Model) -> None:
    assert message(stub_model, imag=X, mask=Y) == "there is no input 'imag'; did you mean 'image'?"


def test_wrong_name_lists_the_inputs_where_none_is_near(stub_model: Model) -> None:
    assert message(stub_model, {"q": X}) == "there is no input 'q'; the model takes 2 inputs (image, mask)"


def test_too_many(stub_model: Model) -> None:
    assert message(stub_model, X, Y, Y) == "the model takes 2 inputs (image, mask), but 3 were given"


def test_missing(stub_model: Model) -> None:
    assert message(stub_model, X) == "input 'mask' is missing; the model takes 2 inputs (image, mask)"
    assert message(stub_model, mask=Y) == "input 'image' is missing; the model takes 2 inputs (image, mask)"


def test_given_twice(stub_model: Model) -> None:
    assert message(stub_model, X, image=X) == "input 'image' is given twice: once in order and once by name"


def test_wrong_shape(stub_model: Model) -> None:
    assert message(stub_model, X.T.copy(), Y) == "input 'image' must have shape (2, 3), not (3, 2)"


@pytest.mark.parametrize("dtype", ["float64", "int64", "float16"])
def test_wrong_type_is_never_converted(stub_model: Model, dtype: str) -> None:
    expected = f"input 'mask' must be float32, not {dtype}; convert it with .astype('float32')"
    assert message(stub_model, X, Y.astype(dtype)) == expected


def test_not_an_array(stub_model: Model) -> None:
    expected = "input 'image' must be a NumPy array or have DLPack, not a list"
    assert message(stub_model, [[1.0, 2.0, 3.0]] * 2, Y) == expected
    assert message(stub_model, X, 1.0) == "input 'mask' must be a NumPy array or have DLPack, not a float"


def test_an_array_that_refuses_to_be_read(stub_model: Model) -> None:
    class OnAnotherDevice:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, **_: object) -> object:
            raise BufferError("the data is on a GPU\nand more")

    expected = "input 'image', a OnAnotherDevice, cannot be read as an array: the data is on a GPU"
    assert message(stub_model, OnAnotherDevice(), Y) == expected


def test_run_checks_too(stub_model: Model) -> None:
    with pytest.raises(InputError, match=r"^there is no input 'masc'; did you mean 'mask'\?$"):
        stub_model.run({"image": X, "masc": Y})


def test_stopped_before_code(stub_artifact) -> None:  # type: ignore[no-untyped-def]
    stub_artifact.runner = None
    with pytest.raises(OptionError) as caught:
        Model(stub_artifact)(X, Y)
    assert str(caught.value) == ("compilation was stopped before there was code to run; leave out stop_after to run it")


def test_every_way_to_call(stub_model: Model) -> None:
    expected = X + Y
    for outputs in (
        stub_model(X, Y),
        stub_model(image=X, mask=Y),
        stub_model(mask=Y, image=X),
        stub_model(X, mask=Y),
        stub_model({"mask": Y, "image": X}),
        list(stub_model.run({"image": X, "mask": Y}).values()),
    ):
        assert isinstance(outputs, list) and len(outputs) == 1
        np.testing.assert_array_equal(outputs[0], expected)


def test_arrays_arrive_contiguous_aligned_and_native(stub_model: Model) -> None:
    transposed = np.asfortranarray(X)
    swapped = Y.astype(Y.dtype.newbyteorder())
    raw = np.zeros(X.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(2, 3)
    unaligned[:] = X
    for first, second in ((transposed, Y), (X, swapped), (unaligned, Y)):
        np.testing.assert_array_equal(stub_model(first, second)[0], X + Y)
    for pair in stub_model.artifact.runner.received:  # type: ignore[union-attr]
        for array in pair:
            assert array.flags.c_contiguous and array.flags.aligned and array.dtype is np.dtype(np.float32)


def test_right_arrays_are_not_copied(stub_model: Model) -> None:
    stub_model(X, Y)
    first, second = stub_model.artifact.runner.received[-1]  # type: ignore[union-attr]
    assert first is X and second is Y


def test_torch_tensors_by_dlpack_without_a_copy(stub_model: Model) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(X.copy())
    np.testing.assert_array_equal(stub_model(tensor, Y)[0], X + Y)
    received = stub_model.artifact.runner.received[-1][0]  # type: ignore[union-attr]
    assert received.ctypes.data == tensor.data_ptr()
    with pytest.raises(InputError, match="^input 'image', a Tensor, cannot be read as an array: Can't call numpy"):
        stub_model(tensor.requires_grad_(), Y)


def test_profile_gives_medians_per_call(stub_model: Model) -> None:
    profile = stub_model.profile(X, Y, repeat=3)
    # the first run warms up, so the three timed ones say 2, 3 and 4 microseconds for the second call
    assert [(call.kernel, call.nanoseconds) for call in profile.calls] == [("load", 3000), ("add", 3000)]
    assert stub_model.profile(repeat=1).total_nanoseconds > 0
    assert str(profile).splitlines()[-1].split() == ["all", "6.0", "100.0%"]
    with pytest.raises(OptionError, match="^repeat cannot be 0: it is a whole number, 1 or more$"):
        stub_model.profile(repeat=0)


def test_ports_and_text(stub_model: Model) -> None:
    assert [str(port) for port in stub_model.inputs] == ["image: float32[2, 3]", "mask: float32[2, 3]"]
    expected = "<tilewright.Model (image: float32[2, 3], mask: float32[2, 3]) -> (sum: float32[2, 3])>"
    assert repr(stub_model) == expected


def test_a_mask_is_not_dropped(stub_model: Model) -> None:
    masked = np.ma.masked_array(X, X > 2)
    assert message(stub_model, masked, Y) == (
        "input 'image' is a masked array, and a model knows no masks; fill it with .filled(...)"
    )
    assert len(stub_model(masked.filled(0), Y)) == 1
