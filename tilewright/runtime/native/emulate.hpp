// The emulator's half of tilewright.cuh: the same views and wrappers as checked C++. Kept free of other headers,
// because every kernel of a test compiles it. The engine itself (emulate.cpp) is compiled once.
#pragma once

namespace tw {
namespace emulate {

// The checks stay calls: inlined into every access they would triple the time a kernel takes to compile.
#define TW_CALL __attribute__((noinline))
#define TW_EXPORT __attribute__((visibility("default")))

constexpr int most_dimensions = 8;
constexpr int warp_size = 32;

enum Kind {
  OUT_OF_BOUNDS, UNINITIALISED, RACE, MISALIGNED, BARRIER, SHUFFLE, UNWRITTEN, UNREAD, OVERWRITTEN, ASYNC, SIZE, ALIAS,
};

// What is remembered of one element. An epoch is the time between two block barriers; epochs never repeat within a
// launch, and blocks run one after the other (from grid barrier to grid barrier), so an epoch also names its block.
struct Cell {
  unsigned write_epoch, write_warp_epoch, read_epoch, read_warp_epoch, first_read_epoch;
  int writer, reader, first_reader;
  int write_block, read_block, first_read_block;
  unsigned written_at;  // of shared memory: how many writes there had been
  short owner;  // the shared buffer that wrote it last: two may use the same bytes at different times
  bool readers_many, readers_across_warps;
  bool read_since_write, ever_read, ever_written, in_flight;
};

// What an index is checked against.
struct Grid {
  const char* name;
  int rank;
  long long extent[most_dimensions];
};

struct Buffer : Grid {
  unsigned char* base;
  long long bytes;
  int element;
  bool shared;
  bool whole_write, whole_read;  // promised: every element is written (read) by a launch
  short id;
  Cell* cells;  // one per element (global), or those of the whole arena (shared); null where nothing is tracked
};

struct Bank;

// What the lanes of a warp do as one, when all have arrived; every lane brings a record that begins with this.
struct Together {
  void (*run)(Together** lanes);
};

struct Engine {
  int thread;
  int block[3];
  bool uses_all;
  Buffer* (*open_global)(void* data, const char* name, int element, bool writable, int rank, const long long* extent);
  Buffer* (*open_shared)(long long first_byte, const char* name, int element, int rank, const long long* extent);
  void (*read)(Buffer*, long long offset);
  void (*write)(Buffer*, long long offset);
  void (*fault)(int kind, const char* name, int rank, const long long* index);
  void (*barrier)(int line);
  void (*warp_barrier)(int line);
  void (*grid_barrier)(int line);
  unsigned long long (*exchange)(int operation, unsigned long long value, int lane, int line);
  void (*close_registers)(const Bank*, int count);
  void (*copy_async)(Buffer* to, long long to_offset, Buffer* from, long long from_offset, int count);
  void (*commit)();
  void (*wait)(int pending);
  void (*zero_async)(Buffer* to, long long to_offset, int count);
  void (*together)(Together* mine, int line);
  void (*async_fence)();
  void (*read_unordered)(Buffer*, long long offset);  // by a unit that sees what was written before a fence alone
  int (*products_committed)(int more);  // groups of products of this thread, that so many were just added to
  long long bank_conflicts;  // turns that reads of matrices waited for each other, beyond the first
};

static Engine* engine;

// The element's number, or -1 (and a fault) where an index leaves its own dimension.
static TW_CALL long long locate(const Grid* grid, const long long* index) {
  long long offset = 0;
  for (int d = 0; d < grid->rank; ++d) {
    if (static_cast<unsigned long long>(index[d]) >= static_cast<unsigned long long>(grid->extent[d])) {
      engine->fault(OUT_OF_BOUNDS, grid->name, grid->rank, index);
      return -1;
    }
    offset = offset * grid->extent[d] + index[d];
  }
  return offset;
}
template <class... I> TW_CALL long long find(const Grid* grid, I... i) {
  long long offset = 0;
  const long long* extent = grid->extent;
  bool inside = true;
  ((inside = inside && static_cast<unsigned long long>(i) < static_cast<unsigned long long>(*extent),
    offset = offset * *extent++ + i), ...);
  if (inside) return offset;
  const long long index[] = {i..., 0};
  return locate(grid, index);  // names the fault
}
template <class> using Whole = long long;  // every index travels as one type: one instance a rank

template <class T> struct Plain { using type = T; };
template <class T> struct Plain<const T> { using type = T; };
template <class T> struct IsConst { static constexpr bool value = false; };
template <class T> struct IsConst<const T> { static constexpr bool value = true; };
// A narrow float read from memory is a float at once: C++ allows one conversion of ours in a row.
template <class T> struct Value { using type = T; };
template <> struct Value<half> { using type = float; };
template <> struct Value<bfloat16> { using type = float; };
template <> struct Value<tf32> { using type = float; };
template <> struct Value<e4m3> { using type = float; };

static TW_CALL void unwritten_register(const Grid* grid, long long offset) {
  long long index[most_dimensions];
  for (int d = grid->rank - 1; d >= 0; --d) {
    index[d] = offset % grid->extent[d];
    offset /= grid->extent[d];
  }
  engine->fault(UNINITIALISED, grid->name, grid->rank, index);
}

// The first element of `count` neighbours, or -1 (and a fault) where one of them is out of bounds.
static TW_CALL long long whole_packet(const Grid* grid, const long long* index, int count) {
  const int last = grid->rank - 1;
  long long end[most_dimensions];
  for (int d = 0; d <= last; ++d) end[d] = index[d];
  end[last] += count - 1;
  const long long first = locate(grid, index);
  return first < 0 || locate(grid, end) < 0 ? -1 : first;
}

// One element of global or shared memory.
template <class T> struct Reference {
  using Element = typename Plain<T>::type;
  Buffer* buffer;
  long long offset;  // -1 out of bounds

  TW_CALL Element read() const {
    if (offset < 0) return Element{};
    if (buffer->cells) engine->read(buffer, offset);
    return reinterpret_cast<const Element*>(buffer->base)[offset];
  }
  TW_CALL void write(Element value) const {
    if (offset < 0) return;
    engine->write(buffer, offset);
    reinterpret_cast<Element*>(buffer->base)[offset] = value;
  }
  operator typename Value<Element>::type() const { return read(); }
  const Reference& operator=(Element value) const { write(value); return *this; }
  const Reference& operator=(const Reference& other) const { write(other.read()); return *this; }
};

// Where N neighbours along the last dimension begin.
template <class T> struct Place {
  Buffer* buffer;
  long long index[most_dimensions];

  TW_CALL long long first(int count) const {
    const long long start = whole_packet(buffer, index, count);
    const unsigned long long address = reinterpret_cast<unsigned long long>(buffer->base + start * sizeof(T));
    if (start >= 0 && address % (count * sizeof(T))) engine->fault(MISALIGNED, buffer->name, buffer->rank, index);
    return start;
  }
  Reference<T> element(long long start, int k) const { return {buffer, start + k}; }
};

template <class T, long long... E> struct View {
  Buffer* buffer;

  template <class... I> Reference<T> operator()(I... i) const {
    static_assert(sizeof...(I) == sizeof...(E), "one index per dimension");
    return {buffer, find<Whole<I>...>(buffer, i...)};
  }
  template <class... I> Place<T> at(I... i) const {
    static_assert(sizeof...(I) == sizeof...(E) && sizeof...(E) > 0, "one index per dimension");
    return {buffer, {static_cast<long long>(i)...}};
  }
  template <class... I> Place<T> apart(I... i) const {
    static_assert(sizeof...(I) == 2 * sizeof...(E) && sizeof...(E) > 0, "two numbers per dimension");
    const long long given[] = {static_cast<long long>(i)...};
    Place<T> place{buffer, {}};
    for (int d = 0; d < static_cast<int>(sizeof...(E)); ++d) place.index[d] = given[d] + given[sizeof...(E) + d];
    return place;
  }
};

enum : unsigned char { IN_FLIGHT = 4 };
struct Flight;

// A thread's register array; bit 0 of a state: written, bit 1: read, bit 2: a product of it is under way.
struct Bank : Grid {
  void* data;
  unsigned char* state;
  Flight* flight;
};

static TW_CALL void register_in_flight(const Bank* bank) { engine->fault(ASYNC, bank->name, 0, nullptr); }

template <class T> struct RegisterReference {
  Bank* bank;
  long long offset;

  TW_CALL T read() const {
    if (offset < 0) return T{};
    if (!(bank->state[offset] & 1)) unwritten_register(bank, offset);
    if (bank->state[offset] & IN_FLIGHT) register_in_flight(bank);
    bank->state[offset] |= 2;
    return static_cast<const T*>(bank->data)[offset];
  }
  TW_CALL void write(T value) const {
    if (offset < 0) return;
    if (bank->state[offset] & IN_FLIGHT) register_in_flight(bank);
    bank->state[offset] |= 1;
    static_cast<T*>(bank->data)[offset] = value;
  }
  operator typename Value<T>::type() const { return read(); }
  const RegisterReference& operator=(T value) const { write(value); return *this; }
  const RegisterReference& operator=(const RegisterReference& other) const { write(other.read()); return *this; }
  const RegisterReference& operator=(const Reference<T>& other) const { write(other.read()); return *this; }
};

template <class T> struct RegisterPlace {
  Bank* bank;
  long long index[most_dimensions];

  long long first(int count) const { return whole_packet(bank, index, count); }
  RegisterReference<T> element(long long start, int k) const { return {bank, start + k}; }
};

// Calls a kernel of any signature with the arguments' addresses.
template <int... N> struct Numbers {};
template <int N, int... Rest> struct Count : Count<N - 1, N - 1, Rest...> {};
template <int... Rest> struct Count<0, Rest...> { using type = Numbers<Rest...>; };
template <class... A, int... N> void call_with(void (*kernel)(A...), void** arguments, Numbers<N...>) {
  kernel(*static_cast<A*>(arguments[N])...);
}
template <class... A> void call(void (*kernel)(A...), void** arguments) {
  call_with(kernel, arguments, typename Count<sizeof...(A)>::type{});
}
template <class... A> constexpr int parameters(void (*)(A...)) { return sizeof...(A); }

}  // namespace emulate

template <class T, long long... E> struct Global : emulate::View<T, E...> {
  template <class... D> Global(T* start, const char* name, D... extents) {
    const long long given[] = {static_cast<long long>(extents)..., 0};
    const long long extent[] = {E..., 0};
    long long whole[sizeof...(E) + 1];
    int next = 0;
    for (unsigned d = 0; d < sizeof...(E); ++d) whole[d] = extent[d] == any ? given[next++] : extent[d];
    using Element = typename emulate::Plain<T>::type;
    this->buffer = emulate::engine->open_global(const_cast<Element*>(start), name, sizeof(T),
                                                !emulate::IsConst<T>::value, sizeof...(E), whole);
  }
};

template <class T, long long... E> struct Shared : emulate::View<T, E...> {
  Shared(int first_byte, const char* name) {
    const long long extent[] = {E..., 0};
    this->buffer = emulate::engine->open_shared(first_byte, name, sizeof(T), sizeof...(E), extent);
  }
};

template <class T, long long... E> struct Regs {
  enum : int { count = static_cast<int>(Shape<E...>::count) };
  T data[count];
  unsigned char state[count] = {};
  emulate::Bank bank;

  explicit Regs(const char* name) : bank{{name, sizeof...(E), {E...}}, data, state, nullptr} {
    __builtin_memset(data, 0xff, sizeof(data));
  }
  ~Regs() {
    bool under_way = false;
    for (int e = 0; bank.flight && e < count; ++e) under_way = under_way || state[e] & emulate::IN_FLIGHT;
    if (under_way) emulate::register_in_flight(&bank);
    __builtin_free(bank.flight);
    if (emulate::engine->uses_all) emulate::engine->close_registers(&bank, count);
  }
  template <class... I> emulate::RegisterReference<T> operator()(I... i) {
    static_assert(sizeof...(I) == sizeof...(E), "one index per dimension");
    return {&bank, emulate::find<emulate::Whole<I>...>(&bank, i...)};
  }
  template <class... I> emulate::RegisterPlace<T> at(I... i) {
    static_assert(sizeof...(I) == sizeof...(E) && sizeof...(E) > 0, "one index per dimension");
    return {&bank, {static_cast<long long>(i)...}};
  }
};

TW_FN unsigned short half_bits(float value) {
  const unsigned whole = bits_as<unsigned>(value);
  const unsigned short sign = static_cast<unsigned short>(whole >> 16 & 0x8000u);
  const unsigned magnitude = whole & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<unsigned short>(0x7fffu);  // the device's canonical NaN
  if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: let float addition round at the right bit
    const float shifted = bits_as<float>(magnitude) + 0.5f;
    return static_cast<unsigned short>(sign | (bits_as<unsigned>(shifted) - 0x3f000000u));
  }
  const unsigned odd = magnitude >> 13 & 1u;
  return static_cast<unsigned short>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

TW_FN float half_value(unsigned short bits) {
  const unsigned sign = static_cast<unsigned>(bits & 0x8000u) << 16;
  const unsigned exponent = bits >> 10 & 0x1fu, fraction = bits & 0x3ffu;
  if (exponent == 0x1fu) return bits_as<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {
    const float value = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -value : value;
  }
  return bits_as<float>(sign | (exponent + 112u) << 23 | fraction << 13);
}

TW_FN unsigned short bfloat16_bits(float value) {
  const unsigned whole = bits_as<unsigned>(value);
  if ((whole & 0x7fffffffu) > 0x7f800000u) return static_cast<unsigned short>(0x7fffu);
  return static_cast<unsigned short>((whole + 0x7fffu + (whole >> 16 & 1u)) >> 16);
}

TW_FN unsigned tf32_bits(float value) {
  const unsigned whole = bits_as<unsigned>(value);
  if ((whole & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu;
  return (whole + 0x1000u) & 0xffffe000u;
}

TW_FN int thread() { return emulate::engine->thread; }
TW_FN int block_x() { return emulate::engine->block[0]; }
TW_FN int block_y() { return emulate::engine->block[1]; }
TW_FN int block_z() { return emulate::engine->block[2]; }

TW_FN void barrier(int line = __builtin_LINE()) { emulate::engine->barrier(line); }
TW_FN void meet() { emulate::engine->barrier(0); }
TW_FN void warp_barrier(int line = __builtin_LINE()) { emulate::engine->warp_barrier(line); }
TW_FN unsigned grid_turn(const unsigned*) { return 0; }
TW_FN void grid_barrier(const unsigned* = nullptr, unsigned = 0, int line = __builtin_LINE()) {
  emulate::engine->grid_barrier(line);
}

namespace emulate {
enum Operation { SHUFFLE_XOR, SHUFFLE_DOWN, SHUFFLE_FROM };
template <class T> inline T exchange(int operation, T value, int argument, int line) {
  unsigned long long packed = 0;
  __builtin_memcpy(&packed, &value, sizeof(T));
  packed = engine->exchange(operation, packed, argument, line);
  __builtin_memcpy(&value, &packed, sizeof(T));
  return value;
}
}  // namespace emulate

template <class T> TW_FN T shuffle_xor(T value, int mask, int line = __builtin_LINE()) {
  return emulate::exchange(emulate::SHUFFLE_XOR, value, mask, line);
}
template <class T> TW_FN T shuffle_down(T value, int distance, int line = __builtin_LINE()) {
  return emulate::exchange(emulate::SHUFFLE_DOWN, value, distance, line);
}
template <class T> TW_FN T shuffle(T value, int lane, int line = __builtin_LINE()) {
  return emulate::exchange(emulate::SHUFFLE_FROM, value, lane, line);
}

template <int N, class To, class From> TW_FN void copy(const To& to, const From& from) {
  const long long source = from.first(N), target = to.first(N);
  if (source < 0 || target < 0) return;
  for (int k = 0; k < N; ++k) to.element(target, k).write(from.element(source, k).read());
}

template <int N, class To, class From> TW_FN void copy_async(const To& to, const From& from) {
  const long long source = from.first(N), target = to.first(N);
  if (source >= 0 && target >= 0) emulate::engine->copy_async(to.buffer, target, from.buffer, source, N);
}
template <int N, class To, class From> TW_FN void copy_async_or_zero(const To& to, const From& from, bool wanted) {
  if (wanted) return copy_async<N>(to, from);
  const long long target = to.first(N);
  if (target >= 0) emulate::engine->zero_async(to.buffer, target, N);
}
template <class From> TW_FN void prefetch(const From&) {}
TW_FN void begin() {}
TW_FN int times(int count) { return count; }
TW_FN void commit() { emulate::engine->commit(); }
template <int Pending> TW_FN void wait() { emulate::engine->wait(Pending); }

// ---- tensor cores

namespace emulate {

struct Rows : Together {
  unsigned long long address;
  unsigned char row[16];
  unsigned char received[16];
};

// Eight rows of 16 bytes at a time; rows in the same quarter of the banks wait for each other.
static TW_CALL void gather_rows(Rows** lanes) {
  for (int phase = 0; phase < 4; ++phase) {
    int most = 0;
    for (int group = 0; group < 8; ++group) {
      int met = 0;
      for (int l = 8 * phase; l < 8 * phase + 8; ++l) {
        bool again = static_cast<int>(lanes[l]->address / 16 % 8) != group;
        for (int before = 8 * phase; before < l; ++before) again = again || lanes[before]->address == lanes[l]->address;
        met += !again;
      }
      most = met > most ? met : most;
    }
    engine->bank_conflicts += most - 1;
  }
}
template <int Bytes, bool Transposed> void share_rows(Together** given) {
  Rows** lanes = reinterpret_cast<Rows**>(given);
  gather_rows(lanes);
  const int each = 4 / Bytes;
  for (int l = 0; l < warp_size; ++l)
    for (int m = 0; m < 4; ++m)
      for (int k = 0; k < each; ++k) {
        const int near = l % 4 * each + k, far = l / 4;
        const int row = Transposed ? near : far, column = Transposed ? far : near;
        __builtin_memcpy(lanes[l]->received + 4 * m + Bytes * k, lanes[8 * m + row]->row + Bytes * column, Bytes);
      }
}

struct Product : Together {
  double a[16], b[8], c[4];  // which hold floats and integers alike
};

// Shapes and lanes as in intrinsics/gpu_matrix.py. Products are exact; their sum is rounded once, as it is stored, and by
// the hardware in an order of its own.
template <int Depth> void multiply(Together** given) {
  Product** lanes = reinterpret_cast<Product**>(given);
  constexpr int each = Depth / 8;  // elements of a register
  static double a[16][Depth], b[Depth][8];
  for (int l = 0; l < warp_size; ++l) {
    for (int e = 0; e < Depth / 2; ++e)
      a[l / 4 + e / each % 2 * 8][l % 4 * each + e % each + e / (2 * each) * 4 * each] = lanes[l]->a[e];
    for (int e = 0; e < Depth / 4; ++e) b[l % 4 * each + e % each + e / each * 4 * each][l / 4] = lanes[l]->b[e];
  }
  for (int l = 0; l < warp_size; ++l)
    for (int e = 0; e < 4; ++e) {
      const int row = l / 4 + e / 2 * 8, column = l % 4 * 2 + e % 2;
      double sum = lanes[l]->c[e];
      for (int k = 0; k < Depth; ++k) sum += a[row][k] * b[k][column];
      lanes[l]->c[e] = sum;
    }
}

template <int Depth, class T, class A> void mma(const RegisterPlace<T>& c, const A& a, const A& b, int line) {
  Product mine;
  mine.run = multiply<Depth>;
  const long long first[] = {c.first(4), a.first(Depth / 2), b.first(Depth / 4)};
  for (int e = 0; e < Depth / 2; ++e) mine.a[e] = first[1] < 0 ? 0.0 : static_cast<float>(a.element(first[1], e).read());
  for (int e = 0; e < Depth / 4; ++e) mine.b[e] = first[2] < 0 ? 0.0 : static_cast<float>(b.element(first[2], e).read());
  for (int e = 0; e < 4; ++e) mine.c[e] = first[0] < 0 ? 0.0 : c.element(first[0], e).read();
  engine->together(&mine, line);
  if (first[0] >= 0) for (int e = 0; e < 4; ++e) c.element(first[0], e).write(static_cast<T>(mine.c[e]));
}

}  // namespace emulate

template <int N, bool Transposed, class T>
TW_FN void ldmatrix(const emulate::RegisterPlace<T>& to, const emulate::Place<T>& from, int line = __builtin_LINE()) {
  emulate::Rows mine;
  mine.run = emulate::share_rows<sizeof(T), Transposed>;
  const long long source = from.first(N), target = to.first(N);
  mine.address = source < 0 ? 0 : reinterpret_cast<unsigned long long>(from.buffer->base + source * sizeof(T));
  for (int k = 0; k < N; ++k) {
    const T value = source < 0 ? T{} : from.element(source, k).read();
    __builtin_memcpy(mine.row + k * sizeof(T), &value, sizeof(T));
  }
  emulate::engine->together(&mine, line);
  if (target < 0) return;
  for (int k = 0; k < N; ++k) {
    T value;
    __builtin_memcpy(&value, mine.received + k * sizeof(T), sizeof(T));
    to.element(target, k).write(value);
  }
}

TW_FN void unpack8(const emulate::RegisterPlace<half>& to, const emulate::RegisterPlace<unsigned char>& from, int shift,
                   int mask, float zero, float scale) {
  const long long source = from.first(8), target = to.first(8);
  for (int k = 0; k < 8 && source >= 0 && target >= 0; ++k) {
    const int code = static_cast<int>(from.element(source, k).read()) >> shift & mask;
    to.element(target, k).write(half((static_cast<float>(code) - zero) * scale));
  }
}

template <int Bits, class Zero, class Scale>
TW_FN void unpack_codes(const emulate::RegisterPlace<half>& to, const emulate::RegisterPlace<unsigned char>& from,
                        Zero zero, Scale scale, int number) {
  const long long source = from.first(2 * Bits), target = to.first(4);
  for (int k = 0; k < 4 && source >= 0 && target >= 0; ++k) {
    const int place = 2 * number + k % 2;
    int code = from.element(source, Bits == 4 ? place : place + 8 * (k / 2)).read();
    if (Bits == 4) code = code >> 4 * (k / 2) & 15;
    to.element(target, k).write(half((static_cast<float>(code) - static_cast<float>(zero)) * static_cast<float>(scale)));
  }
}

template <class C, class A> TW_FN void mma_float16(const C& c, const A& a, const A& b, int line = __builtin_LINE()) {
  emulate::mma<16>(c, a, b, line);
}
template <class C, class A> TW_FN void mma_bfloat16(const C& c, const A& a, const A& b, int line = __builtin_LINE()) {
  emulate::mma<16>(c, a, b, line);
}
template <class C, class A> TW_FN void mma_tf32(const C& c, const A& a, const A& b, int line = __builtin_LINE()) {
  emulate::mma<8>(c, a, b, line);
}
template <class C, class A> TW_FN void mma_int8(const C& c, const A& a, const A& b, int line = __builtin_LINE()) {
  emulate::mma<32>(c, a, b, line);
}
template <class C, class A> TW_FN void mma_e4m3(const C& c, const A& a, const A& b, int line = __builtin_LINE()) {
  emulate::mma<32>(c, a, b, line);
}

}  // namespace tw

#include "emulate_group.hpp"

#define TW_ENTRY(name)                                                                                \
  extern "C" TW_EXPORT void tw_call_##name(void** arguments) { tw::emulate::call(name, arguments); }  \
  extern "C" TW_EXPORT int tw_parameters_##name() { return tw::emulate::parameters(name); }
#define TW_ATTACH \
  extern "C" TW_EXPORT void tw_attach(tw::emulate::Engine* engine) { tw::emulate::engine = engine; }
