// Attention over the int8 KV cache, contract section 7, in parallel with the bits of the serial form:
//   scores       integer dots, independent of each other
//   running max  a prefix maximum, associative and exact
//   exponentials independent, once the running max is known
//   sums         one fma chain per (head, element) over the positions of a chunk; it is multiplied by c where the max
//                moved (elsewhere c = 1) ; the sum of exponentials is a chain of its own
// A block takes the query heads of one KV head (or some of them), which share the K and V rows it reads, and one or
// more chunks of 256 positions. Chunks merge left to right: within the block when it walks all of them (gridDim.x = 1),
// otherwise by the last block of the row, from partial states in `work`.
#include "ucrt.cuh"
#include "port.cuh"

#define CHUNK 256
#define ATTENTION_COUNTERS 4096  // u32 at the start of `work`: zero before and after every launch
#define MINUS_INFINITY f32_from_bits(0xff800000u)

#if !KESTREL_FAST

// Shared memory of a block for `heads` query heads; kestrel/launch.py computes the same size.
struct AttentionShared {
    signed char *q8;  // i8[heads, hd]
    signed char *v8;  // i8[CHUNK, hd]
    float *s;         // f32[heads, CHUNK]: scores, then exponentials p; in the merge, factors a
    float *max;       // f32[heads, CHUNK]: running maximum up to and with t
    float *w;         // f32[heads, CHUNK]: p * vs; in the merge, factors b
    float *c;         // f32[heads, CHUNK]: rescale factor, set where the maximum moved
    unsigned *moved;  // u32[heads, 8]: bit t
    float *run;       // f32[heads, hd]: merged acc
    float *qs;        // f32[heads]
    float *m;         // f32[heads]: merged maximum
    float *l;         // f32[heads]: merged sum
    float *a;         // f32[heads]: factors of the current merge
    float *b;
};

DEVICE AttentionShared attention_shared(unsigned char *base, int heads, int hd) {
    AttentionShared sh;
    sh.q8 = (signed char *)base;
    sh.v8 = sh.q8 + heads * hd;
    sh.s = (float *)(sh.v8 + CHUNK * hd);
    sh.max = sh.s + heads * CHUNK;
    sh.w = sh.max + heads * CHUNK;
    sh.c = sh.w + heads * CHUNK;
    sh.moved = (unsigned *)(sh.c + heads * CHUNK);
    sh.run = (float *)(sh.moved + heads * 8);
    sh.qs = sh.run + heads * hd;
    sh.m = sh.qs + heads;
    sh.l = sh.m + heads;
    sh.a = sh.l + heads;
    sh.b = sh.a + heads;
    return sh;
}

// max[t] = running maximum of start, s[0], ..., s[t] by the contract's rule (s > m; false for NaN); one warp. count <= CHUNK.
DEVICE void warp_prefix_max(const float *s, float *max, int count, float start) {
    const int lane = lane_id(), first = lane * (CHUNK / 32);
    float own[CHUNK / 32];
    float m = MINUS_INFINITY;
#pragma unroll
    for (int i = 0; i < CHUNK / 32; i++) {
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
    for (int i = 0; i < CHUNK / 32; i++) {
        const int t = first + i;
        if (t < count) max[t] = own[i] > before ? own[i] : before;
    }
}

// Queries of heads h0 .. h0+heads-1 of row m, quantised as KV rows are; a warp to a head.
DEVICE void quantize_queries(const AttentionArgs &a, const AttentionShared &sh, int m, int h0, int heads) {
    const int lane = lane_id();
    for (int j = warp_id(); j < heads; j += warp_count()) {
        const float *const q = a.q + (long long)m * a.ld + (long long)(h0 + j) * a.hd;  // f32[hd]
        unsigned amax = 0;
        for (int i = lane; i < a.hd; i += 32) {
            const unsigned u = f32_bits(q[i]) & 0x7fffffffu;
            amax = u > amax ? u : amax;
        }
        const A8Scale scale = a8_scale(group_max_u32(amax, 32));
        for (int i = lane; i < a.hd; i += 32)
            sh.q8[j * a.hd + i] = (signed char)(scale.zero ? 0 : a8_code(q[i], scale.inv));
        if (lane == 0) sh.qs[j] = scale.d * a.qscale;
    }
}

// s[j][t] for the positions of a chunk: `lanes` threads (a power of two) to a K row, 16 bytes each at a time.
DEVICE void chunk_scores(const AttentionArgs &a, const AttentionShared &sh, long long slot0, int kv, int count, int heads) {
    const int units = a.hd / 16;  // of 16 bytes
    const int lanes = units <= 2 ? 2 : units <= 4 ? 4 : 8;
    const int part = threadIdx.x % lanes, rows = blockDim.x / lanes;
    // Whole warps go round together, so that the shuffles see all lanes.
    for (int t0 = 0; t0 < count; t0 += rows) {
        const int t = t0 + threadIdx.x / lanes;
        const bool active = t < count;
        const long long row = (slot0 + (active ? t : 0)) * a.nkv + kv;
        const uint4 *const k = (const uint4 *)(a.kq + row * a.hd);  // i8[hd]
        const float ks = active ? a.ks[row] : 0.0f;
        uint4 k8[2] = {};  // hd <= 256: at most two units of each thread
#pragma unroll
        for (int u = 0; u < 2; u++)
            if (active && part + u * lanes < units) k8[u] = k[part + u * lanes];
        for (int j = 0; j < heads; j++) {
            const uint4 *const q = (const uint4 *)(sh.q8 + j * a.hd);
            int dot = 0;
#pragma unroll
            for (int u = 0; u < 2; u++) {
                if (active && part + u * lanes < units) {
                    const uint4 x = q[part + u * lanes];
                    dot = __dp4a((int)k8[u].x, (int)x.x, dot);
                    dot = __dp4a((int)k8[u].y, (int)x.y, dot);
                    dot = __dp4a((int)k8[u].z, (int)x.z, dot);
                    dot = __dp4a((int)k8[u].w, (int)x.w, dot);
                }
            }
            dot = group_sum_s32(dot, lanes);
            if (active && part == 0) sh.s[j * CHUNK + t] = (float)dot * (sh.qs[j] * ks);
        }
    }
}

// From scores and running maxima: p (over s), w, c and the bits of `moved`.
DEVICE void chunk_exponentials(const AttentionArgs &a, const AttentionShared &sh, long long slot0, int kv, int count,
                               int heads) {
    for (int i = threadIdx.x; i < heads * CHUNK; i += blockDim.x) {  // CHUNK is a multiple of 32: a warp stays in one head
        const int t = i % CHUNK;
        bool moved = false;
        if (t < count) {
            const float s = sh.s[i], m = sh.max[i];
            const float m_before = t == 0 ? MINUS_INFINITY : sh.max[i - 1];
            moved = s > m_before;
            if (moved) sh.c[i] = expf_ucrt(m_before - s);
            const float p = expf_ucrt(s - m);
            sh.s[i] = p;
            sh.w[i] = p * a.vs[(slot0 + t) * a.nkv + kv];
        }
        const unsigned bits = __ballot_sync(FULL_WARP, moved);
        if (lane_id() == 0) sh.moved[i / 32] = bits;
    }
}

// Four neighbouring elements of one head's acc over a chunk. v: i8, the elements at position 0; w, c, moved: the head's.
DEVICE float4 chunk_values(const signed char *v, int pitch, const float *w, const float *c, const unsigned *moved, int count) {
    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int t0 = 0; t0 < count; t0 += 32) {
        const unsigned bits = moved[t0 / 32];
        const int end = count - t0 < 32 ? count - t0 : 32;
#pragma unroll 4
        for (int i = 0; i < end; i++) {
            const int t = t0 + i;
            if (bits >> i & 1u) {
                const float f = c[t];
                acc.x *= f;
                acc.y *= f;
                acc.z *= f;
                acc.w *= f;
            }
            const int v4 = *(const int *)(v + t * pitch);
            const float wt = w[t];
            acc.x = fma_f32(wt, (float)(signed char)v4, acc.x);
            acc.y = fma_f32(wt, (float)(signed char)(v4 >> 8), acc.y);
            acc.z = fma_f32(wt, (float)(signed char)(v4 >> 16), acc.z);
            acc.w = fma_f32(wt, (float)(signed char)(v4 >> 24), acc.w);
        }
    }
    return acc;
}

// The sum of exponentials of one head over a chunk.
DEVICE float chunk_sum(const float *p, const float *c, const unsigned *moved, int count) {
    float l = 0.0f;
    for (int t = 0; t < count; t++) {
        if (moved[t / 32] >> (t % 32) & 1u) l *= c[t];
        l += p[t];
    }
    return l;
}

// One merge step of the contract: (l' or acc' of the right, times b) + (left times a).
DEVICE float merge_one(float left, float right, float factor_left, float factor_right) {
    return fma_f32(right, factor_right, left * factor_left);
}
DEVICE float4 merge_four(float4 left, float4 right, float a, float b) {
    return make_float4(merge_one(left.x, right.x, a, b), merge_one(left.y, right.y, a, b),
                       merge_one(left.z, right.z, a, b), merge_one(left.w, right.w, a, b));
}

// Partial state of one chunk, row and head in `work`: acc f32[hd], m, l, two unused. Chunk-major, so that the layout does not
// depend on the context's capacity.
DEVICE float *partial_state(const AttentionArgs &a, int chunk, int m, int h) {
    float *const states = (float *)((unsigned *)a.work + ATTENTION_COUNTERS);
    return states + (((long long)chunk * a.M + m) * a.nh + h) * (a.hd + 4);
}

// Merges the partial states of a row's chunks, left to right, into run and l.
DEVICE void merge_partials(const AttentionArgs &a, const AttentionShared &sh, int m, int h0, int heads, int chunks) {
    const int quads = a.hd / 4;
    for (int c0 = 0; c0 < chunks; c0 += CHUNK) {
        const int count = chunks - c0 < CHUNK ? chunks - c0 : CHUNK;
        // Running maxima and the factors of every step, a warp to a head.
        for (int j = warp_id(); j < heads; j += warp_count()) {
            for (int c = lane_id(); c < count; c += 32) sh.s[j * CHUNK + c] = load_l2(partial_state(a, c0 + c, m, h0 + j) + a.hd);
            __syncwarp();
            const float before = c0 == 0 ? MINUS_INFINITY : sh.m[j];
            warp_prefix_max(sh.s + j * CHUNK, sh.max + j * CHUNK, count, before);
            __syncwarp();
            for (int c = lane_id(); c < count; c += 32) {
                const float right = sh.s[j * CHUNK + c], merged = sh.max[j * CHUNK + c];
                const float left = c == 0 ? before : sh.max[j * CHUNK + c - 1];
                sh.c[j * CHUNK + c] = expf_ucrt(left - merged);
                sh.w[j * CHUNK + c] = expf_ucrt(right - merged);
            }
            __syncwarp();
            if (lane_id() == 0) sh.m[j] = sh.max[j * CHUNK + count - 1];
        }
        __syncthreads();
        for (int item = threadIdx.x; item < heads * quads + heads; item += blockDim.x) {
            const bool is_sum = item >= heads * quads;
            const int j = is_sum ? item - heads * quads : item / quads;
            const float *const fa = sh.c + j * CHUNK, *const fb = sh.w + j * CHUNK;
            if (is_sum) {
                float l = sh.l[j];
                for (int c = 0; c < count; c++) {
                    const float right = load_l2(partial_state(a, c0 + c, m, h0 + j) + a.hd + 1);
                    l = c0 + c == 0 ? right : merge_one(l, right, fa[c], fb[c]);
                }
                sh.l[j] = l;
            } else {
                const int at = 4 * (item % quads);
                float4 *const run = (float4 *)(sh.run + j * a.hd + at);
                float4 acc = *run;
#pragma unroll 4
                for (int c = 0; c < count; c++) {
                    const float4 right = load_l2((const float4 *)(partial_state(a, c0 + c, m, h0 + j) + at));
                    acc = c0 + c == 0 ? right : merge_four(acc, right, fa[c], fb[c]);
                }
                *run = acc;
            }
        }
        __syncthreads();
    }
}

// Grid (chunk slots, nkv * slices, M): a block takes chunks blockIdx.x, blockIdx.x + gridDim.x, ... of row blockIdx.z for
// one slice of the heads of one KV head. hd is a multiple of 16 up to 256. Dynamic shared: see AttentionShared.
KERNEL void k_attn_decode_online(const AttentionArgs a) {
    DYNAMIC_SHARED(shared);
    __shared__ unsigned arrived;
    const int per_kv = a.nh / a.nkv, slices = gridDim.y / a.nkv, slice_heads = (per_kv + slices - 1) / slices;
    const int m = blockIdx.z, kv = blockIdx.y / slices, first_head = blockIdx.y % slices * slice_heads;
    const int heads = per_kv - first_head < slice_heads ? per_kv - first_head : slice_heads;
    if (heads <= 0) return;  // the whole block
    const int h0 = kv * per_kv + first_head;
    const int chunks = a.pos[m] / CHUNK + 1;
    const bool alone = gridDim.x == 1;           // this block merges as it goes
    const bool single = chunks == 1;             // nothing to merge
    if (!alone && single && blockIdx.x > 0) return;
    const AttentionShared sh = attention_shared(shared, slice_heads, a.hd);
    const int quads = a.hd / 4, items = heads * quads + heads;

    if ((int)blockIdx.x < chunks) quantize_queries(a, sh, m, h0, heads);
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const int begin = chunk * CHUNK;
        const int count = a.pos[m] + 1 - begin < CHUNK ? a.pos[m] + 1 - begin : CHUNK;
        const long long slot0 = (long long)a.base[m] + begin;
        // V rows travel while the scores are computed.
        for (int i = threadIdx.x; i < count * (a.hd / 16); i += blockDim.x) {
            const int t = i / (a.hd / 16), at = i % (a.hd / 16) * 16;
            copy_async_16(sh.v8 + t * a.hd + at, a.vq + ((slot0 + t) * a.nkv + kv) * a.hd + at);
        }
        __syncthreads();  // queries
        chunk_scores(a, sh, slot0, kv, count, heads);
        __syncthreads();
        for (int j = warp_id(); j < heads; j += warp_count())
            warp_prefix_max(sh.s + j * CHUNK, sh.max + j * CHUNK, count, MINUS_INFINITY);
        __syncthreads();
        chunk_exponentials(a, sh, slot0, kv, count, heads);
        if (alone && (int)threadIdx.x < heads) {
            const float right = sh.max[threadIdx.x * CHUNK + count - 1];
            const float left = chunk == 0 ? MINUS_INFINITY : sh.m[threadIdx.x];
            const float merged = right > left ? right : left;
            sh.a[threadIdx.x] = expf_ucrt(left - merged);
            sh.b[threadIdx.x] = expf_ucrt(right - merged);
            sh.m[threadIdx.x] = merged;
        }
        copy_wait_all();
        __syncthreads();
        for (int item = threadIdx.x; item < items; item += blockDim.x) {
            const bool is_sum = item >= heads * quads;
            const int j = is_sum ? item - heads * quads : item / quads;
            const float *const c = sh.c + j * CHUNK;
            const unsigned *const moved = sh.moved + j * (CHUNK / 32);
            if (is_sum) {
                const float l = chunk_sum(sh.s + j * CHUNK, c, moved, count);
                if (alone || single) {
                    sh.l[j] = chunk == 0 ? l : merge_one(sh.l[j], l, sh.a[j], sh.b[j]);
                } else {
                    float *const state = partial_state(a, chunk, m, h0 + j);
                    state[a.hd] = sh.max[j * CHUNK + count - 1];
                    state[a.hd + 1] = l;
                }
            } else {
                const int at = 4 * (item % quads);
                const float4 acc = chunk_values(sh.v8 + at, a.hd, sh.w + j * CHUNK, c, moved, count);
                if (alone || single) {
                    float4 *const run = (float4 *)(sh.run + j * a.hd + at);
                    *run = chunk == 0 ? acc : merge_four(*run, acc, sh.a[j], sh.b[j]);
                } else {
                    *(float4 *)(partial_state(a, chunk, m, h0 + j) + at) = acc;
                }
            }
        }
        __syncthreads();
    }

    if (!alone && !single) {
        // The last block of this row and slice to arrive sees every partial state and merges them.
        __threadfence();
        __syncthreads();
        unsigned *const counter = (unsigned *)a.work + (m * (int)gridDim.y + (int)blockIdx.y);
        if (threadIdx.x == 0) arrived = atomicInc(counter, gridDim.x - 1);  // wraps to 0 for the next launch
        __syncthreads();
        if (arrived != gridDim.x - 1) return;
        __threadfence();
        merge_partials(a, sh, m, h0, heads, chunks);
    }
    for (int i = threadIdx.x; i < heads * a.hd; i += blockDim.x) {
        const int j = i / a.hd;
        a.out[((long long)m * a.nh + h0) * a.hd + i] = sh.run[i] / sh.l[j];
    }
}

#endif
