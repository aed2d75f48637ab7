/* The interface of a compiled model: one shared object made of this driver, a generated table and the kernels.
 *
 * From C:  tw_model *model = tw_open("model.weights", 8);
 *          tw_run(model, inputs, outputs);
 *          tw_destroy(model);
 */
#ifndef TW_DRIVER_H
#define TW_DRIVER_H

#include <stdint.h>

#define TW_API __attribute__((visibility("default")))

typedef void (*tw_kernel)(void *const *buffers, const int64_t *extents, int64_t tile, char *scratch);

enum { TW_INPUT, TW_OUTPUT, TW_WEIGHT, TW_ARENA };
enum { TW_AUTO, TW_STATIC, TW_DYNAMIC, TW_SERIAL };

/* value: the position of an input or output, a byte offset into the weights or the arena. */
typedef struct {
    int32_t space;
    int64_t value;
    int64_t offset; /* bytes into an input or output */
} tw_buffer;

typedef struct {
    tw_kernel kernel;
    int64_t tiles;
    int32_t first_buffer;
    int32_t buffers;
    int32_t barrier_before;
    int32_t balance;
    int64_t first_extent; /* the kernel sees the extents from here on */
} tw_stage;

/* Weights that the steps of a loop read again and again, each worker one of so many equal parts. */
typedef struct {
    int64_t offset, bytes, parts;
} tw_kept;

/* In front of a stage, or behind the last: goes on in front of the target, always or where the first byte of a buffer is
 * 0. */
typedef struct {
    int64_t stage, target;
    int64_t next; /* the jump in front of the target, or of a later stage, that is looked at first */
    int64_t buffer; /* among the table's buffers; -1: always */
} tw_jump;

typedef struct {
    int64_t stages, buffers, extents, inputs, outputs, kept;
    int64_t weight_bytes, arena_bytes, scratch_bytes;
    int64_t keeps_denormals;
    const tw_stage *stage;
    const tw_buffer *buffer;
    const int64_t *extent;
    const int64_t *input_bytes;
    const int64_t *output_bytes;
    const tw_kept *kept_weights;
    int64_t jumps;
    const tw_jump *jump; /* by stage; those in front of one are looked at in order */
} tw_table;

/* Defined by the generated table. */
extern const tw_table tw_model_table;

typedef struct tw_model tw_model;

enum { TW_OK = 0, TW_NO_THREADS = 1, TW_NOT_READY = 2, TW_CANCELLED = 3 };
enum { TW_MAX_THREADS = 1024 };
enum { TW_RUN_SPIN_NS = 100000, TW_IDLE_SPIN_NS = 50000 };

/* Weights from a place among all of them on, up to where the next piece begins. */
typedef struct {
    int64_t begin;
    const char *data;
} tw_piece;

/* How a file begins whose weights lie in another, of so many bytes, that several models share; its name, as seen from
 * here, follows the last place and ends the file with zeros. Pieces are in order and the first begins at 0. */
#define TW_SHARED_MARK "TWSHARED"
enum { TW_WEIGHT_ALIGNMENT = 64 };
typedef struct {
    int64_t begin, at;
} tw_place_in_file;
typedef struct {
    char mark[8];
    int64_t bytes, pieces;
    tw_place_in_file place[];
} tw_shared;

/* pieces are in order, and the weights in them, 64-byte aligned, stay the caller's until tw_destroy. A waiting worker spins for run_spin_ns inside a
 * run and idle_spin_ns between runs before it sleeps. NULL when memory is short, threads is out of range or a stage
 * has more than 2^32 - 1 tiles. */
TW_API tw_model *tw_create(
    const tw_piece *pieces, int64_t count, int threads, int64_t run_spin_ns, int64_t idle_spin_ns);

/* Maps the weights file itself, or the one that it says its weights lie in. NULL also when a file cannot be mapped or is
 * not of the size, or of the form, that it has to be. */
TW_API tw_model *tw_open(const char *weights_path, int threads);

/* Kernels compute to nearest, with denormals flushed or kept as the table says; the caller's own mode is back when the
 * call returns. Calls from several threads at once are safe: they take turns. No output may lie in the memory of an input or of
 * another output. Returns TW_OK, TW_NO_THREADS or TW_CANCELLED. */
TW_API int tw_run(tw_model *model, void *const *inputs, void *const *outputs);

/* Ends the run in progress, if there is one, from any thread and from a signal handler: kernels that have begun are
 * finished, the run returns TW_CANCELLED, what it was to fill holds anything. The next run is not touched. */
TW_API void tw_cancel(tw_model *model);

/* A function that the thread of a run calls about every 50 ms, between kernels; not zero cancels the run. */
typedef int (*tw_watch)(void);
TW_API void tw_set_watch(tw_model *model, tw_watch watch);

/* As tw_run, with a barrier around every stage; stage_ns receives one duration a stage, the sum of all its runs. */
TW_API int tw_run_profile(tw_model *model, void *const *inputs, void *const *outputs, int64_t *stage_ns);

/* As tw_run, for a host language whose arrays are objects: objects are the inputs, then the outputs, and each
 * object keeps its data pointer data_offset bytes from its start. */
TW_API int tw_run_objects(tw_model *model, const char *const *objects, int64_t data_offset);

/* What an array of a host language looks like behind its object header. This is NumPy's, whose layout is part of its
 * binary interface; the pointer to the array's type ends the header. */
typedef struct {
    char *data;
    int rank;
    intptr_t *shape;
    intptr_t *strides;
    void *base;
    void *element_type;
    int flags;
} tw_array;

/* What an input or output must be: this type, this element type, this shape, and all of these flags. */
typedef struct {
    const void *type, *element_type;
    int64_t rank, flags;
    const int64_t *shape;
} tw_form;

/* How arrays are found in a tuple of the host language: the tuple's length follows the header that every object has,
 * its items start at first_item. A closed model is NULL. */
typedef struct {
    tw_model *model;
    const tw_form *forms;
    int64_t header, first_item;
} tw_caller;

/* As tw_run, on a tuple of the inputs, then the outputs, after a look at each: TW_NOT_READY, and nothing done, where
 * one is missing, has not its form or, being an output, lies in the memory of another. */
TW_API int tw_run_tuple(const tw_caller *caller, const char *tuple);

TW_API void tw_destroy(tw_model *model);

TW_API const tw_table *tw_describe(void);

#endif
