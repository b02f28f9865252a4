// One weight row times MT input rows in the contract's order (section 3), by eight threads: thread l owns lane l,
// that is groups l, l+8, l+16, ... (bf16: lanes l, l+8, l+16 and l+24 of elements), so every chain of the contract is one
// thread's own.
// Eight neighbouring threads read 128 contiguous bytes of codes at a time, and each keeps several loads in flight.
#pragma once

#include "port.cuh"

// MT input rows; rows past the end repeat the last one, their results are dropped by the caller.
template <int MT> struct InputRows {
    const float *x[MT];         // f32[K], for bf16 weights
    const signed char *xq[MT];  // i8[K]
    const float *xd[MT];        // f32[G]
    const int *gsum[MT];        // i32[G]
};

// q4local: sum of (code - 8) * q over a group. The high nibbles stay where they are, as unsigned bytes: their products
// are 16 times too large, and so is what they start from.
DEVICE int dot_q4(uint4 c, const uint4 lo, const uint4 hi, int gsum) {
    const unsigned low = 0x0f0f0f0fu, high = 0xf0f0f0f0u;
    int dot = -128 * gsum;
    dot = dot_u8_s8(c.x & high, hi.x, dot);
    dot = dot_u8_s8(c.y & high, hi.y, dot);
    dot = dot_u8_s8(c.z & high, hi.z, dot);
    dot = dot_u8_s8(c.w & high, hi.w, dot);
    dot >>= 4;
    dot = dot_u8_s8(c.x & low, lo.x, dot);
    dot = dot_u8_s8(c.y & low, lo.y, dot);
    dot = dot_u8_s8(c.z & low, lo.z, dot);
    return dot_u8_s8(c.w & low, lo.w, dot);
}

DEVICE int dot_s8(const uint4 a, const uint4 b, int dot) {
    dot = __dp4a((int)a.x, (int)b.x, dot);
    dot = __dp4a((int)a.y, (int)b.y, dot);
    dot = __dp4a((int)a.z, (int)b.z, dot);
    return __dp4a((int)a.w, (int)b.w, dot);
}

// codes: u8[G, 16] and scale: f16[G] of one weight row; UNROLL groups of a thread are loaded before the first is used.
template <int MT, int UNROLL>
DEVICE void row_q4local(const unsigned char *codes, const unsigned short *scale, int groups, const InputRows<MT> &in,
                        int lane, float *acc) {
    for (int g0 = lane; g0 < groups; g0 += 8 * UNROLL) {
        uint4 c[UNROLL];
        unsigned short s[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int g = g0 + 8 * u;
            if (g < groups) {
                c[u] = load_streaming(codes + 16ll * g);
                s[u] = load_streaming_u16(scale + g);
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int g = g0 + 8 * u;
            if (g < groups) {
                const float ws = half_to_float(s[u]);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    const uint4 *const q = (const uint4 *)(in.xq[m] + 32ll * g);
                    const int dot = dot_q4(c[u], q[0], q[1], in.gsum[m][g]);
                    acc[m] = fma_f32((float)dot, ws * in.xd[m][g], acc[m]);
                }
            }
        }
    }
}

// codes: i8[G, 32].
template <int MT, int UNROLL>
DEVICE void row_q8local(const unsigned char *codes, const unsigned short *scale, int groups, const InputRows<MT> &in,
                        int lane, float *acc) {
    for (int g0 = lane; g0 < groups; g0 += 8 * UNROLL) {
        uint4 lo[UNROLL], hi[UNROLL];
        unsigned short s[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int g = g0 + 8 * u;
            if (g < groups) {
                lo[u] = load_streaming(codes + 32ll * g);
                hi[u] = load_streaming(codes + 32ll * g + 16);
                s[u] = load_streaming_u16(scale + g);
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int g = g0 + 8 * u;
            if (g < groups) {
                const float ws = half_to_float(s[u]);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    const uint4 *const q = (const uint4 *)(in.xq[m] + 32ll * g);
                    const int dot = dot_s8(hi[u], q[1], dot_s8(lo[u], q[0], 0));
                    acc[m] = fma_f32((float)dot, ws * in.xd[m][g], acc[m]);
                }
            }
        }
    }
}

// w: bf16[K]. Leaves in acc the folded lanes, of which hsum8 makes hsum32.
template <int MT, int UNROLL>
DEVICE void row_bf16(const unsigned short *w, int length, const InputRows<MT> &in, int lane, float *acc) {
    static_assert(UNROLL % 4 == 0, "element u of a turn belongs to the thread's lane u mod 4");
    float lanes[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) lanes[m][0] = lanes[m][1] = lanes[m][2] = lanes[m][3] = 0.0f;
    for (int k0 = lane; k0 < length; k0 += 8 * UNROLL) {
        unsigned short b[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (k0 + 8 * u < length) b[u] = load_streaming_u16(w + k0 + 8 * u);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int k = k0 + 8 * u;
            if (k < length) {
#pragma unroll
                for (int m = 0; m < MT; m++) lanes[m][u % 4] = fma_f32(bf16_to_f32(b[u]), in.x[m][k], lanes[m][u % 4]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < MT; m++) acc[m] = fold_lanes(lanes[m][0], lanes[m][1], lanes[m][2], lanes[m][3]);
}

// acc[m] of thread `lane` for row `n` of matrix `w` (row 0 is w's own first; experts add e * n before), from +0. DEEP keeps more
// loads in flight for more registers.
template <int MT, bool DEEP = true>
DEVICE void weight_row(const Weight &w, long long n, const InputRows<MT> &in, int lane, float *acc) {
    const int groups = w.k / 32;
    const unsigned char *const codes = (const unsigned char *)w.codes;
    if (w.wtype == KESTREL_Q4LOCAL)
        row_q4local<MT, !DEEP ? 2 : MT == 1 ? 8 : 4>(codes + n * groups * 16, w.scale + n * groups, groups, in, lane, acc);
    else if (w.wtype == KESTREL_Q8LOCAL)
        row_q8local<MT, !DEEP ? 2 : MT == 1 ? 4 : 2>(codes + n * groups * 32, w.scale + n * groups, groups, in, lane, acc);
    else
        row_bf16<MT, !DEEP ? 4 : MT == 1 ? 16 : 8>((const unsigned short *)w.codes + n * w.k, w.k, in, lane, acc);
}
