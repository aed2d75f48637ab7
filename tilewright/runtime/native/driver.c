/* Runs a compiled model: resolves the generated table's buffers, shares each stage's tiles among the team. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "driver.h"
#include "team.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LINE 128
#define PAGE 4096
#define HUGE_PAGE (2 << 20)
/* A dynamic stage hands out about this many pieces a worker: enough to even out, few enough to stay cheap. */
#define PIECES_PER_WORKER 8
#define DYNAMIC_ABOVE_TILES_PER_WORKER 4

enum { SHARED_EVENLY, ONE_TILE_A_WORKER, BALANCED, FIRST_WORKER_ONLY };

/* A stage made ready for this number of workers. Worker w owns share tiles, and one more if w < extra. */
typedef struct {
    tw_kernel kernel;
    void **buffers;
    const int64_t *extents;
    int64_t tiles, share, extra, piece;
    int32_t mode, barrier;
    int32_t first_worker; /* ONE_TILE_A_WORKER: who runs tile 0 */
    int32_t counter;      /* BALANCED: position among the balanced steps */
} step;

/* Where a caller's pointer goes at each run. */
typedef struct {
    void **slot;
    int64_t position;
} patch;

typedef struct {
    void *start, *map;
    size_t map_bytes;
} pages;

struct tw_model {
    tw_team *team;
    int workers;
    step *steps;
    void **buffers;
    patch *input_patches, *output_patches;
    int64_t input_patch_count, output_patch_count;
    int64_t *stage_ns;
    pages arena, weights, counters;
    pages *scratch;
    /* Next unclaimed tile of a worker's share, for each balanced step; each worker's row has lines of its own. Two
     * sets alternate between runs: a worker clears its row of the other set, which nobody reads meanwhile. */
    int64_t counter_row, balanced_steps;
    int counter_set;
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Fresh pages are zero and belong to nobody until touched, so that the first to touch decides their memory node. */
static int map_pages(pages *p, int64_t bytes)
{
    size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : PAGE;
    size_t total = (size_t)bytes + alignment;
    void *map = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return 0;
    void *start = (void *)(((uintptr_t)map + alignment - 1) / alignment * alignment);
#if defined(MADV_HUGEPAGE)
    if (alignment == HUGE_PAGE) madvise(start, (size_t)bytes, MADV_HUGEPAGE);
#endif
    *p = (pages){start, map, total};
    return 1;
}

static void unmap_pages(pages *p)
{
    if (p->map) munmap(p->map, p->map_bytes);
}

/* ---- running ---- */

static inline int64_t share_start(const step *s, int64_t worker)
{
    return worker * s->share + (worker < s->extra ? worker : s->extra);
}

static void run_tiles(const step *s, int64_t from, int64_t to, char *scratch)
{
    for (int64_t tile = from; tile < to; tile++) s->kernel(s->buffers, s->extents, tile, scratch);
}

static _Atomic int64_t *counter_row(const tw_model *m, int set, int worker)
{
    return (_Atomic int64_t *)m->counters.start + ((int64_t)set * m->workers + worker) * m->counter_row;
}

/* Own share first, in order, so that a worker meets the tiles it met in the stage before; then the others'. */
static void run_balanced(const tw_model *m, const step *s, int self, char *scratch)
{
    for (int i = 0; i < m->workers; i++) {
        int owner = self + i < m->workers ? self + i : self + i - m->workers;
        int64_t start = share_start(s, owner);
        int64_t length = share_start(s, owner + 1) - start;
        _Atomic int64_t *next = counter_row(m, m->counter_set, owner) + s->counter;
        /* The plain load keeps workers that find nothing from taking the line away from those at work. */
        while (atomic_load_explicit(next, memory_order_relaxed) < length) {
            int64_t from = atomic_fetch_add_explicit(next, s->piece, memory_order_relaxed);
            if (from >= length) break;
            int64_t to = from + s->piece < length ? from + s->piece : length;
            run_tiles(s, start + from, start + to, scratch);
        }
    }
}

static void run_step(const tw_model *m, const step *s, int self, char *scratch)
{
    switch (s->mode) {
    case SHARED_EVENLY:
        run_tiles(s, share_start(s, self), share_start(s, self + 1), scratch);
        return;
    case ONE_TILE_A_WORKER: {
        int64_t tile = self - s->first_worker;
        if (tile < 0) tile += m->workers;
        if (tile < s->tiles) run_tiles(s, tile, tile + 1, scratch);
        return;
    }
    case BALANCED:
        run_balanced(m, s, self, scratch);
        return;
    default:
        if (self == 0) run_tiles(s, 0, s->tiles, scratch);
    }
}

static void clear_counters_of_next_run(const tw_model *m, int self)
{
    _Atomic int64_t *row = counter_row(m, !m->counter_set, self);
    for (int64_t i = 0; i < m->balanced_steps; i++) atomic_store_explicit(row + i, 0, memory_order_relaxed);
}

static void run_steps(const tw_model *m, int self)
{
    char *scratch = m->scratch[self].start;
    for (int64_t i = 0; i < tw_model_table.stages; i++) {
        const step *s = m->steps + i;
        if (s->barrier) tw_team_barrier(m->team, self);
        run_step(m, s, self, scratch);
    }
    tw_team_barrier(m->team, self);
}

static void run_steps_timed(const tw_model *m, int self)
{
    char *scratch = m->scratch[self].start;
    int64_t *stage_ns = m->stage_ns;
    tw_team_barrier(m->team, self);
    int64_t before = now_ns();
    for (int64_t i = 0; i < tw_model_table.stages; i++) {
        run_step(m, m->steps + i, self, scratch);
        tw_team_barrier(m->team, self);
        int64_t now = now_ns();
        if (self == 0) stage_ns[i] = now - before;
        before = now;
    }
}

static void run_as_worker(void *argument, int self)
{
    const tw_model *m = argument;
    clear_counters_of_next_run(m, self);
    if (m->stage_ns) run_steps_timed(m, self);
    else run_steps(m, self);
}

static void touch_scratch(void *argument, int self)
{
    const tw_model *m = argument;
    volatile char *scratch = m->scratch[self].start;
    for (int64_t i = 0; i < tw_model_table.scratch_bytes; i += PAGE) scratch[i] = 0;
}

/* A run that a fork cut short in the child leaves its counters half used. */
static void reset_counters(void *argument)
{
    tw_model *m = argument;
    memset(m->counters.start, 0, (size_t)(2 * m->workers * m->counter_row) * sizeof(int64_t));
}

/* ---- creation ---- */

static void prepare_buffers(tw_model *m, const char *weights)
{
    for (int64_t i = 0; i < tw_model_table.buffers; i++) {
        const tw_buffer *b = &tw_model_table.buffer[i];
        void **slot = m->buffers + i;
        switch (b->space) {
        case TW_INPUT:
            m->input_patches[m->input_patch_count++] = (patch){slot, b->value};
            break;
        case TW_OUTPUT:
            m->output_patches[m->output_patch_count++] = (patch){slot, b->value};
            break;
        case TW_WEIGHT:
            *slot = (void *)(uintptr_t)(weights + b->value);
            break;
        default:
            *slot = (char *)m->arena.start + b->value;
        }
    }
}

static int choose_mode(const tw_model *m, const step *s, int balance)
{
    if (balance == TW_SERIAL || m->workers == 1) return FIRST_WORKER_ONLY;
    if (s->tiles <= 1 && s->first_worker == 0) return FIRST_WORKER_ONLY;
    if (s->tiles < m->workers) return ONE_TILE_A_WORKER;
    if (balance == TW_DYNAMIC) return BALANCED;
    if (balance == TW_AUTO && s->tiles > DYNAMIC_ABOVE_TILES_PER_WORKER * m->workers) return BALANCED;
    return SHARED_EVENLY;
}

/* offset: tiles of the stages since the last barrier, so that independent small stages spread over the workers. */
static void prepare_steps(tw_model *m)
{
    int64_t offset = 0;
    for (int64_t i = 0; i < tw_model_table.stages; i++) {
        const tw_stage *stage = &tw_model_table.stage[i];
        step *s = m->steps + i;
        if (stage->barrier_before) offset = 0;
        s->kernel = stage->kernel;
        s->buffers = m->buffers + stage->first_buffer;
        s->tiles = stage->tiles;
        s->extents = tw_model_table.extent + stage->first_extent;
        s->share = s->tiles / m->workers;
        s->extra = s->tiles % m->workers;
        s->piece = s->tiles / ((int64_t)m->workers * PIECES_PER_WORKER);
        if (s->piece < 1) s->piece = 1;
        s->first_worker = (int32_t)(offset % m->workers);
        s->barrier = i > 0 && stage->barrier_before;
        s->mode = choose_mode(m, s, stage->balance);
        if (s->mode == BALANCED) s->counter = (int32_t)m->balanced_steps++;
        offset += stage->balance == TW_SERIAL ? 1 : s->tiles;
    }
}

/* Between two groups that only worker 0 runs, program order is the barrier. Returns whether any group needs more. */
static int drop_barriers(tw_model *m)
{
    int parallel = 0, previous_alone = 0;
    for (int64_t i = 0; i < tw_model_table.stages;) {
        int alone = 1;
        int64_t end = i;
        do {
            if (m->steps[end++].mode != FIRST_WORKER_ONLY) alone = 0;
        } while (end < tw_model_table.stages && !m->steps[end].barrier);
        if (alone && previous_alone) m->steps[i].barrier = 0;
        if (!alone) parallel = 1;
        previous_alone = alone;
        i = end;
    }
    return parallel;
}

static int prepare(tw_model *m, const void *weights, int64_t run_spin_ns, int64_t idle_spin_ns)
{
    const tw_table *t = &tw_model_table;
    m->steps = calloc((size_t)t->stages + 1, sizeof *m->steps);
    m->buffers = calloc((size_t)t->buffers + 1, sizeof *m->buffers);
    m->input_patches = calloc((size_t)t->buffers + 1, sizeof *m->input_patches);
    m->output_patches = calloc((size_t)t->buffers + 1, sizeof *m->output_patches);
    if (!m->steps || !m->buffers || !m->input_patches || !m->output_patches) return 0;
    if (!map_pages(&m->arena, t->arena_bytes)) return 0;
    prepare_buffers(m, weights);
    prepare_steps(m);
    if (!drop_barriers(m)) m->workers = 1;

    m->scratch = calloc((size_t)m->workers, sizeof *m->scratch);
    if (!m->scratch) return 0;
    for (int i = 0; i < m->workers; i++)
        if (!map_pages(&m->scratch[i], t->scratch_bytes)) return 0;
    int64_t per_line = LINE / (int64_t)sizeof(int64_t);
    m->counter_row = (m->balanced_steps + per_line - 1) / per_line * per_line;
    if (!map_pages(&m->counters, 2 * m->workers * m->counter_row * (int64_t)sizeof(int64_t))) return 0;
    tw_team_work work = {reset_counters, touch_scratch, run_as_worker};
    m->team = tw_team_create(m->workers, run_spin_ns, idle_spin_ns, work, m);
    return m->team != NULL;
}

void tw_destroy(tw_model *m)
{
    if (!m) return;
    if (m->team) tw_team_destroy(m->team);
    for (int i = 0; m->scratch && i < m->workers; i++) unmap_pages(&m->scratch[i]);
    unmap_pages(&m->counters);
    unmap_pages(&m->arena);
    unmap_pages(&m->weights);
    free(m->scratch);
    free(m->output_patches);
    free(m->input_patches);
    free(m->buffers);
    free(m->steps);
    free(m);
}

tw_model *tw_create(const void *weights, int threads, int64_t run_spin_ns, int64_t idle_spin_ns)
{
    if (threads < 1 || threads > TW_MAX_THREADS) return NULL;
    tw_model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->workers = threads;
    if (prepare(m, weights, run_spin_ns, idle_spin_ns)) return m;
    tw_destroy(m);
    return NULL;
}

tw_model *tw_open(const char *weights_path, int threads)
{
    int file = open(weights_path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return NULL;
    struct stat info;
    int usable = fstat(file, &info) == 0 && (int64_t)info.st_size == tw_model_table.weight_bytes;
    size_t bytes = usable ? (size_t)info.st_size : 0;
    void *map = bytes > 0 ? mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, file, 0) : NULL;
    close(file);
    if (!usable || map == MAP_FAILED) return NULL;
    tw_model *m = tw_create(map, threads, TW_RUN_SPIN_NS, TW_IDLE_SPIN_NS);
    if (m) m->weights = (pages){map, map, bytes};
    else if (map) munmap(map, bytes);
    return m;
}

/* ---- entry points ---- */

static int run_locked(tw_model *m, int64_t *stage_ns)
{
    m->stage_ns = stage_ns;
    m->counter_set = !m->counter_set;
    return tw_team_run(m->team) == 0 ? TW_OK : TW_NO_THREADS;
}

int tw_run_profile(tw_model *m, void *const *inputs, void *const *outputs, int64_t *stage_ns)
{
    tw_team_lock(m->team);
    for (int64_t i = 0; i < m->input_patch_count; i++)
        *m->input_patches[i].slot = inputs[m->input_patches[i].position];
    for (int64_t i = 0; i < m->output_patch_count; i++)
        *m->output_patches[i].slot = outputs[m->output_patches[i].position];
    int status = run_locked(m, stage_ns);
    tw_team_unlock(m->team);
    return status;
}

int tw_run(tw_model *m, void *const *inputs, void *const *outputs)
{
    return tw_run_profile(m, inputs, outputs, NULL);
}

static void *object_data(const char *object, int64_t data_offset)
{
    void *data;
    memcpy(&data, object + data_offset, sizeof data);
    return data;
}

int tw_run_objects(tw_model *m, const char *const *objects, int64_t data_offset)
{
    const char *const *outputs = objects + tw_model_table.inputs;
    tw_team_lock(m->team);
    for (int64_t i = 0; i < m->input_patch_count; i++)
        *m->input_patches[i].slot = object_data(objects[m->input_patches[i].position], data_offset);
    for (int64_t i = 0; i < m->output_patch_count; i++)
        *m->output_patches[i].slot = object_data(outputs[m->output_patches[i].position], data_offset);
    int status = run_locked(m, NULL);
    tw_team_unlock(m->team);
    return status;
}

const tw_table *tw_describe(void)
{
    return &tw_model_table;
}
