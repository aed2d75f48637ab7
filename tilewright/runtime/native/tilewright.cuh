// What a generated CUDA kernel is written against: views of memory, barriers, shuffles, copies, scalar functions.
// On the device a view is a raw pointer whose strides fold into the address and a wrapper is one PTX instruction;
// compiled by a host compiler the same names come from emulate.hpp, where every access is checked.
#pragma once

#if defined(__CUDACC__)
#define TW_FN static __device__ __forceinline__
#define TW_METHOD __device__ __forceinline__
#define TW_MATH(name) ::name
#define TW_MEMCPY memcpy
#else
#define TW_FN static inline
#define TW_METHOD inline
#define TW_MATH(name) __builtin_##name
#define TW_MEMCPY __builtin_memcpy
#define __global__
#define __launch_bounds__(...)
#endif

namespace tw {

// Constants are enumerators: NVRTC would give static constexpr members room in device memory.
enum : long long { any = -1 };  // an extent given at the call
enum : unsigned { everyone = 0xffffffffu };

template <long long... E> struct Shape {
  enum : int { open = (0 + ... + (E == any ? 1 : 0)) };
  enum : long long { count = (1LL * ... * E) };
};

template <bool Wide> struct IndexType { using type = int; };
template <> struct IndexType<true> { using type = long long; };
// 32-bit offsets where they reach: 64-bit address arithmetic costs registers.
template <long long... E>
using Index = typename IndexType<(Shape<E...>::open > 0 || Shape<E...>::count > 0x7fffffff)>::type;

template <class To, class From> TW_FN To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To result;
  TW_MEMCPY(&result, &value, sizeof(To));
  return result;
}

// ---- 16-bit floats: storage types that compute as float (cuda_fp16.h is not part of the NVRTC package)

TW_FN unsigned short half_bits(float value);
TW_FN float half_value(unsigned short bits);
TW_FN unsigned short bfloat16_bits(float value);
TW_FN float bfloat16_value(unsigned short bits) { return bits_as<float>(static_cast<unsigned>(bits) << 16); }
TW_FN unsigned tf32_bits(float value);

struct half {
  unsigned short bits;
  half() = default;
  TW_METHOD half(float value) : bits(half_bits(value)) {}
  TW_METHOD operator float() const { return half_value(bits); }
};

struct bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  TW_METHOD bfloat16(float value) : bits(bfloat16_bits(value)) {}
  TW_METHOD operator float() const { return bfloat16_value(bits); }
};

// A float of 11 significant bits, which tensor cores multiply: rounded when it is made, a float for all others.
struct tf32 {
  unsigned bits;
  tf32() = default;
  TW_METHOD tf32(float value) : bits(tf32_bits(value)) {}
  TW_METHOD operator float() const { return bits_as<float>(bits); }
};

// A float of four significant bits in a byte: exponents from -6 to 8, no infinity, one NaN of each sign.
TW_FN float e4m3_value(unsigned char bits) {
  const unsigned size = bits & 0x7fu, sign = static_cast<unsigned>(bits & 0x80u) << 24;
  const float value = bits_as<float>(size << 20) * 1.329227995784916e36f;  // 2^120, from one bias to the other
  return bits_as<float>((size == 0x7fu ? 0x7fc00000u : bits_as<unsigned>(value)) | sign);
}

TW_FN unsigned char e4m3_bits(float value) {  // halves to even; what is larger than all becomes the largest
  const unsigned whole = bits_as<unsigned>(value), size = whole & 0x7fffffffu;
  const unsigned small = bits_as<unsigned>(bits_as<float>(size) + 16384.0f) - 0x46800000u;  // counts in 2^-9
  const unsigned code = size < 0x3c800000u ? small : ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - 960u;
  return static_cast<unsigned char>((size > 0x7f800000u ? 0x7fu : code < 0x7eu ? code : 0x7eu) | (whole >> 24 & 0x80u));
}

struct e4m3 {
  unsigned char bits;
  e4m3() = default;
  TW_METHOD e4m3(float value) : bits(e4m3_bits(value)) {}
  TW_METHOD operator float() const { return e4m3_value(bits); }
};

}  // namespace tw

#if defined(__CUDACC__)

extern __shared__ __align__(1024) unsigned char tw_arena[];

namespace tw {

TW_FN unsigned short half_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

TW_FN float half_value(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

TW_FN unsigned short bfloat16_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

TW_FN unsigned tf32_bits(float value) {  // halves away from zero
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// A view is indexed per dimension; names serve the emulator and vanish here.
template <class T, long long... E> struct View {
  T* data;
  long long open[Shape<E...>::open + 1];

  template <class... D> TW_METHOD View(T* start, D... extents) : data(start), open{extents..., 1} {}

  template <class... I> TW_METHOD Index<E...> offset(I... i) const {
    static_assert(sizeof...(I) == sizeof...(E), "one index per dimension");
    using Number = Index<E...>;
    Number result = 0;
    int next = 0;
    ((result = result * (E == any ? static_cast<Number>(open[next++]) : static_cast<Number>(E)) +
               static_cast<Number>(i)), ...);
    return result;
  }
  template <class... I> TW_METHOD T& operator()(I... i) const { return data[offset(i...)]; }
  template <class... I> TW_METHOD T* at(I... i) const { return data + offset(i...); }
  // Places apart by numbers that are known when this is compiled, the second half of what is given: added last, they
  // become part of the instruction, and places that differ by them alone share a register.
  template <class... I> TW_METHOD T* apart(I... i) const {
    static_assert(sizeof...(I) == 2 * sizeof...(E) && Shape<E...>::open == 0, "two numbers per dimension");
    const int given[] = {static_cast<int>(i)...};
    int near = 0, far = 0, next = 0;
    ((near = near * static_cast<int>(E) + given[next], far = far * static_cast<int>(E) + given[sizeof...(E) + next],
      ++next), ...);
    return data + near + far;
  }
};

template <class T, long long... E> struct Global : View<T, E...> {
  template <class... D> TW_METHOD Global(T* start, const char*, D... extents) : View<T, E...>(start, extents...) {}
};

template <class T, long long... E> struct Shared : View<T, E...> {
  TW_METHOD Shared(int first_byte, const char*) : View<T, E...>(reinterpret_cast<T*>(tw_arena + first_byte)) {}
};

template <class T, long long... E> struct Regs {
  alignas(16) T data[Shape<E...>::count];

  TW_METHOD explicit Regs(const char*) {}
  template <class... I> TW_METHOD int offset(I... i) const {
    static_assert(sizeof...(I) == sizeof...(E), "one index per dimension");
    int result = 0;
    ((result = result * static_cast<int>(E) + static_cast<int>(i)), ...);
    return result;
  }
  template <class... I> TW_METHOD T& operator()(I... i) { return data[offset(i...)]; }
  template <class... I> TW_METHOD T* at(I... i) { return data + offset(i...); }
};

// Said not to be negative, so that division by a power of two is a shift.
TW_FN int natural(unsigned number) {
  const int value = static_cast<int>(number);
  __builtin_assume(value >= 0);
  return value;
}
TW_FN int thread() { return natural(threadIdx.x); }
TW_FN int block_x() { return natural(blockIdx.x); }
TW_FN int block_y() { return natural(blockIdx.y); }
TW_FN int block_z() { return natural(blockIdx.z); }

TW_FN void barrier() { __syncthreads(); }
// the same, where warps come to it from several places
TW_FN void meet() { asm volatile("bar.sync 0;" ::: "memory"); }
TW_FN void warp_barrier() { __syncwarp(); }

// All blocks of a launch, which must all be resident. They add to a word of memory, all of them together its highest bit,
// which therefore turns when the last has come, whatever it was before: nothing is to be set back. An arrival waits for no
// answer, and the turn that a block waits for it has known since the launch began. Threads of a block see what the release
// and the acquisition of its first thread order, since the block's own barrier is around them.
TW_FN unsigned grid_turn(const unsigned* meeting) { return *const_cast<const volatile unsigned*>(meeting); }
TW_FN void grid_barrier(unsigned* meeting, unsigned& turn) {
  constexpr unsigned highest = 0x80000000u;
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool first = blockIdx.x + blockIdx.y + blockIdx.z == 0;
    const unsigned arrival = first ? highest - (gridDim.x * gridDim.y * gridDim.z - 1) : 1u, before = turn;
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(meeting), "r"(arrival) : "memory");
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(turn) : "l"(meeting) : "memory");
    } while (((turn ^ before) & highest) == 0);
  }
  __syncthreads();
}

template <class T> TW_FN T shuffle_xor(T value, int mask) {
  if constexpr (sizeof(T) >= 4) return __shfl_xor_sync(everyone, value, mask);
  else return T(__shfl_xor_sync(everyone, static_cast<float>(value), mask));
}

template <class T> TW_FN T shuffle_down(T value, int distance) {
  if constexpr (sizeof(T) >= 4) return __shfl_down_sync(everyone, value, distance);
  else return T(__shfl_down_sync(everyone, static_cast<float>(value), distance));
}

template <class T> TW_FN T shuffle(T value, int lane) {
  if constexpr (sizeof(T) >= 4) return __shfl_sync(everyone, value, lane);
  else return T(__shfl_sync(everyone, static_cast<float>(value), lane));
}

template <int Bytes> struct Packet;
template <> struct Packet<2> { using type = unsigned short; };
template <> struct Packet<4> { using type = unsigned; };
template <> struct Packet<8> { using type = uint2; };
template <> struct Packet<16> { using type = uint4; };

// N neighbouring elements in one transaction; both places aligned to the packet.
template <int N, class T> TW_FN void copy(T* to, const T* from) {
  using Whole = typename Packet<N * sizeof(T)>::type;
  *reinterpret_cast<Whole*>(to) = *reinterpret_cast<const Whole*>(from);
}

template <int N, class T> TW_FN void copy_async(T* to, const T* from) {
  constexpr int bytes = N * sizeof(T);
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (bytes == 16) {  // .cg keeps the line out of L1, which only 16-byte copies may ask for
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(bytes) : "memory");
  }
}

// The same, or zeros where it is not wanted: nothing is then read.
template <int N, class T> TW_FN void copy_async_or_zero(T* to, const T* from, bool wanted) {
  constexpr int bytes = N * sizeof(T);
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int read = wanted ? bytes : 0;
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(read) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(bytes), "r"(read) : "memory");
  }
}

// Into the L2 cache, which all blocks read: what every block asks for at its end comes from there then.
template <class T> TW_FN void prefetch(const T* place) { asm volatile("prefetch.global.L2 [%0];" ::"l"(place)); }

// A kernel's first step. Its blocks may start while those of the kernel before still run, wherever there is room: they
// wait here until that has ended and what it wrote is seen, and then let the next kernel's blocks start.
TW_FN void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// How often a loop runs, kept from the compiler: it would write short loops out, whatever they are told to be.
TW_FN int times(int count) {
  int result;
  asm volatile("mov.u32 %0, %1;" : "=r"(result) : "r"(count));
  return result;
}

TW_FN void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending> TW_FN void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }

// ---- tensor cores: a warp multiplies matrices whose elements its lanes keep, two 16-bit floats or four bytes a register

// Four 8 x 8 matrices of 16-bit elements (or 8 x 4 of 32 bits, 8 x 16 of 8): every lane hands over where one row begins.
template <int N, bool Transposed, class T> TW_FN void ldmatrix(T* to, const T* from) {
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(from));
  unsigned r[4];
  if constexpr (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
  TW_MEMCPY(to, r, 16);
}

template <int N, class T> struct Words { unsigned word[N]; };
template <int N, class T> TW_FN Words<N, T> words(const T* from) {
  Words<N, T> result;
  TW_MEMCPY(result.word, from, 4 * N);
  return result;
}

// Codes of eight bytes less a zero point, times a scale, two halves at a time. A half of 1024 counts in ones: with a code
// in its lower byte it is 1024 more than the code, so that nothing is rounded before the last product.
TW_FN void unpack8(half* to, const unsigned char* from, int shift, int mask, float zero, float scale) {
  const auto given = words<2>(from);
  const unsigned base = 0x10001u * half_bits(1024.0f + zero), factor = 0x10001u * half_bits(scale);
  unsigned result[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned codes = given.word[i / 2] >> shift & 0x1010101u * mask;
    unsigned pair = __byte_perm(codes, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(base));
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(factor));
    result[i] = pair;
  }
  TW_MEMCPY(to, result, 16);
}

// 1024 and a zero point, as a half.
TW_FN unsigned with_zero(float zero) { return half_bits(1024.0f + zero); }
TW_FN unsigned with_zero(unsigned char zero) { return 0x6400u + zero; }
TW_FN unsigned with_zero(signed char zero) { return zero < 0 ? 0x6400u + 2 * zero : 0x6400u + zero; }
TW_FN unsigned factor_of(half scale) { return 0x10001u * scale.bits; }
TW_FN unsigned factor_of(float scale) { return 0x10001u * half_bits(scale); }

// The same of a pair of 16 neighbours, and of the one eight places behind it, which is the upper halves of the same bytes
// where codes have 4 bits. There a half of 1024 is 16 times the code more, and its sixteenth 64 more.
template <int Bits, class Zero, class Scale>
TW_FN void unpack_codes(half* to, const unsigned char* from, Zero zero, Scale scale, int number) {
  const auto given = words<Bits / 2>(from);
  const unsigned base = 0x10001u * with_zero(zero), factor = factor_of(scale);
  unsigned result[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned codes = given.word[number / 2 + (Bits == 4 ? 0 : 2 * i)];
    unsigned pair = __byte_perm(codes, 0x64646464u, number % 2 ? 0x4342 : 0x4140);
    if (Bits == 4) pair &= i ? 0xfff0fff0u : 0xff0fff0fu;
    if (Bits == 4 && i) {
      unsigned upper;
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(upper) : "r"(base ^ 0x80008000u), "r"(0x63806380u));  // 960 less
      asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(0x2c002c00u), "r"(upper));
    } else {
      asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(base));
    }
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(factor));
    result[i] = pair;
  }
  TW_MEMCPY(to, result, 8);
}

TW_FN void mma_float16(float* c, const half* a, const half* b) {
  const auto x = words<4>(a);
  const auto y = words<2>(b);
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3]), "r"(y.word[0]), "r"(y.word[1]));
}

TW_FN void mma_bfloat16(float* c, const bfloat16* a, const bfloat16* b) {
  const auto x = words<4>(a);
  const auto y = words<2>(b);
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3]), "r"(y.word[0]), "r"(y.word[1]));
}

TW_FN void mma_tf32(float* c, const tf32* a, const tf32* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0].bits), "r"(a[1].bits), "r"(a[2].bits), "r"(a[3].bits), "r"(b[0].bits), "r"(b[1].bits));
}

TW_FN void mma_int8(int* c, const signed char* a, const signed char* b) {
  const auto x = words<4>(a);
  const auto y = words<2>(b);
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3]), "r"(y.word[0]), "r"(y.word[1]));
}

TW_FN void mma_e4m3(float* c, const e4m3* a, const e4m3* b) {
#if __CUDA_ARCH__ >= 890
  const auto x = words<4>(a);
  const auto y = words<2>(b);
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3]), "r"(y.word[0]), "r"(y.word[1]));
#endif
}

// ---- tensor cores, four warps as one: operands lie in shared memory in lines of 128 bytes, eight of which are exchanged
// packet by packet; the sums come when they are waited for

TW_FN void async_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
TW_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
template <class T> TW_FN void wgmma_commit(const T*) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// The compiler is not to move what it does with sums that are done across the wait for them: so many, 0 where some of
// the products that were waited for go on.
TW_FN void pinned(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }
TW_FN void pinned(int& sum) { asm volatile("" : "+r"(sum)::"memory"); }
template <int Pending, int Sums, class T> TW_FN void wgmma_wait(T* c) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#pragma unroll
  for (int i = 0; i < Sums; ++i) pinned(c[i]);
}

// Where a matrix lies: its first byte, bytes from 64 elements of a line to the next and from eight lines to the next.
TW_FN unsigned long long matrix_place(const void* first, int along) {
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(first));
  return 1ull << 62 | static_cast<unsigned long long>(1024 >> 4) << 32 | static_cast<unsigned long long>(along >> 4) << 16 |
         (shared & 0x3ffffu) >> 4;
}

// The sums' registers, eight more for every 16 columns; behind them the operands, by their numbers.
#define TW_SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TW_SUMS_32 TW_SUMS_16 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define TW_SUMS_48 TW_SUMS_32 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define TW_SUMS_64 TW_SUMS_48 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define TW_SUMS_80 TW_SUMS_64 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define TW_SUMS_96 TW_SUMS_80 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define TW_SUMS_112 TW_SUMS_96 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define TW_SUMS_128 TW_SUMS_112 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define TW_SUMS_144 TW_SUMS_128 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define TW_SUMS_160 TW_SUMS_144 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define TW_SUMS_176 TW_SUMS_160 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define TW_SUMS_192 TW_SUMS_176 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define TW_SUMS_208 TW_SUMS_192 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define TW_SUMS_224 TW_SUMS_208 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define TW_SUMS_240 TW_SUMS_224 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define TW_SUMS_256 TW_SUMS_240 ", " "%120, %121, %122, %123, %124, %125, %126, %127"
#define TW_EIGHT(i) \
  TW_SUM(c[i]), TW_SUM(c[i + 1]), TW_SUM(c[i + 2]), TW_SUM(c[i + 3]), TW_SUM(c[i + 4]), TW_SUM(c[i + 5]), \
      TW_SUM(c[i + 6]), TW_SUM(c[i + 7])
#define TW_KEPT_16 TW_EIGHT(0)
#define TW_KEPT_32 TW_KEPT_16, TW_EIGHT(8)
#define TW_KEPT_48 TW_KEPT_32, TW_EIGHT(16)
#define TW_KEPT_64 TW_KEPT_48, TW_EIGHT(24)
#define TW_KEPT_80 TW_KEPT_64, TW_EIGHT(32)
#define TW_KEPT_96 TW_KEPT_80, TW_EIGHT(40)
#define TW_KEPT_112 TW_KEPT_96, TW_EIGHT(48)
#define TW_KEPT_128 TW_KEPT_112, TW_EIGHT(56)
#define TW_KEPT_144 TW_KEPT_128, TW_EIGHT(64)
#define TW_KEPT_160 TW_KEPT_144, TW_EIGHT(72)
#define TW_KEPT_176 TW_KEPT_160, TW_EIGHT(80)
#define TW_KEPT_192 TW_KEPT_176, TW_EIGHT(88)
#define TW_KEPT_208 TW_KEPT_192, TW_EIGHT(96)
#define TW_KEPT_224 TW_KEPT_208, TW_EIGHT(104)
#define TW_KEPT_240 TW_KEPT_224, TW_EIGHT(112)
#define TW_KEPT_256 TW_KEPT_240, TW_EIGHT(120)
#define TW_WGMMA(kind, n, at) \
  if constexpr (N == n) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n kind " {" TW_SUMS_##n "}, " at ";" : TW_KEPT_##n : TW_GIVEN : "memory");
// operands behind the sums' n / 2 registers
#define TW_WGMMAS(kind) \
  TW_WGMMA(kind, 16, TW_AT(8, 9, 10, 11, 12, 13, 14)) \
  TW_WGMMA(kind, 32, TW_AT(16, 17, 18, 19, 20, 21, 22)) \
  TW_WGMMA(kind, 48, TW_AT(24, 25, 26, 27, 28, 29, 30)) \
  TW_WGMMA(kind, 64, TW_AT(32, 33, 34, 35, 36, 37, 38)) \
  TW_WGMMA(kind, 80, TW_AT(40, 41, 42, 43, 44, 45, 46)) \
  TW_WGMMA(kind, 96, TW_AT(48, 49, 50, 51, 52, 53, 54)) \
  TW_WGMMA(kind, 112, TW_AT(56, 57, 58, 59, 60, 61, 62)) \
  TW_WGMMA(kind, 128, TW_AT(64, 65, 66, 67, 68, 69, 70)) \
  TW_WGMMA(kind, 144, TW_AT(72, 73, 74, 75, 76, 77, 78)) \
  TW_WGMMA(kind, 160, TW_AT(80, 81, 82, 83, 84, 85, 86)) \
  TW_WGMMA(kind, 176, TW_AT(88, 89, 90, 91, 92, 93, 94)) \
  TW_WGMMA(kind, 192, TW_AT(96, 97, 98, 99, 100, 101, 102)) \
  TW_WGMMA(kind, 208, TW_AT(104, 105, 106, 107, 108, 109, 110)) \
  TW_WGMMA(kind, 224, TW_AT(112, 113, 114, 115, 116, 117, 118)) \
  TW_WGMMA(kind, 240, TW_AT(120, 121, 122, 123, 124, 125, 126)) \
  TW_WGMMA(kind, 256, TW_AT(128, 129, 130, 131, 132, 133, 134))
// both in shared memory; elements of 16 bits may lie either way, others along the sum alone. Sums go on, or begin anew.
#define TW_IN_MEMORY(name, sum, type, kind, of_16_bits) \
  template <int N, bool TurnedA, bool TurnedB, int Along, bool On> TW_FN void name(sum* c, const type* a, const type* b) { \
    static_assert(N % 16 == 0 && N <= 256, "columns"); \
    static_assert(of_16_bits || !(TurnedA || TurnedB), "lines of other elements run along the sum"); \
    const unsigned long long x = matrix_place(a, 16), y = matrix_place(b, TurnedB ? Along : 16); \
    TW_WGMMAS(kind) \
  }
#define TW_SUM(place) "+f"(place)
#define TW_GIVEN "l"(x), "l"(y), "n"(On ? 1 : 0), "n"(TurnedA ? 1 : 0), "n"(TurnedB ? 1 : 0)
#define TW_AT(a, b, on, ta, tb, e, f) "%" #a ", %" #b ", %" #on ", 1, 1, %" #ta ", %" #tb
TW_IN_MEMORY(wgmma_float16, float, half, "k16.f32.f16.f16", true)
TW_IN_MEMORY(wgmma_bfloat16, float, bfloat16, "k16.f32.bf16.bf16", true)
#undef TW_GIVEN
#undef TW_AT
#define TW_GIVEN "l"(x), "l"(y), "n"(On ? 1 : 0)
#define TW_AT(a, b, on, ta, tb, e, f) "%" #a ", %" #b ", %" #on ", 1, 1"
TW_IN_MEMORY(wgmma_tf32, float, tf32, "k8.f32.tf32.tf32", false)
TW_IN_MEMORY(wgmma_e4m3, float, e4m3, "k32.f32.e4m3.e4m3", false)
#undef TW_AT
#undef TW_SUM
#define TW_SUM(place) "+r"(place)
#define TW_AT(a, b, on, ta, tb, e, f) "%" #a ", %" #b ", %" #on
TW_IN_MEMORY(wgmma_int8, int, signed char, "k32.s32.s8.s8", false)
#undef TW_SUM
#undef TW_GIVEN
#undef TW_AT
#define TW_SUM(place) "+f"(place)
// rows in registers, as a warp keeps them for a product of its own
#define TW_IN_REGISTERS(name, type, kind) \
  template <int N, bool TurnedB, int Along> TW_FN void name(float* c, const type* a, const type* b) { \
    static_assert(N % 16 == 0 && N <= 256, "columns"); \
    const auto x = words<4>(a); \
    const unsigned long long y = matrix_place(b, TurnedB ? Along : 16); \
    TW_WGMMAS(kind) \
  }
#define TW_GIVEN "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3]), "l"(y), "n"(TurnedB ? 1 : 0)
#define TW_AT(a, b, c, d, y, tb, f) "{%" #a ", %" #b ", %" #c ", %" #d "}, %" #y ", 1, 1, 1, %" #tb
TW_IN_REGISTERS(wgmma_kept_float16, half, "k16.f32.f16.f16")
TW_IN_REGISTERS(wgmma_kept_bfloat16, bfloat16, "k16.f32.bf16.bf16")
#undef TW_GIVEN
#undef TW_AT
#endif

}  // namespace tw

#else
#include "emulate.hpp"
#endif

namespace tw {

TW_FN float choose(bool first, float a, float b) { return first ? a : b; }  // of two that are both computed

// ---- scalar functions; min and max hand on NaN, integer division floors, as in NumPy

template <class T> TW_FN T minimum(T a, T b) { return a < b || a != a ? a : b; }
template <class T> TW_FN T maximum(T a, T b) { return a > b || a != a ? a : b; }
#if defined(__CUDACC__)  // one instruction that hands NaN on
template <> TW_METHOD float minimum<float>(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
template <> TW_METHOD float maximum<float>(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
#define TW_NARROW(type, name, text) \
  template <> TW_METHOD type name<type>(type a, type b) { \
    type result; \
    asm(text " %0, %1, %2;" : "=h"(result.bits) : "h"(a.bits), "h"(b.bits)); \
    return result; \
  }
TW_NARROW(half, minimum, "min.NaN.f16")
TW_NARROW(half, maximum, "max.NaN.f16")
TW_NARROW(bfloat16, minimum, "min.NaN.bf16")
TW_NARROW(bfloat16, maximum, "max.NaN.bf16")
#undef TW_NARROW
#endif

// Division by zero gives 0, the lowest number by -1 itself.
template <class T> TW_FN bool divides(T b) { return b != 0 && (T(-1) > T(0) || b != T(-1)); }
template <class T> TW_FN T negated(T a) {
  using Whole = unsigned long long;
  return static_cast<T>(Whole(0) - static_cast<Whole>(a));
}
template <class T> TW_FN T quotient(T a, T b) {
  return divides(b) ? static_cast<T>(a / b) : b == 0 ? T(0) : negated(a);
}
template <class T> TW_FN T floordiv(T a, T b) {
  if (!divides(b)) return b == 0 ? T(0) : negated(a);
  const T quotient = a / b;
  return static_cast<T>(quotient - (a % b != 0 && (a < 0) != (b < 0)));
}
template <class T> TW_FN T modulo(T a, T b) {
  if (!divides(b)) return 0;
  const T rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? static_cast<T>(rest + b) : rest;
}
template <class T> TW_FN T remainder(T a, T b) { return divides(b) ? static_cast<T>(a % b) : T(0); }

template <class T> TW_FN T sign(T a) { return a != a ? a : T((a > T(0)) - (a < T(0))); }
template <class T> TW_FN T absolute_integer(T a) { return a < 0 ? negated(a) : a; }

// A shift takes the low bits of its count alone; to the left high bits are lost, signed or not.
template <class T> TW_FN T shift_left(T a, T count) {
  return static_cast<T>(static_cast<unsigned long long>(a) << (count & T(sizeof(T) * 8 - 1)));
}
template <class T> TW_FN T shift_right(T a, T count) { return static_cast<T>(a >> (count & T(sizeof(T) * 8 - 1))); }

TW_FN float absolute(float a) { return TW_MATH(fabsf)(a); }
TW_FN float exp(float a) { return TW_MATH(expf)(a); }
#if defined(__CUDACC__)
TW_FN float exp2(float a) {  // two units in the last place of 24; below 2^-126 zero
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}
#else
TW_FN float exp2(float a) { return TW_MATH(exp2f)(a); }
#endif
// By a number that is known, and its reciprocal: rounded as a division is, in five instructions instead of seventeen.
// The remainder of the first quotient is exact; of an infinite one there is none.
TW_FN float divided(float a, float by, float inverse) {
  const float first = a * inverse;
  const float rest = TW_MATH(fmaf)(-first, by, a);
  const float exact = TW_MATH(fmaf)(rest, inverse, first);
  return absolute(first) < bits_as<float>(0x7f800000u) ? exact : first;
}
TW_FN float log(float a) { return TW_MATH(logf)(a); }
TW_FN float sqrt(float a) { return TW_MATH(sqrtf)(a); }
TW_FN float rsqrt(float a) { return 1.0f / TW_MATH(sqrtf)(a); }
TW_FN float tanh(float a) { return TW_MATH(tanhf)(a); }
#if defined(__CUDACC__)
// Without branches: a quotient of polynomials in a squared, fitted to 2e-8; 4e-7 off at most as it is rounded here.
// Beyond 3.925 the result is 1 in float32.
TW_FN float erf(float a) {
  const float x = maximum<float>(minimum<float>(a, 3.925f), -3.925f);
  const float u = x * x;
  float above = 2.0460238374653272e-06f, below = 3.804776497418061e-05f, inverse;
  above = fmaf(above, u, 0.00028484404901973903f);
  above = fmaf(above, u, 0.0037725730799138546f);
  above = fmaf(above, u, 0.05276937410235405f);
  above = fmaf(above, u, 0.19059428572654724f);
  above = fmaf(above, u, 1.1283791065216064f);
  below = fmaf(below, u, 0.001163863344117999f);
  below = fmaf(below, u, 0.01498324517160654f);
  below = fmaf(below, u, 0.11418294906616211f);
  below = fmaf(below, u, 0.5022425055503845f);
  below = fmaf(below, u, 1.0f);
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(below));
  return maximum<float>(minimum<float>(x * above * inverse, 1.0f), -1.0f);
}
#else
TW_FN float erf(float a) { return TW_MATH(erff)(a); }
#endif
#if defined(__CUDACC__)
TW_FN float reciprocal(float a) {  // one instruction, a unit in the last place off at most
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}
TW_FN float sigmoid(float a) { return reciprocal(1.0f + expf(-a)); }
#else
TW_FN float reciprocal(float a) { return 1.0f / a; }
TW_FN float sigmoid(float a) { return 1.0f / (1.0f + TW_MATH(expf)(-a)); }
#endif
TW_FN float sin(float a) { return TW_MATH(sinf)(a); }
TW_FN float cos(float a) { return TW_MATH(cosf)(a); }
TW_FN float floor(float a) { return TW_MATH(floorf)(a); }
TW_FN float ceil(float a) { return TW_MATH(ceilf)(a); }
// A small number to the nearest integer, as a byte: added to 1.5 * 2^23 its last byte is that integer's. Instructions that
// round and convert run at an eighth of the rate of an addition.
template <class T> TW_FN T rounded_byte(float small, int added) {
  return static_cast<T>(bits_as<int>(small + 12582912.0f) + added);
}
TW_FN float round_small(float small) { return (small + 12582912.0f) - 12582912.0f; }
TW_FN float round(float a) { return TW_MATH(rintf)(a); }
TW_FN float trunc(float a) { return TW_MATH(truncf)(a); }
TW_FN float pow(float a, float b) { return TW_MATH(powf)(a, b); }
TW_FN float fmod(float a, float b) { return TW_MATH(fmodf)(a, b); }

TW_FN double absolute(double a) { return TW_MATH(fabs)(a); }
TW_FN double exp(double a) { return TW_MATH(exp)(a); }
TW_FN double exp2(double a) { return TW_MATH(exp2)(a); }
TW_FN double log(double a) { return TW_MATH(log)(a); }
TW_FN double sqrt(double a) { return TW_MATH(sqrt)(a); }
TW_FN double rsqrt(double a) { return 1.0 / TW_MATH(sqrt)(a); }
TW_FN double tanh(double a) { return TW_MATH(tanh)(a); }
TW_FN double erf(double a) { return TW_MATH(erf)(a); }
TW_FN double sigmoid(double a) { return 1.0 / (1.0 + TW_MATH(exp)(-a)); }
TW_FN double sin(double a) { return TW_MATH(sin)(a); }
TW_FN double cos(double a) { return TW_MATH(cos)(a); }
TW_FN double floor(double a) { return TW_MATH(floor)(a); }
TW_FN double ceil(double a) { return TW_MATH(ceil)(a); }
TW_FN double round(double a) { return TW_MATH(rint)(a); }
TW_FN double trunc(double a) { return TW_MATH(trunc)(a); }
TW_FN double pow(double a, double b) { return TW_MATH(pow)(a, b); }
TW_FN double fmod(double a, double b) { return TW_MATH(fmod)(a, b); }

template <class T> TW_FN bool is_nan(T a) { return a != a; }
template <class T> TW_FN bool is_inf(T a) { return a == a && a - a != a - a; }

TW_FN float infinity() { return bits_as<float>(0x7f800000u); }
TW_FN float nan() { return bits_as<float>(0x7fc00000u); }

}  // namespace tw
