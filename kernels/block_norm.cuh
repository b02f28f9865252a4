// One row's rms_norm and a8 by a whole block, results in shared memory (contract sections 2 and 4).
#pragma once

#include "forms.cuh"

// Walks `n` floats of shared memory in ascending order onto `sum`; sixteen loads are in flight ahead of the chain.
DEVICE float ordered_sum(const float *terms, int n, float sum) {
    int i = 0;
#pragma unroll 1
    for (; i + 16 <= n; i += 16) {
        float4 t[4];
#pragma unroll
        for (int j = 0; j < 4; j++) t[j] = *(const float4 *)(terms + i + 4 * j);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sum += t[j].x;
            sum += t[j].y;
            sum += t[j].z;
            sum += t[j].w;
        }
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

// Eight neighbouring elements; `vector`: they are 16-byte aligned.
DEVICE void load_eight(const float *p, bool vector, float *v) {
    if (vector) {
        const float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = p[k];
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

#define NORM_CACHED 2  // blocks of eight that a thread keeps in registers from the sum to the result

// Leaves the normalised row in sh.x; ends with a barrier. x, w: f32[d] in global memory. Asks for w, waits for the
// kernel that makes x, then asks for x: nothing is read twice unless d > 16 * blockDim.x.
DEVICE void block_rms_norm(const float *x, const float *w, int d, float eps, const NormShared &sh) {
    const int blocks = d / 8, tail = d % 8;
    const bool vector = tail == 0;
    float xs[NORM_CACHED][8], ws[NORM_CACHED][8];
#pragma unroll
    for (int c = 0; c < NORM_CACHED; c++) {
        const int b = threadIdx.x + c * blockDim.x;
        if (b < blocks) load_eight_weights(w + 8 * b, vector, ws[c]);
    }
    wait_for_previous();
#pragma unroll
    for (int c = 0; c < NORM_CACHED; c++) {
        const int b = threadIdx.x + c * blockDim.x;
        if (b < blocks) load_eight(x + 8 * b, vector, xs[c]);
    }
#if KESTREL_FAST
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < NORM_CACHED; c++) {
#pragma unroll
        for (int k = 0; k < 8; k++)
            if ((int)(threadIdx.x + c * blockDim.x) < blocks) sum += xs[c][k] * xs[c][k];
    }
    for (int i = 8 * NORM_CACHED * blockDim.x + threadIdx.x; i < 8 * blocks; i += blockDim.x) sum += x[i] * x[i];
    for (int i = 8 * blocks + threadIdx.x; i < d; i += blockDim.x) sum += x[i] * x[i];
    sum = warp_sum_f32(sum);
    if (lane_id() == 0) sh.terms[warp_id()] = sum;
    __syncthreads();
    float ss = 0.0f;
    for (int i = 0; i < warp_count(); i++) ss += sh.terms[i];
    const float r = inverse_sqrt(ss / (float)d + eps);
#else
#pragma unroll
    for (int c = 0; c < NORM_CACHED; c++) {
        const int b = threadIdx.x + c * blockDim.x;
        float square[8];
#pragma unroll
        for (int k = 0; k < 8; k++) square[k] = xs[c][k] * xs[c][k];
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
        const float v = x[8 * blocks + i];
        sh.terms[blocks + i] = v * v;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const float ss = ordered_sum(sh.terms, blocks + tail, 0.0f);
        sh.r[0] = inverse_sqrt(ss / (float)d + eps);
    }
    __syncthreads();
    const float r = sh.r[0];
#endif
#pragma unroll
    for (int c = 0; c < NORM_CACHED; c++) {
        const int b = threadIdx.x + c * blockDim.x;
        if (b < blocks) {
            float4 *const out = (float4 *)(sh.x + 8 * b);
            out[0] = make_float4((xs[c][0] * r) * ws[c][0], (xs[c][1] * r) * ws[c][1], (xs[c][2] * r) * ws[c][2],
                                 (xs[c][3] * r) * ws[c][3]);
            out[1] = make_float4((xs[c][4] * r) * ws[c][4], (xs[c][5] * r) * ws[c][5], (xs[c][6] * r) * ws[c][6],
                                 (xs[c][7] * r) * ws[c][7]);
        }
    }
    // The rest of a very long row, then the tail.
#pragma unroll 1
    for (int i = 8 * NORM_CACHED * blockDim.x + threadIdx.x; i < 8 * blocks; i += blockDim.x) sh.x[i] = (x[i] * r) * w[i];
    for (int i = 8 * blocks + threadIdx.x; i < d; i += blockDim.x) sh.x[i] = (x[i] * r) * w[i];
    __syncthreads();
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

// The a8 row and the norm, written once for taps and for later stages that read them.
DEVICE void store_norm_a8(const RmsNormArgs &norm, const QuantizeA8Args &a8, const NormShared &sh, int m) {
    const int groups = a8.K / 32;
    for (int i = threadIdx.x; i < norm.d; i += blockDim.x) norm.out[(long long)m * norm.d + i] = sh.x[i];
    for (int i = threadIdx.x; i < a8.K / 4; i += blockDim.x)
        ((unsigned *)a8.q)[(long long)m * (a8.K / 4) + i] = ((const unsigned *)sh.q)[i];
    for (int g = threadIdx.x; g < groups; g += blockDim.x) {
        a8.d[(long long)m * groups + g] = sh.d[g];
        a8.gsum[(long long)m * groups + g] = sh.gsum[g];
    }
}

// rms_norm and a8 of row m into shared memory; waits for the kernel that makes the row; ends with a barrier.
DEVICE void block_norm_a8(const RmsNormArgs &norm, int m, const NormShared &sh) {
    block_rms_norm(norm.x + (long long)m * norm.d, norm.w, norm.d, norm.eps, sh);
    block_a8(sh.x, norm.d / 32, sh.q, sh.d, sh.gsum);
    __syncthreads();
}
