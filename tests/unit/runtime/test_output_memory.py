"""Memory of large outputs: given out again only once nobody refers to it."""

import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import tilewright
from tests.cpu_stages import model_of
from tilewright import Options
from tilewright.runtime import BuiltModel, Cache, CpuModel, compile_shared, find_compiler, this_machine
from tilewright.runtime.outputs import ArrayMemory, output_memory, passing_memory

LARGE = (9 << 20,)
FORMS = ((LARGE, np.dtype(np.float32)), ((3, 5), np.dtype(np.int64)))


FLOATS = np.dtype(np.float32)
counts_references = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()


def memory() -> ArrayMemory:
    found = output_memory(FORMS)
    assert found is not None
    return found


@pytest.mark.skipif(not counts_references, reason="this Python does not count references at once")
@pytest.mark.parametrize(("arrays", "shape"), [(memory(), LARGE), (passing_memory(), (128, 256))])
def test_what_was_let_go_comes_again(arrays: ArrayMemory, shape: tuple[int, ...]) -> None:
    first = arrays.empty(shape, FLOATS)
    address = first.ctypes.data
    del first
    again, small = arrays.empty(shape[::-1], np.dtype(np.int32)), arrays.empty(*FORMS[1])
    assert again.ctypes.data == address and again.dtype == np.int32
    assert again.shape == shape[::-1] and again.flags.writeable and small.base is None


@pytest.mark.skipif(not counts_references, reason="this Python does not count references at once")
def test_of_each_size_only_so_many_stay() -> None:
    """All that one moment needed is not kept for ever."""
    arrays = ArrayMemory(least=1000, kept=3)
    held = [arrays.empty((1001,), np.dtype(np.uint8)) for _ in range(8)]
    assert len({each.ctypes.data for each in held}) == 8
    owners = [weakref.ref(each.base) for each in held]
    held.clear()
    assert [each() is not None for each in owners] == [True] * 3 + [False] * 5


@pytest.mark.parametrize("hold", [lambda a: a, lambda a: a[5:], lambda a: a[5:][::2].reshape(-1, 1), memoryview])
def test_what_is_still_held_does_not(hold):
    arrays = memory()
    held = hold(arrays.empty(*FORMS[0]))
    others = [arrays.empty(*FORMS[0]) for _ in range(4)]
    for other in others:
        assert not np.shares_memory(np.asarray(held), other)
    assert len({other.ctypes.data for other in others}) == 4


def test_small_outputs_are_always_new():
    assert output_memory(FORMS[1:]) is None
    assert output_memory([((0,), np.dtype(np.float32))]) is None


def test_results_of_a_model_stay_what_they_were():
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, LARGE)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, LARGE)
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "negated", [x], [y])
    model = tilewright.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    kept = []
    for number in range(4):
        (result,) = model(np.full(LARGE, number, np.float32))
        kept.append(result)
    assert [float(r.max()) for r in kept] == [0.0, -1.0, -2.0, -3.0]
    assert [float(r.min()) for r in kept] == [0.0, -1.0, -2.0, -3.0]


def test_an_output_that_no_memory_holds_is_one_line(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tilewright.compile(model_of([("Relu", ["x"], "y", {})], {"x": (2,)}, {"y": (2,)}),
                               options=Options(cache_dir=kernel_cache))  # fmt: skip

    def no_memory(*_: object) -> None:
        raise MemoryError("Unable to allocate 8.00 EiB")

    monkeypatch.setattr("tilewright.model.empty", no_memory)
    with pytest.raises(tilewright.ToolError, match=r"there is no memory for the outputs: y: float32\[2\]"):
        model(np.ones(2, np.float32))


@pytest.mark.host
def test_a_library_that_is_no_model_is_named(tmp_path: Path) -> None:
    library = compile_shared("int one(void) { return 1; }", find_compiler(), this_machine(), Cache(tmp_path))
    with pytest.raises(tilewright.ToolError, match=r"is no library of one, it has no 'tw_describe'"):
        CpuModel(BuiltModel(library, tmp_path / "none"), 1)
