/* Calls with arrays of a host language, looked at before anything is done. */
#include "model.h"

static int has_form(const char *object, const tw_form *form, int64_t header)
{
    const void *type;
    tw_array array;
    memcpy(&type, object + header - (int64_t)sizeof type, sizeof type);
    if (type != form->type) return 0;
    memcpy(&array, object + header, sizeof array);
    if (array.element_type != form->element_type || array.rank != form->rank) return 0;
    if ((array.flags & form->flags) != form->flags) return 0;
    for (int64_t i = 0; i < form->rank; i++)
        if (array.shape[i] != form->shape[i]) return 0;
    return 1;
}

/* Whether no output lies in the memory of an input or of another output. */
static int are_apart(const char *const *objects, int64_t data_offset)
{
    const tw_table *t = &tw_model_table;
    for (int64_t i = t->inputs; i < t->inputs + t->outputs; i++) {
        const char *start = object_data(objects[i], data_offset), *end = start + t->output_bytes[i - t->inputs];
        for (int64_t j = 0; j < i; j++) {
            const char *other = object_data(objects[j], data_offset);
            int64_t bytes = j < t->inputs ? t->input_bytes[j] : t->output_bytes[j - t->inputs];
            if (start < other + bytes && other < end) return 0;
        }
    }
    return 1;
}

int tw_run_tuple(const tw_caller *caller, const char *tuple)
{
    intptr_t length;
    int64_t expected = tw_model_table.inputs + tw_model_table.outputs;
    memcpy(&length, tuple + caller->header, sizeof length);
    if (!caller->model || length != expected) return TW_NOT_READY;
    const char *const *objects = (const char *const *)(tuple + caller->first_item);
    for (int64_t i = 0; i < expected; i++)
        if (!has_form(objects[i], &caller->forms[i], caller->header)) return TW_NOT_READY;
    if (!are_apart(objects, caller->header)) return TW_NOT_READY;
    return tw_run_objects(caller->model, objects, caller->header);
}
