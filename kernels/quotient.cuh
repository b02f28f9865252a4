// Quotients and inverse roots with the bits of IEEE divisions and roots, without the branch that the compiler puts around those
// to numbers that need more care: what lies around a branch is not interleaved with what lies behind it. An approximation is
// corrected by the rest that it leaves, which fma gives exactly; who calls sees to it that nothing under- or overflows.
#pragma once

#include "port.cuh"

// a / b, rounded as a division rounds, by the rounded 1 / b: the rest of a first quotient corrects it. Without over- and
// underflow that is exact for b = 127 and any a, for a = 127 and any b, for all b that are rows' lengths
// (tests/numerics/test_quotient.py), and for silu (bench/gpu/unary.py), in a third of a division's time.
DEVICE float quotient(float a, float b, float inverse) {
    const float q = a * inverse;
    return fma_f32(fma_f32(-b, q, a), inverse, q);
}

// The same for any a and b. The first correction leaves less than a unit of the last place, and from there the next one always
// gives the rounded quotient (P. Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, 1990).
DEVICE float quotient_of_any(float a, float b, float inverse) {
    const float q = quotient(a, b, inverse);
    return fma_f32(fma_f32(-b, q, a), inverse, q);
}

DEVICE float with_sign_of(float magnitude, float x) {
    return f32_from_bits((f32_bits(magnitude) & 0x7fffffffu) | (f32_bits(x) & 0x80000000u));
}

// Whether quotient_of_any(a, b, reciprocal(b)) is a / b but for the sign of a zero: 1 <= b <= 2^64, and a is 0 or finite and at
// least 2^-90 in magnitude.
DEVICE bool is_plain_quotient(float a, float b) {
    const unsigned above = (f32_bits(a) & 0x7fffffffu) - 0x12800000u;
    return ((f32_bits(a) << 1) == 0 || above < KESTREL_INF_BITS - 0x12800000u) && f32_bits(b) - 0x3f800000u <= 0x20000000u;
}

// 1 / sqrt(ss / d + eps), for ss a sum of squares of d numbers (contract section 4), by the rounded 1 / d. From 2^-60 on neither
// the rest nor the quotient underflows, nor does anything of the root; a NaN or an infinity takes the other way.
DEVICE float inverse_rms(float ss, int d, float inverse, float eps) {
#if KESTREL_FAST
    (void)d;
    return rsqrtf(ss * inverse + eps);
#else
    const float x = quotient(ss, (float)d, inverse) + eps;
    float r = reciprocal(root(x));
    if (__builtin_expect(!(ss >= 8.6736174e-19f && x >= ROOT_FROM && f32_bits(x) < KESTREL_INF_BITS), 0))
        r = 1.0f / sqrt_f32(ss / (float)d + eps);
    return r;
#endif
}
