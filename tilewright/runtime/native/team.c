/* The worker team: helpers spin briefly, then sleep; a barrier is one atomic addition and one shared word. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

/* Two 64-byte lines: x86 fetches lines in pairs, and some Arm cores have 128-byte lines. */
#define LINE 128
#define PAUSES_PER_CLOCK 32

typedef struct {
    _Alignas(LINE) uint32_t generation; /* how many generations this worker has passed */
    int index;
    tw_team *team;
    pthread_t thread;
} member;

struct tw_team {
    /* Workers arrive on one line and wait on another, so that an arrival does not disturb the waiting. */
    _Alignas(LINE) _Atomic uint32_t arrived;
    _Alignas(LINE) _Atomic uint32_t generation;
    _Atomic uint32_t sleepers;
    _Alignas(LINE) pthread_mutex_t turn;
    pthread_mutex_t sleep_lock;
    pthread_cond_t sleep_signal;
    int workers, started, stop;
    int64_t run_spin_ns, idle_spin_ns;
    tw_team_work work;
    void *argument;
    member *members;
    tw_team *next, *previous;
};

/* Every live team, so that a forked child, which has none of the helpers, can forget them. */
static pthread_mutex_t teams_lock = PTHREAD_MUTEX_INITIALIZER;
static tw_team *teams;
static pthread_once_t fork_handlers = PTHREAD_ONCE_INIT;

static inline void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#else
    __asm__ volatile("" ::: "memory");
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- waiting ---- */

static void sleep_while_equal(tw_team *team, uint32_t seen)
{
    atomic_fetch_add(&team->sleepers, 1);
#if defined(__linux__)
    syscall(SYS_futex, &team->generation, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    pthread_mutex_lock(&team->sleep_lock);
    while (atomic_load(&team->generation) == seen) pthread_cond_wait(&team->sleep_signal, &team->sleep_lock);
    pthread_mutex_unlock(&team->sleep_lock);
#endif
    atomic_fetch_sub(&team->sleepers, 1);
}

/* The store and the load are sequentially consistent, as are the sleeper's count and its check of the generation:
 * either the sleeper sees the new generation or it is seen here. */
static void advance(tw_team *team, uint32_t generation)
{
    atomic_store(&team->generation, generation);
    if (atomic_load(&team->sleepers) == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, &team->generation, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    pthread_mutex_lock(&team->sleep_lock);
    pthread_cond_broadcast(&team->sleep_signal);
    pthread_mutex_unlock(&team->sleep_lock);
#endif
}

static void await_change(tw_team *team, uint32_t seen, int64_t spin_ns)
{
    int64_t deadline = 0;
    for (;;) {
        for (int i = 0; i < PAUSES_PER_CLOCK; i++) {
            if (atomic_load_explicit(&team->generation, memory_order_acquire) != seen) return;
            pause_briefly();
        }
        int64_t now = now_ns();
        if (deadline == 0) deadline = now + spin_ns;
        if (now >= deadline) break;
    }
    while (atomic_load_explicit(&team->generation, memory_order_acquire) == seen) sleep_while_equal(team, seen);
}

/* Each worker counts generations for itself: read from the shared word, a late worker could miss one. */
void tw_team_barrier(tw_team *team, int worker)
{
    if (team->workers == 1) return;
    uint32_t seen = team->members[worker].generation++;
    uint32_t before = atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel);
    if (before + 1 < (uint32_t)team->workers) {
        await_change(team, seen, team->run_spin_ns);
        return;
    }
    atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
    advance(team, seen + 1);
}

/* ---- threads ---- */

static void *helper(void *argument)
{
    member *self = argument;
    tw_team *team = self->team;
    team->work.enter(team->argument, self->index);
    for (;;) {
        await_change(team, self->generation++, team->idle_spin_ns);
        if (team->stop) return NULL;
        team->work.run(team->argument, self->index);
    }
}

static void forget_helpers(tw_team *team)
{
    atomic_store(&team->arrived, 0);
    atomic_store(&team->generation, 0);
    atomic_store(&team->sleepers, 0);
    for (int i = 0; i < team->workers; i++) team->members[i].generation = 0;
    team->started = 0;
    team->stop = 0;
}

static void stop_helpers(tw_team *team, int helpers)
{
    team->stop = 1;
    advance(team, ++team->members[0].generation);
    for (int i = 1; i <= helpers; i++) pthread_join(team->members[i].thread, NULL);
    forget_helpers(team);
}

static int start_helpers(tw_team *team)
{
    team->work.reset(team->argument);
    team->work.enter(team->argument, 0);
    /* Signals stay with the host's own threads. */
    sigset_t all, saved;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved);
    int helpers = 0;
    while (helpers < team->workers - 1) {
        member *next = &team->members[helpers + 1];
        if (pthread_create(&next->thread, NULL, helper, next) != 0) break;
        helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
    if (helpers < team->workers - 1) {
        stop_helpers(team, helpers);
        return 1;
    }
    team->started = 1;
    return 0;
}

int tw_team_run(tw_team *team)
{
    if (!team->started && start_helpers(team) != 0) return 1;
    if (team->workers > 1) advance(team, ++team->members[0].generation);
    team->work.run(team->argument, 0);
    return 0;
}

void tw_team_lock(tw_team *team)
{
    pthread_mutex_lock(&team->turn);
}

void tw_team_unlock(tw_team *team)
{
    pthread_mutex_unlock(&team->turn);
}

/* ---- forking ---- */

static void before_fork(void)
{
    pthread_mutex_lock(&teams_lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&teams_lock);
}

static void make_locks(tw_team *team)
{
    pthread_mutex_init(&team->turn, NULL);
    pthread_mutex_init(&team->sleep_lock, NULL);
    pthread_cond_init(&team->sleep_signal, NULL);
}

/* The child has one thread, and a lock held by another thread of the parent would stay held for ever. */
static void after_fork_in_child(void)
{
    pthread_mutex_init(&teams_lock, NULL);
    for (tw_team *team = teams; team; team = team->next) {
        make_locks(team);
        forget_helpers(team);
    }
}

static void register_fork_handlers(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* ---- creation ---- */

static int usable_processors(void)
{
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

static void *allocate_lines(size_t bytes)
{
    size_t rounded = (bytes + LINE - 1) / LINE * LINE;
    void *memory = aligned_alloc(LINE, rounded);
    if (memory) memset(memory, 0, rounded);
    return memory;
}

tw_team *tw_team_create(int workers, int64_t run_spin_ns, int64_t idle_spin_ns, tw_team_work work, void *argument)
{
    tw_team *team = allocate_lines(sizeof *team);
    if (!team) return NULL;
    team->members = allocate_lines((size_t)workers * sizeof *team->members);
    if (!team->members) {
        free(team);
        return NULL;
    }
    for (int i = 0; i < workers; i++) {
        team->members[i].index = i;
        team->members[i].team = team;
    }
    /* With fewer processors than workers, a worker that spins keeps the one it waits for from running. */
    int crowded = workers > usable_processors();
    team->workers = workers;
    team->run_spin_ns = crowded ? 0 : run_spin_ns;
    team->idle_spin_ns = crowded ? 0 : idle_spin_ns;
    team->work = work;
    team->argument = argument;
    make_locks(team);
    pthread_once(&fork_handlers, register_fork_handlers);
    pthread_mutex_lock(&teams_lock);
    team->next = teams;
    if (teams) teams->previous = team;
    teams = team;
    pthread_mutex_unlock(&teams_lock);
    return team;
}

void tw_team_destroy(tw_team *team)
{
    pthread_mutex_lock(&teams_lock);
    if (team->previous) team->previous->next = team->next;
    else teams = team->next;
    if (team->next) team->next->previous = team->previous;
    pthread_mutex_unlock(&teams_lock);
    if (team->started) stop_helpers(team, team->workers - 1);
    free(team->members);
    free(team);
}
