// Primitives of the numerics contract, one text for NVRTC, for g++ (the C++ reference and the kernels run on the CPU): bit
// casts, fused multiply-add, lane sums, f16 and bf16 decode, a8, the codes of V's weights. Builtin types only: NVRTC has
// no headers. Everything is static, so that a copy compiled with AVX flags never serves a file compiled without them.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__CUDA_ARCH__)
#define KESTREL_FN static __device__ __forceinline__
#define KESTREL_CONST static __device__ const
#else
#define KESTREL_FN static inline
#define KESTREL_CONST static const
#endif

#define KESTREL_NAN_BITS 0x7fc00000u  // the canonical NaN
#define KESTREL_INF_BITS 0x7f800000u

// ---- the only lines that differ between compilers: same IEEE-754 operations, other spellings ----
#if defined(__CUDACC_RTC__) || defined(__CUDA_ARCH__)
KESTREL_FN unsigned f32_bits(float x) { return __float_as_uint(x); }
KESTREL_FN float f32_from_bits(unsigned u) { return __uint_as_float(u); }
KESTREL_FN double f64_from_bits(unsigned long long u) { return __longlong_as_double((long long)u); }
KESTREL_FN unsigned f64_low_bits(double x) { return (unsigned)__double2loint(x); }
KESTREL_FN float fma_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KESTREL_FN double fma_f64(double a, double b, double c) { return __fma_rn(a, b, c); }
KESTREL_FN int f64_to_int_rn(double x) { return __double2int_rn(x); }
KESTREL_FN float rint_f32(float x) { return rintf(x); }
KESTREL_FN float sqrt_f32(float x) { return __fsqrt_rn(x); }
#else
KESTREL_FN unsigned f32_bits(float x) {
    unsigned u;
    __builtin_memcpy(&u, &x, 4);
    return u;
}
KESTREL_FN float f32_from_bits(unsigned u) {
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
}
KESTREL_FN double f64_from_bits(unsigned long long u) {
    double x;
    __builtin_memcpy(&x, &u, 8);
    return x;
}
KESTREL_FN unsigned f64_low_bits(double x) {
    unsigned long long u;
    __builtin_memcpy(&u, &x, 8);
    return (unsigned)u;
}
KESTREL_FN float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
KESTREL_FN double fma_f64(double a, double b, double c) { return __builtin_fma(a, b, c); }
// Adding 1.5 * 2^52 pushes the fraction out of the significand with rounding to nearest even, without the library
// call that rint() is on a CPU before SSE4.1. Exact for |x| < 2^31; the f32 form for |x| < 2^22.
KESTREL_FN int f64_to_int_rn(double x) { return (int)((x + 0x1.8p52) - 0x1.8p52); }
KESTREL_FN float rint_f32(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
KESTREL_FN float sqrt_f32(float x) { return __builtin_sqrtf(x); }
#endif

// Section 0. a: f32[8].
KESTREL_FN float hsum8(const float *a) {
    const float lo0 = a[0] + a[4], lo1 = a[1] + a[5], lo2 = a[2] + a[6], lo3 = a[3] + a[7];
    return (lo0 + lo1) + (lo2 + lo3);
}

// The steps of hsum32 ahead of its hsum8, for lanes k, k + 8, k + 16 and k + 24.
KESTREL_FN float fold_lanes(float a0, float a8, float a16, float a24) { return (a0 + a16) + (a8 + a24); }

// a: f32[32].
KESTREL_FN float hsum32(const float *a) {
    float folded[8];
    for (int k = 0; k < 8; k++) folded[k] = fold_lanes(a[k], a[k + 8], a[k + 16], a[k + 24]);
    return hsum8(folded);
}

// Section 1. Exact; a NaN becomes quiet and keeps its payload, as vcvtph2ps does.
KESTREL_FN float f16_to_f32(unsigned short h) {
    const unsigned sign = (unsigned)(h & 0x8000u) << 16;
    const unsigned exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
    if (exponent == 0x1fu)
        return f32_from_bits(sign | KESTREL_INF_BITS | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
    if (exponent != 0)
        return f32_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    // Subnormal halves are mantissa * 2^-24: a product of an integer and a power of two, exact in f32.
    const float magnitude = (float)mantissa * f32_from_bits(0x33800000u);
    return f32_from_bits(sign | f32_bits(magnitude));
}

KESTREL_FN float bf16_to_f32(unsigned short b) { return f32_from_bits((unsigned)b << 16); }

// Section 2. What amax, as the integer max of bits(x) & 0x7fffffff, decides for a group (or a KV head row).
struct A8Scale {
    float d;    // the stored scale
    float inv;  // 0 when every code is 0
    int zero;   // 1: every code is 0, x is not to be looked at
};

KESTREL_FN A8Scale a8_scale(unsigned amax_bits) {
    A8Scale s;
    s.inv = 0.0f;
    s.zero = 1;
    if (amax_bits >= KESTREL_INF_BITS) {  // a NaN or an infinity in the group: carried by d alone
        s.d = f32_from_bits(amax_bits > KESTREL_INF_BITS ? KESTREL_NAN_BITS : KESTREL_INF_BITS);
    } else if (amax_bits < 0x0d800000u) {  // below 2^-100: 127 / amax could overflow
        s.d = 0.0f;
    } else {
        const float amax = f32_from_bits(amax_bits);
        s.d = amax / 127.0f;
        s.inv = 127.0f / amax;
        s.zero = 0;
    }
    return s;
}

// Section 2. One code; |x * inv| <= 127 up to rounding.
#if defined(__CUDACC_RTC__) || defined(__CUDA_ARCH__)
// The fraction pushed out of the significand, as in rint_f32 below; what is left are the bits of the integer. The clamp
// has nothing to do: x * inv is at most 127 * (1 + 2^-23), which rounds to 127. A conversion would cost eight times as much.
KESTREL_FN int a8_code(float x, float inv) { return (int)f32_bits(x * inv + 12582912.0f) - 0x4b400000; }
#else
KESTREL_FN int a8_code(float x, float inv) {
    const float r = rint_f32(x * inv);
    return (int)(r > 127.0f ? 127.0f : r < -127.0f ? -127.0f : r);
}
#endif

// Section 7. What a, as the integer max of bits(w) & 0x7fffffff, decides for the weights w of V in a chunk.
struct ValueScale {
    float d;   // what one unit of a sum of codes times V stands for
    float up;  // 1 / d, a power of two; 0 when every code is 0
    int zero;  // 1: every code is 0, w is not to be looked at
};

KESTREL_FN ValueScale value_scale(unsigned a) {
    ValueScale s;
    s.up = 0.0f;
    s.zero = 1;
    if (a >= KESTREL_INF_BITS) {  // a NaN or an infinity among the weights: carried by d alone
        s.d = f32_from_bits(a > KESTREL_INF_BITS ? KESTREL_NAN_BITS : KESTREL_INF_BITS);
    } else if (a < 0x0d800000u) {  // all below 2^-100
        s.d = 0.0f;
    } else {
        const unsigned e = a >> 23;  // 27..254: both exponents below are those of normal numbers
        s.d = f32_from_bits((e - 141u + 127u) << 23);
        s.up = f32_from_bits((141u - e + 127u) << 23);
        s.zero = 0;
    }
    return s;
}

// Section 7. One code. |w * up| is below 2^15, so 1.5 * 2^23 pushes the fraction out of the significand with rounding to
// nearest even; the low bits of what is left are the integer. Only the largest weights can round to 32768.
KESTREL_FN int value_code(float w, float up) {
    const int code = (int)f32_bits(w * up + 12582912.0f) - 0x4b400000;
    return code < 32767 ? code : 32767;
}
