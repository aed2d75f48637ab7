// The engine under emulated CUDA kernels: threads of a block as fibres, barriers, warp exchanges, asynchronous copies,
// and the record of every tracked element from which races, poison reads and uncovered elements are told.
// Uses C's library alone: the compiler of the ziglang package would first have to build C++'s.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fibres.hpp"
#include "tilewright.cuh"

using namespace tw::emulate;

// ---- the launch, as Python describes it

extern "C" struct tw_fault {
  int kind, rank;
  char name[64];
  long long index[most_dimensions];
  int thread, block[3];
  int other_thread, other_block[3];  // -1 where nobody else takes part
};

extern "C" struct tw_launch {
  void (*entry)(void**);
  void** arguments;
  int grid[3];
  int threads;
  long long shared_bytes;
  int arrays;  // the array arguments: address and size
  void** addresses;
  long long* sizes;
  const char* const* writes_all;  // names, ended by null
  const char* const* reads_all;
  int uses_all;
  int most_faults;
  tw_fault* faults;
  int fault_count;
  long long bank_conflicts;
  int waits;  // its blocks wait for each other: all of them are alive at a time
};

namespace {

constexpr size_t stack_bytes = 256 << 10;
constexpr size_t guard_bytes = 64 << 10;  // a whole page for every page size in use

enum State { READY, AT_BARRIER, AT_WARP, AT_GRID, DONE };

// A growing row of plain values.
template <class T> struct Row {
  T* data;
  int size, room;

  T* add() {
    if (size == room) {
      room = room ? room * 2 : 16;
      data = static_cast<T*>(realloc(static_cast<void*>(data), room * sizeof(T)));
      if (!data) abort();
    }
    return &data[size++];
  }
  T& operator[](int i) { return data[i]; }
  T* begin() { return data; }
  T* end() { return data + size; }
};

void* zeroed(size_t bytes) {
  void* memory = calloc(bytes ? bytes : 1, 1);
  if (!memory) abort();
  return memory;
}

struct Copy {
  Buffer *to, *from;  // from nowhere: zeros
  long long to_offset, from_offset;
  int count;
  int group;
};

struct Thread {
  void* stack;
  State state;
  int line;
  int operation;  // -1: a warp barrier, -2: something that the warp does as one
  int argument;
  unsigned long long value, received;
  Row<Copy> copies;  // issued and not landed, oldest first
  int group;         // the one that a commit closes
  int products;      // groups of products that were committed
  unsigned fenced;   // how many writes there had been at its last fence
};

struct Registers {
  Grid grid;
  unsigned char* state;
  int count;
};

struct Launch {
  tw_launch* given;
  Thread* threads;
  unsigned* warp_epoch;
  Row<Buffer*> globals, shared;
  Row<Registers> registers;
  Cell* arena_cells;
  unsigned char* arena;
  unsigned epoch, block_epoch;  // now, and when the running block began, or went on after a grid barrier
  unsigned first_epoch;         // when the running block began
  unsigned grid_epoch;          // at the last grid barrier: what was done before is ordered
  int block;                    // the running one's number
  unsigned writes;              // to shared memory
  unsigned char* stacks;        // of the running block's threads
  void* scheduler;
  bool stop, at_grid;
};

Engine shared_engine;
Launch* now;
unsigned char* stacks;
int stack_count;

int block_number() { return now->block; }

void report(int kind, const char* name, int rank, const long long* index, int other_thread, int other_block) {
  tw_launch* given = now->given;
  int alike = 0;
  for (int f = 0; f < given->fault_count; ++f)
    alike += given->faults[f].kind == kind && !strncmp(given->faults[f].name, name, sizeof(given->faults[f].name) - 1);
  if (alike >= 3 || given->fault_count >= given->most_faults) return;  // the third of a kind says it all
  tw_fault& fault = given->faults[given->fault_count++];
  memset(&fault, 0, sizeof(fault));
  fault.kind = kind;
  fault.rank = rank;
  strncpy(fault.name, name, 63);
  for (int d = 0; d < rank; ++d) fault.index[d] = index[d];
  fault.thread = shared_engine.thread;
  fault.other_thread = other_thread;
  for (int d = 0; d < 3; ++d) fault.block[d] = shared_engine.block[d];
  const int* grid = given->grid;
  fault.other_block[0] = other_block < 0 ? -1 : other_block % grid[0];
  fault.other_block[1] = other_block < 0 ? -1 : other_block / grid[0] % grid[1];
  fault.other_block[2] = other_block < 0 ? -1 : other_block / grid[0] / grid[1];
}

void report_element(int kind, const Grid* buffer, long long offset, int other_thread, int other_block) {
  long long index[most_dimensions];
  for (int d = buffer->rank - 1; d >= 0; --d) {
    index[d] = offset % buffer->extent[d];
    offset /= buffer->extent[d];
  }
  report(kind, buffer->name, buffer->rank, index, other_thread, other_block);
}

// ---- views

bool listed(const char* const* names, const char* name) {
  for (; *names; ++names) if (!strcmp(*names, name)) return true;
  return false;
}

long long elements(const Buffer* buffer) {
  long long count = 1;
  for (int d = 0; d < buffer->rank; ++d) count *= buffer->extent[d];
  return count;
}

Buffer* new_buffer(const char* name, int element, int rank, const long long* extent) {
  Buffer* buffer = static_cast<Buffer*>(zeroed(sizeof(Buffer)));
  buffer->name = name;
  buffer->element = element;
  buffer->rank = rank;
  for (int d = 0; d < rank; ++d) buffer->extent[d] = extent[d];
  return buffer;
}

void stop_here();

// A view of more than there is: no access through it would be safe.
void refuse(const Buffer* buffer) {
  report(SIZE, buffer->name, buffer->rank, buffer->extent, -1, -1);
  now->stop = true;
  stop_here();
}

Buffer* open_global(void* data, const char* name, int element, bool writable, int rank, const long long* extent) {
  for (Buffer* buffer : now->globals) if (buffer->name == name) return buffer;
  Buffer* buffer = new_buffer(name, element, rank, extent);
  buffer->base = static_cast<unsigned char*>(data);
  const tw_launch* given = now->given;
  for (int a = 0; a < given->arrays; ++a) if (given->addresses[a] == data) buffer->bytes = given->sizes[a];
  const long long wanted = elements(buffer) * element;
  if (wanted > buffer->bytes) {
    *now->globals.add() = buffer;
    refuse(buffer);
  }
  for (const Buffer* other : now->globals) {
    const bool apart = buffer->base + wanted <= other->base || other->base + elements(other) * other->element <= buffer->base;
    // The kernel's pointers are declared __restrict__: a written buffer must not be reachable twice.
    if (!apart && wanted && (writable || other->cells)) report(ALIAS, name, 0, nullptr, -1, -1);
  }
  buffer->whole_write = listed(given->writes_all, name);
  buffer->whole_read = listed(given->reads_all, name);
  if (writable || buffer->whole_read) {
    buffer->cells = static_cast<Cell*>(zeroed(static_cast<size_t>(elements(buffer)) * sizeof(Cell)));
  }
  *now->globals.add() = buffer;
  return buffer;
}

Buffer* open_shared(long long first_byte, const char* name, int element, int rank, const long long* extent) {
  for (Buffer* buffer : now->shared) if (buffer->name == name) return buffer;
  Buffer* buffer = new_buffer(name, element, rank, extent);
  buffer->shared = true;
  buffer->base = now->arena + first_byte;
  buffer->bytes = now->given->shared_bytes - first_byte;
  buffer->id = static_cast<short>(now->shared.size + 1);
  if (elements(buffer) * element > buffer->bytes) {
    *now->shared.add() = buffer;
    refuse(buffer);
  }
  buffer->cells = now->arena_cells;
  *now->shared.add() = buffer;
  return buffer;
}

// ---- the record of accesses

// Shared cells are kept by byte of the arena, so that buffers of different types that share bytes meet in one record;
// first bytes of words lie together, because most accesses are to them.
inline Cell& cell_at(const Buffer* buffer, long long offset) {
  if (!buffer->shared) return buffer->cells[offset];
  const long long byte = buffer->base - now->arena + offset * buffer->element;
  return buffer->cells[byte / 4 + byte % 4 * (now->given->shared_bytes / 4 + 1)];
}

inline Cell& cell_of(Buffer* buffer, long long offset) {
  if (now->stop) stop_here();
  return cell_at(buffer, offset);
}

bool same_warp(int a, int b) { return a / warp_size == b / warp_size; }

void note_read(Buffer* buffer, long long offset) {
  Cell& cell = cell_of(buffer, offset);
  const int me = shared_engine.thread;
  const unsigned warp_epoch = now->warp_epoch[me / warp_size];
  const bool again = cell.read_since_write && cell.reader == me && cell.read_epoch == now->epoch &&
                     cell.read_warp_epoch == warp_epoch && cell.owner == buffer->id;
  if (again && !cell.in_flight) return;  // nothing has happened since this thread read it
  if (cell.in_flight) report_element(ASYNC, buffer, offset, cell.writer, cell.write_block);
  const bool from_here = cell.ever_written && cell.write_epoch >= (buffer->shared ? now->first_epoch : now->block_epoch);
  if (buffer->shared ? !from_here || cell.owner != buffer->id : buffer->whole_write && !cell.ever_written) {
    if (!cell.in_flight) report_element(UNINITIALISED, buffer, offset, -1, -1);
  } else if (cell.ever_written) {
    const bool other_block = !from_here && cell.write_epoch >= now->grid_epoch;
    const bool unordered = cell.write_epoch == now->epoch && cell.writer != me &&
                           !(same_warp(cell.writer, me) && cell.write_warp_epoch != warp_epoch);
    if (other_block || unordered) report_element(RACE, buffer, offset, cell.writer, cell.write_block);
  }
  if (cell.read_epoch != now->epoch) {
    cell.readers_many = cell.readers_across_warps = false;
  } else if (!same_warp(cell.reader, me)) {
    cell.readers_across_warps = true;
  } else if (cell.read_warp_epoch != warp_epoch) {
    cell.readers_many = false;
  } else if (cell.reader != me) {
    cell.readers_many = true;
  }
  if (!cell.ever_read || cell.first_read_epoch < now->grid_epoch) {
    cell.first_read_epoch = now->epoch;
    cell.first_reader = me;
    cell.first_read_block = block_number();
  }
  cell.reader = me;
  cell.read_epoch = now->epoch;
  cell.read_warp_epoch = warp_epoch;
  cell.read_block = block_number();
  cell.ever_read = cell.read_since_write = true;
}

void note_write(Buffer* buffer, long long offset) {
  Cell& cell = cell_of(buffer, offset);
  const int me = shared_engine.thread;
  const unsigned warp_epoch = now->warp_epoch[me / warp_size];
  if (cell.in_flight) report_element(ASYNC, buffer, offset, cell.writer, cell.write_block);
  const bool read_here = cell.ever_read && cell.read_epoch == now->epoch;
  const unsigned before = now->grid_epoch;
  if (!buffer->shared && cell.ever_written && cell.write_epoch < now->block_epoch && cell.write_epoch >= before) {
    report_element(RACE, buffer, offset, cell.writer, cell.write_block);
  } else if (!buffer->shared && cell.ever_read && cell.first_read_epoch < now->block_epoch &&
             cell.first_read_epoch >= before) {
    report_element(RACE, buffer, offset, cell.first_reader, cell.first_read_block);
  } else if (cell.ever_written && cell.write_epoch == now->epoch && cell.writer != me &&
             !(same_warp(cell.writer, me) && cell.write_warp_epoch != warp_epoch)) {
    report_element(RACE, buffer, offset, cell.writer, cell.write_block);
  } else if (read_here && (cell.readers_across_warps || !same_warp(cell.reader, me) ||
                           (cell.read_warp_epoch == warp_epoch && (cell.readers_many || cell.reader != me)))) {
    report_element(RACE, buffer, offset, cell.reader, cell.read_block);
  } else if (buffer->whole_write && cell.ever_written && !cell.read_since_write) {
    report_element(OVERWRITTEN, buffer, offset, cell.writer, cell.write_block);
  }
  cell.ever_written = true;
  cell.read_since_write = false;
  cell.writer = me;
  cell.write_epoch = now->epoch;
  cell.write_warp_epoch = warp_epoch;
  cell.write_block = block_number();
  cell.owner = buffer->id;
  if (buffer->shared) cell.written_at = ++now->writes;
}

// Tensor cores that read by themselves see what a thread wrote only if it fenced its writes off before the barrier.
void async_fence() { now->threads[shared_engine.thread].fenced = now->writes; }

void read_unordered(Buffer* buffer, long long offset) {
  const Cell& cell = cell_of(buffer, offset);
  if (cell.ever_written && cell.written_at > now->threads[cell.writer].fenced)
    report_element(ASYNC, buffer, offset, cell.writer, cell.write_block);
  note_read(buffer, offset);
}

void fault(int kind, const char* name, int rank, const long long* index) {
  report(kind, name, rank, index, -1, -1);
  if (now->stop) stop_here();
}

void close_registers(const Bank* bank, int count) {
  for (Registers& known : now->registers) {
    if (known.grid.name != bank->name) continue;
    for (int e = 0; e < count; ++e) known.state[e] |= bank->state[e];
    return;
  }
  Registers* added = now->registers.add();
  *added = {*bank, static_cast<unsigned char*>(zeroed(count)), count};
  memcpy(added->state, bank->state, count);
}

// ---- fibres

void leave() { tw_switch(&now->threads[shared_engine.thread].stack, now->scheduler); }

void stop_here() {
  now->threads[shared_engine.thread].state = DONE;
  leave();
}

void land(const Copy& copy) {
  for (int k = 0; k < copy.count; ++k) {
    if (copy.from && copy.from->cells) note_read(copy.from, copy.from_offset + k);
    cell_of(copy.to, copy.to_offset + k).in_flight = false;
    note_write(copy.to, copy.to_offset + k);
  }
  const long long size = copy.to->element;
  if (!copy.from) memset(copy.to->base + copy.to_offset * size, 0, copy.count * size);
  else memcpy(copy.to->base + copy.to_offset * size, copy.from->base + copy.from_offset * size, copy.count * size);
}

void copy_async(Buffer* to, long long to_offset, Buffer* from, long long from_offset, int count) {
  Thread& thread = now->threads[shared_engine.thread];
  for (int k = 0; k < count; ++k) {
    note_write(to, to_offset + k);  // issuing already forbids others to touch the place
    cell_of(to, to_offset + k).in_flight = true;
  }
  *thread.copies.add() = {to, from, to_offset, from_offset, count, thread.group};
}

void zero_async(Buffer* to, long long to_offset, int count) { copy_async(to, to_offset, nullptr, 0, count); }

void commit() { ++now->threads[shared_engine.thread].group; }

int products_committed(int more) { return now->threads[shared_engine.thread].products += more; }

// Groups land in order; `pending` of the committed ones may stay in the air.
void wait(int pending) {
  Thread& thread = now->threads[shared_engine.thread];
  int landed = 0;
  while (landed < thread.copies.size && thread.copies[landed].group < thread.group - pending) land(thread.copies[landed++]);
  thread.copies.size -= landed;
  memmove(thread.copies.data, thread.copies.data + landed, thread.copies.size * sizeof(Copy));
}

void fibre() {
  now->given->entry(now->given->arguments);
  Thread& thread = now->threads[shared_engine.thread];
  if (thread.copies.size) report_element(ASYNC, thread.copies[0].to, thread.copies[0].to_offset, -1, -1);
  thread.state = DONE;
  leave();
  abort();  // a finished fibre is never resumed
}

void barrier(int line) {
  Thread& thread = now->threads[shared_engine.thread];
  thread.state = AT_BARRIER;
  thread.line = line;
  leave();
}

void grid_barrier(int line) {
  Thread& thread = now->threads[shared_engine.thread];
  thread.state = AT_GRID;
  thread.line = line;
  leave();
}

unsigned long long exchange(int operation, unsigned long long value, int argument, int line) {
  Thread& thread = now->threads[shared_engine.thread];
  thread.state = AT_WARP;
  thread.operation = operation;
  thread.argument = argument;
  thread.value = value;
  thread.line = line;
  leave();
  return thread.received;
}

void warp_barrier(int line) { exchange(-1, 0, 0, line); }

void together(Together* mine, int line) { exchange(-2, reinterpret_cast<unsigned long long>(mine), 0, line); }

void trouble(int kind, int who, int other) {
  shared_engine.thread = who;
  report(kind, "", 0, nullptr, other, other < 0 ? -1 : block_number());
}

// All lanes of a warp have arrived: hand each the value of its partner.
void exchange_warp(int first, int end) {
  Thread* threads = now->threads;
  for (int t = first; t < end; ++t) {
    Thread& thread = threads[t];
    if (thread.operation != threads[first].operation || thread.line != threads[first].line) trouble(SHUFFLE, t, first);
    if (thread.operation < 0) continue;  // done below, or nothing to do
    const int lane = t - first;
    int partner = thread.operation == SHUFFLE_XOR    ? lane ^ thread.argument
                  : thread.operation == SHUFFLE_DOWN ? lane + thread.argument
                                                     : thread.argument;
    if (thread.operation == SHUFFLE_DOWN && partner >= warp_size) partner = lane;  // as the hardware: its own value
    if (partner < 0 || first + partner >= end) {
      trouble(SHUFFLE, t, first + partner);
      partner = lane;
    }
    thread.received = threads[first + partner].value;
  }
  if (threads[first].operation == -2) {
    Together* lanes[warp_size];
    bool whole = end - first == warp_size;
    for (int t = first; t < end; ++t) {
      whole = whole && threads[t].operation == -2;
      lanes[t - first] = reinterpret_cast<Together*>(threads[t].value);
      whole = whole && lanes[t - first]->run == lanes[0]->run;
    }
    if (whole) lanes[0]->run(lanes);
    else trouble(SHUFFLE, first, end - 1);
  }
  if (threads[first].operation == -1) ++now->warp_epoch[first / warp_size];
  for (int t = first; t < end; ++t) threads[t].state = READY;
}

// Lets waiting threads go on; false when nobody can.
bool release() {
  Thread* threads = now->threads;
  const int count = now->given->threads;
  bool any_ready = false;
  for (int first = 0; first < count; first += warp_size) {
    const int end = first + warp_size < count ? first + warp_size : count;
    bool all = true;
    for (int t = first; t < end; ++t) all = all && threads[t].state == AT_WARP;
    if (!all) continue;
    exchange_warp(first, end);
    any_ready = true;
  }
  if (any_ready) return true;
  int waiting = -1, gone = -1, apart = -1, in_warp = -1;
  for (int t = 0; t < count; ++t) {
    if (threads[t].state == AT_BARRIER || threads[t].state == AT_GRID) {
      if (waiting >= 0 && (threads[t].line != threads[waiting].line || threads[t].state != threads[waiting].state))
        apart = t;
      waiting = t;
    }
    if (threads[t].state == DONE) gone = t;
    if (threads[t].state == AT_WARP) in_warp = t;
  }
  if (in_warp >= 0) {  // its warp will never be complete
    const int first = in_warp / warp_size * warp_size;
    int missing = first;
    for (int t = first; t < first + warp_size && t < count; ++t) if (threads[t].state != AT_WARP) missing = t;
    trouble(SHUFFLE, in_warp, missing);
    return false;
  }
  if (gone >= 0 || apart >= 0) {
    trouble(BARRIER, waiting, gone >= 0 ? gone : apart);
    return false;
  }
  if (threads[waiting].state == AT_GRID) {
    now->at_grid = true;
    return false;
  }
  ++now->epoch;
  for (int t = 0; t < count; ++t) threads[t].state = READY;
  return true;
}

void start_block() {
  Launch& launch = *now;
  launch.first_epoch = launch.block_epoch = ++launch.epoch;
  memset(launch.arena, 0xff, static_cast<size_t>(launch.given->shared_bytes));
  for (int t = 0; t < launch.given->threads; ++t) {
    Thread& thread = launch.threads[t];
    thread.state = READY;
    thread.copies.size = thread.group = 0;
    thread.fenced = 0;
    thread.stack = fresh_stack(launch.stacks + (t + 1) * stack_bytes, fibre);
  }
}

// Until all threads are done, or wait for the other blocks.
void run_block() {
  Launch& launch = *now;
  const int count = launch.given->threads;
  launch.at_grid = false;
  while (!launch.stop) {
    int done = 0;
    for (int t = 0; t < count && !launch.stop; ++t) {
      if (launch.threads[t].state == READY) {
        shared_engine.thread = t;
        tw_switch(&launch.scheduler, launch.threads[t].stack);
      }
      done += launch.threads[t].state == DONE;
    }
    if (done == count || launch.stop) return;
    if (release()) continue;
    if (launch.at_grid) return;
    launch.stop = true;
  }
}

void set_block(int number) {
  const int* grid = now->given->grid;
  now->block = number;
  shared_engine.block[0] = number % grid[0];
  shared_engine.block[1] = number / grid[0] % grid[1];
  shared_engine.block[2] = number / grid[0] / grid[1];
}

// A block that waits for the others: its threads on stacks of their own, and its part of shared memory.
struct Waiting {
  Thread* threads;
  unsigned* warp_epoch;
  unsigned char* arena;
  Cell* cells;
  unsigned first_epoch;
  bool is_done;
};

// All blocks from one grid barrier to the next; each finds its shared memory as it left it.
void run_waiting(int blocks) {
  Launch& launch = *now;
  const size_t threads = launch.given->threads, bytes = launch.given->shared_bytes;
  const size_t cells = (bytes + 4) * sizeof(Cell), warps = (threads + warp_size - 1) / warp_size * sizeof(unsigned);
  Thread* own_threads = launch.threads;
  unsigned* own_epochs = launch.warp_epoch;
  Waiting* waiting = static_cast<Waiting*>(zeroed(blocks * sizeof(Waiting)));
  for (int b = 0; b < blocks; ++b) {
    waiting[b].threads = static_cast<Thread*>(zeroed(threads * sizeof(Thread)));
    waiting[b].warp_epoch = static_cast<unsigned*>(zeroed(warps));
    waiting[b].arena = static_cast<unsigned char*>(zeroed(bytes));
    waiting[b].cells = static_cast<Cell*>(zeroed(cells));
  }
  for (bool first = true, more = true; more && !launch.stop; first = false) {
    int done = 0, last = -1;
    for (int b = 0; b < blocks && !launch.stop; ++b) {
      Waiting& block = waiting[b];
      set_block(b);
      launch.threads = block.threads;
      launch.warp_epoch = block.warp_epoch;
      launch.stacks = stacks + b * threads * stack_bytes;
      if (first) {
        start_block();
        block.first_epoch = launch.first_epoch;
        memcpy(block.cells, launch.arena_cells, cells);
      } else {
        memcpy(launch.arena, block.arena, bytes);
        memcpy(launch.arena_cells, block.cells, cells);
        launch.first_epoch = block.first_epoch;
        launch.block_epoch = ++launch.epoch;
        for (size_t t = 0; t < threads; ++t) block.threads[t].state = READY;
      }
      run_block();
      memcpy(block.arena, launch.arena, bytes);
      memcpy(block.cells, launch.arena_cells, cells);
      if (launch.at_grid) last = b;
      else ++done;
    }
    more = last >= 0;
    if (more && done && !launch.stop) {  // some wait for blocks that have ended
      set_block(last);
      trouble(BARRIER, 0, -1);
      launch.stop = true;
    }
    launch.grid_epoch = ++launch.epoch;
  }
  for (int b = 0; b < blocks; ++b) {
    for (size_t t = 0; t < threads; ++t) free(waiting[b].threads[t].copies.data);
    free(waiting[b].threads);
    free(waiting[b].warp_epoch);
    free(waiting[b].arena);
    free(waiting[b].cells);
  }
  free(waiting);
  launch.threads = own_threads;
  launch.warp_epoch = own_epochs;
}

void check_promises() {
  shared_engine.thread = -1;
  for (Buffer* buffer : now->globals) {
    const long long count = buffer->cells ? elements(buffer) : 0;
    for (long long e = 0; e < count; ++e) {
      if (buffer->whole_write && !buffer->cells[e].ever_written) report_element(UNWRITTEN, buffer, e, -1, -1);
      if (buffer->whole_read && !buffer->cells[e].ever_read) report_element(UNREAD, buffer, e, -1, -1);
    }
  }
  if (!shared_engine.uses_all) return;
  for (const Buffer* buffer : now->shared) {
    for (long long e = 0; e < elements(buffer); ++e) {
      const Cell& cell = cell_at(buffer, e);
      if (cell.ever_written && !cell.ever_read) report_element(UNREAD, buffer, e, -1, -1);
    }
  }
  for (const Registers& known : now->registers) {
    for (int e = 0; e < known.count; ++e)
      if (known.state[e] == 1) report_element(UNREAD, &known.grid, e, -1, -1);
  }
}

bool reserve_stacks(int count) {
  if (count <= stack_count) return true;
  void* memory = mmap(nullptr, count * stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  if (stacks) munmap(stacks, stack_count * stack_bytes);
  stacks = static_cast<unsigned char*>(memory);
  stack_count = count;
  for (int t = 0; t < count; ++t) mprotect(stacks + t * stack_bytes, guard_bytes, PROT_NONE);
  return true;
}

}  // namespace

extern "C" TW_EXPORT Engine* tw_engine() {
  shared_engine.open_global = open_global;
  shared_engine.open_shared = open_shared;
  shared_engine.read = note_read;
  shared_engine.write = note_write;
  shared_engine.fault = fault;
  shared_engine.barrier = barrier;
  shared_engine.warp_barrier = warp_barrier;
  shared_engine.grid_barrier = grid_barrier;
  shared_engine.exchange = exchange;
  shared_engine.close_registers = close_registers;
  shared_engine.copy_async = copy_async;
  shared_engine.commit = commit;
  shared_engine.wait = wait;
  shared_engine.zero_async = zero_async;
  shared_engine.together = together;
  shared_engine.async_fence = async_fence;
  shared_engine.read_unordered = read_unordered;
  shared_engine.products_committed = products_committed;
  return &shared_engine;
}

// 0 when the launch ran (with or without faults), 1 when there is no memory for it.
extern "C" TW_EXPORT int tw_run(tw_launch* given) {
  const int blocks = given->grid[0] * given->grid[1] * given->grid[2];
  if (!reserve_stacks(given->waits ? given->threads * blocks : given->threads)) return 1;
  const size_t arena_bytes = (static_cast<size_t>(given->shared_bytes) + 1023) / 1024 * 1024 + 1024;
  Launch launch{};
  launch.given = given;
  launch.threads = static_cast<Thread*>(zeroed(given->threads * sizeof(Thread)));
  launch.warp_epoch = static_cast<unsigned*>(zeroed((given->threads + warp_size - 1) / warp_size * sizeof(unsigned)));
  launch.arena_cells = static_cast<Cell*>(zeroed((given->shared_bytes + 4) * sizeof(Cell)));
  launch.arena = static_cast<unsigned char*>(aligned_alloc(1024, arena_bytes));
  if (!launch.arena) abort();
  now = &launch;
  given->fault_count = 0;
  shared_engine.uses_all = given->uses_all;
  shared_engine.bank_conflicts = 0;
  launch.stacks = stacks;
  if (given->waits) run_waiting(blocks);
  for (int b = 0; b < blocks && !given->waits && !launch.stop; ++b) {
    set_block(b);
    start_block();
    run_block();
  }
  given->bank_conflicts = shared_engine.bank_conflicts;
  if (!launch.stop) check_promises();
  for (Buffer* buffer : launch.globals) {
    free(buffer->cells);
    free(buffer);
  }
  for (Buffer* buffer : launch.shared) free(buffer);
  for (Registers& known : launch.registers) free(known.state);
  for (int t = 0; t < given->threads; ++t) free(launch.threads[t].copies.data);
  free(launch.globals.data);
  free(launch.shared.data);
  free(launch.registers.data);
  free(launch.threads);
  free(launch.warp_epoch);
  free(launch.arena_cells);
  free(launch.arena);
  now = nullptr;
  return 0;
}
