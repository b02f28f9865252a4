// One row's rms_norm and a8 by a whole block, results in shared memory (contract sections 2 and 4).
#pragma once

#include "forms.cuh"

DEVICE void load_sixteen(const float *p, float4 *t) {
#pragma unroll
    for (int j = 0; j < 4; j++) t[j] = ((const float4 *)p)[j];
}

DEVICE float add_sixteen(const float4 *t, float sum) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        sum += t[j].x;
        sum += t[j].y;
        sum += t[j].z;
        sum += t[j].w;
    }
    return sum;
}

// Walks `n` floats of shared memory in ascending order onto `sum`. Each addition hangs on the one before it, so nothing
// else may cost time: of two sets of sixteen terms one is added while the other travels.
DEVICE float ordered_sum(const float *terms, int n, float sum) {
    int i = 0;
    if (n >= 32) {
        float4 even[4], odd[4];
        load_sixteen(terms, even);
#pragma unroll 1
        for (; i + 32 <= n; i += 32) {
            load_sixteen(terms + i + 16, odd);
            sum = add_sixteen(even, sum);
            load_sixteen(terms + (i + 64 <= n ? i + 32 : 0), even);  // at the end for nothing
            sum = add_sixteen(odd, sum);
        }
    }
    for (; i + 16 <= n; i += 16) {
        float4 t[4];
        load_sixteen(terms + i, t);
        sum = add_sixteen(t, sum);
    }
    for (; i < n; i++) sum += terms[i];
    return sum;
}

// Sum over a warp as a tree, for the fast forms; every lane gets it.
DEVICE float warp_sum_f32(float v) {
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(FULL_WARP, v, step);
    return v;
}

// Shared memory of a block for a row of d elements; kestrel/launch.py computes the same size. d is a multiple of 32
// where a8 is wanted.
struct NormShared {
    float *terms;    // f32[max(d/8 + d%8, 32), rounded up to 4]: block sums, then the tail's squares
    float *r;        // f32[4]
    float *x;        // f32[d rounded up to 4]: the normalised row
    int *gsum;       // i32[d/32 rounded up to 4]
    float *d;        // f32[d/32 rounded up to 4]
    signed char *q;  // i8[d]
};

DEVICE NormShared norm_shared(unsigned char *base, int d) {
    const int sums = d / 8 + d % 8, terms = sums < 32 ? 32 : (sums + 3) / 4 * 4;
    const int row = (d + 3) / 4 * 4, groups = (d / 32 + 3) / 4 * 4;
    NormShared sh;
    sh.terms = (float *)base;
    sh.r = sh.terms + terms;
    sh.x = sh.r + 4;
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

#define NORM_CACHED 2  // blocks of eight that a thread keeps in registers from the sum to the result

// What a thread holds of a row: block threadIdx.x + c * blockDim.x of eight elements.
struct NormRow {
    float x[NORM_CACHED][8];
};

// Asks for the norm's weights, waits for the kernel that makes x, lets the next one begin, asks for x, and returns r to
// every thread. x, w: f32[d] in global memory. Of w each thread copies the elements that it holds of x to sh.x, which
// costs no registers; copy_wait_all stands between here and their use. Where d is no multiple of 8 nothing is copied.
// The chain of block sums is walked by every warp for itself, in one lane: that is as fast as by one warp, and saves a
// barrier behind it.
// `vector`: d is a multiple of 8.
DEVICE float norm_scale(const float *x, const float *w, int d, float eps, const NormShared &sh, NormRow &row,
                        bool vector) {
    const int blocks = d / 8, tail = vector ? 0 : d % 8;
#pragma unroll
    for (int c = 0; c < NORM_CACHED; c++) {
        const int b = threadIdx.x + c * blockDim.x;
        if (b < blocks && vector) {
            copy_async_16(sh.x + 8 * b, w + 8 * b);
            copy_async_16(sh.x + 8 * b + 4, w + 8 * b + 4);
        }
    }
    wait_for_previous();
    start_next();
#pragma unroll
    for (int c = 0; c < NORM_CACHED; c++) {
        const int b = threadIdx.x + c * blockDim.x;
        if (b < blocks) {
            load_eight(x + 8 * b, vector, row.x[c]);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++) row.x[c][k] = 0.0f;
        }
    }
#if KESTREL_FAST
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < NORM_CACHED; c++) {
#pragma unroll
        for (int k = 0; k < 8; k++) sum += row.x[c][k] * row.x[c][k];
    }
    for (int i = 8 * NORM_CACHED * blockDim.x + threadIdx.x; i < 8 * blocks; i += blockDim.x)
        sum += load_l2(x + i) * load_l2(x + i);
    for (int i = threadIdx.x; i < tail; i += blockDim.x)
        sum += load_l2(x + 8 * blocks + i) * load_l2(x + 8 * blocks + i);
    sum = warp_sum_f32(sum);
    if (lane_id() == 0) sh.terms[warp_id()] = sum;
    __syncthreads();
    float ss = 0.0f;
    for (int i = 0; i < warp_count(); i++) ss += sh.terms[i];
    return inverse_sqrt(ss / (float)d + eps);
#else
#pragma unroll
    for (int c = 0; c < NORM_CACHED; c++) {
        const int b = threadIdx.x + c * blockDim.x;
        float square[8];
#pragma unroll
        for (int k = 0; k < 8; k++) square[k] = row.x[c][k] * row.x[c][k];
        if (b < blocks) sh.terms[b] = hsum8(square);
    }
#pragma unroll 1
    for (int b = threadIdx.x + NORM_CACHED * blockDim.x; b < blocks; b += blockDim.x) {
        float square[8];
        load_eight(x + 8 * b, vector, square);
#pragma unroll
        for (int k = 0; k < 8; k++) square[k] = square[k] * square[k];
        sh.terms[b] = hsum8(square);
    }
    for (int i = threadIdx.x; i < tail; i += blockDim.x) {
        const float v = load_l2(x + 8 * blocks + i);
        sh.terms[blocks + i] = v * v;
    }
    __syncthreads();
    float r = 0.0f;
    if (lane_id() == 0) r = inverse_sqrt(ordered_sum(sh.terms, blocks + tail, 0.0f) / (float)d + eps);
    return __shfl_sync(FULL_WARP, r, 0);
#endif
}

// out = (x * r) * w, eight elements; w may be out.
DEVICE void norm_eight(const float *x, const float *w, float r, float *out) {
#pragma unroll
    for (int k = 0; k < 8; k++) out[k] = (x[k] * r) * w[k];
}

// The weights that norm_scale copied: block b of eight.
DEVICE void copied_weights(const NormShared &sh, int b, float *w) {
    const float4 lo = ((const float4 *)(sh.x + 8 * b))[0], hi = ((const float4 *)(sh.x + 8 * b))[1];
    w[0] = lo.x, w[1] = lo.y, w[2] = lo.z, w[3] = lo.w, w[4] = hi.x, w[5] = hi.y, w[6] = hi.z, w[7] = hi.w;
}

// Leaves the normalised row in sh.x; waits as norm_scale does; ends with a barrier. x, w: f32[d] in global memory.
DEVICE void block_rms_norm(const float *x, const float *w, int d, float eps, const NormShared &sh) {
    NormRow row;
    const float r = norm_scale(x, w, d, eps, sh, row, d % 8 == 0);
    const int blocks = d / 8;
    copy_wait_all();
#pragma unroll
    for (int c = 0; c < NORM_CACHED; c++) {
        const int b = threadIdx.x + c * blockDim.x;
        if (b < blocks) {
            float out[8];
            if (d % 8 == 0)
                copied_weights(sh, b, out);
            else
                load_eight_weights(w + 8 * b, false, out);
            norm_eight(row.x[c], out, r, out);
            store_eight(sh.x + 8 * b, out);
        }
    }
    // The rest of a very long row, then the tail.
#pragma unroll 1
    for (int i = 8 * NORM_CACHED * blockDim.x + threadIdx.x; i < 8 * blocks; i += blockDim.x)
        sh.x[i] = (load_l2(x + i) * r) * w[i];
    for (int i = 8 * blocks + threadIdx.x; i < d; i += blockDim.x) sh.x[i] = (load_l2(x + i) * r) * w[i];
    __syncthreads();
}

// One group of 32: v[i] is element 8 * part + i of lane part = lane % 4. Returns the packed codes of this lane; all
// lanes of the warp call it.
DEVICE uint2 a8_group_of_eights(const float *v, float *d, int *gsum) {
    unsigned amax = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const unsigned u = f32_bits(v[i]) & 0x7fffffffu;
        amax = u > amax ? u : amax;
    }
    const A8Scale s = a8_scale(group_max_u32(amax, 4));
    unsigned packed[2] = {0, 0};
    int sum = 0;
    if (!s.zero) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int code = a8_code(v[i], s.inv);
            packed[i / 4] |= ((unsigned)code & 0xffu) << (8 * (i % 4));
            sum += code;
        }
    }
    *d = s.d;
    *gsum = group_sum_s32(sum, 4);
    uint2 both;
    both.x = packed[0], both.y = packed[1];
    return both;
}

// One group of 32: v[i] is element 4 * part + i of lane part = lane % 8. Returns the packed codes of this lane; all
// lanes of the warp call it.
DEVICE unsigned a8_group(const float *v, float *d, int *gsum) {
    unsigned amax = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned u = f32_bits(v[i]) & 0x7fffffffu;
        amax = u > amax ? u : amax;
    }
    const A8Scale s = a8_scale(group_max_u32(amax, 8));
    unsigned packed = 0;
    int sum = 0;
    if (!s.zero) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int code = a8_code(v[i], s.inv);
            packed |= ((unsigned)code & 0xffu) << (8 * i);
            sum += code;
        }
    }
    *d = s.d;
    *gsum = group_sum_s32(sum, 8);
    return packed;
}

// a8 of `groups` groups of x, f32[32 * groups] in shared memory, by the whole block into q, d, gsum (shared or
// global). No barrier at the end.
DEVICE void block_a8(const float *x, int groups, signed char *q, float *d, int *gsum) {
    const int part = lane_id() % 8;
    // Whole warps go round together, so that the shuffles see all lanes.
    for (int first = warp_id() * 4; first < groups; first += warp_count() * 4) {
        const int g = first + lane_id() / 8;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (g < groups) {
            const float4 x4 = *(const float4 *)(x + 32 * g + 4 * part);
            v[0] = x4.x, v[1] = x4.y, v[2] = x4.z, v[3] = x4.w;
        }
        float scale;
        int sum;
        const unsigned packed = a8_group(v, &scale, &sum);
        if (g < groups) {
            ((unsigned *)q)[8 * g + part] = packed;
            if (part == 0) {
                d[g] = scale;
                gsum[g] = sum;
            }
        }
    }
}

// a8 of one group of x, f32[32] in shared memory, as group `g` of the op's output, by one whole warp.
DEVICE void warp_a8_one(const float *x, const QuantizeA8Args &a8, long long g) {
    const int part = lane_id() % 8;  // the warp's four slots do the same work
    const float4 x4 = *(const float4 *)(x + 4 * part);
    const float v[4] = {x4.x, x4.y, x4.z, x4.w};
    float d;
    int sum;
    const unsigned packed = a8_group(v, &d, &sum);
    if (lane_id() < 8) ((unsigned *)a8.q)[8 * g + part] = packed;
    if (lane_id() == 0) {
        a8.d[g] = d;
        a8.gsum[g] = sum;
    }
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

// Block b of eight elements, normalised, becomes a8; whole warps call it, `valid` where b lies in the row.
DEVICE void finish_eight(const RmsNormArgs &norm, const QuantizeA8Args &a8, long long m, const NormShared &sh, int b,
                         bool valid, const float *v, bool keep_x, NormPart part) {
    float scale;
    int sum;
    const uint2 packed = a8_group_of_eights(v, &scale, &sum);
    if (!valid) return;
    ((uint2 *)sh.q)[b] = packed;
    if (b % 4 == 0) {
        sh.d[b / 4] = scale;
        sh.gsum[b / 4] = sum;
    }
    if (keep_x) store_eight(sh.x + 8 * b, v);
    if (b < part.first || b >= part.end) return;
    store_eight(norm.out + m * norm.d + 8 * b, v);
    ((uint2 *)(a8.q + m * norm.d))[b] = packed;
    if (b % 4 == 0) {
        a8.d[m * (norm.d / 32) + b / 4] = scale;
        a8.gsum[m * (norm.d / 32) + b / 4] = sum;
    }
}

// rms_norm and a8 of row m into shared memory, straight from registers, and `part` of both to global memory. sh.x is
// written only with keep_x. d is a multiple of 32. Waits as norm_scale does; ends with a barrier.
DEVICE void block_norm_a8(const RmsNormArgs &norm, const QuantizeA8Args &a8, long long m, const NormShared &sh, bool keep_x,
                          NormPart part) {
    const float *const x = norm.x + m * norm.d;
    NormRow row;
    const float r = norm_scale(x, norm.w, norm.d, norm.eps, sh, row, true);
    const int blocks = norm.d / 8;
    copy_wait_all();
#pragma unroll
    for (int c = 0; c < NORM_CACHED; c++) {
        const int first = c * blockDim.x + 32 * warp_id(), b = first + lane_id();
        if (first < blocks) {
            float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            if (b < blocks) {
                copied_weights(sh, b, v);
                norm_eight(row.x[c], v, r, v);
            }
            finish_eight(norm, a8, m, sh, b, b < blocks, v, keep_x, part);
        }
    }
    // The rest of a very long row.
#pragma unroll 1
    for (int first = NORM_CACHED * blockDim.x + 32 * warp_id(); first < blocks; first += blockDim.x) {
        const int b = first + lane_id();
        float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        if (b < blocks) {
            float w[8];
            load_eight(x + 8 * b, true, v);
            load_eight_weights(norm.w + 8 * b, true, w);
            norm_eight(v, w, r, v);
        }
        finish_eight(norm, a8, m, sh, b, b < blocks, v, keep_x, part);
    }
    __syncthreads();
}
