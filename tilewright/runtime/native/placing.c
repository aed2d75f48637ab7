/* Finds pages for weights that stay in a core's own cache while they are read again and again.
 *
 * All caches but the first choose the place of a line by its physical address, and the system hands out pages as they
 * come. Of random pages that fill half of an eight-way cache, some find all ways of their place taken: their lines come
 * from farther away at every step. How a set of pages does is quickly measured, and it is the same on every core: of
 * a few sets the one that reads fastest stays, and the first one where nothing collides. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "placing.h"

#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define READ_LINE 64
#define SETS 12
#define ROUNDS 4
#define PASSES 3
/* A set may read so much slower than one without collisions: what the clock shows by chance. */
#define AS_GOOD 1.015

int64_t tw_whole_pages(int64_t bytes)
{
    int64_t page = sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

#if defined(__linux__)

static int64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The shortest time of reading all lines, as often as it takes to see what stays in the cache. Several reads at a time:
 * else the start of every page would count, where the hardware's own prefetching begins again. */
static int64_t read_ns(const char *start, int64_t bytes)
{
    int64_t least = INT64_MAX;
    for (int round = 0; round < ROUNDS; round++) {
        int64_t begin = clock_ns();
        for (int pass = 0; pass < PASSES; pass++)
            for (const volatile char *at = start; at < start + bytes; at += 4 * READ_LINE)
                (void)(at[0] + at[READ_LINE] + at[2 * READ_LINE] + at[3 * READ_LINE]);
        int64_t took = clock_ns() - begin;
        if (took < least) least = took;
    }
    return least;
}

static char *fresh_pages(int64_t bytes)
{
    char *pages = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? NULL : pages;
}

/* Sets that lost stay until all is placed: the system would hand out the same pages again. */
static int choose_pages(char *room, int64_t bytes, tw_losers *losers)
{
    /* Half as many pages hardly ever collide: read by themselves, they show what is possible. */
    double good = 2.0 * (double)read_ns(room, bytes / 2) * AS_GOOD;
    int64_t least = read_ns(room, bytes);
    char *best = room;
    for (int set = 1; set < SETS && (double)least > good && losers->count < MOST_LOSERS; set++) {
        char *other = fresh_pages(bytes);
        if (!other) break;
        memcpy(other, room, (size_t)bytes);
        int64_t took = read_ns(other, bytes);
        char *loser = took < least ? best : other;
        if (took < least) least = took, best = other;
        if (loser != room) losers->sets[losers->count++] = (tw_pages){loser, (size_t)bytes};
    }
    if (best == room) return 1;
    if (mremap(best, (size_t)bytes, (size_t)bytes, MREMAP_MAYMOVE | MREMAP_FIXED, room) == room) return 1;
    munmap(best, (size_t)bytes);
#if defined(MAP_FIXED_NOREPLACE)
    /* If the room has lost its pages on the way, nobody else's may come there: it is given back as a whole. */
    mmap(room, (size_t)bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
#endif
    return 0;
}

int tw_place(char *room, const char *weights, int64_t bytes, int64_t parts, tw_losers *losers)
{
    memcpy(room, weights, (size_t)bytes);
    int64_t part = bytes / parts;
    if (bytes % parts || part != tw_whole_pages(part)) return 1; /* pages would be shared with the next part */
    for (int64_t at = 0; at < bytes; at += part)
        if (!choose_pages(room + at, part, losers)) return 0;
    return 1;
}

void tw_release(tw_losers *losers)
{
    while (losers->count > 0) {
        tw_pages *last = &losers->sets[--losers->count];
        munmap(last->start, last->bytes);
    }
}

#else

int tw_place(char *room, const char *weights, int64_t bytes, int64_t parts, tw_losers *losers)
{
    (void)losers, (void)room, (void)weights, (void)bytes, (void)parts;
    return 0;
}

void tw_release(tw_losers *losers)
{
    (void)losers;
}

#endif
