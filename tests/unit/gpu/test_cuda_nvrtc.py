"""NVRTC: our header and generated kernels compile for Ampere and Hopper, and views cost nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpu_kernels import all_cases
from tests.gpu_launch import source_of
from tilewright.runtime.cache import Cache
from tilewright.runtime.nvrtc import NvrtcError, cached_cubin, compile_to_cubin, compile_to_ptx, exact_architecture

ARCHITECTURES = ("sm_80", "sm_90a")

EVERYTHING = """#include "tilewright.cuh"
extern "C" __global__ void everything(const float* x_data, float* y_data, tw::half* h_data, tw::bfloat16* b_data,
                                      long long n, unsigned* m_data) {
  const tw::Global<const float, tw::any, 16> x(x_data, "x", n);
  const tw::Global<float, tw::any, 16> y(y_data, "y", n);
  const tw::Global<tw::half, 64> h(h_data, "h");
  const tw::Global<tw::bfloat16, 64> b(b_data, "b");
  const tw::Shared<float, 64, 16> s(0, "s");
  const tw::Shared<tw::half, 64> hs(4096, "hs");
  tw::Regs<float, 4> r("r");
  const int t = tw::thread() + tw::block_x() * 64 + tw::block_y() + tw::block_z();
  tw::copy_async<4>(s.at(t, 0), x.at(t, 0));
  tw::copy_async<2>(s.at(t, 4), x.at(t, 4));
  tw::copy_async<1>(s.at(t, 6), x.at(t, 6));
  tw::commit();
  tw::wait<0>();
  tw::barrier();
  tw::warp_barrier();
  unsigned turn = tw::grid_turn(m_data);
  tw::grid_barrier(m_data, turn);
  tw::copy<4>(r.at(0), s.at(t, 0));
  tw::copy<2>(s.at(t, 8), x.at(t, 8));
  hs(t) = tw::half(h(t) + hs(63 - t));
  b(t) = tw::bfloat16(b(t) * 2.0f);
  h(t) = tw::shuffle_xor<tw::half>(h(t), 4);
  r(1) = tw::shuffle_xor<float>(r(1), 16);
  r(2) = tw::shuffle_down<float>(r(2), 8);
  r(3) = tw::shuffle<float>(r(3), 0);
  const int k = tw::floordiv<int>(t - 5, 3) + tw::modulo<int>(t - 5, 3) + tw::remainder<int>(t, 7);
  float v = tw::minimum<float>(r(0), r(1)) + tw::maximum<float>(r(2), r(3)) + tw::sign<float>(r(0)) + k;
  v += tw::exp(v) + tw::log(v) + tw::sqrt(v) + tw::rsqrt(v) + tw::tanh(v) + tw::erf(v) + tw::sigmoid(v) + tw::sin(v);
  v += tw::cos(v) + tw::floor(v) + tw::ceil(v) + tw::round(v) + tw::trunc(v) + tw::pow(v, v) + tw::fmod(v, 2.0f);
  const double d = tw::exp(static_cast<double>(v)) + tw::erf(static_cast<double>(v)) + tw::absolute(1.0 - v);
  y(t, 0) = tw::is_nan<float>(v) ? tw::infinity() : tw::is_inf<float>(v) ? tw::nan() : tw::absolute(v);
  y(t, 1) = static_cast<float>(d) + tw::absolute_integer<int>(-t);
  tw::copy<4>(y.at(t, 4), r.at(0));
}
"""

VIEWS = """#include "tilewright.cuh"
extern "C" __global__ void __launch_bounds__(256)
turn(const float* __restrict__ x_data, float* __restrict__ y_data, long long n) {
  const tw::Global<const float, 64, 48> x(x_data, "x");
  const tw::Global<float, 48, tw::any> y(y_data, "y", n);
  const tw::Shared<float, 16, 17> tile(128, "tile");
  tw::Regs<float, 2> r("r");
  const int t = tw::thread();
  const int block = tw::block_x();
  tile(t / 16, t % 16) = x(block * 16 + t / 16, t % 16);
  tw::barrier();
  #pragma unroll
  for (int i = 0; i < 2; ++i) r(i) = tile(t % 16, t / 16 + i);
  y(t / 16, t % 16) = r(0) + r(1);
}
"""

POINTERS = """#include "tilewright.cuh"
extern "C" __global__ void __launch_bounds__(256)
turn(const float* __restrict__ x, float* __restrict__ y, long long n) {
  float* tile = reinterpret_cast<float*>(tw_arena + 128);
  const int t = static_cast<int>(threadIdx.x);
  const int block = static_cast<int>(blockIdx.x);
  __builtin_assume(t >= 0);
  __builtin_assume(block >= 0);
  const int source = block * 16 + t / 16, column = t % 16;
  const float value = x[source * 48 + column];
  const int row = t / 16, place = t % 16;
  tile[row * 17 + place] = value;
  __syncthreads();
  float r[2];
  #pragma unroll
  for (int i = 0; i < 2; ++i) r[i] = tile[t % 16 * 17 + (t / 16 + i)];
  y[t / 16 * n + t % 16] = r[0] + r[1];
}
"""


def instructions(ptx: str) -> list[str]:
    """PTX without comments, with registers numbered by first use."""
    numbers: dict[str, str] = {}
    lines = []
    for line in ptx.splitlines():
        line = " ".join(line.split("//")[0].split())
        if line and not line.startswith((".version", ".target", ".reg")):
            lines.append(
                re.sub(r"%(?:r|rd|f|p|rs|fd)\d+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), line)
            )
    return lines


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_wrapper_compiles(arch: str) -> None:
    assert compile_to_cubin(EVERYTHING, arch).code[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_generated_kernels_compile(arch: str) -> None:
    for case in all_cases():
        assert compile_to_cubin(source_of(case.kernel), arch).code[:4] == b"\x7fELF"


def test_views_cost_nothing() -> None:
    assert instructions(compile_to_ptx(VIEWS)) == instructions(compile_to_ptx(POINTERS))


def test_registers_stay_registers() -> None:
    for case in all_cases():
        ptx = compile_to_ptx(source_of(case.kernel))
        assert ".local" not in ptx, case.kernel.name
        assert ".entry " + case.kernel.name in ptx


def test_a_bad_source_is_one_clear_error() -> None:
    with pytest.raises(NvrtcError, match="NVRTC refused a kernel: .*undefined"):
        compile_to_cubin('extern "C" __global__ void k(float* y) { *y = nowhere; }')


def test_the_cache_keeps_cubins(tmp_path: Path) -> None:
    source = 'extern "C" __global__ void k(float* y) { *y = 1.0f; }'
    first = cached_cubin(source, "sm_90", Cache(tmp_path))
    assert Cache(tmp_path).stats().entries == 2 and set(first.resources) == {"k"}
    assert cached_cubin(source, "sm_90", Cache(tmp_path)) == first


SPILLS = """extern "C" __global__ void __launch_bounds__(1024) crowded(float* y) {
  float v[96];
  for (int i = 0; i < 96; ++i) v[i] = y[i * 1024 + threadIdx.x];
  for (int k = 0; k < 9; ++k) {
    #pragma unroll
    for (int i = 0; i < 96; ++i) v[i] = v[i] * v[(i * 7 + 3) % 96] + v[(i * 5 + 1) % 96];
  }
  for (int i = 0; i < 96; ++i) y[i * 1024 + threadIdx.x] = v[i];
}
extern "C" __global__ void shares(float* y) {
  __shared__ float s[64];
  s[threadIdx.x] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[63 - threadIdx.x];
}"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_assembler_says_what_a_kernel_takes(arch: str) -> None:
    found = compile_to_cubin(SPILLS, arch).resources
    assert set(found) == {"crowded", "shares"}
    assert found["crowded"].registers <= 64 and found["crowded"].spill_bytes > 0  # a thread of 1024 has 64
    assert found["shares"].shared_bytes == 256 and found["shares"].spill_bytes == found["shares"].stack_bytes == 0


def test_hopper_is_compiled_for_itself() -> None:
    assert [exact_architecture(n) for n in (80, 86, 89, 90, 100)] == ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a"]
