/* How a thread computes with floats: rounding to nearest, no traps, and denormals flushed to zero or kept.
 *
 * On x86 a product with a denormal takes some 150 cycles instead of half of one. Flushed, operands and results below
 * the smallest normal number are zeros, in float32 and float64. Half precision keeps its denormals: neither MXCSR nor
 * FPCR.FZ reach it, and FPCR.FZ16 stays off. All workers of a model compute in the same mode, whatever the mode of the
 * thread that calls, so that results depend on neither; that thread gets its own mode back. */
#ifndef TW_ARITHMETIC_H
#define TW_ARITHMETIC_H

#include <stdint.h>

typedef uint64_t tw_arithmetic;

#if defined(__x86_64__) || (defined(__i386__) && defined(__SSE__))
enum {
    TW_FLAGS = 0x3f,        /* what has happened so far: not part of the mode */
    TW_PLAIN = 0x1f80,      /* every exception masked, to nearest */
    TW_FLUSHING = 0x8040,   /* FTZ for results, DAZ for operands */
};
static inline tw_arithmetic tw_arithmetic_now(void)
{
    return __builtin_ia32_stmxcsr();
}
static inline void tw_arithmetic_set(tw_arithmetic mode)
{
    __builtin_ia32_ldmxcsr((unsigned)mode);
}
#elif defined(__aarch64__)
enum { TW_FLAGS = 0, TW_PLAIN = 0, TW_FLUSHING = 1 << 24 /* FZ: operands and results */ };
static inline tw_arithmetic tw_arithmetic_now(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void tw_arithmetic_set(tw_arithmetic mode)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
}
#else
enum { TW_FLAGS = 0, TW_PLAIN = 0, TW_FLUSHING = 0 };
static inline tw_arithmetic tw_arithmetic_now(void)
{
    return 0;
}
static inline void tw_arithmetic_set(tw_arithmetic mode)
{
    (void)mode;
}
#endif

/* Enters the mode and returns the one before. A write of the register waits for all arithmetic under way (some ten
 * cycles), a read does not: it is written only where it changes. */
static inline tw_arithmetic tw_arithmetic_enter(int keeps_denormals)
{
    tw_arithmetic before = tw_arithmetic_now(), wanted = keeps_denormals ? TW_PLAIN : TW_PLAIN | TW_FLUSHING;
    if ((before & ~(tw_arithmetic)TW_FLAGS) != wanted) tw_arithmetic_set(wanted);
    return before;
}

static inline void tw_arithmetic_leave(tw_arithmetic before)
{
    if ((tw_arithmetic_now() ^ before) & ~(tw_arithmetic)TW_FLAGS) tw_arithmetic_set(before);
}

#endif
