/* The program that measures a machine, on small sets and for a moment: it must end well and have run every instruction.
 * How fast they are means nothing here. */
#include <stdint.h>

int tw_probe(int units, int64_t near, int64_t middle, int64_t outer, int64_t far, int passes, double patience,
             double seconds);

int main(void)
{
    return tw_probe(1, 16384, 65536, 0, 1 << 20, 1, 0.0, 1e-5);
}
