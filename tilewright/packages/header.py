"""A saved model's C header and the program that shows its use; names in a model are any text and are spelled out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.packages.manifest import Port
from tilewright.runtime.features import c_checks

_C_TYPES = {
    "float32": "float", "float64": "double", "bool": "uint8_t (0 or 1)", "float16": "uint16_t (the bits of a half)",
    "bfloat16": "uint16_t (the upper half of a float's bits)",
}  # fmt: skip
_MOST_THREADS = 1024

_HEADER = """\
/* A model compiled by Tilewright: libmodel.so has its code, model.weights its weights.
 *
 * inputs, in order:
{inputs}
 * outputs, in order:
{outputs}
 *
 * Arrays are contiguous, the last axis fastest, and aligned to their elements.
 *
 *     if (!tw_check_cpu()) return 1;                        // compiled for another processor
 *     tw_model *model = tw_open("model.weights", 4);        // 4 threads
 *     void *const inputs[TW_INPUTS] = {input_example};
 *     void *const outputs[TW_OUTPUTS] = {output_example};
 *     if (!model || tw_run(model, inputs, outputs) != TW_OK) return 1;
 *     tw_destroy(model);
 *
 * cc program.c -I DIR -L DIR -lmodel -Wl,-rpath,DIR     (example.c, beside this file, is a whole program)
 *
 * Every model has functions of these names. A program links one; several are opened by dlopen with RTLD_LOCAL, and
 * their functions found by dlsym. */
#ifndef TILEWRIGHT_MODEL_H
#define TILEWRIGHT_MODEL_H

#include <stdint.h>
{includes}
#ifdef __cplusplus
extern "C" {{
#endif

#define TW_INPUTS {input_count}
#define TW_OUTPUTS {output_count}

typedef struct {{
    const char *name, *type;
    int64_t bytes, elements;
    int rank;
    int64_t shape[{most_rank}];
}} tw_port;

static const tw_port tw_inputs[] = {{
{input_rows}
}};
static const tw_port tw_outputs[] = {{
{output_rows}
}};

typedef struct tw_model tw_model;
enum {{ TW_OK = 0, TW_NO_THREADS = 1, TW_CANCELLED = 3 }};

/* Maps the weights and prepares a team of threads, the caller's among them; the others start at the first run.
 * NULL when the file is not there or not this model's, memory is short, or threads is not 1 to {most_threads}. */
tw_model *tw_open(const char *weights_path, int threads);

/* Fills the outputs. No output may lie in the memory of an input or of another output. Calls from several threads at
 * once are safe: they take turns. {denormals}
 * Returns TW_OK, TW_NO_THREADS where the system refused to start them, or TW_CANCELLED. */
int tw_run(tw_model *model, void *const *inputs, void *const *outputs);

/* Ends the run in progress, from another thread or a signal handler; the outputs then hold anything. */
void tw_cancel(tw_model *model);

/* Stops the threads and frees the memory. No other thread may be inside tw_run. */
void tw_destroy(tw_model *model);

{helpers}/* Whether this processor has what the code was compiled for: {features}.
 * Call it before anything else: without, the first run may end in an illegal instruction. */
static inline int tw_check_cpu(void)
{{
    return {checks};
}}

#ifdef __cplusplus
}}
#endif
#endif
"""

_CPUID = """\
/* A bit of what the processor says of itself. */
static inline int tw_cpuid(unsigned leaf, unsigned subleaf, char which, int bit)
{
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(leaf, subleaf, &a, &b, &c, &d)) return 0;
    return (which == 'a' ? a : which == 'b' ? b : which == 'c' ? c : d) >> bit & 1;
}

/* Whether the system saves these registers for a program. */
static inline int tw_saved(unsigned which)
{
    unsigned low = 0, high = 0;
    if (!tw_cpuid(1, 0, 'c', 27)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
    return (low & which) == which;
}

"""

_AMX = """\
/* Asks the system for AMX tiles, which it grants a process on request alone. */
static inline int tw_request_amx(void)
{
    return syscall(158 /* arch_prctl */, 0x1023 /* request permission */, 18 /* tile data */) == 0;
}

"""

_EXAMPLE = """\
/* Runs the model beside this file once and prints every output, a value a line.
 *
 *     cc -O2 example.c -L. -lmodel -Wl,-rpath,'$ORIGIN' -o example
 *     ./example {weights} THREADS INPUT...
 *
 * An INPUT is a file with an input's elements as they lie in memory; inputs without a file are zeros. */
#include "{header}"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void give_up(const char *why, const char *what)
{{
    fprintf(stderr, "%s %s\\n", why, what);
    exit(1);
}}

static void *room_for(const tw_port *port)
{{
    void *room = calloc((size_t)port->bytes + 1, 1);
    if (!room) give_up("not enough memory for", port->name);
    return room;
}}

static void read_input(const char *path, void *to, const tw_port *port)
{{
    FILE *file = fopen(path, "rb");
    if (!file || fread(to, 1, (size_t)port->bytes, file) != (size_t)port->bytes)
        give_up("not the size of its input:", path);
    fclose(file);
}}

static void print_value(const void *data, const char *type, int64_t i)
{{
    if (!strcmp(type, "float32")) printf("%.9g\\n", ((const float *)data)[i]);
    else if (!strcmp(type, "float64")) printf("%.17g\\n", ((const double *)data)[i]);
    else if (!strcmp(type, "int64")) printf("%lld\\n", (long long)((const int64_t *)data)[i]);
    else if (!strcmp(type, "int32")) printf("%d\\n", ((const int32_t *)data)[i]);
    else if (!strcmp(type, "int16")) printf("%d\\n", ((const int16_t *)data)[i]);
    else if (!strcmp(type, "int8")) printf("%d\\n", ((const int8_t *)data)[i]);
    else if (!strcmp(type, "uint64")) printf("%llu\\n", (unsigned long long)((const uint64_t *)data)[i]);
    else if (!strcmp(type, "uint32")) printf("%u\\n", ((const uint32_t *)data)[i]);
    else if (!strcmp(type, "uint8") || !strcmp(type, "bool")) printf("%u\\n", ((const uint8_t *)data)[i]);
    else printf("0x%04x\\n", ((const uint16_t *)data)[i]);
}}

int main(int count, char **arguments)
{{
    void *inputs[TW_INPUTS + 1], *outputs[TW_OUTPUTS + 1];
    const char *weights = count > 1 ? arguments[1] : "{weights}";
    int threads = count > 2 ? atoi(arguments[2]) : 1;
    if (!tw_check_cpu()) give_up("compiled for another processor:", weights);
    for (int i = 0; i < TW_INPUTS; i++) {{
        inputs[i] = room_for(&tw_inputs[i]);
        if (count > 3 + i) read_input(arguments[3 + i], inputs[i], &tw_inputs[i]);
    }}
    for (int i = 0; i < TW_OUTPUTS; i++) outputs[i] = room_for(&tw_outputs[i]);
    tw_model *model = tw_open(weights, threads);
    if (!model) give_up("cannot open", weights);
    if (tw_run(model, inputs, outputs) != TW_OK) give_up("cannot start the threads of", weights);
    for (int i = 0; i < TW_OUTPUTS; i++) {{
        printf("# %s: %s, %lld elements\\n", tw_outputs[i].name, tw_outputs[i].type, (long long)tw_outputs[i].elements);
        for (int64_t j = 0; j < tw_outputs[i].elements; j++) print_value(outputs[i], tw_outputs[i].type, j);
    }}
    tw_destroy(model);
    for (int i = 0; i < TW_INPUTS; i++) free(inputs[i]);
    for (int i = 0; i < TW_OUTPUTS; i++) free(outputs[i]);
    return 0;
}}
"""


def header_text(
    inputs: Sequence[Port], outputs: Sequence[Port], features: tuple[str, ...], permissions: tuple[str, ...],
    denormals: str,
) -> str:  # fmt: skip
    checks = c_checks(features)
    includes = ["#include <cpuid.h>"] if any("cpuid" in check for check in checks) else []
    includes += ["#include <sys/auxv.h>"] if any("getauxval" in check for check in checks) else []
    helpers = _CPUID if any("cpuid" in check for check in checks) else ""
    if "amx" in permissions:
        includes.append("#include <unistd.h>")
        helpers += _AMX
        checks.append("tw_request_amx()")
    flushed = "Numbers too small for full precision count as zeros." if denormals == "flush" else ""
    return _HEADER.format(
        inputs="\n".join(map(_described, inputs)) or " *     none",
        outputs="\n".join(map(_described, outputs)) or " *     none",
        input_example="{" + ", ".join(f"in{i}" for i in range(len(inputs))) + "}",
        output_example="{" + ", ".join(f"out{i}" for i in range(len(outputs))) + "}",
        includes="".join(f"{line}\n" for line in includes),
        input_count=len(inputs),
        output_count=len(outputs),
        most_rank=max((len(shape) for _, _, shape in (*inputs, *outputs)), default=1) or 1,
        input_rows=",\n".join(map(_row, inputs)) or '    {"", "", 0, 0, 0, {0}}',
        output_rows=",\n".join(map(_row, outputs)) or '    {"", "", 0, 0, 0, {0}}',
        most_threads=_MOST_THREADS,
        denormals=flushed,
        helpers=helpers,
        features=" ".join(features) or "nothing that others lack",
        checks="\n        && ".join(checks) or "1",
    )


def example_text(header: str, weights: str) -> str:
    return _EXAMPLE.format(header=header, weights=weights)


def _described(port: Port) -> str:
    name, dtype, shape = port
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "_./:- ") else "_" for c in name)
    kind = _C_TYPES.get(dtype.name, f"{dtype.name}_t")
    return f" *     {plain}: {kind}, shape {list(shape)}, {math.prod(shape) * dtype.bytes} bytes"


def _row(port: Port) -> str:
    name, dtype, shape = port
    size = math.prod(shape)
    extents = ", ".join(map(str, shape)) or "0"
    return f'    {{{_literal(name)}, "{dtype.name}", {size * dtype.bytes}, {size}, {len(shape)}, {{{extents}}}}}'


def _literal(text: str) -> str:
    """A string of C; octal escapes end after three digits, whatever follows."""
    plain = b"_./:- 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    data = text.encode("utf-8", "surrogatepass")
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in data) + '"'
