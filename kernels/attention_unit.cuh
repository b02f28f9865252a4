// One unit of the attention stage: a chunk of 256 positions for up to HS query heads of one KV head, from the raw rows
// that the QKV product left to the unit's partial state (contract sections 4 to 7). A block is 256 threads: a thread to a
// position where positions are independent, a thread to an element of the head where sums are chains.
#pragma once

#include "attention_chunk.cuh"

#define UNIT_THREADS CHUNK
#define UNIT_WARPS (UNIT_THREADS / 32)
#define UNIT_HEADS 8                // query heads of a unit, at most
#define UNIT_ROWS (UNIT_HEADS + 2)  // and the new K and V row
#define UNIT_PITCH (CHUNK + 4)      // f32 of a head's positions: spreads the heads over the banks
#define UNIT_STEP 32                // the chains take so many positions at a time: rows end in idle ones up to that

// Shared memory of a block; kestrel/launch.py computes the same size. HS is the heads of the unit at hand.
struct UnitShared {
    float *s;              // f32[HS, UNIT_PITCH]: scores
    float *squares;        // in its place, while rows are made: f32[UNIT_ROWS, hd rounded up to 64, + 4]
    float *angle;          // f32[hd]: cosines, then sines
    float *ks, *vs;        // f32[CHUNK]; vs is +0 past the chunk's positions
    float *qs;             // f32[HS]
    float *new_scale;      // f32[2]: ks and vs of the new row
    unsigned *arrived;     // u32[1]: of last_block_to_arrive
    float *max;            // f32[HS]: maximum of the chunk
    unsigned *totals;      // u32[UNIT_WARPS]: order_key of the maximum of the positions of each warp
    unsigned *moved;       // u32[HS, CHUNK / 64]: bit i: the maximum moved at positions 2 * i or 2 * i + 1 of 64; for one
                           // head u32[CHUNK / 32]: at position i of 32
    signed char *q8;       // i8[HS, hd]
    signed char *new_row;  // i8[2, hd]: the new K and V row
    signed char *v8;       // i8[CHUNK / 4, 4 * pitch], pitch the largest hd of the kernel; see unit_transpose
    signed char *k8;       // i8[CHUNK, hd], units of 16 bytes at unit_place
    // Where K was, once the scores are made:
    float *w;              // f32[HS, UNIT_PITCH]: p * vs
    float *c;              // f32[HS, UNIT_PITCH]: rescale factor, 1 where the maximum did not move
    float *p;              // f32[HS, UNIT_PITCH]: exponentials; sixteen floats behind them are read, too
};

DEVICE UnitShared unit_shared(unsigned char *base, int hd, int pitch) {
    const int squares = UNIT_ROWS * ((hd + 63) / 64 * 64 + 4), scores = UNIT_PITCH * UNIT_HEADS;
    UnitShared sh;
    sh.s = sh.squares = (float *)base;
    sh.angle = sh.s + (squares > scores ? squares : scores);
    sh.ks = sh.angle + hd;
    sh.vs = sh.ks + CHUNK;
    sh.qs = sh.vs + CHUNK;
    sh.new_scale = sh.qs + UNIT_HEADS;
    sh.arrived = (unsigned *)(sh.new_scale + 2);
    sh.max = sh.new_scale + 4;
    sh.totals = (unsigned *)(sh.max + UNIT_HEADS);
    sh.moved = sh.totals + UNIT_WARPS;
    sh.q8 = (signed char *)(sh.moved + UNIT_HEADS * (CHUNK / 64));
    sh.new_row = sh.q8 + UNIT_HEADS * hd;
    sh.v8 = sh.new_row + 2 * hd;
    sh.k8 = sh.v8 + CHUNK * pitch;
    sh.w = (float *)sh.k8;
    sh.c = sh.w + scores;
    sh.p = sh.c + scores;
    return sh;
}

// What a unit works on.
struct Unit {
    int kv, h0, heads;   // KV head, first query head, query heads (at most HS)
    bool first_of_kv;    // h0 is the first head of its KV head
    int slot, slots;     // takes chunks slot, slot + slots, ...
    int pos, chunks;     // position of the row, chunks up to it
    long long base;      // cache slot of position 0
};

// Where unit `at` of 16 bytes of row t lies in sh.k8: rows of 64 and of 128 bytes change the order of their units, so that
// eight lanes touch every bank once, both those of mma_s8, which read four units of two neighbouring rows, and those that
// read the same unit of eight rows.
DEVICE int unit_turn(int hd, int t) {
    return (hd & 127) == 0 ? (t & 1) * 4 + (t >> 1 & 3) : hd == 64 ? t >> 1 & 3 : 0;
}
DEVICE int unit_place(int hd, int t, int at) { return t * hd + 16 * (at ^ unit_turn(hd, t)); }

// The first warps make the rows, the others fetch K and V and turn V meanwhile: four positions (a quad) at a time, a lane
// to 16 elements of them.
struct UnitQuads {
    int first, step;  // quads of this lane; first: past the last, if it has none
    int at;           // its unit of 16 bytes in a row
};

// 0: every warp does both, in turn.
DEVICE int unit_makers(int HS) { return HS + 2 < UNIT_WARPS ? HS + 2 : 0; }

DEVICE UnitQuads unit_quads(int HS, int hd) {
    const int makers = unit_makers(HS);
    const int units = hd / 16, rows = 32 / units, row = lane_id() / units;
    UnitQuads q;
    q.at = lane_id() - row * units;
    q.step = (UNIT_WARPS - makers) * rows;
    q.first = warp_id() < makers || row >= rows ? CHUNK / 4 : (warp_id() - makers) * rows + row;
    return q;
}

// Quads of a chunk with `cached` positions and, past them, the new one: in whole UNIT_STEPs.
DEVICE int unit_quads_end(int cached) {
    const int quads = (cached + UNIT_STEP) / UNIT_STEP * (UNIT_STEP / 4);
    return quads < CHUNK / 4 ? quads : CHUNK / 4;
}

// K and V rows of the chunk that begins at cache slot `slot0`, as far as they are cached, on their way to shared memory;
// allowed before the stage's wait, because earlier steps wrote them. V rows past them are +0.
DEVICE void unit_fetch(const AttentionArgs &a, const UnitShared &sh, int pitch, const UnitQuads &q, long long slot0, int kv,
                       int cached) {
    const int stride = a.nkv * a.hd, end = unit_quads_end(cached);
    const long long start = slot0 * stride + kv * a.hd + 16 * q.at;
#pragma unroll 1
    for (int quad = q.first; quad < end; quad += q.step) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = 4 * quad + i;
            if (t < cached) {
                const long long from = start + t * stride;
                copy_async_16(sh.k8 + unit_place(a.hd, t, q.at), a.kq + from);
                copy_async_16(sh.v8 + t * pitch + 16 * q.at, a.vq + from);
            } else {
                *(uint4 *)(sh.v8 + t * pitch + 16 * q.at) = make_uint4(0, 0, 0, 0);
            }
        }
    }
}

// Where four positions of an element lie together: in rows of 4 * pitch bytes, one for each four positions, word `at`
// holds element (at % (hd/4)) / 4 * 16 + at / (hd/4) * 4 + at % 4. An order in which the transposition meets no bank twice.
DEVICE int unit_element_at(int at, int hd) {
    const int quarter = hd / 4, which = (at >= quarter) + (at >= 2 * quarter) + (at >= 3 * quarter);
    return (at - which * quarter) / 4 * 16 + which * 4 + at % 4;
}
DEVICE int unit_word_of(int e, int hd) { return (e >> 2 & 3) * (hd >> 2) + (e >> 4) * 4 + (e & 3); }

// V bytes are kept plus 128, so that a byte is a float's lowest significand bits (value_float).
#define VALUE_BIAS 0x80808080u

// Waits for the lane's copies and turns V from rows of a position to words of an element's four positions, in place: one
// load then gives a chain four terms.
DEVICE void unit_transpose(const UnitShared &sh, int pitch, int hd, const UnitQuads &q, int cached) {
    copy_wait_all();
    const int units = hd / 16, end = unit_quads_end(cached);
#pragma unroll 1
    for (int quad = q.first; __any_sync(FULL_WARP, quad < end); quad += q.step) {  // whole warps
        signed char *const row = sh.v8 + 4 * quad * pitch;
        uint4 r[4] = {};
        if (quad < end) {
#pragma unroll
            for (int i = 0; i < 4; i++) r[i] = *(const uint4 *)(row + i * pitch + 16 * q.at);
        }
        __syncwarp();
        if (quad < end) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const unsigned a = k == 0 ? r[0].x : k == 1 ? r[0].y : k == 2 ? r[0].z : r[0].w;
                const unsigned b = k == 0 ? r[1].x : k == 1 ? r[1].y : k == 2 ? r[1].z : r[1].w;
                const unsigned c = k == 0 ? r[2].x : k == 1 ? r[2].y : k == 2 ? r[2].z : r[2].w;
                const unsigned d = k == 0 ? r[3].x : k == 1 ? r[3].y : k == 2 ? r[3].z : r[3].w;
                const unsigned ab0 = __byte_perm(a, b, 0x5140), ab1 = __byte_perm(a, b, 0x7362);
                const unsigned cd0 = __byte_perm(c, d, 0x5140), cd1 = __byte_perm(c, d, 0x7362);
                ((uint4 *)row)[k * units + q.at] =
                    make_uint4(__byte_perm(ab0, cd0, 0x5410) ^ VALUE_BIAS, __byte_perm(ab0, cd0, 0x7632) ^ VALUE_BIAS,
                               __byte_perm(ab1, cd1, 0x5410) ^ VALUE_BIAS, __byte_perm(ab1, cd1, 0x7632) ^ VALUE_BIAS);
            }
        }
        __syncwarp();
    }
}

// The new V row takes its place among the transposed ones; a thread to an element, barriers around it are the caller's.
DEVICE void unit_place_value(const UnitShared &sh, int pitch, int hd, int t) {
    const int e = threadIdx.x;
    if (e < hd) sh.v8[(t & ~3) * pitch + 4 * unit_word_of(e, hd) + (t & 3)] = (signed char)(sh.new_row[hd + e] ^ 0x80);
}

// A lane holds N neighbouring pairs (e, e + hd/2) of a row, 2 or 4, so hd <= 64 * N: which are its elements.
template <int N> DEVICE int lane_element() { return N * lane_id(); }

template <int N> struct Floats;
template <> struct Floats<2> {
    typedef float2 vector;
};
template <> struct Floats<4> {
    typedef float4 vector;
};
DEVICE void unpack(float2 v, float *x) { x[0] = v.x, x[1] = v.y; }
DEVICE void unpack(float4 v, float *x) { x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w; }
template <int N> DEVICE void get(const float *p, float (&x)[N]) { unpack(*(const typename Floats<N>::vector *)p, x); }
template <int N> DEVICE void get_l2(const float *p, float (&x)[N]) { unpack(load_l2((const typename Floats<N>::vector *)p), x); }
template <int N> DEVICE void get_weight(const float *p, float (&x)[N]) {
    unpack(load_weight((const typename Floats<N>::vector *)p), x);
}
DEVICE void put(float *p, const float (&x)[2]) { *(float2 *)p = make_float2(x[0], x[1]); }
DEVICE void put(float *p, const float (&x)[4]) { *(float4 *)p = make_float4(x[0], x[1], x[2], x[3]); }
DEVICE void put_codes(signed char *p, unsigned codes, const float (&)[2]) { *(unsigned short *)p = (unsigned short)codes; }
DEVICE void put_codes(signed char *p, unsigned codes, const float (&)[4]) { *(unsigned *)p = codes; }
DEVICE unsigned a8_codes(const float (&x)[4], const A8Scale &s) { return a8_four(x, s); }
DEVICE unsigned a8_codes(const float (&x)[2], const A8Scale &s) {
    const float v[4] = {x[0], x[1], 0.0f, 0.0f};
    return a8_four(v, s);
}

// The norm weights of the warp's first row: asked for before the stage's wait.
template <int N> struct RowWeights {
    float w0[N], w1[N];
};

template <int N> DEVICE RowWeights<N> unit_row_weights(const AttentionStageArgs &st, int HS, int row) {
    RowWeights<N> rw;
    const int half = st.attn.hd / 2, e = lane_element<N>();
    const float *const w = row < HS ? st.q_norm.w : st.k_norm.w;  // f32[hd]
#pragma unroll
    for (int n = 0; n < N; n++) rw.w0[n] = rw.w1[n] = 1.0f;
    if (st.has_norm && row <= HS && e < half) {
        get_weight(w + e, rw.w0);
        get_weight(w + e + half, rw.w1);
    }
    return rw;
}

// cos and sin of the row's angles; allowed before the stage's wait.
DEVICE void unit_angles(const RopeArgs &rope, int pos, float *angle) {
    const int half = rope.hd / 2;
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * half; i += UNIT_THREADS) {
        const float turn = (float)pos * load_weight(rope.inv_freq + i % half);
        angle[i] = (i < half ? cos_form(turn) : sin_form(turn)) * rope.factor;
    }
}

// Where a lane's part of a raw row lies, and whether it has one: queries past the unit's heads are zero.
struct RowSource {
    const float *at;
    int has;
};

template <int N> DEVICE RowSource unit_row_source(const AttentionStageArgs &st, const Unit &u, int HS, int row, int rows) {
    const int hd = st.attn.hd, e = lane_element<N>();
    RowSource s;
    s.at = (row < HS ? st.attn.q + (u.h0 + row) * hd : (row == HS ? st.kv.k : st.kv.v) + u.kv * hd) + e;
    s.has = e < hd / 2 && row < rows && (row < u.heads || row >= HS);
    return s;
}

template <int N> struct RowValues {
    float x0[N], x1[N];
};

template <int N> DEVICE RowValues<N> unit_row_load(const RowSource &source, int hd) {
    RowValues<N> x;
#pragma unroll
    for (int n = 0; n < N; n++) x.x0[n] = x.x1[n] = 0.0f;
    if (source.has) {
        get_l2(source.at, x.x0);
        get_l2(source.at + hd / 2, x.x1);
    }
    return x;
}

// Row 0 .. HS - 1 of a unit: a query through norm and RoPE, quantised; row HS: the new K row likewise, row HS + 1: the new V
// row, quantised; K also goes to position t_new of the chunk, if it is in there. A warp to a row; x: this lane's part of the
// raw one. Taps and the cache are written by one block each: q by `store_q`, K and V by `store_new`.
template <int N>
DEVICE void unit_row(const AttentionStageArgs &st, const UnitShared &sh, const Unit &u, int HS, int row, const RowValues<N> &x,
                     const RowWeights<N> &rw, float inverse_hd, int t_new, bool store_q, bool store_new) {
    const int hd = st.attn.hd, half = hd / 2, lane = lane_id(), e = lane_element<N>();
    const bool is_q = row < HS, is_v = row == HS + 1, has = e < half;
    const bool real = !is_q || row < u.heads;
    float x0[N], x1[N];
#pragma unroll
    for (int n = 0; n < N; n++) x0[n] = x.x0[n], x1[n] = x.x1[n];
    const bool store = has && (is_q ? store_q : store_new);
    const long long tap = (long long)(is_q ? u.h0 + row : st.attn.nh + u.kv) * hd + e;  // in normed and roped
    if (real && !is_v) {
        if (st.has_norm) {
            float ss = 0.0f;
#if KESTREL_FAST
#pragma unroll
            for (int n = 0; n < N; n++) ss += x0[n] * x0[n] + x1[n] * x1[n];
            ss = warp_sum_f32(ss);
#else
            float *const squares = sh.squares + row * ((hd + 63) / 64 * 64 + 4);
            if (has) {
                float s0[N], s1[N];
#pragma unroll
                for (int n = 0; n < N; n++) s0[n] = x0[n] * x0[n], s1[n] = x1[n] * x1[n];
                put(squares + e, s0);
                put(squares + e + half, s1);
            }
            __syncwarp();
            ss = sum_in_lanes<2 * N>(squares + lane, hd - lane, hd);
#endif
            const float r = inverse_sqrt(mean_of(ss, hd, inverse_hd) + (is_q ? st.q_norm.eps : st.k_norm.eps));
#pragma unroll
            for (int n = 0; n < N; n++) {
                x0[n] = (x0[n] * r) * rw.w0[n];
                x1[n] = (x1[n] * r) * rw.w1[n];
            }
            if (store) {
                put(st.normed + tap, x0);
                put(st.normed + tap + half, x1);
            }
        }
        if (has) {
            float c[N], s[N];
            get(sh.angle + e, c);
            get(sh.angle + half + e, s);
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float y0 = x0[n] * c[n] - x1[n] * s[n], y1 = x1[n] * c[n] + x0[n] * s[n];
                x0[n] = y0;
                x1[n] = y1;
            }
            if (store) {
                put(st.roped + tap, x0);
                put(st.roped + tap + half, x1);
            }
        }
    }
    const unsigned a0 = max_magnitude(x0, N), a1 = max_magnitude(x1, N);
    const A8Scale scale = a8_scale_quick(__reduce_max_sync(FULL_WARP, !has ? 0u : a0 > a1 ? a0 : a1));
    const long long slot = (u.base + u.pos) * st.kv.nkv + u.kv;
    const bool here = !is_q && t_new < CHUNK;
    if (has) {
        signed char *const codes = (is_q ? sh.q8 + row * hd : sh.new_row + (row - HS) * hd) + e;
        const unsigned c0 = a8_codes(x0, scale), c1 = a8_codes(x1, scale);
        put_codes(codes, c0, x0);
        put_codes(codes + half, c1, x1);
        if (here && !is_v) {
            put_codes(sh.k8 + unit_place(hd, t_new, e / 16) + e % 16, c0, x0);
            put_codes(sh.k8 + unit_place(hd, t_new, (e + half) / 16) + (e + half) % 16, c1, x1);
        }
        if (!is_q && store_new) {
            signed char *const cache = (is_v ? st.kv.vq : st.kv.kq) + slot * hd + e;
            put_codes(cache, c0, x0);
            put_codes(cache + half, c1, x1);
        }
    }
    if (lane == 0) {
        if (is_q) {
            sh.qs[row] = scale.d * st.attn.qscale;
        } else {
            sh.new_scale[row - HS] = scale.d;
            if (here) (is_v ? sh.vs : sh.ks)[t_new] = scale.d;
            if (store_new) (is_v ? st.kv.vs : st.kv.ks)[slot] = scale.d;
        }
    }
}
