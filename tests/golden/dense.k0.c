typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define tw_floordiv(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); __auto_type _q = _a / _b; \
    _q - ((_a % _b != 0) & ((_a < 0) != (_b < 0))); })
#define tw_mod(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); __auto_type _r = _a % _b; \
    _r + (-(__typeof__(_r))((_r != 0) & ((_r < 0) != (_b < 0))) & _b); })
#define tw_max(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); (_a > _b) || (_a != _a) ? _a : _b; })
#define tw_min(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); (_a < _b) || (_a != _a) ? _a : _b; })
#define tw_abs(a) ({ __auto_type _a = (a); _a < 0 ? -_a : _a; })
#define tw_sign(a) ({ __auto_type _a = (a); _a != _a ? _a : (__typeof__(_a))((_a > 0) - (_a < 0)); })
#ifndef TW_5a398bf6
#define TW_5a398bf6
static inline float tw_fmax(float a, float b) {
#if defined(__aarch64__)
    __asm__("fmax %s0, %s1, %s2" : "=w"(a) : "w"(a), "w"(b));
    return a;
#elif defined(__AVX512F__)
    float y = b;
    uint16_t number;
    __asm__("vcmpss $7, %1, %1, %0" : "=Yk"(number) : "v"(b));
    __asm__("vmaxss %1, %2, %0%{%3%}" : "+v"(y) : "v"(a), "v"(b), "Yk"(number));
    return y;
#elif defined(__AVX__)
    float y, absent;  // the second operand where one is NaN; a branch would be foreseen half the time
    __asm__("vmaxss %1, %2, %0" : "=x"(y) : "x"(a), "x"(b));
    __asm__("vcmpunordss %1, %1, %0" : "=x"(absent) : "x"(b));
    __asm__("vblendvps %2, %1, %0, %0" : "+x"(y) : "x"(b), "x"(absent));
    return y;
#else
    return tw_max(a, b);
#endif
}
static inline float tw_fmin(float a, float b) {
#if defined(__aarch64__)
    __asm__("fmin %s0, %s1, %s2" : "=w"(a) : "w"(a), "w"(b));
    return a;
#elif defined(__AVX512F__)
    float y = b;
    uint16_t number;
    __asm__("vcmpss $7, %1, %1, %0" : "=Yk"(number) : "v"(b));
    __asm__("vminss %1, %2, %0%{%3%}" : "+v"(y) : "v"(a), "v"(b), "Yk"(number));
    return y;
#elif defined(__AVX__)
    float y, absent;  // the second operand where one is NaN; a branch would be foreseen half the time
    __asm__("vminss %1, %2, %0" : "=x"(y) : "x"(a), "x"(b));
    __asm__("vcmpunordss %1, %1, %0" : "=x"(absent) : "x"(b));
    __asm__("vblendvps %2, %1, %0, %0" : "+x"(y) : "x"(b), "x"(absent));
    return y;
#else
    return tw_min(a, b);
#endif
}
#endif
typedef float v8f32 __attribute__((vector_size(32)));
typedef float v8f32u __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8i32 __attribute__((vector_size(32)));
typedef int32_t v8i32u __attribute__((vector_size(32), aligned(4), may_alias));
#ifndef TW_a537f57a
#define TW_a537f57a

static inline v8f32 tw_select_v8f32(v8i32 mask, v8f32 a, v8f32 b) { return (v8f32)((mask & (v8i32)a) | (~mask & (v8i32)b)); }
#endif
#ifndef TW_2e0fef64
#define TW_2e0fef64

static inline v8f32 tw_max_constant_v8f32(v8f32 a, v8f32 b) {
#if 8 == 4 && defined(__aarch64__)
    v8f32 y;
    __asm__("fmax %0.4s, %1.4s, %2.4s" : "=w"(y) : "w"(a), "w"(b));
    return y;
#elif (8 == 16 && defined(__AVX512F__)) || (8 == 8 && defined(__AVX__)) || (8 == 4 && defined(__AVX__))
    v8f32 y;
    __asm__("vmaxps %1, %2, %0" : "=v"(y) : "v"(a), "v"(b));
    return y;
#else
    return tw_select_v8f32(~(a <= b), a, b);
#endif
}
#endif
void k0(void *const *buffers, const int64_t *extents, int64_t tile, char *scratch) {
    float *restrict p0 = buffers[0];
    float *restrict p1 = buffers[1];
    float *restrict p2 = buffers[2];
    float *restrict p3 = buffers[3];
    {
        v8f32 acc_0, acc_1, acc_2;
        acc_0 = ((v8f32){});
        acc_1 = ((v8f32){});
        acc_2 = ((v8f32){});
        const v8f32 x_0 = ((p0[0]) - (v8f32){});
        const v8f32 x_1 = (*(const v8f32u *)(p1 + 0));
        acc_0 = (acc_0 + (x_0 * x_1));
        const v8f32 x_2 = ((p0[4]) - (v8f32){});
        acc_1 = (acc_1 + (x_2 * x_1));
        const v8f32 x_3 = ((p0[8]) - (v8f32){});
        acc_2 = (acc_2 + (x_3 * x_1));
        const v8f32 x_4 = ((p0[1]) - (v8f32){});
        const v8f32 x_5 = (*(const v8f32u *)(p1 + 8));
        acc_0 = (acc_0 + (x_4 * x_5));
        const v8f32 x_6 = ((p0[5]) - (v8f32){});
        acc_1 = (acc_1 + (x_6 * x_5));
        const v8f32 x_7 = ((p0[9]) - (v8f32){});
        acc_2 = (acc_2 + (x_7 * x_5));
        const v8f32 x_8 = ((p0[2]) - (v8f32){});
        const v8f32 x_9 = (*(const v8f32u *)(p1 + 16));
        acc_0 = (acc_0 + (x_8 * x_9));
        const v8f32 x_10 = ((p0[6]) - (v8f32){});
        acc_1 = (acc_1 + (x_10 * x_9));
        const v8f32 x_11 = ((p0[10]) - (v8f32){});
        acc_2 = (acc_2 + (x_11 * x_9));
        const v8f32 x_12 = ((p0[3]) - (v8f32){});
        const v8f32 x_13 = (*(const v8f32u *)(p1 + 24));
        acc_0 = (acc_0 + (x_12 * x_13));
        const v8f32 x_14 = ((p0[7]) - (v8f32){});
        acc_1 = (acc_1 + (x_14 * x_13));
        const v8f32 x_15 = ((p0[11]) - (v8f32){});
        acc_2 = (acc_2 + (x_15 * x_13));
        *(v8f32u *)(p3 + 0) = tw_max_constant_v8f32((acc_0 + (*(const v8f32u *)(p2 + 0))), ((v8f32){}));
        *(v8f32u *)(p3 + 9) = tw_max_constant_v8f32((acc_1 + (*(const v8f32u *)(p2 + 0))), ((v8f32){}));
        *(v8f32u *)(p3 + 18) = tw_max_constant_v8f32((acc_2 + (*(const v8f32u *)(p2 + 0))), ((v8f32){}));
    }
    {
        v8f32 acc1_0, acc1_1, acc1_2;
        acc1_0 = ((v8f32){});
        acc1_1 = ((v8f32){});
        acc1_2 = ((v8f32){});
        const v8f32 x_16 = ((p0[0]) - (v8f32){});
        const v8f32 x_17 = (*(const v8f32u *)(p1 + 32));
        acc1_0 = (acc1_0 + (x_16 * x_17));
        const v8f32 x_18 = ((p0[4]) - (v8f32){});
        acc1_1 = (acc1_1 + (x_18 * x_17));
        const v8f32 x_19 = ((p0[8]) - (v8f32){});
        acc1_2 = (acc1_2 + (x_19 * x_17));
        const v8f32 x_20 = ((p0[1]) - (v8f32){});
        const v8f32 x_21 = (*(const v8f32u *)(p1 + 40));
        acc1_0 = (acc1_0 + (x_20 * x_21));
        const v8f32 x_22 = ((p0[5]) - (v8f32){});
        acc1_1 = (acc1_1 + (x_22 * x_21));
        const v8f32 x_23 = ((p0[9]) - (v8f32){});
        acc1_2 = (acc1_2 + (x_23 * x_21));
        const v8f32 x_24 = ((p0[2]) - (v8f32){});
        const v8f32 x_25 = (*(const v8f32u *)(p1 + 48));
        acc1_0 = (acc1_0 + (x_24 * x_25));
        const v8f32 x_26 = ((p0[6]) - (v8f32){});
        acc1_1 = (acc1_1 + (x_26 * x_25));
        const v8f32 x_27 = ((p0[10]) - (v8f32){});
        acc1_2 = (acc1_2 + (x_27 * x_25));
        const v8f32 x_28 = ((p0[3]) - (v8f32){});
        const v8f32 x_29 = (*(const v8f32u *)(p1 + 56));
        acc1_0 = (acc1_0 + (x_28 * x_29));
        const v8f32 x_30 = ((p0[7]) - (v8f32){});
        acc1_1 = (acc1_1 + (x_30 * x_29));
        const v8f32 x_31 = ((p0[11]) - (v8f32){});
        acc1_2 = (acc1_2 + (x_31 * x_29));
        p3[8] = tw_fmax((acc1_0[0] + p2[8]), 0.0f);
        p3[17] = tw_fmax((acc1_1[0] + p2[8]), 0.0f);
        p3[26] = tw_fmax((acc1_2[0] + p2[8]), 0.0f);
    }
}
