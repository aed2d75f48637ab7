/* Runs a compiled model: resolves the generated table's buffers, shares each stage's tiles among the team. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "arithmetic.h"
#include "driver.h"
#include "placing.h"
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
/* In a march every worker reads a line of every other: among many, one line to count on is quicker. */
#define MOST_WORKERS_OF_A_MARCH 8
#define WATCH_NS 50000000

enum { SHARED_EVENLY, ONE_TILE_A_WORKER, BALANCED, FIRST_WORKER_ONLY };

/* A stage made ready for this number of workers. Worker w owns share tiles, and one more if w < extra. */
typedef struct {
    tw_kernel kernel;
    void **buffers;
    const int64_t *extents;
    int64_t tiles, share, extra, piece;
    int32_t mode, barrier;
    int32_t first_worker; /* ONE_TILE_A_WORKER: who runs tile 0 */
} step;

/* Steps that run without a barrier between them. Those of a chain all belong to worker 0 and may depend on each
 * other: one worker runs them in order, and they are one unit of work. Elsewhere a unit is a tile.
 * Those of a march have one tile a worker and do have barriers between them: every worker says for itself that it is
 * through a step and goes on when all have said so, where counting on a common line and opening the next group would
 * send two more lines from one worker to the other. Only the last step is counted. */
typedef struct {
    int64_t end; /* the step that starts the next group */
    int64_t units;
    int32_t chain, march;
    int32_t eager; /* the tiles are uneven, whoever is free takes the others' at once */
} group;

typedef struct {
    _Alignas(LINE) char *scratch;
    int hurried; /* in this worker's last group somebody was away */
} worker;

/* Where a caller's pointer goes at each run. */
typedef struct {
    void **slot;
    int64_t position;
    int64_t offset;
} patch;

typedef struct {
    void *start, *map;
    size_t map_bytes;
} pages;

struct tw_model {
    tw_team *team;
    int workers;
    step *steps;
    group *groups; /* for each step that starts one */
    /* For each step and the end: its first jump, or any of another step; and whether a run may come to it from elsewhere than the step
     * before it. */
    int64_t *first_jump;
    char *entered;
    worker *members;
    void **buffers;
    patch *input_patches, *output_patches;
    int64_t input_patch_count, output_patch_count;
    /* A run that is timed has a barrier around every stage. A late worker may look at the wrong run's pointer: it
     * then sees other groups, but can claim nothing in them. */
    _Atomic(int64_t *) stage_ns;
    int64_t opened_ns;
    /* Set by anyone at any time, taken back when the next run begins. Kernels are then skipped, and the run is over
     * with the group it is in. */
    _Atomic int cancelled;
    tw_watch watch;
    int64_t watched_ns; /* when the caller's thread looked last; it alone does */
    pages arena, weights, kept, member_pages;
    pages *scratch;
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Of one thread alone the time that it had a processor for: what else runs on the machine is not in it. */
static int64_t processor_ns(void)
{
#if defined(CLOCK_THREAD_CPUTIME_ID)
    struct timespec t;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) == 0) return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
#endif
    return now_ns();
}

/* A clock that is read in a few nanoseconds and goes by milliseconds. */
static int64_t coarse_now_ns(void)
{
#if defined(CLOCK_MONOTONIC_COARSE)
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
#else
    return now_ns();
#endif
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

static inline int64_t share_start(const step *s, int64_t owner)
{
    return owner * s->share + (owner < s->extra ? owner : s->extra);
}

/* How many units of the step belong to the owner; *start: the first of them. */
static inline int64_t share_of(const tw_model *m, const step *s, int owner, int64_t *start)
{
    switch (s->mode) {
    case FIRST_WORKER_ONLY:
        *start = 0;
        return owner == 0;
    case ONE_TILE_A_WORKER:
        *start = owner < s->first_worker ? owner - s->first_worker + m->workers : owner - s->first_worker;
        return *start < s->tiles;
    default:
        *start = share_start(s, owner);
        return share_start(s, owner + 1) - *start;
    }
}

static inline int64_t units_of(const step *s)
{
    return s->mode == FIRST_WORKER_ONLY ? 1 : s->tiles;
}

static inline int is_cancelled(const tw_model *m)
{
    return atomic_load_explicit(&m->cancelled, memory_order_relaxed);
}

/* From time to time the caller's thread asks whether to go on. */
static void look_up(tw_model *m)
{
    int64_t now = coarse_now_ns();
    if (now - m->watched_ns < WATCH_NS) return;
    if (m->watched_ns != 0 && m->watch()) tw_cancel(m);
    m->watched_ns = now;
}

/* The step that a run goes on with where it has come to this one. A run that was cancelled is at its end. */
static int64_t after_jumps(const tw_model *m, int64_t at)
{
    const tw_table *t = &tw_model_table;
    int64_t i = m->first_jump[at];
    while (i < t->jumps && t->jump[i].stage == at) {
        const tw_jump *jump = &t->jump[i++];
        if (jump->buffer >= 0 && *(const char *)m->buffers[jump->buffer] != 0) continue;
        at = jump->target;
        i = jump->next;
        if (is_cancelled(m)) break;
    }
    return is_cancelled(m) ? t->stages : at;
}

static inline void run_tiles(tw_model *m, const step *s, int64_t from, int64_t to, char *scratch)
{
    if (m->watch && scratch == m->members[0].scratch) look_up(m);
    for (int64_t tile = from; tile < to && !is_cancelled(m); tile++) s->kernel(s->buffers, s->extents, tile, scratch);
}

static void run_units(tw_model *m, const step *s, int64_t from, int64_t to, char *scratch)
{
    if (s->mode == FIRST_WORKER_ONLY) run_tiles(m, s, 0, s->tiles, scratch);
    else run_tiles(m, s, from, to, scratch);
}

static int64_t run_chain(tw_model *m, const group *g, uint32_t epoch, int64_t first, char *scratch)
{
    int64_t from;
    if (!tw_team_claim(m->team, 0, epoch, 1, 1, &from)) return 0;
    for (int64_t i = first; i < g->end; i++) run_tiles(m, m->steps + i, 0, m->steps[i].tiles, scratch);
    return 1;
}

/* Runs what is left of the owner's part of the group; returns the number of units. */
static int64_t run_part(tw_model *m, const group *g, uint32_t epoch, int64_t first, int owner, char *scratch)
{
    if (g->chain) return owner == 0 ? run_chain(m, g, epoch, first, scratch) : 0;
    int64_t units = 0;
    for (int64_t i = first; i < g->end; i++, epoch++) {
        const step *s = m->steps + i;
        int64_t start, from, taken, length = share_of(m, s, owner, &start);
        while ((taken = tw_team_claim(m->team, owner, epoch, length, s->piece, &from)) > 0) {
            run_units(m, s, start + from, start + from + taken, scratch);
            units += taken;
        }
    }
    return units;
}

static int64_t run_parts_of_others(
    tw_model *m, const group *g, uint32_t epoch, int64_t first, int self, int only_away)
{
    worker *me = m->members + self;
    int64_t units = 0;
    for (int i = 1; i < m->workers; i++) {
        int owner = self + i < m->workers ? self + i : self + i - m->workers;
        int away = tw_team_away(m->team, owner, epoch);
        if (only_away && !away) continue;
        int64_t taken = run_part(m, g, epoch, first, owner, me->scratch);
        if (taken > 0 && away) me->hurried = 1;
        units += taken;
    }
    return units;
}

/* Runs the worker's part of a march; the units of the last step it has run, or -1 when the group is over already. As
 * elsewhere it takes tiles of others only after some patience, unless they were away at the step before and still
 * are. */
static int64_t run_march(tw_model *m, const group *g, uint32_t opened, int64_t first, int self)
{
    worker *me = m->members + self;
    const step *last = m->steps + g->end - 1;
    uint32_t epoch = opened;
    int64_t from, mine = tw_team_claim(m->team, self, epoch, 1, 1, &from);
    for (const step *s = m->steps + first; s < last; s++, epoch++) {
        int hurried = me->hurried;
        me->hurried = 0;
        if (mine) {
            run_tiles(m, s, self, self + 1, me->scratch);
            tw_team_pass(m->team, self, epoch, 1);
        }
        /* a step that streams its weights has pushed the tables out of the near caches */
        __builtin_prefetch(s[1].buffers);
        __builtin_prefetch(s[1].extents);
        for (int owner = 0; owner < m->workers; owner++) {
            for (int tries = 0;; tries++) {
                int away = hurried && tw_team_away(m->team, owner, epoch);
                if (!away && tw_team_passed_soon(m->team, owner, epoch, tries)) break;
                if (!tw_team_is_open(m->team, opened)) return -1;
                if (!tw_team_claim(m->team, owner, epoch, 1, 1, &from)) continue;
                run_tiles(m, s, owner, owner + 1, me->scratch);
                tw_team_pass(m->team, owner, epoch, 0);
                me->hurried = 1;
            }
        }
        if (!mine) mine = tw_team_claim(m->team, self, epoch + 1, 1, 1, &from);
    }
    if (mine) run_tiles(m, last, self, self + 1, me->scratch);
    return mine;
}

/* Counts units the worker has run; the one who completes the group opens the next. Whether that was this one. */
static int complete(tw_model *m, const group *g, uint32_t epoch, int64_t first, int self, int64_t units)
{
    if (units == 0 || !tw_team_complete(m->team, units, g->units)) return 0;
    int64_t *stage_ns = atomic_load_explicit(&m->stage_ns, memory_order_relaxed);
    if (stage_ns) {
        int64_t now = now_ns();
        stage_ns[first] += now - m->opened_ns;
        m->opened_ns = now;
    }
    int64_t next = after_jumps(m, g->end);
    /* Worker 0 runs a chain: if it opens the chain itself, nobody needs to wake up for it. */
    int wake = self != 0 || (next < tw_model_table.stages && !m->groups[next].chain);
    tw_team_open(m->team, epoch + (uint32_t)(g->end - first), next, wake);
    return 1;
}

/* The worker's own part first, so that it meets the data it met in the stage before and in the last run. What others
 * have not started it takes only after some patience, unless they were away in the group before and still are. */
static void run_group(void *argument, int self, uint32_t epoch, int64_t first)
{
    tw_model *m = argument;
    worker *me = m->members + self;
    group g = m->groups[first];
    if (atomic_load_explicit(&m->stage_ns, memory_order_relaxed))
        g = (group){first + 1, units_of(m->steps + first), 0, 0, m->steps[first].mode == BALANCED};
    uint32_t opened = epoch;
    int64_t units = g.march ? run_march(m, &g, opened, first, self) : run_part(m, &g, epoch, first, self, me->scratch);
    if (units < 0) return;
    if (g.march) {
        epoch += (uint32_t)(g.end - 1 - first);
        first = g.end - 1;
    }
    int hurried = me->hurried;
    me->hurried = 0;
    if (g.eager && units < g.units) units += run_parts_of_others(m, &g, epoch, first, self, 0);
    if (complete(m, &g, epoch, first, self, units) || g.eager) return;
    if (hurried) {
        units = run_parts_of_others(m, &g, epoch, first, self, 1);
        if (complete(m, &g, epoch, first, self, units)) return;
    }
    if (tw_team_over_soon(m->team, opened)) return;
    units = run_parts_of_others(m, &g, epoch, first, self, 0);
    complete(m, &g, epoch, first, self, units);
}

static void run_alone(tw_model *m)
{
    int64_t *stage_ns = atomic_load_explicit(&m->stage_ns, memory_order_relaxed);
    for (int64_t i = after_jumps(m, 0); i < tw_model_table.stages; i = after_jumps(m, i + 1)) {
        run_tiles(m, m->steps + i, 0, m->steps[i].tiles, m->members[0].scratch);
        if (!stage_ns) continue;
        int64_t now = processor_ns();
        stage_ns[i] += now - m->opened_ns;
        m->opened_ns = now;
    }
}

/* What a worker does first. Its thread is the team's own for good, but for worker 0, who is the caller. */
static void enter_team(void *argument, int self)
{
    const tw_model *m = argument;
    if (self != 0) tw_arithmetic_enter(tw_model_table.keeps_denormals);
    volatile char *scratch = m->members[self].scratch;
    for (int64_t i = 0; i < tw_model_table.scratch_bytes; i += PAGE) scratch[i] = 0;
}

/* ---- creation ---- */

/* Where weights lie, by their place among all of them. */
static const char *weights_at(const tw_piece *pieces, int64_t count, int64_t place)
{
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (pieces[middle].begin <= place) low = middle;
        else high = middle;
    }
    return count > 0 ? pieces[low].data + (place - pieces[low].begin) : NULL;
}

static void prepare_buffers(tw_model *m, const tw_piece *pieces, int64_t count)
{
    for (int64_t i = 0; i < tw_model_table.buffers; i++) {
        const tw_buffer *b = &tw_model_table.buffer[i];
        void **slot = m->buffers + i;
        switch (b->space) {
        case TW_INPUT:
            m->input_patches[m->input_patch_count++] = (patch){slot, b->value, b->offset};
            break;
        case TW_OUTPUT:
            m->output_patches[m->output_patch_count++] = (patch){slot, b->value, b->offset};
            break;
        case TW_WEIGHT:
            *slot = (void *)(uintptr_t)weights_at(pieces, count, b->value);
            break;
        default:
            *slot = (char *)m->arena.start + b->value;
        }
    }
}

/* Where there is no room for it, the weights stay where they are. */
static void place_kept_weights(tw_model *m, const tw_piece *pieces, int64_t count)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < tw_model_table.kept; i++) bytes += tw_whole_pages(tw_model_table.kept_weights[i].bytes);
    if (bytes == 0 || !map_pages(&m->kept, bytes)) return;
    char *room = m->kept.start;
    tw_losers losers = {0};
    for (int64_t i = 0; i < tw_model_table.kept; i++) {
        const tw_kept *k = &tw_model_table.kept_weights[i];
        int placed = tw_place(room, weights_at(pieces, count, k->offset), k->bytes, k->parts, &losers);
        for (int64_t j = 0; placed && j < tw_model_table.buffers; j++) {
            const tw_buffer *b = &tw_model_table.buffer[j];
            int64_t inside = b->space == TW_WEIGHT ? b->value - k->offset : -1;
            if (inside >= 0 && inside < k->bytes) m->buffers[j] = room + inside;
        }
        room += tw_whole_pages(k->bytes);
    }
    tw_release(&losers);
}

static int choose_mode(const tw_model *m, const step *s, int balance)
{
    if (balance == TW_SERIAL || m->workers == 1) return FIRST_WORKER_ONLY;
    if (s->tiles == 0 || (s->tiles == 1 && s->first_worker == 0)) return FIRST_WORKER_ONLY;
    if (s->tiles < m->workers) return ONE_TILE_A_WORKER;
    if (balance == TW_DYNAMIC) return BALANCED;
    if (balance == TW_AUTO && s->tiles > DYNAMIC_ABOVE_TILES_PER_WORKER * m->workers) return BALANCED;
    return SHARED_EVENLY;
}

static void prepare_jumps(tw_model *m)
{
    const tw_table *t = &tw_model_table;
    for (int64_t i = 0; i <= t->stages; i++) m->first_jump[i] = t->jumps;
    for (int64_t i = t->jumps - 1; i >= 0; i--) {
        m->first_jump[t->jump[i].stage] = i;
        m->entered[t->jump[i].stage] = m->entered[t->jump[i].target] = 1;
    }
}

/* offset: tiles of the stages since the last barrier, so that independent small stages spread over the workers. */
static int prepare_steps(tw_model *m)
{
    int64_t offset = 0;
    for (int64_t i = 0; i < tw_model_table.stages; i++) {
        const tw_stage *stage = &tw_model_table.stage[i];
        step *s = m->steps + i;
        if (stage->tiles > UINT32_MAX) return 0; /* claims count tiles in 32 bits */
        int barrier = stage->barrier_before || m->entered[i];
        if (barrier) offset = 0;
        s->kernel = stage->kernel;
        s->buffers = m->buffers + stage->first_buffer;
        s->tiles = stage->tiles;
        s->extents = tw_model_table.extent + stage->first_extent;
        s->share = s->tiles / m->workers;
        s->extra = s->tiles % m->workers;
        s->piece = s->tiles / ((int64_t)m->workers * PIECES_PER_WORKER);
        if (s->piece < 1) s->piece = 1;
        s->first_worker = (int32_t)(offset % m->workers);
        s->barrier = i > 0 && barrier;
        s->mode = choose_mode(m, s, stage->balance);
        offset += stage->balance == TW_SERIAL ? 1 : s->tiles;
    }
    return 1;
}

static int marches(const tw_model *m, const step *s, const group *g)
{
    if (m->workers < 2 || m->workers > MOST_WORKERS_OF_A_MARCH) return 0;
    return m->steps + g->end == s + 1 && s->mode == SHARED_EVENLY && s->tiles == m->workers;
}

/* Between two groups that only worker 0 runs, program order is the barrier. In a march workers look for each other:
 * not where they may not spin. Returns whether any group needs more than one worker. */
static int prepare_groups(tw_model *m, int may_spin)
{
    int parallel = 0;
    group *previous = NULL;
    for (int64_t i = 0; i < tw_model_table.stages;) {
        group g = {i, 0, 1, 0, 0};
        do {
            const step *s = m->steps + g.end++;
            if (s->mode != FIRST_WORKER_ONLY) g.chain = 0;
            if (s->mode == BALANCED) g.eager = 1;
            g.units += units_of(s);
        } while (g.end < tw_model_table.stages && !m->steps[g.end].barrier);
        if (g.chain) g.units = 1;
        else parallel = 1;
        g.march = may_spin && marches(m, m->steps + i, &g);
        int joins = previous && !m->entered[i];
        if (joins && ((g.chain && previous->chain) || (g.march && previous->march))) {
            previous->end = g.end;
        } else {
            m->groups[i] = g;
            previous = m->groups + i;
        }
        i = g.end;
    }
    return parallel;
}

static int prepare(tw_model *m, const tw_piece *pieces, int64_t count, int64_t run_spin_ns, int64_t idle_spin_ns)
{
    const tw_table *t = &tw_model_table;
    m->steps = calloc((size_t)t->stages + 1, sizeof *m->steps);
    m->groups = calloc((size_t)t->stages + 1, sizeof *m->groups);
    m->buffers = calloc((size_t)t->buffers + 1, sizeof *m->buffers);
    m->first_jump = calloc((size_t)t->stages + 1, sizeof *m->first_jump);
    m->entered = calloc((size_t)t->stages + 1, sizeof *m->entered);
    m->input_patches = calloc((size_t)t->buffers + 1, sizeof *m->input_patches);
    m->output_patches = calloc((size_t)t->buffers + 1, sizeof *m->output_patches);
    if (!m->steps || !m->groups || !m->buffers || !m->input_patches || !m->output_patches) return 0;
    if (!m->first_jump || !m->entered) return 0;
    if (!map_pages(&m->arena, t->arena_bytes)) return 0;
    prepare_buffers(m, pieces, count);
    place_kept_weights(m, pieces, count);
    prepare_jumps(m);
    if (!prepare_steps(m)) return 0;
    if (!prepare_groups(m, run_spin_ns > 0 && !tw_team_crowded(m->workers))) m->workers = 1;

    m->scratch = calloc((size_t)m->workers, sizeof *m->scratch);
    if (!m->scratch) return 0;
    if (!map_pages(&m->member_pages, m->workers * (int64_t)sizeof *m->members)) return 0;
    m->members = m->member_pages.start;
    for (int i = 0; i < m->workers; i++) {
        if (!map_pages(&m->scratch[i], t->scratch_bytes)) return 0;
        m->members[i].scratch = m->scratch[i].start;
    }
    tw_team_work work = {enter_team, run_group};
    m->team = tw_team_create(m->workers, t->stages, run_spin_ns, idle_spin_ns, work, m);
    return m->team != NULL;
}

void tw_destroy(tw_model *m)
{
    if (!m) return;
    if (m->team) tw_team_destroy(m->team);
    for (int i = 0; m->scratch && i < m->workers; i++) unmap_pages(&m->scratch[i]);
    unmap_pages(&m->member_pages);
    unmap_pages(&m->arena);
    unmap_pages(&m->weights);
    unmap_pages(&m->kept);
    free(m->scratch);
    free(m->output_patches);
    free(m->input_patches);
    free(m->buffers);
    free(m->entered);
    free(m->first_jump);
    free(m->groups);
    free(m->steps);
    free(m);
}

tw_model *tw_create(
    const tw_piece *pieces, int64_t count, int threads, int64_t run_spin_ns, int64_t idle_spin_ns)
{
    if (threads < 1 || threads > TW_MAX_THREADS) return NULL;
    tw_model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->workers = threads;
    if (prepare(m, pieces, count, run_spin_ns, idle_spin_ns)) return m;
    tw_destroy(m);
    return NULL;
}

static int map_file(const char *path, pages *p)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    struct stat info;
    int usable = fstat(file, &info) == 0;
    size_t bytes = usable ? (size_t)info.st_size : 0;
    void *map = bytes > 0 ? mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, file, 0) : NULL;
    close(file);
    if (!usable || map == MAP_FAILED) return 0;
    *p = (pages){map, map, bytes};
    return 1;
}

/* A file in the folder of another. */
static int map_beside(const char *path, const char *name, pages *p)
{
    const char *slash = strrchr(path, '/');
    size_t folder = slash ? (size_t)(slash - path) + 1 : 0, length = strlen(name) + 1;
    char *whole = malloc(folder + length);
    if (!whole) return 0;
    memcpy(whole, path, folder);
    memcpy(whole + folder, name, length);
    int mapped = map_file(whole, p);
    free(whole);
    return mapped;
}

/* The pieces that a file without weights of its own says there are in another, which is mapped. NULL: it says nothing
 * that holds. */
static tw_piece *shared_pieces(const char *path, const pages *own, pages *shared, int64_t *count)
{
    const tw_shared *about = own->start;
    if (own->map_bytes <= sizeof *about || memcmp(about->mark, TW_SHARED_MARK, sizeof about->mark) != 0) return NULL;
    size_t room = (own->map_bytes - sizeof *about) / sizeof *about->place;
    if (about->pieces < 1 || (size_t)about->pieces > room) return NULL;
    const char *name = (const char *)(about->place + about->pieces), *end = (const char *)own->start + own->map_bytes;
    if (name == end || end[-1] != 0 || !map_beside(path, name, shared)) return NULL;
    int64_t previous = 0, bytes = (int64_t)shared->map_bytes;
    int holds = bytes == about->bytes && about->place[0].begin == 0;
    for (int64_t i = 0; holds && i < about->pieces; i++) {
        int64_t at = about->place[i].at, begin = about->place[i].begin;
        int64_t next = i + 1 < about->pieces ? about->place[i + 1].begin : tw_model_table.weight_bytes;
        holds = begin >= previous && next > begin && at >= 0 && at % TW_WEIGHT_ALIGNMENT == 0 && at <= bytes - (next - begin);
        previous = next;
    }
    tw_piece *pieces = holds ? calloc((size_t)about->pieces, sizeof *pieces) : NULL;
    for (int64_t i = 0; pieces && i < about->pieces; i++)
        pieces[i] = (tw_piece){about->place[i].begin, (const char *)shared->start + about->place[i].at};
    *count = about->pieces;
    return pieces;
}

tw_model *tw_open(const char *weights_path, int threads)
{
    pages own = {0}, shared = {0};
    if (!map_file(weights_path, &own)) return NULL;
    tw_piece whole = {0, own.start}, *pieces = NULL;
    int64_t count = own.map_bytes > 0;
    int is_whole = (int64_t)own.map_bytes == tw_model_table.weight_bytes;
    if (!is_whole) pieces = shared_pieces(weights_path, &own, &shared, &count);
    tw_model *m = NULL;
    if (is_whole || pieces)
        m = tw_create(is_whole ? &whole : pieces, count, threads, TW_RUN_SPIN_NS, TW_IDLE_SPIN_NS);
    free(pieces);
    if (m) m->weights = is_whole ? own : shared;
    if (!m || !is_whole) unmap_pages(&own);
    if (!m) unmap_pages(&shared);
    return m;
}

/* ---- entry points ---- */

static int run_locked(tw_model *m, int64_t *stage_ns)
{
    if (tw_team_start(m->team) != 0) return TW_NO_THREADS;
    atomic_store_explicit(&m->stage_ns, stage_ns, memory_order_relaxed);
    atomic_store_explicit(&m->cancelled, 0, memory_order_relaxed);
    m->watched_ns = 0;
    for (int64_t i = 0; stage_ns && i < tw_model_table.stages; i++) stage_ns[i] = 0;
    if (stage_ns) m->opened_ns = m->workers > 1 ? now_ns() : processor_ns();
    tw_arithmetic callers = tw_arithmetic_enter(tw_model_table.keeps_denormals);
    if (m->workers > 1) tw_team_run(m->team, after_jumps(m, 0));
    else run_alone(m);
    tw_arithmetic_leave(callers);
    return is_cancelled(m) ? TW_CANCELLED : TW_OK;
}

void tw_cancel(tw_model *m)
{
    atomic_store_explicit(&m->cancelled, 1, memory_order_relaxed);
}

void tw_set_watch(tw_model *m, tw_watch watch)
{
    m->watch = watch;
}

int tw_run_profile(tw_model *m, void *const *inputs, void *const *outputs, int64_t *stage_ns)
{
    tw_team_lock(m->team);
    for (int64_t i = 0; i < m->input_patch_count; i++)
        *m->input_patches[i].slot = (char *)inputs[m->input_patches[i].position] + m->input_patches[i].offset;
    for (int64_t i = 0; i < m->output_patch_count; i++)
        *m->output_patches[i].slot = (char *)outputs[m->output_patches[i].position] + m->output_patches[i].offset;
    int status = run_locked(m, stage_ns);
    tw_team_unlock(m->team);
    return status;
}

int tw_run(tw_model *m, void *const *inputs, void *const *outputs)
{
    return tw_run_profile(m, inputs, outputs, NULL);
}

static char *object_data(const char *object, int64_t data_offset)
{
    char *data;
    memcpy(&data, object + data_offset, sizeof data);
    return data;
}

int tw_run_objects(tw_model *m, const char *const *objects, int64_t data_offset)
{
    const char *const *outputs = objects + tw_model_table.inputs;
    tw_team_lock(m->team);
    for (int64_t i = 0; i < m->input_patch_count; i++)
        *m->input_patches[i].slot =
            object_data(objects[m->input_patches[i].position], data_offset) + m->input_patches[i].offset;
    for (int64_t i = 0; i < m->output_patch_count; i++)
        *m->output_patches[i].slot =
            object_data(outputs[m->output_patches[i].position], data_offset) + m->output_patches[i].offset;
    int status = run_locked(m, NULL);
    tw_team_unlock(m->team);
    return status;
}

static int has_form(const char *object, const tw_form *form, int64_t header)
{
    const void *type;
    tw_array array;
    memcpy(&type, object + header - (int64_t)sizeof type, sizeof type);
    if (type != form->type) return 0;
    memcpy(&array, object + header, sizeof array);
    if (array.element_type != form->element_type || array.rank != form->rank) return 0;
    if ((array.flags & form->flags) != form->flags) return 0;
    for (int64_t i = 0; i < form->rank; i++)
        if (array.shape[i] != form->shape[i]) return 0;
    return 1;
}

/* Whether no output lies in the memory of an input or of another output. */
static int are_apart(const char *const *objects, int64_t data_offset)
{
    const tw_table *t = &tw_model_table;
    for (int64_t i = t->inputs; i < t->inputs + t->outputs; i++) {
        const char *start = object_data(objects[i], data_offset), *end = start + t->output_bytes[i - t->inputs];
        for (int64_t j = 0; j < i; j++) {
            const char *other = object_data(objects[j], data_offset);
            int64_t bytes = j < t->inputs ? t->input_bytes[j] : t->output_bytes[j - t->inputs];
            if (start < other + bytes && other < end) return 0;
        }
    }
    return 1;
}

int tw_run_tuple(const tw_caller *caller, const char *tuple)
{
    intptr_t length;
    int64_t expected = tw_model_table.inputs + tw_model_table.outputs;
    memcpy(&length, tuple + caller->header, sizeof length);
    if (!caller->model || length != expected) return TW_NOT_READY;
    const char *const *objects = (const char *const *)(tuple + caller->first_item);
    for (int64_t i = 0; i < expected; i++)
        if (!has_form(objects[i], &caller->forms[i], caller->header)) return TW_NOT_READY;
    if (!are_apart(objects, caller->header)) return TW_NOT_READY;
    return tw_run_objects(caller->model, objects, caller->header);
}

const tw_table *tw_describe(void)
{
    return &tw_model_table;
}
