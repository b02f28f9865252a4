// One weight row by a whole warp, in the contract's order (section 3), for a single input row. The 8-lane order makes
// only the fma chain of each lane serial; dots and scales of its terms are free. So the warp's four slots of eight
// threads split the row's steps (a step is eight groups): slot q computes the terms of steps q*U .. q*U+U-1, then the
// eight running sums are handed from slot to slot, each adding its U terms. Four times the threads of matvec.cuh for
// the same bytes: shorter loads per thread and a shorter tail.
#pragma once

#include "matvec.cuh"
#include "stage_args.h"

// One a8 row.
struct A8Row {
    const signed char *q;  // i8[K]
    const float *d;        // f32[G]
    const int *gsum;       // i32[G]
};

// R neighbouring q4local rows, U steps of each slot in flight: 16 * R * U bytes per thread.
template <int U, int R> struct WarpRowsQ4 {
    uint4 codes[R][U];
    unsigned short scale[R][U];

    // c: u8[rows, G, 16], s: f16[rows, G]; super-step `super` covers steps 4*U*super ...
    DEVICE_MEMBER void load(const unsigned char *c, const unsigned short *s, int groups, int super, int rows) {
        const int first = (4 * super + lane_id() / 8) * U;
#pragma unroll
        for (int r = 0; r < R; r++) {
#pragma unroll
            for (int u = 0; u < U; u++) {
                const int g = (first + u) * 8 + lane_id() % 8;
                if (g < groups && r < rows) {
                    codes[r][u] = load_streaming(c + ((long long)r * groups + g) * 16);
                    scale[r][u] = load_streaming_u16(s + (long long)r * groups + g);
                }
            }
        }
    }

    // acc[r] of lane l lies in slot 0 before and after. All lanes call it.
    DEVICE_MEMBER void accumulate(const A8Row &in, int groups, int super, int rows, float *acc) {
        const int lane = lane_id(), slot = lane / 8;
        const int first = (4 * super + slot) * U;
        float dot[R][U], ws[R][U];
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int g = (first + u) * 8 + lane % 8;
            if (g < groups) {
                const uint4 *const q = (const uint4 *)(in.q + 32ll * g);
                const uint4 lo = q[0], hi = q[1];
                const float d = in.d[g];
                const int gsum = in.gsum[g];
#pragma unroll
                for (int r = 0; r < R; r++) {
                    if (r < rows) {
                        dot[r][u] = (float)dot_q4(codes[r][u], lo, hi, gsum);
                        ws[r][u] = half_to_float(scale[r][u]) * d;
                    }
                }
            }
        }
#pragma unroll
        for (int turn = 0; turn < 4; turn++) {
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (slot == turn && r < rows) {
#pragma unroll
                    for (int u = 0; u < U; u++)
                        if ((first + u) * 8 + lane % 8 < groups) acc[r] = fma_f32(dot[r][u], ws[r][u], acc[r]);
                }
                acc[r] = __shfl_sync(FULL_WARP, acc[r], (lane + 24) & 31);  // from the slot before; slot 3 hands to slot 0
            }
        }
    }
};

// Asks L2 for weights of a later stage; all threads of the grid share the work.
DEVICE void prefetch_ranges(const PrefetchRanges &ranges) {
    const long long block = ((long long)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const long long first = 128 * (block * blockDim.x + threadIdx.x);
    const long long step = 128ll * gridDim.x * gridDim.y * gridDim.z * blockDim.x;
#pragma unroll 1
    for (int i = 0; i < 6; i++)
        for (long long at = first; at < ranges.bytes[i]; at += step) prefetch_l2((const char *)ranges.start[i] + at);
}

// Asks L2 for `rows` neighbouring rows of quantised weights; one warp.
DEVICE void prefetch_rows(const Weight &w, long long n, int rows) {
    if (w.wtype == KESTREL_BF16) return;
    const long long groups = w.k / 32, codes = groups * (w.wtype == KESTREL_Q4LOCAL ? 16 : 32);  // bytes of a row
    for (long long at = 128ll * lane_id(); at < rows * codes; at += 128 * 32)
        prefetch_l2((const unsigned char *)w.codes + n * codes + at);
    for (long long at = 64ll * lane_id(); at < rows * groups; at += 64 * 32) prefetch_l2(w.scale + n * groups + at);
}

// y[r] of up to R neighbouring rows of one matrix, first row n; valid in lanes 0..7. Loads may be started ahead:
// begin() once, then finish().
template <int U, int R> struct WarpRows {
    WarpRowsQ4<U, R> q4;

    DEVICE_MEMBER void begin(const Weight &w, long long n, int rows) {
        if (w.wtype != KESTREL_Q4LOCAL) return;
        const int groups = w.k / 32;
        q4.load((const unsigned char *)w.codes + n * groups * 16, w.scale + n * groups, groups, 0, rows);
    }

    // in: the a8 row; x: f32[K] for bf16 weights.
    DEVICE_MEMBER void finish(const Weight &w, long long n, int rows, const A8Row &in, const float *x, float *y) {
        if (w.wtype == KESTREL_Q4LOCAL) {
            const int groups = w.k / 32;
            const unsigned char *const c = (const unsigned char *)w.codes + n * groups * 16;
            const unsigned short *const s = w.scale + n * groups;
            float acc[R];
#pragma unroll
            for (int r = 0; r < R; r++) acc[r] = 0.0f;
            q4.accumulate(in, groups, 0, rows, acc);
            for (int super = 1; super * 4 * U * 8 < groups; super++) {
                q4.load(c, s, groups, super, rows);
                q4.accumulate(in, groups, super, rows, acc);
            }
#pragma unroll
            for (int r = 0; r < R; r++) y[r] = group_hsum8(acc[r]);
            return;
        }
        // Other formats: a row to a slot, as in matvec.cuh; R <= 4.
        const int slot = lane_id() / 8;
        InputRows<1> one = {{x}, {in.q}, {in.d}, {in.gsum}};
        float acc[1] = {0.0f};
        if (slot < rows) weight_row<1, false>(w, n + slot, one, lane_id() % 8, acc);
        const float sum = group_hsum8(acc[0]);
#pragma unroll
        for (int r = 0; r < R; r++) y[r] = __shfl_sync(FULL_WARP, sum, 8 * r);
    }
};
