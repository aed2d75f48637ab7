/* A team of worker threads that stays up between runs; the thread that starts a run is worker 0.
 *
 * A run goes through groups of steps, and one group is open at a time. The team knows the open group by an epoch,
 * a number that only grows: every step of every run has one, and so has the pause after a run. Nobody waits for
 * workers to arrive. Whoever completes the last unit of work of a group opens the next, and a worker that was
 * away joins at the group it then finds open. */
#ifndef TW_TEAM_H
#define TW_TEAM_H

#include <stdint.h>

typedef struct tw_team tw_team;

/* What a team runs. enter: once by every worker, by worker 0 also in a forked child.
 * group: does what is left to do of the group that starts at step, by every worker that finds it open. It may come
 * late, when the group or even the run is over: the epoch tells, and it must then touch nothing of the caller's. */
typedef struct {
    void (*enter)(void *argument, int worker);
    void (*group)(void *argument, int worker, uint32_t epoch, int64_t step);
} tw_team_work;

/* Whether so many workers have to share processors. */
int tw_team_crowded(int workers);

/* A waiting worker spins for run_spin_ns inside a run and idle_spin_ns between runs before it sleeps. */
tw_team *tw_team_create(
    int workers, int64_t steps, int64_t run_spin_ns, int64_t idle_spin_ns, tw_team_work work, void *argument);

/* Returns when the last helper has left, including those that are late. */
void tw_team_destroy(tw_team *team);

/* One caller at a time; the lock covers what the caller sets up for its run. */
void tw_team_lock(tw_team *team);
void tw_team_unlock(tw_team *team);

/* With the lock held: brings the helpers up. 0, or nonzero when they could not be started. */
int tw_team_start(tw_team *team);

/* With the lock held, after tw_team_start: opens the group at this step, returns when a group has opened the step
 * behind all of them. */
void tw_team_run(tw_team *team, int64_t first);

/* Takes up to piece units of the owner's share of the step with this epoch; how many, and the first in *from. The steps
 * of a group are claimed in order: the next one only after a claim has found nothing left of the one before. A
 * claim in a group that is over finds nothing. */
int64_t tw_team_claim(tw_team *team, int owner, uint32_t epoch, int64_t share, int64_t piece, int64_t *from);

/* Whether nobody has yet claimed anything of this owner's shares in the group with this epoch. */
int tw_team_away(const tw_team *team, int owner, uint32_t epoch);

/* For groups in which everybody has one unit a step: says that the owner's of the step with this epoch is done. The
 * owner takes its unit of the next step with the same word; who has done it for the owner leaves that open. */
void tw_team_pass(tw_team *team, int owner, uint32_t epoch, int take_next);

/* Waits a little for that; whether it has been said. With every further try the caller is in less of a hurry. */
int tw_team_passed_soon(tw_team *team, int owner, uint32_t epoch, int tries);

/* Whether the group with this epoch is the open one. */
int tw_team_is_open(const tw_team *team, uint32_t epoch);

/* Counts units of the open group as done. True for the one worker that completes it; it calls tw_team_open. */
int tw_team_complete(tw_team *team, int64_t units, int64_t units_of_group);

/* Opens the group that starts at this step, with an epoch that no group had. Without wake, workers that sleep stay
 * asleep. */
void tw_team_open(tw_team *team, uint32_t epoch, int64_t step, int wake);

/* Waits a little for the group with this epoch to be over; whether it is. */
int tw_team_over_soon(tw_team *team, uint32_t epoch);

#endif
