/* Makes a model ready: resolves the generated table's buffers, deals its stages out to the workers. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "model.h"
#include "placing.h"

#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE (2 << 20)
/* A dynamic stage hands out about this many pieces a worker: enough to even out, few enough to stay cheap. */
#define PIECES_PER_WORKER 8
#define DYNAMIC_ABOVE_TILES_PER_WORKER 4
/* In a march every worker reads a line of every other: among many, one line to count on is quicker. */
#define MOST_WORKERS_OF_A_MARCH 8

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

void tw_unmap_pages(pages *p)
{
    if (p->map) munmap(p->map, p->map_bytes);
}

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
    tw_team_work work = {tw_enter_team, tw_run_group};
    m->team = tw_team_create(m->workers, t->stages, run_spin_ns, idle_spin_ns, work, m);
    return m->team != NULL;
}

void tw_destroy(tw_model *m)
{
    if (!m) return;
    if (m->team) tw_team_destroy(m->team);
    for (int i = 0; m->scratch && i < m->workers; i++) tw_unmap_pages(&m->scratch[i]);
    tw_unmap_pages(&m->member_pages);
    tw_unmap_pages(&m->arena);
    tw_unmap_pages(&m->weights);
    tw_unmap_pages(&m->kept);
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

const tw_table *tw_describe(void)
{
    return &tw_model_table;
}
