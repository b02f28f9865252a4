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
    float *s;              // f32[HS, UNIT_PITCH]: scores, then exponentials p
    float *squares;        // f32[UNIT_ROWS, hd rounded up to 64, + 4]
    float *angle;          // f32[hd]: cosines, then sines
    float *ks;             // f32[CHUNK]
    float *qs;             // f32[HS]
    float *new_scale;      // f32[2]: ks and vs of the new row
    float *totals;         // f32[HS, UNIT_WARPS]: maximum of the positions of each warp
    unsigned char *moved;  // u8[2, UNIT_WARPS]: bit i: the maximum of a head moved within the i-th four positions of the
                           // warp; of heads 0 to 3, and 4 to 7
    signed char *q8;       // i8[HS, hd]
    signed char *new_row;  // i8[2, hd]: the new K and V row
    signed char *v8;       // i8[CHUNK / 4, 4 * pitch], pitch the largest hd of the kernel; see unit_transpose
    signed char *k8;       // i8[CHUNK, hd], units of 16 bytes at unit_place
    // Where K was, once the scores are made:
    float *w;              // f32[HS, UNIT_PITCH]: p * vs
    float *c;              // f32[HS, UNIT_PITCH]: rescale factor, 1 where the maximum did not move
};

DEVICE UnitShared unit_shared(unsigned char *base, int hd, int pitch) {
    UnitShared sh;
    sh.s = (float *)base;
    sh.squares = sh.s + UNIT_PITCH * UNIT_HEADS;
    sh.angle = sh.squares + UNIT_ROWS * ((hd + 63) / 64 * 64 + 4);
    sh.ks = sh.angle + hd;
    sh.qs = sh.ks + CHUNK;
    sh.new_scale = sh.qs + UNIT_HEADS;
    sh.totals = sh.new_scale + 4;
    sh.moved = (unsigned char *)(sh.totals + UNIT_WARPS * UNIT_HEADS);
    sh.q8 = (signed char *)(sh.moved + 4 * UNIT_WARPS);
    sh.new_row = sh.q8 + UNIT_HEADS * hd;
    sh.v8 = sh.new_row + 2 * hd;
    sh.k8 = sh.v8 + CHUNK * pitch;
    sh.w = (float *)sh.k8;
    sh.c = sh.w + UNIT_PITCH * UNIT_HEADS;
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

// Where unit `at` of 16 bytes of row t lies in sh.k8: rows of 128 bytes swap their halves by turns, so that the eight
// lanes of mma_s8 that read two neighbouring rows touch every bank once.
DEVICE int unit_place(int hd, int t, int at) { return t * hd + 16 * (hd % 128 == 0 ? at ^ (t % 2 * 4) : at); }

// The first warps make the rows, the others fetch K and V and turn V meanwhile: four positions (a quad) at a time, a lane
// to 16 elements of them.
struct UnitQuads {
    int first, step;  // quads of this lane; first: past the last, if it has none
    int at;           // its unit of 16 bytes in a row
};

DEVICE UnitQuads unit_quads(int HS, int hd) {
    const int makers = HS + 2 < UNIT_WARPS ? HS + 2 : 0;  // 0: every warp does both, in turn
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
    const int quarter = hd / 4, which = at / quarter;
    return (at - which * quarter) / 4 * 16 + which * 4 + at % 4;
}
DEVICE int unit_word_of(int e, int hd) { return e % 16 / 4 * (hd / 4) + e / 16 * 4 + e % 4; }

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
    for (int e = threadIdx.x; e < hd; e += UNIT_THREADS)
        sh.v8[t / 4 * 4 * pitch + 4 * unit_word_of(e, hd) + t % 4] = (signed char)(sh.new_row[hd + e] ^ 0x80);
}

// The norm weights of the warp's first row: asked for before the stage's wait. PAIRS: pairs (e, e + hd/2) of a lane, so hd
// <= 64 * PAIRS.
template <int PAIRS> struct RowWeights {
    float w0[PAIRS], w1[PAIRS];
};

template <int PAIRS> DEVICE RowWeights<PAIRS> unit_row_weights(const AttentionStageArgs &st, int HS, int row) {
    RowWeights<PAIRS> rw;
    const int half = st.attn.hd / 2;
    const float *const w = row < HS ? st.q_norm.w : st.k_norm.w;  // f32[hd]
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        const int e = lane_id() + 32 * n;
        rw.w0[n] = rw.w1[n] = 1.0f;
        if (st.has_norm && row <= HS && e < half) {
            rw.w0[n] = load_weight(w + e);
            rw.w1[n] = load_weight(w + e + half);
        }
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

// Row 0 .. HS - 1 of a unit: a query through norm and RoPE, quantised; row HS: the new K row likewise, row HS + 1: the new V
// row, quantised; K also goes to position t_new of the chunk, if it is in there. A warp to a row, lane e % 32 holds the
// pairs (e, e + hd/2). Taps and the cache are written by one block each: q by `store_q`, K and V by `store_new`.
template <int PAIRS>
DEVICE void unit_row(const AttentionStageArgs &st, const UnitShared &sh, const Unit &u, int HS, int row,
                     const RowWeights<PAIRS> &rw, int t_new, bool store_q, bool store_new) {
    const int hd = st.attn.hd, half = hd / 2, lane = lane_id();
    const bool is_q = row < HS, is_v = row == HS + 1;
    const bool real = !is_q || row < u.heads;  // queries past the unit's heads are zero
    const float *const x = is_q ? st.attn.q + (u.h0 + row) * hd : (is_v ? st.kv.v : st.kv.k) + u.kv * hd;  // f32[hd]
    float x0[PAIRS], x1[PAIRS];
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        const int e = lane + 32 * n;
        x0[n] = x1[n] = 0.0f;
        if (real && e < half) {
            x0[n] = load_l2(x + e);
            x1[n] = load_l2(x + e + half);
        }
    }
    const bool store = is_q ? store_q : store_new;
    const long long tap = (long long)(is_q ? u.h0 + row : st.attn.nh + u.kv) * hd;  // in normed and roped
    if (real && !is_v) {
        if (st.has_norm) {
            float ss = 0.0f;
#if KESTREL_FAST
#pragma unroll
            for (int n = 0; n < PAIRS; n++) ss += x0[n] * x0[n] + x1[n] * x1[n];
            ss = warp_sum_f32(ss);
#else
            const int padded = (hd + 63) / 64 * 64;  // +0 changes no sum of squares
            float *const squares = sh.squares + row * (padded + 4);
            for (int e = hd + lane; e < padded; e += 32) squares[e] = 0.0f;
#pragma unroll
            for (int n = 0; n < PAIRS; n++) {
                const int e = lane + 32 * n;
                if (e < half) {
                    squares[e] = x0[n] * x0[n];
                    squares[e + half] = x1[n] * x1[n];
                }
            }
            __syncwarp();
            ss = padded_sum(squares, padded);  // every lane: the reads are broadcasts
#endif
            const float r = inverse_sqrt(ss / (float)hd + (is_q ? st.q_norm.eps : st.k_norm.eps));
#pragma unroll
            for (int n = 0; n < PAIRS; n++) {
                const int e = lane + 32 * n;
                x0[n] = (x0[n] * r) * rw.w0[n];
                x1[n] = (x1[n] * r) * rw.w1[n];
                if (store && e < half) {
                    st.normed[tap + e] = x0[n];
                    st.normed[tap + e + half] = x1[n];
                }
            }
        }
#pragma unroll
        for (int n = 0; n < PAIRS; n++) {
            const int e = lane + 32 * n;
            if (e < half) {
                const float c = sh.angle[e], s = sh.angle[half + e];
                const float y0 = x0[n] * c - x1[n] * s, y1 = x1[n] * c + x0[n] * s;
                x0[n] = y0;
                x1[n] = y1;
                if (store) {
                    st.roped[tap + e] = y0;
                    st.roped[tap + e + half] = y1;
                }
            }
        }
    }
    unsigned amax = 0;
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        const unsigned a0 = f32_bits(x0[n]) & 0x7fffffffu, a1 = f32_bits(x1[n]) & 0x7fffffffu;
        const unsigned larger = a0 > a1 ? a0 : a1;
        if (lane + 32 * n < half) amax = larger > amax ? larger : amax;
    }
    const A8Scale scale = a8_scale(__reduce_max_sync(FULL_WARP, amax));
    signed char *const codes = is_q ? sh.q8 + row * hd : sh.new_row + (row - HS) * hd;  // i8[hd]
    const long long slot = (u.base + u.pos) * st.kv.nkv + u.kv;
    signed char *const cache = (is_v ? st.kv.vq : st.kv.kq) + slot * hd;  // i8[hd]
    const bool here = row == HS && t_new < CHUNK;
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        const int e = lane + 32 * n;
        if (e < half) {
            const signed char c0 = (signed char)(scale.zero ? 0 : a8_code(x0[n], scale.inv));
            const signed char c1 = (signed char)(scale.zero ? 0 : a8_code(x1[n], scale.inv));
            codes[e] = c0;
            codes[e + half] = c1;
            if (here) {
                sh.k8[unit_place(hd, t_new, e / 16) + e % 16] = c0;
                sh.k8[unit_place(hd, t_new, (e + half) / 16) + (e + half) % 16] = c1;
            }
            if (!is_q && store_new) {
                cache[e] = c0;
                cache[e + half] = c1;
            }
        }
    }
    if (lane == 0) {
        if (is_q) {
            sh.qs[row] = scale.d * st.attn.qscale;
        } else {
            sh.new_scale[row - HS] = scale.d;
            if (here) sh.ks[t_new] = scale.d;
            if (store_new) (is_v ? st.kv.vs : st.kv.ks)[slot] = scale.d;
        }
    }
}

// This lane's share of a row of hd int8 in shared memory: every fourth 16-byte unit, or where rows are not made of 64
// bytes every fourth word. Which elements they are does not matter to a dot, as long as both factors agree. t: the row's
// number in sh.k8, 0 for other rows.
template <int W> DEVICE void unit_words(const signed char *rows, int hd, int t, int part, unsigned *words) {
    if (hd % 64 == 0) {
#pragma unroll
        for (int j = 0; j < W / 4; j++) {
            if (64 * j < hd) {
                const uint4 v = *(const uint4 *)(rows + unit_place(hd, t, part + 4 * j));
                words[4 * j] = v.x, words[4 * j + 1] = v.y, words[4 * j + 2] = v.z, words[4 * j + 3] = v.w;
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < W; j++)
            if (16 * j < hd) words[j] = ((const unsigned *)(rows + t * hd))[part + 4 * j];
    }
}

// s[t][j] of the chunk, 16 positions by up to eight heads at a time, in int8.
template <int W> DEVICE void unit_scores(const UnitShared &sh, int HS, int hd, int count) {
    const int group = lane_id() / 4, part = lane_id() % 4;
    unsigned q8[W] = {};  // of head `group`; what lies past the heads, and past the positions, makes scores that nobody reads
    unit_words<W>(sh.q8 + group * hd, hd, 0, part, q8);
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        const int t0 = 32 * warp_id() + 16 * tile;
        if (t0 < count) {
            unsigned k8[2][W] = {};  // rows t0 + group and t0 + group + 8
#pragma unroll
            for (int i = 0; i < 2; i++) unit_words<W>(sh.k8, hd, t0 + group + 8 * i, part, k8[i]);
            int dots[4] = {0, 0, 0, 0};
#pragma unroll
            for (int step = 0; step < W / 2; step++) {
                if (32 * step < hd) {
                    const unsigned ka[4] = {k8[0][2 * step], k8[1][2 * step], k8[0][2 * step + 1], k8[1][2 * step + 1]};
                    mma_s8(dots, ka, q8 + 2 * step);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = 2 * part + i % 2, t = t0 + group + 8 * (i / 2);
                if (j < HS && t < count) sh.s[j * UNIT_PITCH + t] = (float)dots[i] * (sh.qs[j] * sh.ks[t]);
            }
        }
    }
}

// Scores to exponentials p, weights w and factors c of this thread's position; vs is its V scale. The warp made the scores
// itself. Heads go by twos, which saves registers. No barrier at the end.
DEVICE void unit_softmax(const UnitShared &sh, int HS, int count, float vs) {
    const int t = threadIdx.x, lane = lane_id();
    constexpr int TURN = 2;
#if !KESTREL_FAST
    float before[TURN];  // maximum of the positions before t in this warp; of more heads than two, in c
#endif
    if (HS > TURN)
        __syncthreads();  // c takes the place of K
    else
        __syncwarp();
#pragma unroll 1
    for (int j0 = 0; j0 < HS; j0 += TURN) {
        float run[TURN];
#pragma unroll
        for (int j = 0; j < TURN; j++) {
            run[j] = t < count && j0 + j < HS ? sh.s[(j0 + j) * UNIT_PITCH + t] : MINUS_INFINITY;
            run[j] = run[j] > MINUS_INFINITY ? run[j] : MINUS_INFINITY;  // the rule s > m is false for NaN
        }
#if KESTREL_FAST
        for (int step = 16; step > 0; step >>= 1) {
#pragma unroll
            for (int j = 0; j < TURN; j++) run[j] = fmaxf(run[j], __shfl_xor_sync(FULL_WARP, run[j], step));
        }
#else
        // The running maximum: a prefix maximum over lanes here, over warps behind the barrier.
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
#pragma unroll
            for (int j = 0; j < TURN; j++) {
                const float left = __shfl_up_sync(FULL_WARP, run[j], step);
                if (lane >= step) run[j] = run[j] > left ? run[j] : left;
            }
        }
#pragma unroll
        for (int j = 0; j < TURN; j++) {
            before[j] = __shfl_up_sync(FULL_WARP, run[j], 1);
            if (lane == 0) before[j] = MINUS_INFINITY;
            if (HS > TURN && j0 + j < HS) sh.c[(j0 + j) * UNIT_PITCH + t] = before[j];
        }
#endif
#pragma unroll
        for (int j = 0; j < TURN; j++)
            if (lane == 31 && j0 + j < HS) sh.totals[(j0 + j) * UNIT_WARPS + warp_id()] = run[j];
    }
    __syncthreads();
    bool any[2] = {false, false};
#pragma unroll 1
    for (int j0 = 0; j0 < HS; j0 += TURN) {
#pragma unroll
        for (int j = 0; j < TURN; j++) {
            if (j0 + j >= HS) continue;
            const int at = (j0 + j) * UNIT_PITCH + t;
            const float s = t < count ? sh.s[at] : MINUS_INFINITY;
            float totals[UNIT_WARPS];
#pragma unroll
            for (int v = 0; v < UNIT_WARPS; v += 4) {
                const float4 four = *(const float4 *)(sh.totals + (j0 + j) * UNIT_WARPS + v);
                totals[v] = four.x, totals[v + 1] = four.y, totals[v + 2] = four.z, totals[v + 3] = four.w;
            }
#if KESTREL_FAST
            float m = totals[0];
#pragma unroll
            for (int v = 1; v < UNIT_WARPS; v++) m = fmaxf(m, totals[v]);
#else
            float m_before = HS > TURN ? sh.c[at] : before[j];
#pragma unroll
            for (int v = 0; v < UNIT_WARPS - 1; v++)
                if (v < warp_id()) m_before = m_before > totals[v] ? m_before : totals[v];
            const bool moved = s > m_before;
            const float m = moved ? s : m_before;
            float c = 1.0f;
            if (moved) c = exp_form(m_before - s);
            any[0] = any[0] || (moved && j0 < 4);
            any[1] = any[1] || (moved && j0 >= 4);
            sh.c[at] = c;
#endif
            // -0 changes no sum, of whatever sign.
            const float p = t < count ? exp_form(s - m) : -0.0f;
            sh.s[at] = p;
            sh.w[at] = t < count ? p * vs : -0.0f;
        }
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        unsigned bits = __ballot_sync(FULL_WARP, any[k]);
        bits = (bits | bits >> 1 | bits >> 2 | bits >> 3) & 0x11111111u;  // four positions to a bit, then side by side
        bits = (bits | bits >> 3) & 0x03030303u;
        bits = (bits | bits >> 6) & 0x000f000fu;
        if (lane == 0) sh.moved[k * UNIT_WARPS + warp_id()] = (unsigned char)(bits | bits >> 12);
    }
}

// The same of the whole chunk, for the heads that j is one of: bit i for positions 4 * i to 4 * i + 3.
DEVICE unsigned long long unit_moved(const UnitShared &sh, int j) {
    return *(const unsigned long long *)(sh.moved + j / 4 * UNIT_WARPS);
}

// Byte `i` of the word as the float it stands for: 2^23 + 128 + v, less the constant, both exact. A conversion of an
// integer takes several times as long.
DEVICE float value_float(unsigned word, int i) {
    return f32_from_bits(__byte_perm(word, 0x4b000000u, 0x7440u + (unsigned)i)) - 8388736.0f;
}

DEVICE void load_four(const float *p, float *to) {
    const float4 four = *(const float4 *)p;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// What SIZE neighbouring positions add to an element of HPT heads: V, in rows of PITCH words to four positions, and the
// weights.
template <int HPT, int PITCH> struct ValueGroup {
    static constexpr int SIZE = HPT == 4 ? 4 : 8;
    unsigned x[SIZE / 4];  // four positions each
    float w[HPT][SIZE];

    // v: the element's word at the first of the positions; weights: f32[HPT, UNIT_PITCH] there
    DEVICE_MEMBER void load(const unsigned *v, const float *weights) {
#pragma unroll
        for (int i = 0; i < SIZE / 4; i++) {
            x[i] = v[i * PITCH];
#pragma unroll
            for (int j = 0; j < HPT; j++) load_four(weights + j * UNIT_PITCH + 4 * i, w[j] + 4 * i);
        }
    }

    // acc[j] = fma(w, v, acc[j] * c) in order; c is 1 where the maximum of a head did not move, which changes nothing. Four
    // heads leave the products out where no maximum `moved`; for fewer a branch would take longer than they do.
    DEVICE_MEMBER void add(bool moved, const float *factors, float *acc) const {
        if (KESTREL_FAST || (HPT == 4 && !moved)) {  // the fast form has no c
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                const float value = value_float(x[i / 4], i % 4);
#pragma unroll
                for (int j = 0; j < HPT; j++) acc[j] = fma_f32(w[j][i], value, acc[j]);
            }
            return;
        }
        float c[HPT][SIZE];
#pragma unroll
        for (int j = 0; j < HPT; j++) {
#pragma unroll
            for (int i = 0; i < SIZE; i += 4) load_four(factors + j * UNIT_PITCH + i, c[j] + i);
        }
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const float value = value_float(x[i / 4], i % 4);
#pragma unroll
            for (int j = 0; j < HPT; j++) acc[j] = fma_f32(w[j][i], value, acc[j] * c[j][i]);
        }
    }
};

// acc[j] of the element of word `at` of HPT heads, the first of them j0, over positions begin .. end - 1, both multiples of
// UNIT_STEP. Two groups take turns, so that the next is read behind the chain of this one; at the end what lies behind the
// arrays of the chunk is read, too, and not used.
template <int HPT, int PITCH>
DEVICE void unit_values(const UnitShared &sh, int at, int j0, int begin, int end, float *acc) {
    typedef ValueGroup<HPT, PITCH> Group;
    constexpr int SIZE = Group::SIZE, FOURS = SIZE / 4;
    const unsigned *v = (const unsigned *)sh.v8 + at + begin / 4 * PITCH;
    const float *w = sh.w + j0 * UNIT_PITCH + begin, *c = sh.c + j0 * UNIT_PITCH + begin;
    unsigned long long moved = unit_moved(sh, j0) >> (begin / 4);
#pragma unroll
    for (int j = 0; j < HPT; j++) acc[j] = 0.0f;
    Group even, odd;
    even.load(v, w);
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += 2 * SIZE) {
        odd.load(v + FOURS * PITCH, w + SIZE);
        even.add(((unsigned)moved & ((1u << FOURS) - 1u)) != 0u, c, acc);
        v += 2 * FOURS * PITCH;
        w += 2 * SIZE;
        even.load(v, w);
        odd.add(((unsigned)moved >> FOURS & ((1u << FOURS) - 1u)) != 0u, c + SIZE, acc);
        c += 2 * SIZE;
        moved >>= 2 * FOURS;
    }
}

// The sum of exponentials of head j of the unit over `end` positions, in order.
DEVICE float unit_sum(const UnitShared &sh, int j, int end) {
    const float *const p = sh.s + j * UNIT_PITCH, *const c = sh.c + j * UNIT_PITCH;  // f32[UNIT_PITCH]
    float l = 0.0f;
    unsigned long long moved = unit_moved(sh, j);
#pragma unroll 1
    for (int t0 = 0; t0 < end; t0 += 16) {
        if (((unsigned)moved & 15u) == 0u) {
            l = ordered_sum(p + t0, 16, l);
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                l *= c[t0 + i];  // 1 where the maximum did not move
                l += p[t0 + i];
            }
        }
        moved >>= 4;
    }
    return l;
}

// One element of HPT heads to to[j * pitch], heads past `heads` left out; at: its word.
template <int HPT, int PITCH>
DEVICE void unit_element(const UnitShared &sh, int at, int j0, int begin, int end, float *to, int pitch, int heads) {
    float acc[HPT];
    unit_values<HPT, PITCH>(sh, at, j0, begin, end, acc);
#pragma unroll
    for (int j = 0; j < HPT; j++) {
        if (j0 + j < heads) *to = acc[j];
        to += pitch;
    }
}

// The elements of all heads over positions begin .. end - 1 to to[j * pitch + element], by `threads` threads of which this
// one is the thread-th: a thread to an element of as few heads as leave work for all.
template <int PITCH>
DEVICE void unit_elements(const UnitShared &sh, int HS, int hd, int begin, int end, float *to, int pitch, int heads, int thread,
                          int threads) {
    const int each = HS == 1 || HS * hd <= threads ? 1 : HS == 2 || HS * hd <= 2 * threads ? 2 : 4;  // heads of a thread
#pragma unroll 1
    for (int item = thread; item < HS / each * hd; item += threads) {
        const int part = item < hd ? 0 : item / hd, j0 = part * each, at = item - part * hd;
        float *const first = to + j0 * pitch + unit_element_at(at, hd);
        if (each == 1)
            unit_element<1, PITCH>(sh, at, j0, begin, end, first, pitch, heads);
        else if (each == 2)
            unit_element<2, PITCH>(sh, at, j0, begin, end, first, pitch, heads);
        else
            unit_element<4, PITCH>(sh, at, j0, begin, end, first, pitch, heads);
    }
}

// The partial states of the unit's heads: sums of values and of exponentials, and the maximum.
template <int PITCH>
DEVICE void unit_states(const AttentionArgs &a, const UnitShared &sh, const Unit &u, int HS, int chunk, int count) {
    float *const states = partial_state(a, chunk, 0, u.h0);  // f32[heads, hd + 4]
    const int hd = a.hd, pitch = hd + 4, end = (count + UNIT_STEP - 1) / UNIT_STEP * UNIT_STEP;
#if KESTREL_FAST
    if (HS * hd <= UNIT_THREADS / 2) {  // too few elements for the block: two halves of the positions, in the place of c
        const int half = UNIT_THREADS / 2, part = threadIdx.x / half, cut = end / (2 * UNIT_STEP) * UNIT_STEP;
        unit_elements<PITCH>(sh, HS, hd, part * cut, part == 0 ? cut : end, sh.c + part * half, hd, HS, threadIdx.x % half, half);
        __syncthreads();
        for (int i = threadIdx.x; i < u.heads * hd; i += UNIT_THREADS)
            states[i / hd * pitch + i % hd] = sh.c[i] + sh.c[half + i];
    } else {
        unit_elements<PITCH>(sh, HS, hd, 0, end, states, pitch, u.heads, threadIdx.x, UNIT_THREADS);
    }
    for (int j = warp_id(); j < u.heads; j += UNIT_WARPS) {
        float l = 0.0f;
        for (int t = lane_id(); t < count; t += 32) l += sh.s[j * UNIT_PITCH + t];
        l = warp_sum_f32(l);
        if (lane_id() == 0) states[j * pitch + hd + 1] = l;
    }
#else
    unit_elements<PITCH>(sh, HS, hd, 0, end, states, pitch, u.heads, threadIdx.x, UNIT_THREADS);
    const int j = UNIT_THREADS - 1 - (int)threadIdx.x;  // threads that have no element, if there are any
    if (j < u.heads) states[j * pitch + hd + 1] = unit_sum(sh, j, end);
#endif
    const int k = (int)threadIdx.x - 5 * 32;  // of a warp that has less to do
    if (k >= 0 && k < u.heads) {
        float m = MINUS_INFINITY;
#pragma unroll
        for (int v = 0; v < UNIT_WARPS; v++) {
            const float other = sh.totals[k * UNIT_WARPS + v];
            m = m > other ? m : other;
        }
        states[k * pitch + hd] = m;
    }
}
