// What one unit of the attention stage makes of its rows (attention_unit.cuh): scores, the running maximum and the
// exponentials, the chains over its positions, its partial states (contract section 7).
#pragma once

#include "attention_unit.cuh"

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

// Floats that are not NaN as numbers of the same order, and back. -0 comes before +0; which of the two a maximum is makes
// no difference to an exponential.
DEVICE unsigned order_key(float x) { return f32_bits(x) ^ ((unsigned)((int)f32_bits(x) >> 31) | 0x80000000u); }
DEVICE float of_order_key(unsigned key) {
    return f32_from_bits(key ^ (~(unsigned)((int)key >> 31) | 0x80000000u));
}

// What one position becomes of: its score, the maximum before it, its V scale.
struct Softened {
    float p, w, c;
    bool moved;
};

// One exponential serves both: where the maximum moves, p is exp(s - s), which is 1, or NaN of an infinity, and c is
// exp(before - s); where it does not, c is 1 and p is exp(s - before), of the same argument. fmaxf ignores NaN, as the
// rule s > m does. Positions that are not `real` are -0 times a V scale of +0, which changes no sum, of whatever sign.
DEVICE Softened soften(float s, float before, float vs, bool real) {
    Softened x;
    x.moved = real && s > before;
#if KESTREL_FAST
    x.c = 1.0f;
    x.p = real ? exp_form(s - before) : -0.0f;
#else
    const float e = exp_form(-fabsf(s - before));
    x.c = x.moved ? e : 1.0f;
    x.p = x.moved ? (s < f32_from_bits(KESTREL_INF_BITS) ? 1.0f : f32_from_bits(KESTREL_NAN_BITS)) : real ? e : -0.0f;
#endif
    x.w = x.p * vs;
    return x;
}

// Scores to exponentials p, weights w, factors c and the maximum, of one head: a thread to a position, which is in the warp
// that made its score. The running maximum is a prefix maximum over lanes, and over warps behind the barrier.
DEVICE void unit_softmax_one(const UnitShared &sh, int count) {
    const int t = threadIdx.x, lane = lane_id();
    const bool real = t < count;
    __syncwarp();
    const float s = real ? sh.s[t] : MINUS_INFINITY;
    unsigned key = order_key(fmaxf(s, MINUS_INFINITY));
#if KESTREL_FAST
    const unsigned total = __reduce_max_sync(FULL_WARP, key);
    if (lane == 0) sh.totals[warp_id()] = total;
    __syncthreads();
    const unsigned all = __reduce_max_sync(FULL_WARP, sh.totals[lane % UNIT_WARPS]);
    const float before = of_order_key(all);
    if (t == 0) sh.max[0] = before;
#else
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const unsigned left = __shfl_up_sync(FULL_WARP, key, step);  // the first lanes get their own
        key = left > key ? left : key;
    }
    unsigned own = __shfl_up_sync(FULL_WARP, key, 1);
    if (lane == 0) own = 0u;
    if (lane == 31) sh.totals[warp_id()] = key;
    __syncthreads();
    const int v = lane % UNIT_WARPS;
    const unsigned earlier = __reduce_max_sync(FULL_WARP, v < warp_id() ? sh.totals[v] : order_key(MINUS_INFINITY));
    const float before = of_order_key(own > earlier ? own : earlier);
    if (t == CHUNK - 1) sh.max[0] = of_order_key(key > earlier ? key : earlier);
#endif
    const Softened x = soften(s, before, sh.vs[t], real);
    sh.p[t] = x.p;
    sh.w[t] = x.w;
    sh.c[t] = x.c;
    const unsigned bits = __ballot_sync(FULL_WARP, x.moved);
    if (lane == 0) sh.moved[warp_id()] = bits;
}

// The same of HS heads, two or more: 8 / HS warps to a head, a lane to two neighbouring positions of 64 at a time. end:
// count, rounded up to UNIT_STEP. A barrier lies between the scores and this.
DEVICE void unit_softmax_many(const UnitShared &sh, int HS, int count, int end) {
    const int lane = lane_id(), head = warp_id() * HS / UNIT_WARPS;
    const int part = warp_id() * HS % UNIT_WARPS;  // in positions of 32
    const int first = 32 * part, last = 32 * (part + HS) < end ? 32 * (part + HS) : end;
    const float *const s = sh.s + head * UNIT_PITCH;
#if KESTREL_FAST
    const int known = count;  // the maximum of the chunk serves all positions
#else
    const int known = first < count ? first : count;
#endif
    float m = MINUS_INFINITY;  // of the positions before
#pragma unroll 1
    for (int t = lane; t < known; t += 32) m = fmaxf(m, s[t]);
    if (known > 0) m = of_order_key(__reduce_max_sync(FULL_WARP, order_key(m)));
#pragma unroll 1
    for (int t0 = first; t0 < last; t0 += 64) {
        const int t = t0 + 2 * lane, at = head * UNIT_PITCH + t;
        const float2 both = *(const float2 *)(sh.s + at), vs = *(const float2 *)(sh.vs + t);
        const float s0 = t < count ? both.x : MINUS_INFINITY, s1 = t + 1 < count ? both.y : MINUS_INFINITY;
#if KESTREL_FAST
        const float before0 = m, before1 = m;
#else
        float run = fmaxf(s0, s1);
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) run = fmaxf(run, __shfl_up_sync(FULL_WARP, run, step));
        const float left = __shfl_up_sync(FULL_WARP, run, 1);
        const float before0 = lane == 0 ? m : fmaxf(m, left), before1 = fmaxf(before0, s0);
        m = fmaxf(m, __shfl_sync(FULL_WARP, run, 31));
#endif
        const Softened x0 = soften(s0, before0, vs.x, t < count), x1 = soften(s1, before1, vs.y, t + 1 < count);
        *(float2 *)(sh.p + at) = make_float2(x0.p, x1.p);
        *(float2 *)(sh.w + at) = make_float2(x0.w, x1.w);
        *(float2 *)(sh.c + at) = make_float2(x0.c, x1.c);
        const unsigned bits = __ballot_sync(FULL_WARP, x0.moved || x1.moved);
        if (lane == 0) sh.moved[head * (CHUNK / 64) + t0 / 64] = bits;
    }
    if (lane == 0 && part + HS == UNIT_WARPS) sh.max[head] = m;
}

// Where the maximum of a head moved, of HPT heads from j0 on: positions to a bit, and the bits of the word that position t
// is in.
DEVICE int unit_moved_span(int HS) { return HS == 1 ? 1 : 2; }
template <int HPT> DEVICE unsigned unit_moved(const UnitShared &sh, int HS, int j0, int t) {
    if (HS == 1) return sh.moved[t / 32];
    unsigned bits = 0u;
#pragma unroll
    for (int j = 0; j < HPT; j++) bits |= sh.moved[(j0 + j) * (CHUNK / 64) + t / 64];
    return bits;
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
DEVICE void unit_values(const UnitShared &sh, int HS, int at, int j0, int begin, int end, float *acc) {
    typedef ValueGroup<HPT, PITCH> Group;
    constexpr int SIZE = Group::SIZE, FOURS = SIZE / 4;
    const unsigned *v = (const unsigned *)sh.v8 + at + begin / 4 * PITCH;
    const float *w = sh.w + j0 * UNIT_PITCH + begin, *c = sh.c + j0 * UNIT_PITCH + begin;
    const int span = unit_moved_span(HS), each = SIZE / span;
    unsigned moved = 0u;
#pragma unroll
    for (int j = 0; j < HPT; j++) acc[j] = 0.0f;
    Group even, odd;
    even.load(v, w);
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += 2 * SIZE) {
        if (t0 % (32 * span) == 0) moved = unit_moved<HPT>(sh, HS, j0, t0);
        odd.load(v + FOURS * PITCH, w + SIZE);
        even.add((moved & ((1u << each) - 1u)) != 0u, c, acc);
        v += 2 * FOURS * PITCH;
        w += 2 * SIZE;
        even.load(v, w);
        odd.add((moved >> each & ((1u << each) - 1u)) != 0u, c + SIZE, acc);
        c += 2 * SIZE;
        moved >>= 2 * each;
    }
}

// The sum of exponentials of head j of the unit over `end` positions, in order.
DEVICE float unit_sum(const UnitShared &sh, int HS, int j, int end) {
    const float *const p = sh.p + j * UNIT_PITCH, *const c = sh.c + j * UNIT_PITCH;  // f32[UNIT_PITCH]
    const int each = 16 / unit_moved_span(HS);
    float l = 0.0f;
    unsigned moved = 0u;
#pragma unroll 1
    for (int t0 = 0; t0 < end; t0 += 16) {
        if (t0 % (512 / each) == 0) moved = unit_moved<1>(sh, HS, j, t0);
        if ((moved & ((1u << each) - 1u)) == 0u) {
            l = ordered_sum(p + t0, 16, l);
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                l *= c[t0 + i];  // 1 where the maximum did not move
                l += p[t0 + i];
            }
        }
        moved >>= each;
    }
    return l;
}

// One element of HPT heads to to[j * pitch], heads past `heads` left out; at: its word.
template <int HPT, int PITCH>
DEVICE void unit_element(const UnitShared &sh, int HS, int at, int j0, int begin, int end, float *to, int pitch, int heads) {
    float acc[HPT];
    unit_values<HPT, PITCH>(sh, HS, at, j0, begin, end, acc);
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
            unit_element<1, PITCH>(sh, HS, at, j0, begin, end, first, pitch, heads);
        else if (each == 2)
            unit_element<2, PITCH>(sh, HS, at, j0, begin, end, first, pitch, heads);
        else
            unit_element<4, PITCH>(sh, HS, at, j0, begin, end, first, pitch, heads);
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
        for (int t = lane_id(); t < count; t += 32) l += sh.p[j * UNIT_PITCH + t];
        l = warp_sum_f32(l);
        if (lane_id() == 0) states[j * pitch + hd + 1] = l;
    }
#else
    unit_elements<PITCH>(sh, HS, hd, 0, end, states, pitch, u.heads, threadIdx.x, UNIT_THREADS);
    const int j = UNIT_THREADS - 1 - (int)threadIdx.x;  // threads that have no element, if there are any
    if (j < u.heads) states[j * pitch + hd + 1] = unit_sum(sh, HS, j, end);
#endif
    const int k = (int)threadIdx.x - 5 * 32;  // of a warp that has less to do
    if (k >= 0 && k < u.heads) states[k * pitch + hd] = sh.max[k];
}
