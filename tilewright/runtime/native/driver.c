/* Runs a compiled model: shares the tiles of each group of steps among the team. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "arithmetic.h"
#include "model.h"

#include <time.h>

#define WATCH_NS 50000000

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
void tw_run_group(void *argument, int self, uint32_t epoch, int64_t first)
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
void tw_enter_team(void *argument, int self)
{
    const tw_model *m = argument;
    if (self != 0) tw_arithmetic_enter(tw_model_table.keeps_denormals);
    volatile char *scratch = m->members[self].scratch;
    for (int64_t i = 0; i < tw_model_table.scratch_bytes; i += PAGE) scratch[i] = 0;
}

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
