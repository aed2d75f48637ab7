/* Opens a model with the weights that lie in a file, or in one that several models share. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "model.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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
    if (!m || !is_whole) tw_unmap_pages(&own);
    if (!m) tw_unmap_pages(&shared);
    return m;
}
