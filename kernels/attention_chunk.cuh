// The parts of attention over one chunk of 256 positions, and the merge of chunks; contract section 7. attention.cu
// says how they fit together.
#pragma once

#include "attention_softmax.cuh"
#include "block_norm.cuh"
#include "stage_args.h"

#define ATTENTION_COUNTERS 4096  // u32 at the start of `work`: zero before and after every launch

// Shared memory of a block for `heads` query heads; kestrel/launch.py computes the same size.
struct AttentionShared {
    signed char *q8;  // i8[heads, hd]
    signed char *v8;  // i8[CHUNK, hd], units of 16 bytes at row_place
    unsigned *codes;  // of the weights of V: attention_values.cuh
    unsigned long long *exp_table;  // u64[64]: of exp_down
    float *s;         // f32[heads, CHUNK]: scores, -inf past the chunk's positions
    float *vs;        // f32[CHUNK]: scales of V, +0 past the chunk's positions
    float *run;       // f32[heads, hd]: merged acc
    float *qs;        // f32[heads]
    float *d;         // f32[heads]: scale of the codes
    float *m;         // f32[heads]: merged maximum
    float *l;         // f32[heads]: merged sum
    float *a;         // f32[heads]: factors of the current merge
    float *b;
    unsigned *arrived;  // u32[4]
};

DEVICE AttentionShared attention_shared(unsigned char *base, int heads, int hd) {
    AttentionShared sh;
    sh.q8 = (signed char *)base;
    sh.v8 = sh.q8 + heads * hd;
    sh.codes = (unsigned *)(sh.v8 + CHUNK * hd);
    sh.exp_table = (unsigned long long *)(sh.codes + (heads + 7) / 8 * (CODES_BYTES / 4));
    sh.s = (float *)(sh.exp_table + 64);
    sh.vs = sh.s + heads * CHUNK;
    sh.run = sh.vs + CHUNK;
    sh.qs = sh.run + heads * hd;
    sh.d = sh.qs + heads;
    sh.m = sh.d + heads;
    sh.l = sh.m + heads;
    sh.a = sh.l + heads;
    sh.b = sh.a + heads;
    sh.arrived = (unsigned *)(sh.b + heads + (4 - 6 * heads % 4) % 4);  // 16-byte aligned
    return sh;
}

#define MERGE_ROUND (CHUNK / 4)  // chunks that merge at a time: a head's scores leave room for four floats of each

// max[t] = running maximum of start, s[0], ..., s[t] by the contract's rule (s > m; false for NaN); one warp. count
// <= MERGE_ROUND.
DEVICE void warp_prefix_max(const float *s, float *max, int count, float start) {
    const int lane = lane_id(), first = lane * (MERGE_ROUND / 32);
    float own[MERGE_ROUND / 32];
    float m = MINUS_INFINITY;
#pragma unroll
    for (int i = 0; i < MERGE_ROUND / 32; i++) {
        const int t = first + i;
        if (t < count && s[t] > m) m = s[t];
        own[i] = m;
    }
    // Inclusive scan over lanes, then the maximum of all earlier lanes.
    for (int step = 1; step < 32; step <<= 1) {
        const float left = __shfl_up_sync(FULL_WARP, m, step);
        if (lane >= step) m = m > left ? m : left;
    }
    const float scanned = __shfl_up_sync(FULL_WARP, m, 1);
    float before = start;
    if (lane > 0 && scanned > before) before = scanned;
#pragma unroll
    for (int i = 0; i < MERGE_ROUND / 32; i++) {
        const int t = first + i;
        if (t < count) max[t] = own[i] > before ? own[i] : before;
    }
}

// One head row as the KV cache holds it: codes i8[hd] to q8, its scale returned. One warp.
DEVICE float warp_quantize_row(const float *x, int hd, signed char *q8) {
    const int lane = lane_id();
    unsigned amax = 0;
    for (int i = lane; i < hd; i += 32) {
        const unsigned u = f32_bits(x[i]) & 0x7fffffffu;
        amax = u > amax ? u : amax;
    }
    const A8Scale scale = a8_scale(group_max_u32(amax, 32));
    for (int i = lane; i < hd; i += 32) q8[i] = (signed char)(scale.zero ? 0 : a8_code(x[i], scale.inv));
    return scale.d;
}

// The queries of a block's heads; q: f32[heads, hd], rows `pitch` apart. A warp to a head.
DEVICE void quantize_queries(const AttentionArgs &a, const AttentionShared &sh, const float *q, int pitch, int heads) {
    for (int j = warp_id(); j < heads; j += warp_count()) {
        const float d = warp_quantize_row(q + j * pitch, a.hd, sh.q8 + j * a.hd);
        if (lane_id() == 0) sh.qs[j] = d * a.qscale;
    }
}

// This thread's share of a row of hd int8: every fourth word, or of rows of 64 bytes every fourth 16-byte unit. Which
// elements they are does not matter to a dot, as long as both factors agree.
DEVICE void row_words(const signed char *row, int hd, int part, unsigned *words) {
    if (hd % 64 == 0) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (64 * j < hd) {
                const uint4 v = ((const uint4 *)row)[part + 4 * j];
                words[4 * j] = v.x, words[4 * j + 1] = v.y, words[4 * j + 2] = v.z, words[4 * j + 3] = v.w;
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < 16; j++)
            if (16 * j < hd) words[j] = ((const unsigned *)row)[part + 4 * j];
    }
}

// s[j][t] for the positions of a chunk: a warp multiplies 16 K rows with up to eight queries at a time, in int8.
DEVICE void chunk_scores(const AttentionArgs &a, const AttentionShared &sh, long long slot0, int kv, int count, int heads) {
    const int group = lane_id() / 4, part = lane_id() % 4;
    for (int t0 = 16 * warp_id(); t0 < CHUNK; t0 += 16 * warp_count()) {
        unsigned k8[2][16] = {};  // rows t0 + group and t0 + group + 8
        float ks[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = t0 + group + 8 * i < count ? t0 + group + 8 * i : count - 1;
            const long long row = (slot0 + t) * a.nkv + kv;
            if (t0 < count) row_words(a.kq + row * a.hd, a.hd, part, k8[i]);
            ks[i] = a.ks[row];
        }
        for (int j0 = 0; j0 < heads; j0 += 8) {
            unsigned q8[16] = {};  // of head j0 + group
            if (j0 + group < heads) row_words(sh.q8 + (j0 + group) * a.hd, a.hd, part, q8);
            int dots[4] = {DOT_BIAS, DOT_BIAS, DOT_BIAS, DOT_BIAS};
#pragma unroll
            for (int step = 0; step < 8; step++) {
                if (32 * step < a.hd) {
                    const unsigned ka[4] = {k8[0][2 * step], k8[1][2 * step], k8[0][2 * step + 1], k8[1][2 * step + 1]};
                    mma_s8(dots, ka, q8 + 2 * step);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = j0 + 2 * part + i % 2, t = t0 + group + 8 * (i / 2);
                if (j < heads) sh.s[j * CHUNK + t] = t < count ? biased_dot(dots[i]) * (sh.qs[j] * ks[i / 2]) : MINUS_INFINITY;
            }
        }
    }
}

// One merge step of the contract: (l' or acc' of the right, times b) + (left times a).
DEVICE float merge_one(float left, float right, float factor_left, float factor_right) {
    return fma_f32(right, factor_right, left * factor_left);
}
DEVICE float4 merge_four(float4 left, float4 right, float a, float b) {
    return make_float4(merge_one(left.x, right.x, a, b), merge_one(left.y, right.y, a, b),
                       merge_one(left.z, right.z, a, b), merge_one(left.w, right.w, a, b));
}

// Partial state of one chunk, row and head in `work`: acc f32[hd], m, l, two unused. Chunk-major, so that the layout
// does not depend on the context's capacity. Before the states lie the rows that a stage stores for taps.
DEVICE float *partial_state(const AttentionArgs &a, int chunk, int m, int h) {
    float *const states = (float *)((unsigned *)a.work + ATTENTION_COUNTERS) + 4ll * a.nh * a.hd;
    return states + (((long long)chunk * a.M + m) * a.nh + h) * (a.hd + 4);
}

#define MERGE_AHEAD 12  // chunks whose states a merging thread has in flight

// What the merge of a head has in the place of its scores, f32[MERGE_ROUND] each.
struct MergeShared {
    float *s;       // maxima of the chunks, then their sums
    float *max;     // running maximum up to and with the chunk
    float *a, *b;   // factors of what is merged and of the chunk
};

DEVICE MergeShared merge_shared(const AttentionShared &sh, int j) {
    float *const s = sh.s + j * CHUNK;
    return {s, s + MERGE_ROUND, s + 2 * MERGE_ROUND, s + 3 * MERGE_ROUND};
}

// Merges the partial states of a row's chunks, left to right, into run and l.
DEVICE void merge_partials(const AttentionArgs &a, const AttentionShared &sh, int m, int h0, int heads, int chunks) {
    const int quads = a.hd / 4;
    for (int c0 = 0; c0 < chunks; c0 += MERGE_ROUND) {
        const int count = chunks - c0 < MERGE_ROUND ? chunks - c0 : MERGE_ROUND;
        // Running maxima and the factors of every step, a warp to a head.
        for (int j = warp_id(); j < heads; j += warp_count()) {
            const MergeShared ms = merge_shared(sh, j);
            for (int c = lane_id(); c < count; c += 32) ms.s[c] = load_l2(partial_state(a, c0 + c, m, h0 + j) + a.hd);
            __syncwarp();
            const float before = c0 == 0 ? MINUS_INFINITY : sh.m[j];
            warp_prefix_max(ms.s, ms.max, count, before);
            __syncwarp();
            for (int c = lane_id(); c < count; c += 32) {
                const float sum = load_l2(partial_state(a, c0 + c, m, h0 + j) + a.hd + 1);
                const float right = ms.s[c], merged = ms.max[c];
                const float left = c == 0 ? before : ms.max[c - 1];
                ms.a[c] = exp_form(left - merged);
                ms.b[c] = exp_form(right - merged);
                ms.s[c] = sum;
            }
            __syncwarp();
            if (lane_id() == 0) sh.m[j] = ms.max[count - 1];
        }
        __syncthreads();
        for (int item = threadIdx.x; item < heads * quads + heads; item += blockDim.x) {
            const bool is_sum = item >= heads * quads;
            const int j = is_sum ? item - heads * quads : item / quads;
            const MergeShared ms = merge_shared(sh, j);
            if (is_sum) {
                float l = sh.l[j];
                for (int c = 0; c < count; c++) {
                    const float right = ms.s[c];
                    l = c0 + c == 0 ? right : merge_one(l, right, ms.a[c], ms.b[c]);
                }
                sh.l[j] = l;
            } else {
                const int at = 4 * (item % quads);
                float4 *const run = (float4 *)(sh.run + j * a.hd + at);
                float4 acc = *run;
                const float *const first = partial_state(a, c0, m, h0 + j) + at;
                const long long stride = (long long)a.M * a.nh * (a.hd + 4);  // floats from chunk to chunk
#pragma unroll 1
                for (int b0 = 0; b0 < count; b0 += MERGE_AHEAD) {
                    float4 right[MERGE_AHEAD];
#pragma unroll
                    for (int i = 0; i < MERGE_AHEAD; i++)
                        if (b0 + i < count) right[i] = load_l2((const float4 *)(first + (b0 + i) * stride));
#pragma unroll
                    for (int i = 0; i < MERGE_AHEAD; i++) {
                        const int c = b0 + i;
                        if (c < count) acc = c0 + c == 0 ? right[i] : merge_four(acc, right[i], ms.a[c], ms.b[c]);
                    }
                }
                *run = acc;
            }
        }
        __syncthreads();
    }
}

