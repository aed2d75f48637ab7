"""The emulator: good kernels give the right answer, and each rule it holds kernels to is broken once."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.gpu_kernels import all_cases
from tests.gpu_launch import emulate, source_of, strict_contract
from tilewright.errors import InternalError
from tilewright.runtime.cache import Cache
from tilewright.runtime.emulator import Contract, EmulatedModule, EmulationFault, Fault

ONE = (1, 1, 1)
HEAD = '#include "tilewright.cuh"\nextern "C" __global__ void '
ALL_LANES = "const int t = tw::thread();"

# name -> body of a kernel with one parameter `float* y_data`, seen as y[32]
BROKEN = {
    "outside": "y(t + 1) = 1.0f;",
    "outside_row": 'const tw::Global<float, 4, 8> z(y_data, "z"); z(0, t) = 1.0f;',
    "poison": 'const tw::Shared<float, 32> s(0, "s"); y(t) = s(t);',
    "poison_register": 'tw::Regs<float, 2> r("r"); r(0) = 1.0f; y(t) = r(1);',
    "race": 'const tw::Shared<float, 32> s(0, "s"); s(t) = 1.0f; y(t) = s(31 - t);',
    "shuffle_is_no_barrier": 'const tw::Shared<float, 32> s(0, "s"); s(t) = 1.0f; tw::shuffle_xor<float>(1.0f, 1); '
    "y(t) = s(31 - t);",
    "write_after_read": 'const tw::Shared<float, 32> s(0, "s"); s(t) = 1.0f; tw::barrier(); '
    "y(t) = s(31 - t); s(t) = 2.0f;",
    "two_writers": "y(t / 2) = 1.0f; y(t / 2 + 16) = 1.0f;",
    "blocks_meet": "y(t) = static_cast<float>(tw::block_x());",
    "some_wait": "y(t) = 0.0f; if (t < 16) tw::barrier();",
    "two_barriers": "y(t) = 0.0f;\nif (t < 16)\ntw::barrier();\nelse\ntw::barrier();",
    "some_shuffle": "y(t) = t < 16 ? tw::shuffle_xor<float>(1.0f, 1) : 0.0f;",
    "crooked_copy": 'const tw::Shared<float, 64> s(0, "s"); s(t) = s(t + 32) = 1.0f; tw::barrier(); '
    "tw::Regs<float, 4> r(\"r\"); tw::copy<4>(r.at(0), s.at(1)); y(t) = r(0);",
    "too_early": 'const tw::Shared<float, 32> s(0, "s"); const tw::Global<const float, 32> x(y_data + 0, "x"); '
    "tw::copy_async<1>(s.at(t), x.at(t)); tw::commit(); const float v = s(t); tw::wait<0>();",
    "never_awaited": 'const tw::Shared<float, 32> s(0, "s"); const tw::Global<const float, 32> x(y_data + 0, "x"); '
    "tw::copy_async<1>(s.at(t), x.at(t)); tw::commit();",
    "gap": "if (t != 5) y(t) = 1.0f;",
    "twice": "y(t) = 1.0f; y(t) = 2.0f;",
    "unused": 'const tw::Shared<float, 64> s(0, "s"); s(t) = 1.0f; s(t + 32) = 2.0f; y(t) = s(t);',
    "large": 'const tw::Global<float, 64> z(y_data, "z"); z(t) = 1.0f;',
    "grid_race": "if (tw::block_x() == 0) y(t) = 1.0f; if (tw::block_x() == 1) y(t) = y(t) + 1.0f; tw::grid_barrier();",
    "grid_alone": "if (tw::block_x() == 0) tw::grid_barrier(); y(t / 2 + 16 * tw::block_x()) = 1.0f;",
    "grid_some": "if (t < 16) tw::grid_barrier(); else tw::barrier(); y(t) = 1.0f;",
}  # fmt: skip
# name -> the kind of fault and the buffer it must name
EXPECTED = {
    "outside": ("out of bounds", "y"),
    "outside_row": ("out of bounds", "z"),
    "poison": ("uninitialised", "s"),
    "poison_register": ("uninitialised", "r"),
    "race": ("race", "s"),
    "shuffle_is_no_barrier": ("race", "s"),
    "write_after_read": ("race", "s"),
    "two_writers": ("race", "y"),
    "blocks_meet": ("race", "y"),
    "some_wait": ("divergent barrier", ""),
    "two_barriers": ("divergent barrier", ""),
    "some_shuffle": ("broken shuffle", ""),
    "crooked_copy": ("misaligned", "s"),
    "too_early": ("asynchronous copy", "s"),
    "never_awaited": ("asynchronous copy", "s"),
    "gap": ("never written", "y"),
    "twice": ("overwritten unread", "y"),
    "unused": ("never read", "s"),
    "large": ("too small", "z"),
    "grid_race": ("race", "y"),
    "grid_alone": ("divergent barrier", ""),
    "grid_some": ("divergent barrier", ""),
}

GOOD = {
    "grid_ordered": 'const tw::Shared<float, 32> s(0, "s"); s(t) = 1.0f + tw::block_x(); '
    "if (tw::block_x() == 0) y(t) = 1.0f; tw::grid_barrier(); if (tw::block_x() == 1) y(t) = y(t) + s(31 - t); "
    "tw::grid_barrier(); const float v = y(31 - t) + s(31 - t);",
    "warp_ordered": 'const tw::Shared<float, 32> s(0, "s"); s(t) = 1.0f; tw::warp_barrier(); y(t) = s(31 - t);',
    "reused_bytes": 'const tw::Shared<float, 32> a(0, "a"); const tw::Shared<int, 32> b(0, "b"); a(t) = 1.0f; '
    "tw::barrier(); const float v = a(31 - t); tw::barrier(); b(t) = 2; tw::barrier(); y(t) = v + b(31 - t);",
    "awaited": 'const tw::Shared<float, 32> s(0, "s"); const tw::Global<const float, 32> x(y_data, "x"); '
    "tw::copy_async<1>(s.at(t), x.at(t)); tw::commit(); tw::wait<0>(); tw::barrier(); const float v = s(31 - t);",
}  # fmt: skip


def kernel_text(name: str, body: str) -> str:
    view = "" if "y_data" in body else 'const tw::Global<float, 32> y(y_data, "y");'
    return f"{HEAD}{name}(float* y_data) {{ {view} {ALL_LANES} {body} }}\n"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModule:
    sources = {name: kernel_text(name, body) for name, body in {**BROKEN, **GOOD}.items()}
    return EmulatedModule(sources, Cache(tmp_path_factory.mktemp("emulated")), optimise=0)


def faults_of(module: EmulatedModule, name: str) -> tuple[Fault, ...]:
    contract = Contract(writes_all=("y",) if name in ("gap", "twice") else (), uses_all=name == "unused")
    grid = (2, 1, 1) if name == "blocks_meet" or name.startswith("grid") else ONE
    room = np.zeros(64, np.float32)
    start = -(room.ctypes.data // 4) % 4  # 16-byte aligned
    return module.inspect(name, grid, 32, 1024, [room[start : start + 32]], contract)


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_rule_is_reported(broken: EmulatedModule, name: str) -> None:
    kind, buffer = EXPECTED[name]
    found = faults_of(broken, name)
    assert (kind, buffer) in {(f.kind, f.buffer) for f in found}, [str(f) for f in found]


@pytest.mark.parametrize("name", list(GOOD))
def test_an_ordered_kernel_is_not(broken: EmulatedModule, name: str) -> None:
    assert faults_of(broken, name) == ()


def test_a_race_names_both_threads(broken: EmulatedModule) -> None:
    fault = next(f for f in faults_of(broken, "race") if f.kind == "race")
    assert fault.other_thread is not None
    assert fault.thread + fault.other_thread == 31
    assert fault.index[0] in (fault.thread, fault.other_thread)
    assert str(fault) == (
        f"race: s[{fault.index[0]}] by thread {fault.thread} of block (0, 0, 0) "
        f"against thread {fault.other_thread} of block (0, 0, 0)"
    )


def test_a_launch_fails_with_its_faults(broken: EmulatedModule) -> None:
    with pytest.raises(EmulationFault, match="kernel outside: out of bounds: y\\[32\\]") as caught:
        broken.launch("outside", ONE, 32, 0, [np.zeros(32, np.float32)])
    assert caught.value.faults[0].index == (32,)


def test_a_wrong_number_of_arguments(broken: EmulatedModule) -> None:
    with pytest.raises(InternalError, match="takes 1 arguments, got 0"):
        broken.launch("outside", ONE, 32, 0, [])


def test_hand_written_kernels(tmp_path: Path) -> None:
    cases = all_cases()
    module = EmulatedModule({c.kernel.name: source_of(c.kernel) for c in cases}, Cache(tmp_path))
    for case in cases:
        output, faults = emulate(module, case, case.kernel, strict_contract(case.kernel))
        assert faults == (), case.kernel.name
        np.testing.assert_allclose(output, case.expected, rtol=1e-5, atol=1e-5)


def test_written_parameters_may_not_overlap(tmp_path: Path) -> None:
    text = (
        f'{HEAD}twins(float* a_data, float* b_data) {{ const tw::Global<float, 8> a(a_data, "a"); '
        'const tw::Global<float, 8> b(b_data, "b"); a(tw::thread()) = 1.0f; }\n'
    )
    module = EmulatedModule({"twins": text}, Cache(tmp_path), optimise=0)
    room = np.zeros(12, np.float32)
    assert {f.kind for f in module.inspect("twins", ONE, 8, 0, [room[:8], room[4:]])} == {"aliased"}
    assert module.inspect("twins", ONE, 8, 0, [np.zeros(8, np.float32), np.zeros(8, np.float32)]) == ()


def test_sixteen_bit_floats(tmp_path: Path) -> None:
    """All 65536 values widen as in NumPy, and floats between them round as in NumPy."""
    types = {"half": np.float16, "bfloat16": ml_dtypes.bfloat16}
    count = 1 << 16
    sources = {
        f"convert_{name}": (
            f'{HEAD}convert_{name}(const unsigned short* x_data, float* y_data, const float* u_data, '
            f"unsigned short* v_data) {{ const int i = tw::block_x() * 256 + tw::thread(); "
            f"y_data[i] = tw::{name}_value(x_data[i]); v_data[i] = tw::{name}_bits(u_data[i]); }}\n"
        )
        for name in types
    }  # fmt: skip
    module = EmulatedModule(sources, Cache(tmp_path))
    bits = np.arange(count, dtype=np.uint16)
    rng = np.random.default_rng(5)
    floats = (rng.standard_normal(count) * 10.0 ** rng.uniform(-10, 6, count)).astype(np.float32)
    floats[:4] = [np.inf, -np.inf, 0.0, -0.0]
    for name, kind in types.items():
        wide, narrow = np.empty(count, np.float32), np.empty(count, np.uint16)
        module.launch(f"convert_{name}", (count // 256, 1, 1), 256, 0, [bits, wide, floats, narrow])
        with np.errstate(over="ignore", invalid="ignore"):
            np.testing.assert_array_equal(wide, bits.view(kind).astype(np.float32))
            np.testing.assert_array_equal(narrow, floats.astype(kind).view(np.uint16))
