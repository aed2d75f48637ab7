/* What a core can do: multiply-adds by instruction, and bytes read and written at each memory level, by one core alone
 * and by all at once. Every figure is the best of many short bursts, taken in several passes over all figures: other
 * work on the machine makes bursts slower, never faster, and rarely spoils all of them.
 *
 * Compiled for this processor with VECTOR_BYTES and VECTOR_REGISTERS given, and TW_SDOT, TW_VNNI, TW_AVX_VNNI,
 * TW_VDP_BF16, TW_AMX_BF16 and TW_AMX_INT8 where it has them. Prints "name alone all" a line, each as soon as it is
 * known: whatever an instruction does to the process, the lines before it stand. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#define LANES (VECTOR_BYTES / 4)
#define WINDOW (8 << 10) /* bytes between two looks at the end of the set */
#define BURST_SECONDS 100e-6 /* far longer than threads take to start together, far shorter than a time slice */
#define SPINS_BEFORE_YIELD 20000
#define LINE 128
#define PAGE (2 << 20)
/* A processor runs a little slower when all are busy, never at two thirds: then something else ran on one of them. */
#define DISTURBED 0.67
/* A pass that still raises a figure by this much says that the passes before it were disturbed. */
#define BETTER 1.04

enum { NO_MEMORY = 2, NO_THREADS = 3 };

typedef float vec __attribute__((vector_size(VECTOR_BYTES)));

/* The compiler takes the value as changed here, and must have it in a vector register. */
#if defined(__aarch64__)
#define HIDE(x) __asm__ volatile("" : "+w"(x))
#define USE4(a, b, c, d) __asm__ volatile("" ::"w"(a), "w"(b), "w"(c), "w"(d))
#elif defined(__AVX512F__)
#define HIDE(x) __asm__ volatile("" : "+v"(x))
#define USE4(a, b, c, d) __asm__ volatile("" ::"v"(a), "v"(b), "v"(c), "v"(d))
#else
#define HIDE(x) __asm__ volatile("" : "+x"(x))
#define USE4(a, b, c, d) __asm__ volatile("" ::"x"(a), "x"(b), "x"(c), "x"(d))
#endif

#define TIMES12(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#if VECTOR_REGISTERS >= 32
#define CHAINS 24
#define TIMES_CHAINS(X) TIMES12(X) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23)
#else
#define CHAINS 12
#define TIMES_CHAINS(X) TIMES12(X)
#endif

typedef struct {
    _Alignas(LINE) char *set; /* what a burst reads or writes, one window after the other, round and round */
    int64_t bytes, at;
    double start, end;
    int index;
    struct session *session;
} worker;

/* Does `count` repetitions of something, and says how much that was. */
typedef double (*burst)(worker *self, int64_t count);

typedef struct session {
    _Alignas(LINE) _Atomic int arrived;
    _Alignas(LINE) _Atomic int generation;
    _Alignas(LINE) int threads, stop;
    burst work;
    int64_t count;
    double until, best;
    worker *workers;
} session;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- arithmetic ---- */

/* One addition of whole numbers after the other: one cycle each on every processor there is. */
static double cycles(worker *self, int64_t count)
{
    (void)self;
    uint64_t x = 1, y = 3;
    __asm__ volatile("" : "+r"(y));
    for (int64_t i = 0; i < count; i++) {
#define STEP(n) x ^= y; __asm__ volatile("" : "+r"(x));
        TIMES12(STEP) TIMES12(STEP) TIMES12(STEP) TIMES12(STEP)
#undef STEP
    }
    return 48.0 * (double)count;
}

/* Each chain multiplies its own register: a product that chains share would be computed once, and only added. */
static double fma_float32(worker *self, int64_t count)
{
    (void)self;
    /* Too small to change the sums: no denormals and no infinities, whose speed may differ. */
    vec m = (vec){0} + 1e-9f;
    HIDE(m);
#define DECLARE(n) vec a##n = (vec){0} + (n + 1.0f);
    TIMES_CHAINS(DECLARE)
#undef DECLARE
    for (int64_t i = 0; i < count; i++) {
#define STEP(n) a##n += a##n * m;
        TIMES_CHAINS(STEP)
#undef STEP
    }
#define KEEP(n) HIDE(a##n);
    TIMES_CHAINS(KEEP)
#undef KEEP
    return (double)CHAINS * LANES * (double)count;
}

/* One chain through the addend, as the accumulator of a contraction is. */
static double fma_chain(worker *self, int64_t count)
{
    (void)self;
    vec a = {0}, x = (vec){0} + 1.5f, y = (vec){0} + 1e-3f;
    for (int64_t i = 0; i < count; i++) {
#define STEP(n) HIDE(x); a += x * y;
        TIMES12(STEP)
#undef STEP
    }
    HIDE(a);
    return 12.0 * LANES * (double)count;
}

/* Instructions beyond the plain multiply-add, on twelve registers each, spelled for the assembler: what is measured is
 * the instruction itself, whatever the compiler calls it. */
#define DOT(name, bytes, macs, text, constraint)                                                                      \
    static double name(worker *self, int64_t count)                                                                   \
    {                                                                                                                 \
        (void)self;                                                                                                   \
        typedef int wide __attribute__((vector_size(bytes)));                                                         \
        wide x = {0}, y = {0};                                                                                        \
        wide a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, a4 = {0}, a5 = {0};                                              \
        wide a6 = {0}, a7 = {0}, a8 = {0}, a9 = {0}, a10 = {0}, a11 = {0};                                            \
        for (int64_t i = 0; i < count; i++) {                                                                         \
            DOT_STEP(a0, text, constraint) DOT_STEP(a1, text, constraint) DOT_STEP(a2, text, constraint)              \
            DOT_STEP(a3, text, constraint) DOT_STEP(a4, text, constraint) DOT_STEP(a5, text, constraint)              \
            DOT_STEP(a6, text, constraint) DOT_STEP(a7, text, constraint) DOT_STEP(a8, text, constraint)              \
            DOT_STEP(a9, text, constraint) DOT_STEP(a10, text, constraint) DOT_STEP(a11, text, constraint)            \
        }                                                                                                             \
        return 12.0 * (macs) * (double)count;                                                                         \
    }
#define DOT_STEP(a, text, constraint) __asm__ volatile(text : "+" constraint(a) : constraint(x), constraint(y));

#if defined(TW_SDOT)
DOT(sdot_int8, 16, 16, "sdot %0.4s, %1.16b, %2.16b", "w")
#endif
#if defined(TW_VNNI)
DOT(vnni_int8, 64, 64, "vpdpbusd %2, %1, %0", "v")
#elif defined(TW_AVX_VNNI)
DOT(vnni_int8, 32, 32, "%{vex%} vpdpbusd %2, %1, %0", "x")
#endif
#if defined(TW_VDP_BF16)
DOT(vdp_bf16, 64, 32, "vdpbf16ps %2, %1, %0", "v")
#endif

#if defined(TW_AMX_BF16) || defined(TW_AMX_INT8)
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* The kernel gives the tile registers to a process that asks, before its first use of them. */
static int may_use_tiles(void)
{
#if defined(__linux__)
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

/* Eight tiles of 16 rows of 64 bytes, all zero. */
static void open_tiles(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } configuration = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        configuration.row_bytes[i] = 64;
        configuration.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(configuration));
    __asm__ volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3\n\t"
                     "tilezero %tmm4\n\ttilezero %tmm5\n\ttilezero %tmm6\n\ttilezero %tmm7");
}

/* A product takes 52 cycles and one can start every 16: four accumulators keep the unit busy, as they do in a kernel
 * of 2 by 2 tiles. */
#define TILES(name, macs, instruction)                                                                                \
    static double name(worker *self, int64_t count)                                                                   \
    {                                                                                                                 \
        (void)self;                                                                                                   \
        open_tiles();                                                                                                 \
        for (int64_t i = 0; i < count; i++)                                                                           \
            __asm__ volatile(instruction " %tmm6, %tmm4, %tmm0\n\t" instruction " %tmm7, %tmm4, %tmm1\n\t"            \
                             instruction " %tmm6, %tmm5, %tmm2\n\t" instruction " %tmm7, %tmm5, %tmm3");              \
        __asm__ volatile("tilerelease");                                                                              \
        return 4.0 * (macs) * (double)count;                                                                          \
    }
#endif
#if defined(TW_AMX_BF16)
TILES(amx_bf16, 16 * 16 * 32, "tdpbf16ps")
#endif
#if defined(TW_AMX_INT8)
TILES(amx_int8, 16 * 16 * 64, "tdpbssd")
#endif

/* ---- memory ---- */

static char *next_window(worker *self)
{
    char *window = self->set + self->at;
    self->at = self->at + WINDOW >= self->bytes ? 0 : self->at + WINDOW;
    return window;
}

static double read_set(worker *self, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const vec *p = (const vec *)next_window(self);
        for (int64_t k = 0; k < WINDOW / VECTOR_BYTES; k += 8) {
            USE4(p[k], p[k + 1], p[k + 2], p[k + 3]);
            USE4(p[k + 4], p[k + 5], p[k + 6], p[k + 7]);
        }
    }
    return (double)count * WINDOW;
}

static double write_set(worker *self, int64_t count)
{
    vec x = (vec){0} + 1.0f;
    for (int64_t i = 0; i < count; i++) {
        vec *p = (vec *)next_window(self);
        HIDE(x); /* and the compiler cannot make it a call of memset, which may go around the caches */
        for (int64_t k = 0; k < WINDOW / VECTOR_BYTES; k += 4) {
            p[k] = x;
            p[k + 1] = x;
            p[k + 2] = x;
            p[k + 3] = x;
            __asm__ volatile("" ::: "memory");
        }
    }
    return (double)count * WINDOW;
}

/* Pages that nobody wrote are all the same page of zeros. */
static double touch_set(worker *self, int64_t count)
{
    (void)count;
    memset(self->set, 1, (size_t)self->bytes);
    return 1.0;
}

/* ---- bursts ---- */

static void meet(session *s)
{
    int generation = atomic_load(&s->generation);
    if (atomic_fetch_add(&s->arrived, 1) == s->threads - 1) {
        atomic_store(&s->arrived, 0);
        atomic_store(&s->generation, generation + 1);
        return;
    }
    for (int64_t spins = 0; atomic_load_explicit(&s->generation, memory_order_acquire) == generation; spins++) {
        if (spins > SPINS_BEFORE_YIELD) sched_yield();
    }
}

/* From the first one's start to the last one's end: only bursts that really ran at the same time look fast. */
static void judge(session *s, double amount)
{
    double start = s->workers[0].start, end = s->workers[0].end;
    for (int i = 1; i < s->threads; i++) {
        if (s->workers[i].start < start) start = s->workers[i].start;
        if (s->workers[i].end > end) end = s->workers[i].end;
    }
    double rate = amount / (end - start);
    if (rate > s->best) s->best = rate;
    s->stop = now() >= s->until;
}

/* Two threads on one processor would look like two that share its speed. */
static void stay_on_one(worker *self)
{
#if defined(__linux__)
    cpu_set_t usable, one;
    if (sched_getaffinity(getpid(), sizeof usable, &usable) != 0) return;
    int skip = self->index;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &usable) || skip-- > 0) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        sched_setaffinity(0, sizeof one, &one);
        return;
    }
#else
    (void)self;
#endif
}

static void *rounds(void *argument)
{
    worker *self = argument;
    session *s = self->session;
    if (s->threads > 1) stay_on_one(self);
    for (;;) {
        meet(s);
        if (s->stop) return NULL;
        self->start = now();
        double amount = s->work(self, s->count);
        self->end = now();
        meet(s);
        if (self->index == 0) judge(s, amount);
    }
}

/* The best rate of one worker in that many seconds of bursts. The calling thread only waits: where it may run is
 * what the workers choose their processors from. */
static double best_rate(worker *workers, int threads, burst work, int64_t count, double seconds)
{
    session s = {.threads = threads, .work = work, .count = count, .until = now() + seconds, .workers = workers};
    pthread_t *running = calloc((size_t)threads, sizeof *running);
    if (!running) exit(NO_MEMORY);
    for (int i = 0; i < threads; i++) {
        workers[i].session = &s;
        if (pthread_create(&running[i], NULL, rounds, &workers[i]) != 0) exit(NO_THREADS);
    }
    for (int i = 0; i < threads; i++) pthread_join(running[i], NULL);
    free(running);
    return s.best;
}

/* How many repetitions make a burst. */
static int64_t burst_count(worker *first, burst work)
{
    for (int64_t count = 1;; count *= 2) {
        double start = now();
        work(first, count);
        if (now() - start >= BURST_SECONDS || count >= (int64_t)1 << 40) return count;
    }
}

/* ---- what is measured ---- */

typedef struct {
    const char *name;
    burst work;
    int64_t bytes; /* of the set of one worker */
    int far; /* a set of its own, that nothing else brings into a cache */
    double alone, all;
    int64_t count;
} figure;

static void *allocate(int64_t bytes)
{
    size_t rounded = ((size_t)bytes + PAGE - 1) / PAGE * PAGE;
    void *memory = NULL;
    if (posix_memalign(&memory, PAGE, rounded) != 0) return NULL;
#if defined(MADV_HUGEPAGE)
    madvise(memory, rounded, MADV_HUGEPAGE);
#endif
    return memory;
}

static worker *workers_with(int threads, int64_t bytes)
{
    worker *workers = NULL;
    if (posix_memalign((void **)&workers, LINE, (size_t)threads * sizeof *workers) != 0) exit(NO_MEMORY);
    for (int i = 0; i < threads; i++) {
        workers[i] = (worker){.set = allocate(bytes), .bytes = bytes, .index = i};
        if (!workers[i].set) exit(NO_MEMORY);
    }
    /* By the worker itself, so that on a machine with several memories each gets the nearest. */
    best_rate(workers, threads, touch_set, 1, 0);
    return workers;
}

/* Whether the figure was clearly worse until now. */
static int measure(figure *f, worker *workers, int threads, double seconds)
{
    int moves = f->work == read_set || f->work == write_set;
    for (int w = 0; w < threads && moves && !f->far; w++) {
        workers[w].bytes = f->bytes;
        workers[w].at = 0;
    }
    if (f->count == 0) f->count = burst_count(&workers[0], f->work);
    double alone = best_rate(workers, 1, f->work, f->count, seconds);
    double all = threads > 1 ? best_rate(workers, threads, f->work, f->count, seconds) : alone;
    int better = alone > BETTER * f->alone || all > BETTER * f->all;
    if (alone > f->alone) f->alone = alone;
    if (all > f->all) f->all = all;
    printf("%s %.6g %.6g\n", f->name, f->alone, f->all);
    fflush(stdout);
    return better;
}

/* The bytes that one worker reads and writes at L1, at L2, in the outer cache (0: there is none) and in main memory;
 * how many passes, and how many seconds more passes may go on where the machine is disturbed; seconds for one figure
 * in one pass. */
__attribute__((visibility("default"))) int tw_probe(
    int threads, int64_t level1, int64_t level2, int64_t level3, int64_t main_memory, int passes, double patience,
    double seconds)
{
    double give_up = now() + patience;
    figure figures[] = {
        {"clock", cycles, 0, 0, 0, 0, 0},
        {"fma_chain", fma_chain, 0, 0, 0, 0, 0},
        {"fma_float32", fma_float32, 0, 0, 0, 0, 0},
        {"read_L1", read_set, level1, 0, 0, 0, 0},
        {"read_L2", read_set, level2, 0, 0, 0, 0},
        {"read_L3", read_set, level3, 0, 0, 0, 0},
        {"read_DRAM", read_set, main_memory, 1, 0, 0, 0},
        {"write_L1", write_set, level1, 0, 0, 0, 0},
        {"write_L2", write_set, level2, 0, 0, 0, 0},
        {"write_L3", write_set, level3, 0, 0, 0, 0},
        {"write_DRAM", write_set, main_memory, 1, 0, 0, 0},
#if defined(TW_SDOT)
        {"sdot_int8", sdot_int8, 0, 0, 0, 0, 0},
#endif
#if defined(TW_VNNI) || defined(TW_AVX_VNNI)
        {"vnni_int8", vnni_int8, 0, 0, 0, 0, 0},
#endif
#if defined(TW_VDP_BF16)
        {"vdp_bf16", vdp_bf16, 0, 0, 0, 0, 0},
#endif
#if defined(TW_AMX_BF16)
        {"amx_bf16", amx_bf16, 0, 0, 0, 0, 0},
#endif
#if defined(TW_AMX_INT8)
        {"amx_int8", amx_int8, 0, 0, 0, 0, 0},
#endif
    };
    int count = (int)(sizeof figures / sizeof *figures);
    worker *near = workers_with(threads, level3 > level2 ? level3 : level2);
    worker *far = workers_with(threads, main_memory);
#if defined(TW_AMX_BF16) || defined(TW_AMX_INT8)
    if (!may_use_tiles()) {
        while (strncmp(figures[count - 1].name, "amx", 3) == 0) count--;
    }
#endif
    int better = 1;
    for (int pass = 0;; pass++) {
        int settled = !better && figures[0].all > DISTURBED * figures[0].alone;
        if (pass >= passes && (settled || now() > give_up)) break;
        better = 0;
        for (int i = 0; i < count; i++) {
            figure *f = &figures[i];
            int absent = f->bytes == 0 && (f->work == read_set || f->work == write_set);
            if (!absent) better |= measure(f, f->far ? far : near, threads, seconds);
        }
    }
    return 0;
}
