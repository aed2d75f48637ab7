// The emulator's tensor cores that four warps feed as one from shared memory, or with rows in registers: part of
// emulate.hpp. A product is noted when it is issued, and done when its sums are waited for: until then they may not be
// touched, nor rows in registers, and what it reads may not change. Where the operands' elements lie in memory is
// computed from addresses, as by the hardware.
#pragma once

namespace tw {
namespace emulate {

constexpr int most_products = 64;  // under way at a time
constexpr int most_columns = 256;
constexpr int most_depth = 32;
// Elements of the sum that one product takes: 32 bytes of them.
template <class T> constexpr int depth_of() { return 32 / sizeof(T); }

struct Pending {
  Buffer *a, *b;  // no `a` where rows are in registers
  Bank* rows;
  long long first_row;
  unsigned long long a_start, b_start;  // bytes from the start of the arena's memory
  bool a_turned, b_turned;
  bool on;  // sums go on; else they begin anew
  int columns, along, group;
  unsigned long long seen;  // of what this lane read when it was issued
};

struct Flight {
  Pending product[most_products];
  long long first;  // of the sums
  int sums, count;
  void (*finish)(Bank*, int line);  // of the operands' type
};

struct Grouped : Together {
  Pending* product;
  float a[most_depth / 2], b[most_columns];
  double c[most_columns / 2];  // which hold floats and integers alike
  int warp;
};

// Packets of 16 bytes change places by the number of their line of 128.
inline unsigned long long exchanged(unsigned long long address) { return address ^ (address >> 7 & 7) << 4; }

template <class T>
inline unsigned long long matrix_address(unsigned long long start, bool turned, int along, int own, int summed) {
  if (turned) return exchanged(start + own % 64 * 2 + own / 64 * along + summed % 8 * 128 + summed / 8 * 1024);
  return exchanged(start + own % 8 * 128 + own / 8 * 1024 + summed * sizeof(T));
}

template <class T> inline unsigned long long bits_of(T value) { return value.bits; }
inline unsigned long long bits_of(signed char value) { return static_cast<unsigned char>(value); }

template <class T> TW_CALL float matrix_element(Buffer* buffer, unsigned long long address, unsigned long long* seen) {
  const unsigned long long base = reinterpret_cast<unsigned long long>(buffer->base);
  long long count = 1;
  for (int d = 0; d < buffer->rank; ++d) count *= buffer->extent[d];
  const long long offset = static_cast<long long>(address - base) / static_cast<long long>(sizeof(T));
  if (address < base || offset >= count) {
    const long long index[] = {offset};
    engine->fault(OUT_OF_BOUNDS, buffer->name, 1, index);
    return 0.0f;
  }
  engine->read_unordered(buffer, offset);
  const T value = reinterpret_cast<const T*>(buffer->base)[offset];
  *seen = *seen * 1099511628211ull + bits_of(value);
  return static_cast<float>(value);
}

// What a lane fetches for its warp: a 32nd of its 16 rows, and of all columns.
template <class T> TW_CALL unsigned long long fetch_share(const Pending& product, Grouped* mine) {
  unsigned long long seen = 0;
  constexpr int depth = depth_of<T>();
  const int lane = engine->thread % warp_size, warp = engine->thread / warp_size % 4;
  const int rows = 16 * depth / warp_size, columns = product.columns * depth / warp_size;
  for (int e = 0; e < rows; ++e) {
    const int n = lane * rows + e;
    if (product.rows) {
      const T value = static_cast<const T*>(product.rows->data)[product.first_row + e];
      seen = seen * 1099511628211ull + bits_of(value);
      mine->a[e] = static_cast<float>(value);
      continue;
    }
    mine->a[e] = matrix_element<T>(product.a, matrix_address<T>(product.a_start, product.a_turned, 0, warp * 16 + n / depth, n % depth), &seen);
  }
  for (int e = 0; e < columns; ++e) {
    const int n = lane * columns + e;
    mine->b[e] = matrix_element<T>(product.b, matrix_address<T>(product.b_start, product.b_turned, product.along, n / depth, n % depth), &seen);
  }
  return seen;
}

static TW_CALL bool same_operands(Grouped** lanes) {
  bool same = true;
  for (int l = 1; l < warp_size; ++l)
    same = same && lanes[l]->product->a_start == lanes[0]->product->a_start &&
           lanes[l]->product->b_start == lanes[0]->product->b_start && lanes[l]->warp == lanes[0]->warp;
  return same;
}

static TW_CALL void issue_group(Together** given) {
  Grouped** lanes = reinterpret_cast<Grouped**>(given);
  if (!same_operands(lanes)) engine->fault(SHUFFLE, lanes[0]->product->b->name, 0, nullptr);
}

template <int Depth> TW_CALL void multiply_group(Together** given) {
  Grouped** lanes = reinterpret_cast<Grouped**>(given);
  static float a[16][most_depth], b[most_depth][most_columns];
  const int columns = lanes[0]->product->columns;
  const int of_rows = 16 * Depth / warp_size, of_columns = columns * Depth / warp_size;
  for (int l = 0; l < warp_size; ++l) {
    for (int e = 0; e < of_rows; ++e) {
      if (lanes[l]->product->rows) a[l / 4 + e / 2 % 2 * 8][l % 4 * 2 + e % 2 + e / 4 * 8] = lanes[l]->a[e];
      else a[(l * of_rows + e) / Depth][(l * of_rows + e) % Depth] = lanes[l]->a[e];
    }
    for (int e = 0; e < of_columns; ++e) {
      const int n = l * of_columns + e;
      b[n % Depth][n / Depth] = lanes[l]->b[e];
    }
  }
  for (int l = 0; l < warp_size; ++l)
    for (int e = 0; e < columns / 2; ++e) {
      const int row = l / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + l % 4 * 2 + e % 2;
      double sum = lanes[l]->c[e];
      for (int k = 0; k < Depth; ++k) sum += static_cast<double>(a[row][k]) * b[k][column];
      lanes[l]->c[e] = sum;
    }
}

template <class T> TW_CALL unsigned long long matrix_start(const Place<T>& place) {
  const long long first = locate(place.buffer, place.index);
  return reinterpret_cast<unsigned long long>(place.buffer->base) + (first < 0 ? 0 : first) * sizeof(T);
}

template <class S, class T> TW_CALL void finish_product(Bank* bank, int line) {
  Flight* flight = bank->flight;
  Pending& product = flight->product[0];
  Grouped mine;
  mine.run = multiply_group<depth_of<T>()>;
  mine.product = &product;
  mine.warp = engine->thread / warp_size;
  if (fetch_share<T>(product, &mine) != product.seen) engine->fault(ASYNC, product.b->name, 0, nullptr);
  if (product.rows)
    for (int e = 0; e < depth_of<T>() / 2; ++e) product.rows->state[product.first_row + e] &= ~IN_FLIGHT;
  S* sums = static_cast<S*>(bank->data) + flight->first;
  for (int e = 0; e < flight->sums; ++e) mine.c[e] = product.on ? sums[e] : 0;
  engine->together(&mine, line);
  for (int e = 0; e < flight->sums; ++e) sums[e] = static_cast<S>(mine.c[e]);
  --flight->count;
  for (int p = 0; p < flight->count; ++p) flight->product[p] = flight->product[p + 1];
  if (!flight->count)
    for (int e = 0; e < flight->sums; ++e) bank->state[flight->first + e] &= ~IN_FLIGHT;
}

template <class S, class T> TW_CALL void issue_product(const RegisterPlace<S>& c, Pending given, int line) {
  Bank* bank = c.bank;
  if (!bank->flight) {
    bank->flight = static_cast<Flight*>(__builtin_malloc(sizeof(Flight)));
    bank->flight->count = 0;
  }
  Flight* flight = bank->flight;
  flight->first = locate(bank, c.index);
  flight->sums = given.columns / 2;
  flight->finish = finish_product<S, T>;
  for (int e = 0; e < flight->sums; ++e) {
    unsigned char& state = bank->state[flight->first + e];
    if (given.on && !(state & 1)) unwritten_register(bank, flight->first + e);
    if (!given.on && state & IN_FLIGHT) register_in_flight(bank);
    state |= 1 | 2 | IN_FLIGHT;
  }
  for (int e = 0; given.rows && e < depth_of<T>() / 2; ++e) {
    unsigned char& state = given.rows->state[given.first_row + e];
    if (!(state & 1)) unwritten_register(given.rows, given.first_row + e);
    state |= 2 | IN_FLIGHT;
  }
  if (flight->count == most_products) return engine->fault(ASYNC, bank->name, 0, nullptr);
  Pending& product = flight->product[flight->count++];
  product = given;
  product.group = engine->products_committed(0);
  Grouped mine;
  mine.run = issue_group;
  mine.product = &product;
  mine.warp = engine->thread / warp_size;
  product.seen = fetch_share<T>(product, &mine);
  engine->together(&mine, line);
}

template <int N, bool TurnedA, bool TurnedB, int Along, bool On, class S, class T>
void multiply_memory(const RegisterPlace<S>& c, const Place<T>& a, const Place<T>& b, int line) {
  issue_product<S, T>(c, {a.buffer, b.buffer, nullptr, 0, matrix_start(a), matrix_start(b), TurnedA, TurnedB, On, N, Along}, line);
}
template <int N, bool TurnedB, int Along, class T>
void multiply_kept(const RegisterPlace<float>& c, const RegisterPlace<T>& a, const Place<T>& b, int line) {
  const long long first = a.first(depth_of<T>() / 2);
  if (first < 0) return;
  issue_product<float, T>(c, {nullptr, b.buffer, a.bank, first, 0, matrix_start(b), false, TurnedB, true, N, Along}, line);
}

}  // namespace emulate

TW_FN void async_fence() { emulate::engine->async_fence(); }
TW_FN void wgmma_fence() {}
template <class S> TW_FN void wgmma_commit(const emulate::RegisterPlace<S>&) { emulate::engine->products_committed(1); }
// Groups end in order, whatever they sum up in; `Pending` of those that a thread has committed may be under way still.
template <int Pending, int Sums, class S>
TW_FN void wgmma_wait(const emulate::RegisterPlace<S>& c, int line = __builtin_LINE()) {
  emulate::Flight* flight = c.bank->flight;
  while (flight && flight->count && flight->product[0].group < emulate::engine->products_committed(0) - Pending)
    flight->finish(c.bank, line);
}
#define TW_IN_MEMORY(name, sum, type) \
  template <int N, bool TurnedA, bool TurnedB, int Along, bool On> \
  TW_FN void name(const emulate::RegisterPlace<sum>& c, const emulate::Place<type>& a, const emulate::Place<type>& b, \
                  int line = __builtin_LINE()) { \
    static_assert(sizeof(type) == 2 || !(TurnedA || TurnedB), "lines of other elements run along the sum"); \
    emulate::multiply_memory<N, TurnedA, TurnedB, Along, On>(c, a, b, line); \
  }
TW_IN_MEMORY(wgmma_float16, float, half)
TW_IN_MEMORY(wgmma_bfloat16, float, bfloat16)
TW_IN_MEMORY(wgmma_tf32, float, tf32)
TW_IN_MEMORY(wgmma_int8, int, signed char)
TW_IN_MEMORY(wgmma_e4m3, float, e4m3)
#define TW_IN_REGISTERS(name, type) \
  template <int N, bool TurnedB, int Along> \
  TW_FN void name(const emulate::RegisterPlace<float>& c, const emulate::RegisterPlace<type>& a, \
                  const emulate::Place<type>& b, int line = __builtin_LINE()) { \
    emulate::multiply_kept<N, TurnedB, Along>(c, a, b, line); \
  }
TW_IN_REGISTERS(wgmma_kept_float16, half)
TW_IN_REGISTERS(wgmma_kept_bfloat16, bfloat16)

}  // namespace tw
