// One row's rms_norm and a8 by a whole block, results in shared memory (contract sections 2 and 4).
#pragma once

#include "forms.cuh"
#include "quotient.cuh"

// Sum over a warp as a tree, for the fast forms; every lane gets it.
DEVICE float warp_sum_f32(float v) {
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(FULL_WARP, v, step);
    return v;
}

// The sum of n > 0 squares, or of sums of them, in shared memory in the contract's 32 lanes (sections 0 and 4), by a warp;
// every lane gets it. mine: the lane's first term, which is term lane_id(); left: n - lane_id(). The terms of a lane, BATCH at
// a time, are on their way together; +0 in the place of those past the end changes no bit of a sum of what is not negative.
template <int BATCH> DEVICE float sum_in_lanes(const float *mine, int left, int n) {
    float sum = 0.0f;
#pragma unroll 1
    do {
        float t[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) t[j] = 32 * j < left ? mine[32 * j] : 0.0f;
#pragma unroll
        for (int j = 0; j < BATCH; j++) sum += t[j];
        mine += 32 * BATCH, left -= 32 * BATCH, n -= 32 * BATCH;
    } while (n > 0);
    return warp_hsum32(sum);
}

// Floats that the terms of a row's norm take.
DEVICE int norm_terms(int d) { return (d / 8 + d % 8 + 3) / 4 * 4; }

// Shared memory of a block for a row of d elements; kestrel/launch.py computes the same size. d is a multiple of 32
// where a8 is wanted.
struct NormShared {
    float *terms;    // f32[norm_terms(d)]: block sums, then the tail's squares
    float *x;        // f32[d rounded up to 4]: the normalised row
    int *gsum;       // i32[d/32 rounded up to 4]
    float *d;        // f32[d/32 rounded up to 4]
    signed char *q;  // i8[d]
};

DEVICE NormShared norm_shared(unsigned char *base, int d) {
    const int row = (d + 3) / 4 * 4, groups = (d / 32 + 3) / 4 * 4;
    NormShared sh;
    sh.terms = (float *)base;
    sh.x = sh.terms + norm_terms(d);
    sh.gsum = (int *)(sh.x + row);
    sh.d = (float *)(sh.gsum + groups);
    sh.q = (signed char *)(sh.d + groups);
    return sh;
}

// Eight neighbouring elements of a row that another kernel wrote, past L1; `vector`: they are 16-byte aligned.
DEVICE void load_eight(const float *p, bool vector, float *v) {
    if (vector) {
        const float4 a = load_l2((const float4 *)p), b = load_l2((const float4 *)p + 1);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = load_l2(p + k);
    }
}

// The same of weights, which no kernel writes: allowed ahead of wait_for_previous.
DEVICE void load_eight_weights(const float *p, bool vector, float *v) {
    if (vector) {
        const float4 a = load_weight((const float4 *)p), b = load_weight((const float4 *)p + 1);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = load_weight(p + k);
    }
}

DEVICE void store_eight(float *p, const float *v) {  // 16-byte aligned
    ((float4 *)p)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4 *)p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// What a thread holds of a row and of the norm's weights: C blocks of eight elements of each span, which is what all
// threads hold at a time; a span is called by its first block. Where a row has several spans, they go round twice: for the
// sum from the last to the first, for the result from the first, which is still there, to the last.
template <int C> struct NormRow {
    float x[C][8], w[C][8];
    int thread;  // threadIdx.x, at hand

    DEVICE_MEMBER static int span_size() { return C * (int)blockDim.x; }
    DEVICE_MEMBER static int last_span(int blocks) {  // negative: none
        int span = blocks > 0 ? 0 : -1;
#pragma unroll 1
        while (span + span_size() < blocks) span += span_size();
        return span;
    }
    DEVICE_MEMBER int eight(int span, int c) const { return span + c * (int)blockDim.x + thread; }

    // `vector`: d is a multiple of 8. Past the row it is block 0 again.
    DEVICE_MEMBER void load_row(const float *p, int spread, int span, int blocks, bool vector) {
#pragma unroll
        for (int c = 0; c < C; c++)
            load_eight(p + KESTREL_SPREAD_AT(8 * (eight(span, c) < blocks ? eight(span, c) : 0), spread), vector, x[c]);
    }
    DEVICE_MEMBER void load_weights(const float *p, int span, int blocks, bool vector) {
#pragma unroll
        for (int c = 0; c < C; c++)
            load_eight_weights(p + 8 * (eight(span, c) < blocks ? eight(span, c) : 0), vector, w[c]);
    }
    // out = (x * r) * w of block c.
    DEVICE_MEMBER void result(int c, float r, float *out) const {
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = (x[c][k] * r) * w[c][k];
    }
};

// Asks for the norm's weights, lets the next kernel begin, waits for the one that makes x, asks for x, and returns r to
// every thread that has a part of the row; `row` holds span 0. x, w: f32[d] in global memory; terms: f32[norm_terms(d)] in
// shared memory. Every warp sums the terms for itself: that is as fast as by one warp, and saves a barrier behind it. Unless
// `real` nobody is waited for, and what is in `row` is taken for x: a rehearsal.
template <int C>
DEVICE float norm_scale(const float *x, int spread, const float *w, int d, float eps, float *terms, NormRow<C> &row, bool vector,
                        bool real = true) {
    const int blocks = d / 8, tail = vector ? 0 : d % 8, last = row.last_span(blocks);
    row.thread = (int)threadIdx.x;
    settle(row.thread);
    if (blocks > 0) row.load_weights(w, 0, blocks, vector);
    // Where this thread's part of x is, ahead of the wait for it.
    const float *at[C];
#pragma unroll
    for (int c = 0; c < C; c++) {
        at[c] = x + KESTREL_SPREAD_AT(8 * (last >= 0 && row.eight(last, c) < blocks ? row.eight(last, c) : 0), spread);
        settle(at[c]);
    }
    // And what the sum needs.
    const int all = blocks + tail;
    const float *mine = terms + lane_id();
    int left = all - lane_id();
    float inverse = reciprocal((float)d);
    settle_shared(mine);
    settle(left);
    settle(inverse);
    start_next();
    if (real) wait_for_previous(at[0]);
#pragma unroll 1
    for (int span = last; span >= 0; span -= row.span_size()) {
#pragma unroll
        for (int c = 0; c < C; c++) {
            if (real) load_eight(at[c], vector, row.x[c]);
            // A whole span lies ahead of the last.
            at[c] = x + KESTREL_SPREAD_AT(8 * (row.eight(span, c) - row.span_size()), spread);
        }
#pragma unroll
        for (int c = 0; c < C; c++) {
            float square[8];
#pragma unroll
            for (int k = 0; k < 8; k++) square[k] = row.x[c][k] * row.x[c][k];
            if (row.eight(span, c) < blocks) terms[row.eight(span, c)] = hsum8(square);
        }
    }
    for (int i = threadIdx.x; tail > 0 && i < tail; i += blockDim.x) {
        const float v = load_l2(x + KESTREL_SPREAD_AT(8 * blocks + i, spread));
        terms[blocks + i] = v * v;
    }
    __syncthreads();
    // The first warp has the tail; the others leave shared memory to those that have a block.
    if (warp_id() > 0 && 32 * warp_id() >= blocks) return 0.0f;
    return inverse_rms(sum_in_lanes<8>(mine, left, all), d, inverse, eps);
}

// Leaves the normalised row in sh.x; waits as norm_scale does; ends with a barrier. x, w: f32[d] in global memory.
DEVICE void block_rms_norm(const float *x, int spread, const float *w, int d, float eps, const NormShared &sh) {
    NormRow<2> row = {};
    const bool vector = d % 8 == 0;
    const float r = norm_scale(x, spread, w, d, eps, sh.terms, row, vector);
    const int blocks = d / 8;
#pragma unroll 1
    for (int span = 0; span < blocks; span += row.span_size()) {
        if (span > 0) {
            row.load_row(x, spread, span, blocks, vector);
            row.load_weights(w, span, blocks, vector);
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float out[8];
            row.result(c, r, out);
            if (row.eight(span, c) < blocks) store_eight(sh.x + 8 * row.eight(span, c), out);
        }
    }
    for (int i = 8 * blocks + threadIdx.x; i < d; i += blockDim.x)
        sh.x[i] = (load_l2(x + KESTREL_SPREAD_AT(i, spread)) * r) * w[i];
    __syncthreads();
}

// a8_scale with the same bits, without a division and without a branch: magnitudes above 2^64 are scaled down, so that
// their inverse keeps its digits.
DEVICE A8Scale a8_scale_quick(unsigned amax_bits) {
    const bool finite = amax_bits < KESTREL_INF_BITS;
    A8Scale s;
    s.zero = !finite || amax_bits < 0x0d800000u;
    const float amax = f32_from_bits(s.zero ? 0x3f800000u : amax_bits);
    const float down = amax_bits < 0x5f800000u ? 1.0f : 5.4210109e-20f;  // 2^-64
    const float a = amax * down;
    s.inv = quotient(127.0f, a, reciprocal(a)) * down;
    s.d = quotient(amax, 127.0f, 1.0f / 127.0f);
    if (s.zero) s.d = amax_bits > KESTREL_INF_BITS ? f32_from_bits(KESTREL_NAN_BITS) : finite ? 0.0f : f32_from_bits(amax_bits);
    return s;
}

// Four codes as bytes. 1.5 * 2^23 pushes the fraction out of the significand, whose low byte is the code then; x * inv is
// 127 at most, when rounded, so that there is nothing to clamp.
DEVICE unsigned a8_four(const float *v, const A8Scale &s) {
    unsigned t[4];
#pragma unroll
    for (int i = 0; i < 4; i++) t[i] = f32_bits(v[i] * s.inv + 12582912.0f);
    const unsigned packed = __byte_perm(__byte_perm(t[0], t[1], 0x0040), __byte_perm(t[2], t[3], 0x0040), 0x5410);
    return s.zero ? 0u : packed;
}

DEVICE unsigned max_magnitude(const float *v, int count) {
    unsigned amax = 0;
#pragma unroll
    for (int i = 0; i < count; i++) {
        const unsigned u = f32_bits(v[i]) & 0x7fffffffu;
        amax = u > amax ? u : amax;
    }
    return amax;
}

// a8 of eight elements, of a group that four neighbouring lanes hold.
struct A8Eight {
    uint2 codes;
    float d;
    int sum;  // of these eight codes
};

// All lanes of the warp call it.
DEVICE A8Eight a8_eight(const float *v) {
    const A8Scale s = a8_scale_quick(group_max_u32(max_magnitude(v, 8), 4));
    A8Eight out;
    out.codes.x = a8_four(v, s), out.codes.y = a8_four(v + 4, s);
    out.d = s.d;
    out.sum = __dp4a((int)out.codes.x, 0x01010101, __dp4a((int)out.codes.y, 0x01010101, 0));
    return out;
}

// One group of 32: v[i] is element 4 * part + i of lane part = lane % 8. Returns the packed codes of this lane; all
// lanes of the warp call it.
DEVICE unsigned a8_group(const float *v, float *d, int *gsum) {
    const A8Scale s = a8_scale_quick(group_max_u32(max_magnitude(v, 4), 8));
    const unsigned packed = a8_four(v, s);
    *d = s.d;
    *gsum = group_sum_s32(__dp4a((int)packed, 0x01010101, 0), 8);
    return packed;
}

// Which part of a row's norm and a8 a block also writes to global memory: eights [first, end) of the row.
struct NormPart {
    int first, end;
};

// The part of block `block` of `blocks`, in whole groups of 32.
DEVICE NormPart norm_part(int d, int block, int blocks) {
    const int groups = d / 32, each = (groups + blocks - 1) / blocks;
    NormPart part;
    part.first = 4 * each * block;
    part.end = part.first + 4 * each;
    return part;
}

// rms_norm and a8 of row m, straight from registers: put(b, v, a8) takes each block of eight, whole warps at a time, those
// past the row too; `part` of the normalised row and of the codes goes to global memory. d is a multiple of 32. Waits as
// norm_scale does.
template <int C, class Put>
DEVICE void norm_a8_eights(const RmsNormArgs &norm, const QuantizeA8Args &a8, long long m, float *terms, NormPart part,
                           const Put &put) {
    const float *const x = norm.x + m * norm.d;
    NormRow<C> row = {};
    const float r = norm_scale(x, norm.spread, norm.w, norm.d, norm.eps, terms, row, true);
    const int blocks = norm.d / 8;
    int span = 0;
#pragma unroll 1
    do {
        if (span > 0) {
            row.load_row(x, norm.spread, span, blocks, true);
            row.load_weights(norm.w, span, blocks, true);
        }
#pragma unroll
        for (int c = 0; c < C; c++) {
            const int b = row.eight(span, c);
            float v[8];
            row.result(c, r, v);
            const A8Eight eight = a8_eight(v);
            put(b, v, eight);
            if (b >= part.first && b < part.end && b < blocks) {
                store_eight(norm.out + m * norm.d + 8 * b, v);
                ((uint2 *)(a8.q + m * norm.d))[b] = eight.codes;
            }
        }
        span += row.span_size();
    } while (span < blocks);
}

// rms_norm and a8 of row m into shared memory, and `part` of both to global memory. sh.x is written only with keep_x.
// Ends with a barrier.
DEVICE void block_norm_a8(const RmsNormArgs &norm, const QuantizeA8Args &a8, long long m, const NormShared &sh, bool keep_x,
                          NormPart part) {
    const int blocks = norm.d / 8;
    norm_a8_eights<2>(norm, a8, m, sh.terms, part, [&](int b, const float *v, const A8Eight &eight) {
        const int sum = group_sum_s32(eight.sum, 4);
        if (b >= blocks) return;
        ((uint2 *)sh.q)[b] = eight.codes;
        if (b % 4 == 0) sh.d[b / 4] = eight.d, sh.gsum[b / 4] = sum;
        if (keep_x) store_eight(sh.x + 8 * b, v);
    });
    __syncthreads();
    const int groups = norm.d / 32, end = part.end / 4 < groups ? part.end / 4 : groups;
    for (int g = part.first / 4 + threadIdx.x; g < end; g += blockDim.x) {
        a8.d[m * groups + g] = sh.d[g];
        a8.gsum[m * groups + g] = sh.gsum[g];
    }
}
