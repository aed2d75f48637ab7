/* Memory for weights that stay in a core's own cache while they are read again and again. */
#ifndef TW_PLACING_H
#define TW_PLACING_H

#include <stddef.h>
#include <stdint.h>

enum { MOST_LOSERS = 64 };

typedef struct {
    void *start;
    size_t bytes;
} tw_pages;

/* Pages that were tried and not taken. */
typedef struct {
    int count;
    tw_pages sets[MOST_LOSERS];
} tw_losers;

/* The bytes and what fills up their last page: systems have pages of 4, 16 or 64 KB. */
int64_t tw_whole_pages(int64_t bytes);

/* Copies the weights to pages that keep out of each other's way in the caches. Each of the equal parts is what one core
 * reads. room starts a page and has whole pages. 0 when that cannot be done; the room is of no use then. */
int tw_place(char *room, const char *weights, int64_t bytes, int64_t parts, tw_losers *losers);

/* When all is placed: returns the pages that were not taken. */
void tw_release(tw_losers *losers);

#endif
