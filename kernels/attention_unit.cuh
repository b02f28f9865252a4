// One unit of the attention stage: a chunk of 256 positions for up to HS query heads of one KV head, from the raw rows
// that the QKV product left to the unit's partial state (contract sections 4 to 7), by a block of 256 threads. Here: its shared
// memory, its rows and what it reads of the cache; attention_states.cuh has the rest.
#pragma once

#include "attention_chunk.cuh"

#define UNIT_THREADS CHUNK
// What kernels name as the most threads of a block, of which two are to fit: so they get 96 registers, not 128, and a block
// finds room beside those of the kernels before and behind, which run at the same time.
#define UNIT_BOUND 320
#define UNIT_WARPS (UNIT_THREADS / 32)
#define UNIT_HEADS 8                // query heads of a unit, at most
#define UNIT_ROWS (UNIT_HEADS + 2)  // and the new K and V row
#define UNIT_PITCH (CHUNK + 4)      // f32 of a head's positions: spreads the heads over the banks

// Shared memory of a block; kestrel/launch.py computes the same size. HS is the heads of the unit at hand.
struct UnitShared {
    float *s;              // f32[HS, UNIT_PITCH]: scores, -inf past the chunk's positions
    float *p;              // f32[HS, UNIT_PITCH]: exponentials, for less than eight heads
    float *squares;        // in the place of s, while rows are made: f32[UNIT_ROWS, hd rounded up to 64, + 4]
    float *angle;          // f32[hd]: cosines, then sines
    float *ks, *vs;        // f32[CHUNK]; vs is +0 past the chunk's positions
    float *qs;             // f32[HS]
    float *new_scale;      // f32[2]: ks and vs of the new row
    unsigned *arrived;     // u32[1]: of last_block_to_arrive
    float *max, *sum, *d;  // f32[HS]: maximum of the chunk; of eight heads sum of exponentials; scale of the codes
    unsigned *totals;      // u32[UNIT_WARPS]: order_key of the maximum of the scores of each warp
    unsigned *largest;     // u32[UNIT_WARPS]: magnitude of the largest weight of each warp
    signed char *q8;       // i8[HS, hd]
    signed char *new_row;  // i8[2, hd]: the new K and V row
    unsigned *codes;       // of the weights of V: attention_values.cuh
    unsigned long long *exp_table;  // u64[64]: of exp_down
    signed char *v8;        // i8[CHUNK, hd], units of 16 bytes at row_place; K is in registers (UnitKeys)
    signed char *v8_ahead;  // of the next chunk, where there is room for it
    float4 *factors;       // in the place of v8, while chunks merge: f32[HS, MERGE_PITCH, 4]
};

#define MERGE_PITCH 64  // f32[4] of a head

DEVICE UnitShared unit_shared(unsigned char *base, int hd) {
    const int squares = UNIT_ROWS * ((hd + 63) / 64 * 64 + 4), scores = UNIT_PITCH * UNIT_HEADS;
    UnitShared sh;
    sh.s = sh.squares = (float *)base;
    sh.p = sh.s + UNIT_HEADS / 2 * UNIT_PITCH;  // there are no more than four heads then, nor are there of their states
    sh.angle = sh.s + (squares > scores ? squares : scores);
    sh.ks = sh.angle + hd;
    sh.vs = sh.ks + CHUNK;
    sh.qs = sh.vs + CHUNK;
    sh.new_scale = sh.qs + UNIT_HEADS;
    sh.arrived = (unsigned *)(sh.new_scale + 2);
    sh.max = sh.new_scale + 4;
    sh.sum = sh.max + UNIT_HEADS;
    sh.d = sh.sum + UNIT_HEADS;
    sh.totals = (unsigned *)(sh.d + UNIT_HEADS);
    sh.largest = sh.totals + UNIT_WARPS;
    sh.codes = sh.largest + UNIT_WARPS;
    sh.exp_table = (unsigned long long *)(sh.codes + CODES_BYTES / 4);
    sh.q8 = (signed char *)(sh.exp_table + 64);
    sh.new_row = sh.q8 + UNIT_HEADS * hd;
    sh.v8 = sh.new_row + 2 * hd;
    sh.v8_ahead = sh.v8 + CHUNK * hd;
    sh.factors = (float4 *)sh.v8;
    return sh;
}

// a / b, neither negative: shorter than a division that minds signs.
DEVICE int whole_quotient(int a, int b) { return (int)((unsigned)a / (unsigned)b); }

// What a unit works on.
struct Unit {
    int kv, h0, heads;   // KV head, first query head, query heads (at most HS)
    bool stores_q;       // stores the taps of its queries,
    bool stores_kv;      // and the new K and V row, and theirs: one unit of a KV head
    int slot, slots;     // takes chunks slot, slot + slots, ...
    int pos, chunks;     // position of the row, chunks up to it
    long long base;      // cache slot of position 0
};

// Positions of a chunk that are cached: all, but for the new one and what lies behind it.
DEVICE int unit_cached(const Unit &u, int chunk) {
    const int left = u.pos - chunk * CHUNK;
    return left < CHUNK ? left : CHUNK;
}

// The K rows that this thread multiplies: of its warp's 32 positions those from 4 * (lane / 4) on, four of them, of each every
// fourth unit of 16 bytes, lane % 4 first. So four lanes read 64 neighbouring bytes of a row, every lane has what mma_s8 takes of
// it, and of a head the scores of four neighbouring positions.
template <int W> struct UnitKeys {
    uint4 rows[4][W / 4];

    // Asks for those of a chunk, as far as it is cached; allowed before the stage's wait, because earlier steps wrote them. What
    // lies past them may be anything: it makes scores that nobody reads.
    DEVICE_MEMBER void ask(const AttentionArgs &a, int hd, const Unit &u, int chunk) {
        const int t = 32 * warp_id() + lane_id() / 4 * 4, part = lane_id() % 4, left = unit_cached(u, chunk) - t;
        const int stride = a.nkv * hd;
        const signed char *from = a.kq + (u.base + chunk * CHUNK + t) * stride + u.kv * hd + 16 * part;
        settle(from);  // or all of it is worked out anew for every row
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < W / 4; j++)
                rows[i][j] = load_l2_where(i < left && 16 * part + 64 * j < hd, (const uint4 *)(from + i * stride + 64 * j));
        }
    }
    // The row at position t of the chunk, if it is one of these, from shared memory.
    DEVICE_MEMBER void place(const signed char *row, int hd, int t) {
        const int own = t - 32 * warp_id();
        if ((unsigned)own >= 32u) return;
        const int part = lane_id() % 4;
#pragma unroll
        for (int j = 0; j < W / 4; j++) {
            if (64 * j < hd) {
                const int at = 16 * part + 64 * j;
                const uint4 unit = *(const uint4 *)(row + (at < hd ? at : 0));
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (own == lane_id() / 4 * 4 + i) rows[i][j] = unit;
            }
        }
    }
};

// V of a chunk, if there is such a chunk, as far as it is cached, on its way to v8; allowed before the stage's wait, because
// earlier steps wrote it. What lies past it has codes of 0. A lane takes a unit of 16 bytes of every `step`-th row.
DEVICE void unit_fetch(const AttentionArgs &a, signed char *v8, int hd, const Unit &u, int chunk) {
    const int cached = unit_cached(u, chunk);
    if (cached > 0) {
        const int units = hd / 16, rows = 32 / units, row = lane_id() / units, at = lane_id() - row * units;
        const int step = UNIT_WARPS * rows, stride = a.nkv * hd;
        const int first = warp_id() % UNIT_WARPS * rows + row, left = row < rows ? cached - first : 0;
        const signed char *from = a.vq + (u.base + chunk * CHUNK + first) * stride + u.kv * hd + 16 * at;
        // Where places are turned, steps are powers of two and `first` is less than one: only bit 5 of i turns them again.
        int place = row_place(hd, first, at), turned = place ^ ((hd & 63) == 0 ? 16 : 0);
        settle(from);  // or all of it is worked out anew for every copy
        settle(place);
        settle(turned);
#pragma unroll 8
        for (int i = 0; i < CHUNK; i += step)
            if (i < left) copy_async_16(v8 + i * hd + ((i & 32) == 0 ? place : turned), from + (unsigned)(i * stride));
    }
}

// Scales of this thread's position of a chunk, +0 where it is not cached; likewise allowed before the wait.
struct UnitScales {
    float k, v;
};

DEVICE UnitScales unit_scales(const AttentionArgs &a, const Unit &u, int chunk) {
    UnitScales scales = {0.0f, 0.0f};
    if ((int)threadIdx.x < unit_cached(u, chunk)) {
        const long long row = (u.base + chunk * CHUNK + threadIdx.x) * a.nkv + u.kv;
        scales.k = load_l2(a.ks + row);
        scales.v = load_l2(a.vs + row);
    }
    return scales;
}

// Where element e of V lies at position t.
DEVICE signed char *unit_value(const UnitShared &sh, int hd, int t, int e) { return sh.v8 + row_place(hd, t, e / 16) + e % 16; }

// The new V row, and the scales of both, take their place in a chunk behind the one that they were made in.
DEVICE void unit_place_row(const UnitShared &sh, int hd, int t) {
#pragma unroll 1
    for (int e = threadIdx.x; e < hd; e += UNIT_THREADS) *unit_value(sh, hd, t, e) = sh.new_row[hd + e];
    if (threadIdx.x == 0) {
        sh.ks[t] = sh.new_scale[0];
        sh.vs[t] = sh.new_scale[1];
    }
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

template <int N> DEVICE RowWeights<N> unit_row_weights(const AttentionStageArgs &st, int HS, int hd, int row) {
    RowWeights<N> rw;
    const int half = hd / 2, e = lane_element<N>();
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
DEVICE void unit_angles(const RopeArgs &rope, int hd, int pos, float *angle) {
    const int half = hd / 2;
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * half; i += UNIT_THREADS) {
        const float turn = (float)pos * load_weight(rope.inv_freq + i % half);
        angle[i] = cos_or_sin_form(turn, i < half) * rope.factor;
    }
}

// Where a lane's part of a raw row lies, and whether it has one: queries past the unit's heads are zero.
struct RowSource {
    const float *at;
    int has;
};

template <int N>
DEVICE RowSource unit_row_source(const AttentionStageArgs &st, const Unit &u, int HS, int hd, int row, int rows) {
    const int e = lane_element<N>();
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
// row, quantised; V and both scales also go to position t_new of the chunk, if it is in there. A warp to a row; x: this lane's
// part of the raw one. Taps and the cache are written by one block each: q by `store_q`, K and V by `store_new`.
template <int N>
DEVICE void unit_row(const AttentionStageArgs &st, const UnitShared &sh, const Unit &u, int HS, int hd, int row,
                     const RowValues<N> &x, const RowWeights<N> &rw, float inverse_hd, int t_new, bool store_q, bool store_new) {
    const int half = hd / 2, lane = lane_id(), e = lane_element<N>();
    const bool is_q = row < HS, is_v = row == HS + 1, has = e < half;
    const bool real = !is_q || row < u.heads;
    float x0[N], x1[N];
#pragma unroll
    for (int n = 0; n < N; n++) x0[n] = x.x0[n], x1[n] = x.x1[n];
    const bool store = has && (is_q ? store_q : store_new);
    const int tap = (is_q ? u.h0 + row : st.attn.nh + u.kv) * hd + e;  // in normed and roped
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
            const float r = inverse_rms(ss, hd, inverse_hd, is_q ? st.q_norm.eps : st.k_norm.eps);
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
        if (here && is_v) {
            put_codes(unit_value(sh, hd, t_new, e), c0, x0);
            put_codes(unit_value(sh, hd, t_new, e + half), c1, x1);
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
