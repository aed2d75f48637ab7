/* One case in the guest: a model with its inputs and wanted outputs in files, run and compared.
 *
 * usage: guest NAME THREADS TOLERANCE PERMISSION KINDS   (in the folder of the case)
 * PERMISSION 1 asks the system for tiles, with the numbers that tilewright/runtime/permissions.py uses. KINDS has a
 * letter for each output: f float32, i int32, b int8, u uint8.
 * Buffers end where the page behind them cannot be touched, so that one element too far is a fault. */
#define _GNU_SOURCE
#include "driver.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, POISON = 0xa5 };

static char *ending_at_a_fault(int64_t size)
{
    const int64_t whole = (size + PAGE - 1) / PAGE * PAGE;
    char *start = mmap(0, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + whole, PAGE, PROT_NONE) != 0) {
        perror("memory");
        exit(3);
    }
    memset(start, POISON, whole);
    return start + whole - size;
}

static void fill(char *to, int64_t size, const char *kind, int number)
{
    char path[64];
    snprintf(path, sizeof(path), "%s%d", kind, number);
    FILE *file = fopen(path, "rb");
    if (!file || fread(to, 1, size, file) != (size_t)size || fgetc(file) != EOF) {
        printf("cannot read %lld bytes of %s\n", (long long)size, path);
        exit(3);
    }
    fclose(file);
}

static double value(const char *from, char kind, int64_t i)
{
    switch (kind) {
    case 'f': return ((const float *)from)[i];
    case 'i': return ((const int32_t *)from)[i];
    case 'b': return ((const int8_t *)from)[i];
    default: return ((const uint8_t *)from)[i];
    }
}

int main(int count, char **given)
{
    if (count != 6) {
        return 2;
    }
    const char *name = given[1], *kinds = given[5];
    const double tolerance = atof(given[3]);
    if (given[4][0] == '1' && syscall(PERMISSION_CALL, PERMISSION_REQUEST, PERMISSION_TILES) != 0) {
        printf("%s: REFUSED: no permission for tiles (error %d)\n", name, errno);
        return 1;
    }
    const tw_table *table = tw_describe();
    void *inputs[8], *outputs[8];
    for (int i = 0; i < table->inputs; ++i) {
        inputs[i] = ending_at_a_fault(table->input_bytes[i]);
        fill(inputs[i], table->input_bytes[i], "input", i);
    }
    for (int i = 0; i < table->outputs; ++i) {
        outputs[i] = ending_at_a_fault(table->output_bytes[i]);
    }
    tw_model *model = tw_open("weights", atoi(given[2]));
    if (!model) {
        printf("%s: cannot be opened\n", name);
        return 1;
    }
    int wrong = 0;
    for (int run = 0; run < 2; ++run) {
        if (tw_run(model, inputs, outputs) != TW_OK) {
            printf("%s: cannot be run\n", name);
            return 1;
        }
        for (int i = 0; i < table->outputs; ++i) {
            const int64_t size = table->output_bytes[i];
            const int64_t elements = size / (kinds[i] == 'f' || kinds[i] == 'i' ? 4 : 1);
            char *wanted = malloc(size);
            fill(wanted, size, "wanted", i);
            double worst = 0, largest = 0;
            for (int64_t e = 0; e < elements; ++e) {
                const double found = value(outputs[i], kinds[i], e), right = value(wanted, kinds[i], e);
                const double error = found == right ? 0 : fabs(found - right); /* infinities too */
                worst = error <= worst ? worst : isnan(error) ? INFINITY : error;
                largest = fabs(right) > largest ? fabs(right) : largest;
            }
            const double limit = kinds[i] == 'f' && tolerance > 0 ? tolerance * largest : tolerance;
            wrong |= !(worst <= limit);
            if (run == 0 || worst > limit) {
                printf("%s: %s, error %.3g where %.3g is the largest of %lld\n", name,
                       worst <= limit ? "right" : "WRONG", worst, largest, (long long)elements);
            }
            free(wanted);
            memset(outputs[i], POISON, size);
        }
    }
    tw_destroy(model);
    return wrong;
}
