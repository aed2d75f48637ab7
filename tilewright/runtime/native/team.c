/* The worker team: one shared word says which group of steps is open; workers spin on it briefly, then sleep. */
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
/* How long a worker leaves the others' unstarted tiles alone. Longer than workers on processors of their own drift
 * apart, so that each keeps the data in its caches; far shorter than the milliseconds a descheduled one is away. */
#define PATIENCE_NS 10000
#define NAP_NS 50000
/* Between runs a worker also spins for this part of what a run takes: to be woken up takes it tens of microseconds, and
 * after a long run it may wait for the next a little longer to spare them. */
#define IDLE_PART_OF_RUN 64
#define EPOCHS_A_REFRESH_BITS 28

/* claim says how far the worker's own work is handed out: the epoch of a step in the upper half, the next unit of the
 * worker's share of that step in the lower. A later epoch means that nothing is left, since steps are claimed in
 * order. That makes a late worker harmless, and nothing has to be reset between runs: every share of a finished
 * group is used up or carries a later epoch. */
typedef struct {
    _Alignas(LINE) _Atomic uint64_t claim;
    _Alignas(LINE) int index;
    tw_team *team;
    pthread_t thread;
} member;

struct tw_team {
    /* Workers count on one line and wait on another, so that counting does not disturb the waiting. */
    _Alignas(LINE) _Atomic int64_t done; /* units of the open group; nobody works on any other, so one count will do */
    _Alignas(LINE) _Atomic uint32_t epoch;
    _Atomic uint32_t sleepers;
    _Atomic int stop;
    _Alignas(LINE) pthread_mutex_t turn;
    pthread_mutex_t sleep_lock;
    pthread_cond_t sleep_signal;
    int workers, started;
    int64_t steps, run_spin_ns, idle_spin_ns, patience_ns;
    /* The step at which the group with an epoch starts, by the epoch's low bits: there are more than a group has steps,
     * so that the place of the open group is not written to while it is open. `steps` in a pause. */
    _Atomic int64_t *starts;
    uint32_t starts_mask;
    _Atomic int64_t pause_ns; /* how long to spin for the next run */
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

/* To a few milliseconds, and in no time. */
static int64_t coarse_now_ns(void)
{
#if defined(CLOCK_MONOTONIC_COARSE)
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
#else
    return 0;
#endif
}

/* ---- waiting ---- */

/* A loop may open groups for hours in which some worker owns nothing: its claim must not seem to be of a later epoch
 * when the numbers have wrapped around. No group is open here, and who is late finds nothing in any case. */
static void refresh_claims(tw_team *team, uint32_t epoch)
{
    for (int i = 0; i < team->workers; i++)
        atomic_store_explicit(&team->members[i].claim, (uint64_t)epoch << 32, memory_order_relaxed);
}

static void sleep_while_open(tw_team *team, uint32_t epoch)
{
    atomic_fetch_add(&team->sleepers, 1);
#if defined(__linux__)
    syscall(SYS_futex, &team->epoch, FUTEX_WAIT_PRIVATE, epoch, NULL, NULL, 0);
#else
    pthread_mutex_lock(&team->sleep_lock);
    while (atomic_load(&team->epoch) == epoch) pthread_cond_wait(&team->sleep_signal, &team->sleep_lock);
    pthread_mutex_unlock(&team->sleep_lock);
#endif
    atomic_fetch_sub(&team->sleepers, 1);
}

/* The store and the load are sequentially consistent, as are the sleeper's count and its check of the epoch:
 * either the sleeper sees the new epoch or it is seen here. */
void tw_team_open(tw_team *team, uint32_t epoch, int64_t step, int wake)
{
    uint32_t last = atomic_load_explicit(&team->epoch, memory_order_relaxed);
    if ((last ^ epoch) >> EPOCHS_A_REFRESH_BITS) refresh_claims(team, epoch);
    atomic_store_explicit(&team->starts[epoch & team->starts_mask], step, memory_order_relaxed);
    atomic_store(&team->epoch, epoch);
    if (!wake || atomic_load(&team->sleepers) == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, &team->epoch, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    pthread_mutex_lock(&team->sleep_lock);
    pthread_cond_broadcast(&team->sleep_signal);
    pthread_mutex_unlock(&team->sleep_lock);
#endif
}

static inline uint32_t open_epoch(const tw_team *team)
{
    return atomic_load_explicit(&team->epoch, memory_order_acquire);
}

static int over_within(const tw_team *team, uint32_t epoch, int64_t spin_ns)
{
    int64_t deadline = 0;
    for (;;) {
        for (int i = 0; i < PAUSES_PER_CLOCK; i++) {
            if (open_epoch(team) != epoch) return 1;
            pause_briefly();
        }
        if (spin_ns == 0) return 0;
        int64_t now = now_ns();
        if (deadline == 0) deadline = now + spin_ns;
        if (now >= deadline) return 0;
    }
}

int tw_team_over_soon(tw_team *team, uint32_t epoch)
{
    return over_within(team, epoch, team->patience_ns);
}

/* The step at which the group with this epoch starts, or -1 when it is over already. */
static int64_t start_of(const tw_team *team, uint32_t epoch)
{
    int64_t step = atomic_load_explicit(&team->starts[epoch & team->starts_mask], memory_order_acquire);
    return open_epoch(team) == epoch ? step : -1;
}

/* Returns the epoch that is open then: not always the next one. */
static uint32_t await_another(tw_team *team, uint32_t epoch, int64_t spin_ns)
{
    if (!over_within(team, epoch, spin_ns))
        while (open_epoch(team) == epoch) sleep_while_open(team, epoch);
    return open_epoch(team);
}

/* ---- sharing work ---- */

/* Whether epoch a is before b, also when the numbers have wrapped around. */
static inline int before(uint32_t a, uint32_t b)
{
    return (int32_t)(a - b) < 0;
}

/* Relaxed: only who takes what is settled here; what the kernels read and write is ordered by the opening and the
 * completion of groups. */
int64_t tw_team_claim(tw_team *team, int owner, uint32_t epoch, int64_t share, int64_t piece, int64_t *from)
{
    _Atomic uint64_t *word = &team->members[owner].claim;
    uint64_t seen = atomic_load_explicit(word, memory_order_relaxed), taken;
    int64_t units;
    do {
        uint32_t at = (uint32_t)(seen >> 32);
        *from = at == epoch ? (int64_t)(uint32_t)seen : 0;
        if (before(epoch, at) || *from >= share) return 0;
        units = piece < share - *from ? piece : share - *from;
        taken = (uint64_t)epoch << 32 | (uint64_t)(*from + units);
    } while (!atomic_compare_exchange_weak_explicit(word, &seen, taken, memory_order_relaxed, memory_order_relaxed));
    return units;
}

int tw_team_away(const tw_team *team, int owner, uint32_t epoch)
{
    uint64_t claim = atomic_load_explicit(&team->members[owner].claim, memory_order_relaxed);
    return before((uint32_t)(claim >> 32), epoch) || claim == (uint64_t)epoch << 32;
}

/* A plain store will do: until all is said to be done, nobody claims anything of the next step, and what was claimed of
 * this one is claimed no more. */
void tw_team_pass(tw_team *team, int owner, uint32_t epoch, int take_next)
{
    uint64_t claim = (uint64_t)(epoch + 1) << 32 | (uint64_t)take_next;
    atomic_store_explicit(&team->members[owner].claim, claim, memory_order_release);
}

static inline int has_passed(const tw_team *team, int owner, uint32_t epoch)
{
    return before(epoch, (uint32_t)(atomic_load_explicit(&team->members[owner].claim, memory_order_acquire) >> 32));
}

/* Nobody wakes a worker here: after a while it looks again from time to time only. */
int tw_team_passed_soon(tw_team *team, int owner, uint32_t epoch, int tries)
{
    if (has_passed(team, owner, epoch)) return 1;
    if (tries * team->patience_ns > team->run_spin_ns) {
        struct timespec nap = {0, NAP_NS};
        nanosleep(&nap, NULL);
    }
    int64_t deadline = 0;
    for (;;) {
        for (int i = 0; i < PAUSES_PER_CLOCK; i++) {
            if (has_passed(team, owner, epoch)) return 1;
            pause_briefly();
        }
        int64_t now = now_ns();
        if (deadline == 0) deadline = now + team->patience_ns;
        if (now >= deadline) return 0;
    }
}

int tw_team_is_open(const tw_team *team, uint32_t epoch)
{
    return open_epoch(team) == epoch;
}

/* Acquire and release: the worker that completes a group has seen all of it, and hands that on with the epoch. */
int tw_team_complete(tw_team *team, int64_t units, int64_t units_of_group)
{
    int64_t earlier = atomic_fetch_add_explicit(&team->done, units, memory_order_acq_rel);
    if (earlier + units < units_of_group) return 0;
    atomic_store_explicit(&team->done, 0, memory_order_relaxed);
    return 1;
}

/* ---- threads ---- */

static void *helper(void *argument)
{
    member *self = argument;
    tw_team *team = self->team;
    team->work.enter(team->argument, self->index);
    while (!atomic_load_explicit(&team->stop, memory_order_relaxed)) {
        uint32_t epoch = open_epoch(team);
        int64_t step = start_of(team, epoch);
        if (step < 0) continue;
        if (step < team->steps) team->work.group(team->argument, self->index, epoch, step);
        int64_t pause_ns = atomic_load_explicit(&team->pause_ns, memory_order_relaxed);
        await_another(team, epoch, step == team->steps ? pause_ns : team->run_spin_ns);
    }
    return NULL;
}

static void forget_helpers(tw_team *team)
{
    atomic_store(&team->done, 0);
    atomic_store(&team->epoch, 0);
    atomic_store(&team->sleepers, 0);
    atomic_store(&team->starts[0], team->steps);
    atomic_store(&team->stop, 0);
    for (int i = 0; i < team->workers; i++) atomic_store(&team->members[i].claim, 0);
    team->started = 0;
}

static void stop_helpers(tw_team *team, int helpers)
{
    atomic_store(&team->stop, 1);
    tw_team_open(team, open_epoch(team) + 1, team->steps, 1);
    for (int i = 1; i <= helpers; i++) pthread_join(team->members[i].thread, NULL);
    forget_helpers(team);
}

static int start_helpers(tw_team *team)
{
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

int tw_team_start(tw_team *team)
{
    return team->started ? 0 : start_helpers(team);
}

/* Epochs may wrap around: only equality and small differences are used. */
void tw_team_run(tw_team *team, int64_t first)
{
    uint32_t epoch = open_epoch(team) + 1;
    int64_t begin = coarse_now_ns();
    tw_team_open(team, epoch, first, 1);
    for (;;) {
        int64_t step = start_of(team, epoch);
        if (step == team->steps) break;
        if (step >= 0) team->work.group(team->argument, 0, epoch, step);
        epoch = await_another(team, epoch, team->run_spin_ns);
    }
    int64_t part = team->idle_spin_ns > 0 ? (coarse_now_ns() - begin) / IDLE_PART_OF_RUN : 0;
    int64_t pause_ns = part > team->idle_spin_ns ? part : team->idle_spin_ns;
    atomic_store_explicit(&team->pause_ns, pause_ns, memory_order_relaxed);
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

int tw_team_crowded(int workers)
{
    return workers > usable_processors();
}

static void *allocate_lines(size_t bytes)
{
    size_t rounded = (bytes + LINE - 1) / LINE * LINE;
    void *memory = aligned_alloc(LINE, rounded);
    if (memory) memset(memory, 0, rounded);
    return memory;
}

tw_team *tw_team_create(
    int workers, int64_t steps, int64_t run_spin_ns, int64_t idle_spin_ns, tw_team_work work, void *argument)
{
    tw_team *team = allocate_lines(sizeof *team);
    if (!team) return NULL;
    team->members = allocate_lines((size_t)workers * sizeof *team->members);
    size_t places = 2;
    while (places <= (size_t)steps) places *= 2;
    team->starts = allocate_lines(places * sizeof *team->starts);
    team->starts_mask = (uint32_t)(places - 1);
    if (!team->members || !team->starts) {
        free(team->starts);
        free(team->members);
        free(team);
        return NULL;
    }
    for (int i = 0; i < workers; i++) {
        team->members[i].index = i;
        team->members[i].team = team;
    }
    /* With fewer processors than workers, a worker that spins keeps the one it waits for from running. */
    int crowded = tw_team_crowded(workers);
    team->workers = workers;
    team->steps = steps;
    team->run_spin_ns = crowded ? 0 : run_spin_ns;
    team->idle_spin_ns = crowded ? 0 : idle_spin_ns;
    atomic_store(&team->pause_ns, team->idle_spin_ns);
    team->patience_ns = team->run_spin_ns < PATIENCE_NS ? team->run_spin_ns : PATIENCE_NS;
    team->work = work;
    team->argument = argument;
    atomic_store(&team->starts[0], steps);
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
    free(team->starts);
    free(team->members);
    free(team);
}
