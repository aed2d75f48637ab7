/* A team of worker threads that stays up between runs; the thread that starts a run is worker 0. */
#ifndef TW_TEAM_H
#define TW_TEAM_H

#include <stdint.h>

typedef struct tw_team tw_team;

/* What a team runs. reset: before the threads start, also again in a forked child. enter: once by every worker.
 * run: by every worker in each run; returns when the worker has passed its last barrier. */
typedef struct {
    void (*reset)(void *argument);
    void (*enter)(void *argument, int worker);
    void (*run)(void *argument, int worker);
} tw_team_work;

/* A waiting worker spins for run_spin_ns inside a run and idle_spin_ns between runs before it sleeps. */
tw_team *tw_team_create(int workers, int64_t run_spin_ns, int64_t idle_spin_ns, tw_team_work work, void *argument);
void tw_team_destroy(tw_team *team);

/* One caller at a time; the lock covers what the caller sets up for its run. */
void tw_team_lock(tw_team *team);
void tw_team_unlock(tw_team *team);

/* With the lock held. 0, or nonzero when the helpers could not be started. */
int tw_team_run(tw_team *team);

/* By every worker, the same number of times in a run. */
void tw_team_barrier(tw_team *team, int worker);

#endif
