/* A model made ready to run: what the parts of the driver know of it. */
#ifndef TW_MODEL_H
#define TW_MODEL_H

#include "driver.h"
#include "team.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#define LINE 128
#define PAGE 4096

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

static inline int64_t units_of(const step *s)
{
    return s->mode == FIRST_WORKER_ONLY ? 1 : s->tiles;
}

/* By every worker of the team: once at first, and for every group of steps. */
void tw_enter_team(void *model, int worker);
void tw_run_group(void *model, int worker, uint32_t epoch, int64_t step);

void tw_unmap_pages(pages *p);

/* Where an object of a host language has its data. */
static inline char *object_data(const char *object, int64_t data_offset)
{
    char *data;
    memcpy(&data, object + data_offset, sizeof data);
    return data;
}

#endif
