// What a GPU can do: arithmetic by instruction, bytes and latency of each memory, and what barriers cost. Every kernel
// leaves something that depends on all its work, so that none of it can be left out. Included before this text:
// REPEAT, the steps of a short loop.
#include "tilewright.cuh"

typedef unsigned int u32;
typedef unsigned long long u64;

extern "C" __global__ void empty_kernel() {}

extern "C" __global__ void line_kernel(float* data) {  // a line read and written by each warp, as dependent kernels do
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  data[i] = data[i] + 1.0f;
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void dependent_kernel(float* data) {  // lets the next one start, and waits for the one before
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  data[i] = data[i] + 1.0f;
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) cluster_barriers(u32* out) {
  for (int i = 0; i < REPEAT; ++i) {
    asm volatile("barrier.cluster.arrive.aligned;");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  }
  if (threadIdx.x == 0) out[blockIdx.x] = REPEAT;
}
#endif

extern "C" __global__ void grid_barriers(u32* meeting, u32* out) {  // all blocks are resident: one a multiprocessor
  u32 turn = tw::grid_turn(meeting);
  for (u32 i = 0; i < REPEAT; ++i) tw::grid_barrier(meeting, turn);
  if (threadIdx.x == 0) out[blockIdx.x] = turn;
}

extern "C" __global__ void fma_float32(float* out, float a) {
  float v[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = threadIdx.x + i;
  for (int r = 0; r < 16 * REPEAT; ++r) {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = fmaf(v[i], a, 1.0f);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) sum += v[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

extern "C" __global__ void clock_ticks(u64* ticks, float* out, float a) {  // cycles and nanoseconds of the same work
  u64 first, last;
  float v = threadIdx.x;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(first)::"memory");
  const u64 begin = clock64();
  for (int r = 0; r < REPEAT * 512; ++r) v = fmaf(v, a, 1.0f);
  out[blockIdx.x * blockDim.x + threadIdx.x] = v;
  const u64 end = clock64();
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(last)::"memory");
  if (blockIdx.x == 0 && threadIdx.x == 0) ticks[0] = end - begin, ticks[1] = last - first;
}

#define MMA_KERNEL(NAME, SUM, KEPT, INSTRUCTION)                                                    \
  extern "C" __global__ void NAME(float* out, u32 bits) {                                                         \
    SUM c[8][4];                                                                                                \
    const u32 a0 = bits + threadIdx.x, a1 = a0 + 1, a2 = a0 + 2, a3 = a0 + 3, b0 = bits, b1 = bits + 1;           \
    (void)a2, (void)a3, (void)b1;                                                                                 \
    _Pragma("unroll") for (int i = 0; i < 8; ++i) for (int j = 0; j < 4; ++j) c[i][j] = i + j;                    \
    for (int r = 0; r < 16 * REPEAT; ++r) {                                                                            \
      _Pragma("unroll") for (int i = 0; i < 8; ++i) asm volatile(INSTRUCTION                                      \
          : KEPT(c[i][0]), KEPT(c[i][1]), KEPT(c[i][2]), KEPT(c[i][3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3),      \
            "r"(b0), "r"(b1));                                                                                    \
    }                                                                                                             \
    float sum = 0.0f;                                                                                             \
    _Pragma("unroll") for (int i = 0; i < 8; ++i) for (int j = 0; j < 4; ++j) sum += c[i][j];                     \
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;                                                             \
  }
#define MMA(SHAPE, TYPES) "mma.sync.aligned." SHAPE ".row.col." TYPES \
  " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
MMA_KERNEL(mma_float16, float, "+f", MMA("m16n8k16", "f32.f16.f16.f32"))
MMA_KERNEL(mma_bfloat16, float, "+f", MMA("m16n8k16", "f32.bf16.bf16.f32"))
MMA_KERNEL(mma_tf32, float, "+f", MMA("m16n8k8", "f32.tf32.tf32.f32"))
MMA_KERNEL(mma_int8, int, "+r", MMA("m16n8k32", "s32.s8.s8.s32"))
#if __CUDA_ARCH__ >= 890
MMA_KERNEL(mma_e4m3, float, "+f", MMA("m16n8k32", "f32.e4m3.e4m3.f32"))
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Four warps as one, 64 x 256 and 32 bytes of the sum a step, two steps under way.
#define GROUP_KERNEL(NAME, SUM, TYPE)                                                           \
  extern "C" __global__ void __launch_bounds__(256, 1) NAME(float* out, u32 bits) {       \
    __shared__ __align__(1024) u32 data[10 << 10];                                         \
    for (int i = threadIdx.x; i < 10 << 10; i += blockDim.x) data[i] = bits;               \
    tw::async_fence();                                                                     \
    __syncthreads();                                                                       \
    const TYPE *a = reinterpret_cast<const TYPE*>(data), *b = reinterpret_cast<const TYPE*>(data + (2 << 10)); \
    SUM c[128] = {};                                                                     \
    tw::wgmma_wait<0, 128>(c);                                                             \
    for (int r = 0; r < 16 * REPEAT; ++r) {                                                \
      tw::wgmma_fence();                                                                   \
      tw::NAME<256, false, false, 16>(c, a, b);                                            \
      tw::wgmma_commit(c);                                                                 \
      tw::wgmma_wait<1, 128>(c);                                                           \
    }                                                                                      \
    tw::wgmma_wait<0, 128>(c);                                                             \
    float sum = 0.0f;                                                                      \
    _Pragma("unroll") for (int i = 0; i < 128; ++i) sum += c[i];                           \
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;                                      \
  }
GROUP_KERNEL(wgmma_float16, float, tw::half)
GROUP_KERNEL(wgmma_bfloat16, float, tw::bfloat16)
GROUP_KERNEL(wgmma_tf32, float, tw::tf32)
GROUP_KERNEL(wgmma_int8, int, signed char)
GROUP_KERNEL(wgmma_e4m3, float, tw::e4m3)
#endif

extern "C" __global__ void read_shared(float* out) {  // 16 bytes a thread, no two of a phase in one bank
  __shared__ float4 data[1024];
  data[threadIdx.x] = make_float4(threadIdx.x, 1.0f, 2.0f, 3.0f);
  __syncthreads();
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int mask = blockDim.x - 1;
  for (int r = 0; r < 16 * REPEAT; ++r) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 v = data[(threadIdx.x + 32 * (8 * r + i)) & mask];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum.x + sum.y + sum.z + sum.w;
}

extern "C" __global__ void read_global(const uint4* data, u32* out, u64 count, int turns) {
  u32 sum = 0;
  const u64 step = (u64)gridDim.x * blockDim.x;
  for (int t = 0; t < turns; ++t) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i + 3 * step < count; i += 4 * step) {
      uint4 v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)  // beside the first cache: it would keep what a small set reads again
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w) : "l"(data + i + k * step));
#pragma unroll
      for (int k = 0; k < 4; ++k) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

extern "C" __global__ void write_global(uint4* data, u64 count) {
  const u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) data[i] = make_uint4(i, 1, 2, 3);
}

extern "C" __global__ void chain(u32* data, u32 count, u32 stride) {  // a ring: each word says where the next one is
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    data[(u64)i * stride] = (u32)(((u64)i * 7919 + 7919) % count) * stride;
}

extern "C" __global__ void follow(const u32* data, u64* cycles, u32* out, u32 start, int again) {
  u32 place = start;
  for (int i = 0; i < REPEAT; ++i)  // brings pages near, and lines where they are read again
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(place) : "l"(data + place));
  if (again) place = start;
  const u64 begin = clock64();
  for (int i = 0; i < REPEAT; ++i)
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(place) : "l"(data + place));
  *out = place;
  *cycles = clock64() - begin;
}

extern "C" __global__ void follow_shared(u64* cycles, u32* out) {
  __shared__ u32 data[256];
  for (int i = threadIdx.x; i < 256; i += 32) data[i] = (i * 5 + 17) & 255;
  __syncthreads();
  u32 place = 0;
  const u64 begin = clock64();
  for (int i = 0; i < REPEAT; ++i) place = data[place];
  *out = place;
  *cycles = clock64() - begin;
}
