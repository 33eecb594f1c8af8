/* Branch-free float32 functions for the kernels' inner loops.
 *
 * libm's expf and its kin are calls, and a loop with a call does not vectorise without -ffast-math,
 * which this package never uses (it would delete the NaN guard). These are straight-line code: a
 * compiler that inlines them into a loop over contiguous floats vectorises the loop for whatever
 * instruction set it compiles for. The choices between two values are ternaries (blends); a
 * comparison with NaN is false, and every clamp is written so that NaN then passes through it.
 *
 * The polynomials come from tools/fit_vecmath.py. Largest errors over every float in range, in units
 * in the last place, are stated at each function and tested in tests/test_vecmath.py.
 */
#ifndef MAMBA_FAST_VECMATH_H
#define MAMBA_FAST_VECMATH_H

#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER)
#  define MF_INLINE static __forceinline
#  define MF_RESTRICT __restrict
#else
#  define MF_INLINE static inline __attribute__((always_inline))
#  define MF_RESTRICT __restrict__
#endif

/* Pointers that the kernels promise not to alias: with them a loop needs no run-time overlap checks. */
typedef float *MF_RESTRICT mf_out;
typedef const float *MF_RESTRICT mf_in;

#define MF_LOG2E 1.44269504088896340736f
/* Adding and taking away 1.5 * 2^23 rounds to the nearest integer, and leaves that integer in the low
 * bits of the sum. */
#define MF_ROUND 12582912.0f

MF_INLINE float mf_from_bits(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define MF_NAN mf_from_bits(0x7fc00000)
#define MF_INFINITY mf_from_bits(0x7f800000)

MF_INLINE int32_t mf_to_bits(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* e^(y - k ln 2) for |y - k ln 2| <= 0.347 */
MF_INLINE float mf_exp_reduced(float y, float k) {
    float r = y - k * 0.693145751953125f; /* ln 2 in two parts: k times the first is exact */
    r = r - k * 1.42860677e-6f;
    float p = 1.390551333e-03f;
    p = p * r + 8.362974972e-03f;
    p = p * r + 4.166676477e-02f;
    p = p * r + 1.666657925e-01f;
    p = p * r + 5.000000000e-01f;
    p = p * (r * r) + r;
    return p + 1.0f;
}

/* e^x for x <= 0: 0 below -87.7, 0 for NaN. Error below 1.1 ulp.
 *
 * The clamp compares the bits as unsigned integers, among which the negative floats come last and grow
 * with their magnitude: one instruction, where comparisons of floats let the compiler split the whole
 * function into cases and blend their results. */
MF_INLINE float mf_exp_neg(float x) {
    uint32_t bits = (uint32_t)mf_to_bits(x);
    float y = mf_from_bits((int32_t)(bits < 0xc2b00000u ? bits : 0xc2b00000u)); /* -88 */
    float shifted = y * MF_LOG2E + MF_ROUND;
    float k = shifted - MF_ROUND;
    /* k = -127 gives the factor 0 */
    return mf_exp_reduced(y, k) * mf_from_bits((int32_t)((uint32_t)(mf_to_bits(shifted) - 0x4b400000 + 127) << 23));
}

/* e^x for every x: 0 below -87, infinity above 88.72, NaN for NaN. Error below 1.1 ulp. */
MF_INLINE float mf_exp(float x) {
    uint32_t bits = (uint32_t)mf_to_bits(x);
    float y = mf_from_bits((int32_t)(bits < 0xc2af0000u ? bits : 0xc2af0000u)); /* -87.5, as in mf_exp_neg */
    float shifted = y * MF_LOG2E + MF_ROUND;
    float p = mf_exp_reduced(y, shifted - MF_ROUND);
    /* 2 and 2^(k - 1): k may be 128, which is no exponent of a float. k = -126 gives the factor 0. */
    p = (p * 2.0f) * mf_from_bits((int32_t)((uint32_t)(mf_to_bits(shifted) - 0x4b400000 + 126) << 23));
    p = x > 88.7228394f ? MF_INFINITY : p;
    return x != x ? x : p;
}

/* 2^t = s (1 + p) with s a power of two and |p| < 0.42, for t <= 127.4; t is taken as -126 below that.
 * `t` is a product with log2(e) in the scan, which saves a two-part reduction.
 *
 * The parts serve better than 2^t itself. h decays to s (p h + h): exact scaling of a sum that does
 * not cancel, so that a decay near 1 keeps its distance from 1 and one near 0 its own digits.
 *
 * The clamp is that of mf_exp_neg. A NaN passes if its sign bit is clear; callers see to that. */
MF_INLINE void mf_exp2_parts(float t, float *s, float *p) {
    uint32_t bits = (uint32_t)mf_to_bits(t);
    float y = mf_from_bits((int32_t)(bits < 0xc2fc0000u ? bits : 0xc2fc0000u));
    float shifted = y + MF_ROUND;
    float f = y - (shifted - MF_ROUND);
    float q = 1.538456418e-04f;
    q = q * f + 1.338742091e-03f;
    q = q * f + 9.618305601e-03f;
    q = q * f + 5.550367385e-02f;
    q = q * f + 2.402264923e-01f;
    q = q * f + 6.931471825e-01f;
    *p = q * f;
    *s = mf_from_bits((int32_t)((uint32_t)mf_to_bits(shifted) << 23) + 0x3f800000);
}

/* 2^t - 1 without cancellation near 0, same range. Error below 1.8 ulp for t <= 0, 2.5 above. */
MF_INLINE float mf_exp2m1(float t) {
    float s, p;
    mf_exp2_parts(t, &s, &p);
    return s * p + (s - 1.0f);
}

/* log(1 + w) for 0 <= w <= 1; NaN for NaN. Error below 1.7 ulp. */
MF_INLINE float mf_log1p_unit(float w) {
    float p = -3.310628003e-03f;
    p = p * w + 2.016826533e-02f;
    p = p * w - 5.759408697e-02f;
    p = p * w + 1.067316905e-01f;
    p = p * w - 1.535084993e-01f;
    p = p * w + 1.969374567e-01f;
    p = p * w - 2.495824695e-01f;
    p = p * w + 3.333047628e-01f;
    p = p * w - 4.999993145e-01f;
    return (p * w) * w + w;
}

MF_INLINE float mf_abs(float x) {
    return mf_from_bits(mf_to_bits(x) & 0x7fffffff);
}

/* softplus(x) = log(1 + e^x) = max(x, 0) + log1p(e^-|x|), which never overflows. NaN for NaN.
 * Error below 2.4 ulp. */
MF_INLINE float mf_softplus(float x) {
    float w = mf_exp_neg(-mf_abs(x));
    return (x < 0.0f ? 0.0f : x) + mf_log1p_unit(w);
}

/* 1 / (1 + e^-x), with full relative accuracy on both sides. 1 for NaN: it is always
 * multiplied by x here. Error below 2.4 ulp. */
MF_INLINE float mf_sigmoid(float x) {
    float w = mf_exp_neg(-mf_abs(x));
    return (x < 0.0f ? w : 1.0f) / (1.0f + w);
}

/* x * sigmoid(x) */
MF_INLINE float mf_silu(float x) {
    return x * mf_sigmoid(x);
}

/* phi'(z) for |z| <= 0.3475, where phi(z) = expm1(z) / z; the closed form (z e^z - expm1(z)) / z^2
 * cancels there. Error below 1.2 ulp. */
MF_INLINE float mf_phi_prime_near_zero(float z) {
    float p = 1.188418362e-03f;
    p = p * z + 6.973491516e-03f;
    p = p * z + 3.333400190e-02f;
    p = p * z + 1.249989271e-01f;
    p = p * z + 3.333333135e-01f;
    p = p * z + 5.000000000e-01f;
    return p;
}

#endif
