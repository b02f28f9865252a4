// Attention over the int8 KV cache, contract section 7, in parallel with the bits of the serial form:
//   scores       integer dots, independent of each other
//   running max  a prefix maximum, associative and exact
//   exponentials independent, once the running max is known
//   sums         one fma chain per (head, element) over the positions of a chunk; it is multiplied by c where the max
//                moved (elsewhere c = 1) ; the sum of exponentials is a chain of its own
// A block takes the query heads of one KV head (or some of them), which share the K and V rows it reads, and one or
// more chunks of 256 positions. Chunks merge left to right: within the block when it walks all of them (gridDim.x = 1),
// otherwise by the last block of the row, from partial states in `work`.
#include "block_norm.cuh"
#include "stage_args.h"

#define CHUNK 256
#define ATTENTION_COUNTERS 4096  // u32 at the start of `work`: zero before and after every launch
#define MINUS_INFINITY f32_from_bits(0xff800000u)

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
    // Of the stage only, whose block makes the queries and the new K and V row itself:
    float *rows;       // f32[heads + 1, hd + 4]: q of each head and k, by steps raw, normed, turned
    float *squares;    // f32[heads + 1, hd + 4]: squares, then r
    float *angle;      // f32[hd]: cosines, sines
    float *new_scale;  // f32[4]: ks and vs of the new row
    signed char *new_row;  // i8[2, hd]: the new K and V row
    unsigned *arrived;     // u32[4]
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
    sh.arrived = (unsigned *)(sh.b + heads + (4 - 5 * heads % 4) % 4);  // 16-byte aligned
    sh.new_scale = (float *)(sh.arrived + 4);
    sh.rows = sh.new_scale + 4;
    sh.squares = sh.rows + (heads + 1) * (hd + 4);
    sh.angle = sh.squares + (heads + 1) * (hd + 4);
    sh.new_row = (signed char *)(sh.angle + hd);
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

// Of the stage: q of the block's heads, and with them the new K row when `with_new`, through norm and RoPE into sh.rows; then
// the new K and V row quantised into sh.new_row. Row 0 of every op (M = 1). Taps are written by one block each:
// q by `store_q`, k and the cache by `store_new`. Ends with a barrier.
DEVICE void make_rows(const AttentionStageArgs &st, const AttentionShared &sh, int h0, int heads, int kv, bool with_new,
                      bool store_q, bool store_new) {
    const int hd = st.attn.hd, half = hd / 2, pitch = hd + 4, rows = heads + (with_new ? 1 : 0);
    const float pos = (float)st.rope.pos[0];
    for (int i = threadIdx.x; i < rows * hd; i += blockDim.x) {
        const int j = i / hd, e = i % hd;
        const float v = j < heads ? st.attn.q[(h0 + j) * hd + e] : st.kv.k[kv * hd + e];
        sh.rows[j * pitch + e] = v;
        sh.squares[j * pitch + e] = v * v;
    }
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const float angle = pos * st.rope.inv_freq[i];
        sh.angle[i] = cos_form(angle) * st.rope.factor;
        sh.angle[half + i] = sin_form(angle) * st.rope.factor;
    }
    __syncthreads();
#if KESTREL_FAST
    for (int j = warp_id(); st.has_norm && j < rows; j += warp_count()) {
        float *const squares = sh.squares + j * pitch;
        float ss = 0.0f;
        for (int i = lane_id(); i < hd; i += 32) ss += squares[i];
        ss = warp_sum_f32(ss);
        if (lane_id() == 0) squares[hd] = inverse_sqrt(ss / (float)hd + (j < heads ? st.q_norm.eps : st.k_norm.eps));
    }
#else
    if (st.has_norm && (int)threadIdx.x < rows) {  // the chains of all heads side by side
        float *const squares = sh.squares + threadIdx.x * pitch;
        const float ss = ordered_sum(squares, hd, 0.0f);
        const float eps = (int)threadIdx.x < heads ? st.q_norm.eps : st.k_norm.eps;
        squares[hd] = inverse_sqrt(ss / (float)hd + eps);
    }
#endif
    __syncthreads();
    for (int i = threadIdx.x; i < rows * half; i += blockDim.x) {
        const int j = i / half, e = i % half;
        const bool is_q = j < heads, store = is_q ? store_q : store_new;
        const long long tap = (long long)(is_q ? h0 + j : st.attn.nh + kv) * hd;  // in normed and roped
        float x0 = sh.rows[j * pitch + e], x1 = sh.rows[j * pitch + e + half];
        if (st.has_norm) {
            const float r = sh.squares[j * pitch + hd];
            const float *const w = is_q ? st.q_norm.w : st.k_norm.w;  // f32[hd]
            x0 = (x0 * r) * w[e];
            x1 = (x1 * r) * w[e + half];
            if (store) {
                st.normed[tap + e] = x0;
                st.normed[tap + e + half] = x1;
            }
        }
        const float c = sh.angle[e], s = sh.angle[half + e];
        const float y0 = x0 * c - x1 * s, y1 = x1 * c + x0 * s;
        sh.rows[j * pitch + e] = y0;
        sh.rows[j * pitch + e + half] = y1;
        if (store) {
            st.roped[tap + e] = y0;
            st.roped[tap + e + half] = y1;
        }
    }
    __syncthreads();
    if (!with_new) return;
    for (int i = warp_id(); i < 2; i += warp_count()) {  // 0: K, 1: V
        const float *const x = i == 0 ? sh.rows + heads * pitch : st.kv.v + kv * hd;  // f32[hd]
        signed char *const row = sh.new_row + i * hd;
        const float d = warp_quantize_row(x, hd, row);
        if (lane_id() == 0) sh.new_scale[i] = d;
        __syncwarp();
        if (store_new) {
            const long long slot = ((long long)st.kv.base[0] + st.kv.pos[0]) * st.kv.nkv + kv;
            for (int e = lane_id(); e < hd; e += 32) (i == 0 ? st.kv.kq : st.kv.vq)[slot * hd + e] = row[e];
            if (lane_id() == 0) (i == 0 ? st.kv.ks : st.kv.vs)[slot] = d;
        }
    }
    __syncthreads();
}

// s[j][t] for the positions of a chunk: `lanes` threads (a power of two) to a K row, 16 bytes each at a time. Position t_new,
// if in the chunk, is read from sh.new_row.
DEVICE void chunk_scores(const AttentionArgs &a, const AttentionShared &sh, long long slot0, int kv, int count, int heads,
                         int t_new) {
    const int units = a.hd / 16;  // of 16 bytes
    const int lanes = units <= 2 ? 2 : units <= 4 ? 4 : 8;
    const int part = threadIdx.x % lanes, rows = blockDim.x / lanes;
    // Whole warps go round together, so that the shuffles see all lanes.
    for (int t0 = 0; t0 < count; t0 += rows) {
        const int t = t0 + threadIdx.x / lanes;
        const bool active = t < count;
        const long long row = (slot0 + (active ? t : 0)) * a.nkv + kv;
        const bool is_new = t == t_new;
        const uint4 *const k = (const uint4 *)(is_new ? sh.new_row : a.kq + row * a.hd);  // i8[hd]
        const float ks = is_new ? sh.new_scale[0] : active ? a.ks[row] : 0.0f;
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

#if KESTREL_FAST

// Scores to weights of one chunk by its overall maximum; the sum of exponentials in c[0], the maximum in max[count - 1]. A
// warp to a head.
DEVICE void chunk_softmax(const AttentionArgs &a, const AttentionShared &sh, long long slot0, int kv, int count, int heads,
                          int t_new) {
    const int lane = lane_id();
    for (int j = warp_id(); j < heads; j += warp_count()) {
        float *const s = sh.s + j * CHUNK, *const w = sh.w + j * CHUNK;
        float m = MINUS_INFINITY, l = 0.0f;
        for (int t = lane; t < count; t += 32) m = fmaxf(m, s[t]);
        for (int step = 16; step > 0; step >>= 1) m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, step));
        for (int t = lane; t < count; t += 32) {
            const float p = exp_form(s[t] - m);
            l += p;
            w[t] = p * (t == t_new ? sh.new_scale[1] : a.vs[(slot0 + t) * a.nkv + kv]);
        }
        l = warp_sum_f32(l);
        __syncwarp();
        if (lane == 0) {
            sh.c[j * CHUNK] = l;
            sh.max[j * CHUNK + count - 1] = m;
        }
    }
}

DEVICE float chunk_sum(const float *, const float *c, const unsigned *, int) { return c[0]; }

// Four chains for four neighbouring elements: positions t, t+4, ... each.
DEVICE float4 chunk_values(const signed char *v, int pitch, const float *w, const float *, const unsigned *, int count) {
    float4 acc[4] = {};
    for (int t0 = 0; t0 < count; t0 += 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (t0 + i < count) {
                const int v4 = *(const int *)(v + (t0 + i) * pitch);
                const float wt = w[t0 + i];
                acc[i].x += wt * (float)(signed char)v4;
                acc[i].y += wt * (float)(signed char)(v4 >> 8);
                acc[i].z += wt * (float)(signed char)(v4 >> 16);
                acc[i].w += wt * (float)(signed char)(v4 >> 24);
            }
        }
    }
    return make_float4((acc[0].x + acc[1].x) + (acc[2].x + acc[3].x), (acc[0].y + acc[1].y) + (acc[2].y + acc[3].y),
                       (acc[0].z + acc[1].z) + (acc[2].z + acc[3].z), (acc[0].w + acc[1].w) + (acc[2].w + acc[3].w));
}

#else

// From scores and running maxima: p (over s), w, c and the bits of `moved`. Ends without a barrier.
DEVICE void chunk_exponentials(const AttentionArgs &a, const AttentionShared &sh, long long slot0, int kv, int count,
                               int heads, int t_new) {
    for (int i = threadIdx.x; i < heads * CHUNK; i += blockDim.x) {  // CHUNK is a multiple of 32: a warp stays in one head
        const int t = i % CHUNK;
        bool moved = false;
        if (t < count) {
            const float s = sh.s[i], m = sh.max[i];
            const float m_before = t == 0 ? MINUS_INFINITY : sh.max[i - 1];
            moved = s > m_before;
            if (moved) sh.c[i] = exp_form(m_before - s);
            const float p = exp_form(s - m);
            sh.s[i] = p;
            sh.w[i] = p * (t == t_new ? sh.new_scale[1] : a.vs[(slot0 + t) * a.nkv + kv]);
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

// Scores to weights of one chunk.
DEVICE void chunk_softmax(const AttentionArgs &a, const AttentionShared &sh, long long slot0, int kv, int count, int heads,
                          int t_new) {
    for (int j = warp_id(); j < heads; j += warp_count())
        warp_prefix_max(sh.s + j * CHUNK, sh.max + j * CHUNK, count, MINUS_INFINITY);
    __syncthreads();
    chunk_exponentials(a, sh, slot0, kv, count, heads, t_new);
}

#endif

// One merge step of the contract: (l' or acc' of the right, times b) + (left times a).
DEVICE float merge_one(float left, float right, float factor_left, float factor_right) {
    return fma_f32(right, factor_right, left * factor_left);
}
DEVICE float4 merge_four(float4 left, float4 right, float a, float b) {
    return make_float4(merge_one(left.x, right.x, a, b), merge_one(left.y, right.y, a, b),
                       merge_one(left.z, right.z, a, b), merge_one(left.w, right.w, a, b));
}

// Partial state of one chunk, row and head in `work`: acc f32[hd], m, l, two unused. Chunk-major, so that the layout does not
// depend on the context's capacity. Before the states lie the rows that a stage stores for taps.
DEVICE float *partial_state(const AttentionArgs &a, int chunk, int m, int h) {
    float *const states = (float *)((unsigned *)a.work + ATTENTION_COUNTERS) + 4ll * a.nh * a.hd;
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
                sh.c[j * CHUNK + c] = exp_form(left - merged);
                sh.w[j * CHUNK + c] = exp_form(right - merged);
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

// V rows of a chunk on their way to shared memory; position t_new from sh.new_row.
DEVICE void fetch_values(const AttentionArgs &a, const AttentionShared &sh, long long slot0, int kv, int count, int t_new) {
    const int units = a.hd / 16;
    for (int i = threadIdx.x; i < count * units; i += blockDim.x) {
        const int t = i / units, at = i % units * 16;
        if (t != t_new) copy_async_16(sh.v8 + t * a.hd + at, a.vq + ((slot0 + t) * a.nkv + kv) * a.hd + at);
    }
}

// A block takes chunks blockIdx.x, blockIdx.x + gridDim.x, ... of row blockIdx.z for one slice of the heads of one KV head
// (blockIdx.y). With `st` it makes the row's queries and its new K and V row itself.
DEVICE void attention_block(const AttentionArgs &a, const AttentionStageArgs *st, unsigned char *shared) {
    const int per_kv = a.nh / a.nkv, slices = gridDim.y / a.nkv, slice_heads = (per_kv + slices - 1) / slices;
    const int m = blockIdx.z, kv = blockIdx.y / slices, first_head = blockIdx.y % slices * slice_heads;
    const int heads = per_kv - first_head < slice_heads ? per_kv - first_head : slice_heads;
    if (heads <= 0) return;  // the whole block
    const int h0 = kv * per_kv + first_head;
    const int pos = a.pos[m], chunks = pos / CHUNK + 1;
    const bool alone = gridDim.x == 1;  // this block merges as it goes
    const bool single = chunks == 1;    // nothing to merge
    if (!alone && single && blockIdx.x > 0) return;
    const AttentionShared sh = attention_shared(shared, slice_heads, a.hd);
    const int quads = a.hd / 4, items = heads * quads + heads;

    if ((int)blockIdx.x < chunks) {
        if (st != nullptr) {
            // The first chunk's rows travel while the queries are made.
            const int begin = blockIdx.x * CHUNK, count = pos - begin < CHUNK ? pos - begin : CHUNK;
            const long long slot0 = (long long)a.base[m] + begin;
            for (int t = threadIdx.x; t < count; t += blockDim.x)
                for (int at = 0; at < a.hd; at += 128) prefetch_l2(a.kq + ((slot0 + t) * a.nkv + kv) * a.hd + at);
            const bool has_new = (chunks - 1) % gridDim.x == blockIdx.x;
            make_rows(*st, sh, h0, heads, kv, has_new, blockIdx.x == 0, has_new && first_head == 0);
            quantize_queries(a, sh, sh.rows, a.hd + 4, heads);
        } else {
            quantize_queries(a, sh, a.q + (long long)m * a.ld + (long long)h0 * a.hd, a.hd, heads);
        }
    }
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const int begin = chunk * CHUNK;
        const int count = pos + 1 - begin < CHUNK ? pos + 1 - begin : CHUNK;
        const int t_new = st != nullptr ? pos - begin : -1;  // outside of the chunk unless it is the last
        const long long slot0 = (long long)a.base[m] + begin;
        fetch_values(a, sh, slot0, kv, count, t_new);
        if (t_new >= 0 && t_new < count)
            for (int i = threadIdx.x; i < a.hd; i += blockDim.x) sh.v8[t_new * a.hd + i] = sh.new_row[a.hd + i];
        __syncthreads();  // queries
        chunk_scores(a, sh, slot0, kv, count, heads, t_new);
        __syncthreads();
        chunk_softmax(a, sh, slot0, kv, count, heads, t_new);
#if KESTREL_FAST
        __syncthreads();  // the maxima
#endif
        if (alone && (int)threadIdx.x < heads) {
            const float right = sh.max[threadIdx.x * CHUNK + count - 1];
            const float left = chunk == 0 ? MINUS_INFINITY : sh.m[threadIdx.x];
            const float merged = right > left ? right : left;
            sh.a[threadIdx.x] = exp_form(left - merged);
            sh.b[threadIdx.x] = exp_form(right - merged);
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
        if (threadIdx.x == 0) *sh.arrived = atomicInc(counter, gridDim.x - 1);  // wraps to 0 for the next launch
        __syncthreads();
        if (*sh.arrived != gridDim.x - 1) return;
        __threadfence();
        merge_partials(a, sh, m, h0, heads, chunks);
    }
    for (int i = threadIdx.x; i < heads * a.hd; i += blockDim.x) {
        const float out = sh.run[i] / sh.l[i / a.hd];
        sh.run[i] = out;
        a.out[((long long)m * a.nh + h0) * a.hd + i] = out;
    }
    if (st != nullptr && st->has_a8) {  // heads * hd and h0 * hd are multiples of 32
        __syncthreads();
        const int g0 = h0 * a.hd / 32;
        block_a8(sh.run, heads * a.hd / 32, st->a8.q + 32 * g0, st->a8.d + g0, st->a8.gsum + g0);
    }
}

// Grid (chunk slots, nkv * slices, M); hd is a multiple of 16 up to 256. Dynamic shared: AttentionShared without the stage's.
#if KESTREL_FAST
#define k_attn_decode_online k_attn_fast
#endif
KERNEL LAUNCH_BOUNDS(512) void k_attn_decode_online(const AttentionArgs a) {
    DYNAMIC_SHARED(shared);
    attention_block(a, nullptr, shared);
}

// One row: q and k norm, RoPE, KV append, attention and the a8 of its result. Grid (chunk slots, nkv * slices).
KERNEL LAUNCH_BOUNDS(512) void FORM(k_attn_stage)(const AttentionStageArgs a) {
    DYNAMIC_SHARED(shared);
    attention_block(a.attn, &a, shared);
}
