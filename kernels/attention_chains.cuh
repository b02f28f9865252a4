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

// The score of position t by a single head: a thread to a position.
DEVICE float unit_score(const UnitShared &sh, int hd, int t) {
    const signed char *const row = sh.k8 + t * hd;
    const int turn = 16 * unit_turn(hd, t);
    int dots[2] = {0, 0};
#pragma unroll 4
    for (int at = 0; at < hd; at += 16) {
        const int4 k = *(const int4 *)(row + (at ^ turn)), q = *(const int4 *)(sh.q8 + at);
        dots[0] = __dp4a(k.x, q.x, dots[0]);
        dots[1] = __dp4a(k.y, q.y, dots[1]);
        dots[0] = __dp4a(k.z, q.z, dots[0]);
        dots[1] = __dp4a(k.w, q.w, dots[1]);
    }
    return (float)(dots[0] + dots[1]) * (sh.qs[0] * sh.ks[t]);
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
    const float e = exp_form(-fabsf(s - before)), idle = real ? e : -0.0f;
    int one = s < f32_from_bits(KESTREL_INF_BITS) ? 0x3f800000 : (int)KESTREL_NAN_BITS;
    settle(one);  // or the compiler makes a branch of it
    x.c = x.moved ? e : 1.0f;
    x.p = x.moved ? f32_from_bits((unsigned)one) : idle;
#endif
    x.w = x.p * vs;
    return x;
}

// The score of this thread's position by a single head to the exponential p, weight w, factor c, and the maximum of all. The
// running maximum is a prefix maximum over lanes, and over warps behind the barrier.
DEVICE void unit_softmax_one(const UnitShared &sh, int count, float score) {
    const int t = threadIdx.x, lane = lane_id();
    const bool real = t < count;
    const float s = real ? score : MINUS_INFINITY;
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

// PARTS times 64 positions from t0 on of one head, two neighbouring ones of each 64 to a lane: the prefix maxima of all
// parts side by side, since each is a chain of shuffles, then the exponentials. m: the maximum before them, which becomes
// that behind them, or, in the fast form, the maximum of the chunk.
template <int PARTS> DEVICE void unit_soften(const UnitShared &sh, int head, int t0, int count, float &m) {
    const int lane = lane_id(), first = t0 + 2 * lane, at = head * UNIT_PITCH + first;
    float s[2 * PARTS], before[2 * PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const float2 both = *(const float2 *)(sh.s + at + 64 * i);
        s[2 * i] = first + 64 * i < count ? both.x : MINUS_INFINITY;
        s[2 * i + 1] = first + 64 * i + 1 < count ? both.y : MINUS_INFINITY;
    }
#if KESTREL_FAST
#pragma unroll
    for (int i = 0; i < 2 * PARTS; i++) before[i] = m;
#else
    float run[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) run[i] = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) run[i] = fmaxf(run[i], __shfl_up_sync(FULL_WARP, run[i], step));
    }
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const float left = __shfl_up_sync(FULL_WARP, run[i], 1);
        before[2 * i] = lane == 0 ? m : fmaxf(m, left);
        before[2 * i + 1] = fmaxf(before[2 * i], s[2 * i]);
        m = fmaxf(m, __shfl_sync(FULL_WARP, run[i], 31));
    }
#endif
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const float2 vs = *(const float2 *)(sh.vs + first + 64 * i);
        const Softened x0 = soften(s[2 * i], before[2 * i], vs.x, first + 64 * i < count);
        const Softened x1 = soften(s[2 * i + 1], before[2 * i + 1], vs.y, first + 64 * i + 1 < count);
        *(float2 *)(sh.p + at + 64 * i) = make_float2(x0.p, x1.p);
        *(float2 *)(sh.w + at + 64 * i) = make_float2(x0.w, x1.w);
        *(float2 *)(sh.c + at + 64 * i) = make_float2(x0.c, x1.c);
        const unsigned bits = __ballot_sync(FULL_WARP, x0.moved || x1.moved);
        if (lane == 0) sh.moved[head * (CHUNK / 64) + t0 / 64 + i] = bits;
    }
}

// The same of HS heads, two or more: 8 / HS warps to a head. end: count, rounded up to UNIT_STEP. A barrier lies between the
// scores and this.
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
    for (int t0 = first; t0 < last; t0 += 128) {
        if (HS == 2)  // there are no more
            unit_soften<1>(sh, head, t0, count, m);
        else  // positions behind the last are idle ones, too
            unit_soften<2>(sh, head, t0, count, m);
    }
    if (lane == 0 && part + HS == UNIT_WARPS) sh.max[head] = m;
}

// Bit i: the maximum of one of the HS heads moved within sixteen positions from 16 * i on; the bit behind those of `end`
// positions is the last one set. All lanes of the warp call it.
DEVICE unsigned unit_moved_sixteens(const UnitShared &sh, int HS, int end) {
    const int i = lane_id() % (CHUNK / 16);
    unsigned bits = 0u;
    if (HS == 1) {
        bits = ((const unsigned short *)sh.moved)[i];
    } else {
#pragma unroll 1
        for (int j = 0; j < HS; j++) bits |= ((const unsigned char *)sh.moved)[j * (CHUNK / 16) + i];
    }
    const unsigned behind = 1u << (end / 16);
    return (__ballot_sync(FULL_WARP, bits != 0u) & (behind - 1u)) | behind;
}

// Byte `i` of the word as the float it stands for: 2^23 + 128 + v, less the constant, both exact. A conversion of an
// integer takes several times as long. magic: value_magic(), 2^23 as bits, of which the compiler does not know that it is a
// constant: it would spend the instruction's only immediate operand on it, and a register, filled anew each time, on `i`.
DEVICE int value_magic() { return 0x4affffff + (int)blockDim.y; }
DEVICE float value_float(unsigned word, int i, int magic) {
    return f32_from_bits(__byte_perm(word, (unsigned)magic, 0x7440u + (unsigned)i)) - 8388736.0f;
}

DEVICE void load_eight_floats(const float *p, float *to) {
    const float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
    to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// The chain of an element of HPT heads, one or two, sixteen positions at a time. Few chains leave a multiprocessor idle most
// of the time, so what counts is the latency of one: while eight positions are added, V of the next eight turns into floats,
// and what is used up is read anew from behind. So at the end positions behind the last are read, too, and not used.
template <int HPT, int PITCH> struct ValueChain {
    float x[8], w[HPT][8], w2[HPT][8];  // V of the first eight positions; weights of the first and of the second eight
    unsigned words[2], next[2];         // V of the second eight and of the eight behind them, as it is stored
    int magic;                          // value_magic

    DEVICE_MEMBER void convert(const unsigned *from, float *to) const {
#pragma unroll
        for (int i = 0; i < 8; i++) to[i] = value_float(from[i / 4], i % 4, magic);
    }
    DEVICE_MEMBER static void load_weights(const float *weights, float (*w)[8]) {
#pragma unroll
        for (int j = 0; j < HPT; j++) load_eight_floats(weights + j * UNIT_PITCH, w[j]);
    }
    // acc[j] = fma(w, x, acc[j] * c) in order; c is 1 where the maximum of a head did not move, which changes nothing.
    template <bool MOVED>
    DEVICE_MEMBER static void add(const float (*w)[8], const float *x, const float *factors, float *acc) {
        float c[HPT][8];
        if (MOVED) load_weights(factors, c);
#pragma unroll
        for (int i = 0; i < 8; i++) {
#pragma unroll
            for (int j = 0; j < HPT; j++) acc[j] = fma_f32(w[j][i], x[i], MOVED ? acc[j] * c[j][i] : acc[j]);
        }
    }
    // v: the element's word at the first position, rows of PITCH words to four; weights: f32[HPT, UNIT_PITCH] there
    DEVICE_MEMBER void start(const unsigned *v, const float *weights) {
        magic = value_magic();
        const unsigned first[2] = {v[0], v[PITCH]};
        convert(first, x);
        load_weights(weights, w);
        load_weights(weights + 8, w2);
        words[0] = v[2 * PITCH], words[1] = v[3 * PITCH];
        next[0] = v[4 * PITCH], next[1] = v[5 * PITCH];
    }
    // Adds sixteen positions; v, weights, factors: at the first of them.
    template <bool MOVED>
    DEVICE_MEMBER void step(const unsigned *v, const float *weights, const float *factors, float *acc) {
        float x2[8];
        convert(words, x2);
        words[0] = v[6 * PITCH], words[1] = v[7 * PITCH];
        add<MOVED>(w, x, factors, acc);
        load_weights(weights + 16, w);
        convert(next, x);
        next[0] = v[8 * PITCH], next[1] = v[9 * PITCH];
        add<MOVED>(w2, x2, factors + 8, acc);
        load_weights(weights + 24, w2);
    }
};

// acc[j] of the element of word `at` of HPT heads, the first of them j0, over positions begin .. end - 1, both multiples of
// UNIT_STEP; moved: of unit_moved_sixteens.
template <int HPT, int PITCH>
DEVICE void unit_chain(const UnitShared &sh, int at, int j0, int begin, [[maybe_unused]] int end,
                       [[maybe_unused]] unsigned moved, float *acc) {
    const unsigned *v = (const unsigned *)sh.v8 + at + begin / 4 * PITCH;
    const float *w = sh.w + j0 * UNIT_PITCH + begin, *c = sh.c + j0 * UNIT_PITCH + begin;
    ValueChain<HPT, PITCH> chain;
    chain.start(v, w);
#pragma unroll
    for (int j = 0; j < HPT; j++) acc[j] = 0.0f;
#if KESTREL_FAST
#pragma unroll 1
    for (int t = begin; t < end; t += 16, v += 4 * PITCH, w += 16) chain.template step<false>(v, w, c, acc);
#else
#pragma unroll 1
    for (;;) {
#pragma unroll 1
        for (; (moved & 1u) == 0u; moved >>= 1, v += 4 * PITCH, w += 16, c += 16) chain.template step<false>(v, w, c, acc);
        if (moved == 1u) break;
        chain.template step<true>(v, w, c, acc);
        moved >>= 1, v += 4 * PITCH, w += 16, c += 16;
    }
#endif
}

// Bit i: the maximum of one of H heads, the first of them j0, moved within eight positions from 8 * (i + 1) on; the bit
// behind those of `end` positions is the last one set. All lanes of the warp call it, with the same j0.
template <int H> DEVICE unsigned unit_moved_eights(const UnitShared &sh, int j0, int end) {
    const int i = lane_id();
    unsigned bits = 0u;  // of sixteen positions
#pragma unroll
    for (int j = 0; j < H; j++) bits |= ((const unsigned char *)sh.moved)[(j0 + j) * (CHUNK / 16) + i / 2];
    const unsigned behind = 1u << (end / 8 - 1);
    return (__ballot_sync(FULL_WARP, (bits >> 4 * (i % 2) & 15u) != 0u) >> 1 & (behind - 1u)) | behind;
}

// The chains of two neighbouring elements of H heads, four positions at a time, in two turns. Here instructions count, not
// latency: the heads share the conversion of V, the elements the weights. Behind the chain of one turn all is made ready for
// the same turn of the next eight positions. So at the end positions behind the last are read, too, and not used.
template <int H, int PITCH> struct ValueChains {
    unsigned words[2][2];  // V of the four positions behind the next, as it is stored
    unsigned x[2][2][4];   // V of each turn's four, as bits of floats that are 2^23 + 128 too large
    float w[2][H][4];      // their weights
    unsigned magic;        // value_magic

    DEVICE_MEMBER static void load_words(const unsigned *p, unsigned *x) {
        const uint2 v = *(const uint2 *)p;
        x[0] = v.x, x[1] = v.y;
    }
    // The first half of value_float.
    DEVICE_MEMBER void convert(const unsigned *words, unsigned (*to)[4]) const {
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[e][i] = __byte_perm(words[e], magic, 0x7440u + (unsigned)i);
        }
    }

    DEVICE_MEMBER static void load_weights(const float *weights, float (*w)[4]) {
#pragma unroll
        for (int j = 0; j < H; j++) {
            const float4 four = *(const float4 *)(weights + j * UNIT_PITCH);
            w[j][0] = four.x, w[j][1] = four.y, w[j][2] = four.z, w[j][3] = four.w;
        }
    }
    // acc[j] = fma(w, v, acc[j] * c) in order; c is 1 where the maximum of a head did not move, which changes nothing.
    template <bool MOVED> DEVICE_MEMBER void add_four(int turn, const float *factors, float (*acc)[2]) const {
        float c[H][4];
        if (MOVED) load_weights(factors, c);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float value = f32_from_bits(x[turn][e][i]) - 8388736.0f;
#pragma unroll
                for (int j = 0; j < H; j++)
                    acc[j][e] = fma_f32(w[turn][j][i], value, MOVED ? acc[j][e] * c[j][i] : acc[j][e]);
            }
        }
    }
    // v: the first element's word at the first position, rows of PITCH words to four; weights: f32[H, UNIT_PITCH] there
    DEVICE_MEMBER void start(const unsigned *v, const float *weights) {
        magic = (unsigned)value_magic();
#pragma unroll
        for (int turn = 0; turn < 2; turn++) {
            load_words(v + turn * PITCH, words[turn]);
            convert(words[turn], x[turn]);
            load_weights(weights + 4 * turn, w[turn]);
        }
        load_words(v + 2 * PITCH, words[0]);
    }
    // Adds four positions; v, weights, factors: at the first of the eight.
    template <bool MOVED>
    DEVICE_MEMBER void add(int turn, const unsigned *v, const float *weights, const float *factors, float (*acc)[2]) {
        add_four<MOVED>(turn, factors + 4 * turn, acc);
        convert(words[turn], x[turn]);
        load_weights(weights + 8 + 4 * turn, w[turn]);
        load_words(v + (3 + turn) * PITCH, words[1 - turn]);
    }
};

// acc[j] of two elements from word `at` of H heads, the first of them j0, over the unit's positions up to `end`, a multiple of
// UNIT_STEP. All lanes of the warp call it, with the same j0.
template <int H, int PITCH> DEVICE void unit_values(const UnitShared &sh, int at, int j0, int end, float (*acc)[2]) {
    const unsigned *v = (const unsigned *)sh.v8 + at;
    const float *w = sh.w + j0 * UNIT_PITCH;
    const int to_c = (int)(sh.c - sh.w);
    ValueChains<H, PITCH> chains;
    chains.start(v, w);
#pragma unroll
    for (int j = 0; j < H; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) acc[j][e] = 0.0f;
    }
#if KESTREL_FAST
#pragma unroll 1
    for (int t = 0; t < end; t += 8, v += 2 * PITCH, w += 8) {
        chains.template add<false>(0, v, w, w + to_c, acc);
        chains.template add<false>(1, v, w, w + to_c, acc);
    }
#else
    unsigned moved = unit_moved_eights<H>(sh, j0, end);
#pragma unroll 1
    for (;;) {  // the maximum moves at the first position
        chains.template add<true>(0, v, w, w + to_c, acc);
        chains.template add<true>(1, v, w, w + to_c, acc);
        v += 2 * PITCH, w += 8;
#pragma unroll 1
        for (; (moved & 1u) == 0u; moved >>= 1, v += 2 * PITCH, w += 8) {
            chains.template add<false>(0, v, w, w + to_c, acc);
            if (moved == 0u) break;  // never so; without a branch the reads of both turns would all stand behind the chains
            chains.template add<false>(1, v, w, w + to_c, acc);
        }
        if (moved == 1u) break;
        moved >>= 1;
    }
#endif
}

#if !KESTREL_FAST
// Sixteen terms of a sum of exponentials; those of the next sixteen are read behind them.
struct SumChain {
    float p[8], p2[8];

    template <bool MOVED> DEVICE_MEMBER void step(const float *next, const float *factors, float &l) {
        float c[16];
        if (MOVED) {
            load_eight_floats(factors, c);
            load_eight_floats(factors + 8, c + 8);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) l = (MOVED ? l * c[i] : l) + p[i];
        load_eight_floats(next, p);
#pragma unroll
        for (int i = 0; i < 8; i++) l = (MOVED ? l * c[8 + i] : l) + p2[i];
        load_eight_floats(next + 8, p2);
    }
};

// The sum of exponentials of head j of the unit, in order; moved: of unit_moved_sixteens.
DEVICE float unit_sum(const UnitShared &sh, int j, unsigned moved) {
    const float *p = sh.p + j * UNIT_PITCH, *c = sh.c + j * UNIT_PITCH;  // f32[UNIT_PITCH]
    SumChain chain;
    load_eight_floats(p, chain.p);
    load_eight_floats(p + 8, chain.p2);
    float l = 0.0f;
#pragma unroll 1
    for (;;) {
#pragma unroll 1
        for (; (moved & 1u) == 0u; moved >>= 1, p += 16, c += 16) chain.step<false>(p + 16, c, l);
        if (moved == 1u) break;
        chain.step<true>(p + 16, c, l);
        moved >>= 1, p += 16, c += 16;
    }
    return l;
}
#endif

// The elements of all heads, two of H heads to a thread, to to[j * pitch + element], by `warps` warps of which this
// one is the warp-th. Whole warps take part: those of their lanes that have no elements do what the first does.
template <int H, int PITCH>
DEVICE void unit_value_rows(const UnitShared &sh, int HS, int hd, int end, float *to, int pitch, int heads, int warp,
                            int warps) {
    int j0 = 0, at = 2 * (32 * warp + lane_id());
#pragma unroll 1
    for (;; at += 64 * warps) {
        const int row = (hd + 63) & -64;  // of H heads, in whole warps
#pragma unroll 1
        for (; at >= row; at -= row) j0 += H;
        if (j0 >= HS) break;
        float acc[H][2];
        unit_values<H, PITCH>(sh, at < hd ? at : 0, j0, end, acc);
        float *first = to + j0 * pitch + unit_element_at(at, hd);
#pragma unroll
        for (int j = 0; j < H; j++, first += pitch)
            if (at < hd && j0 + j < heads) *(float2 *)first = make_float2(acc[j][0], acc[j][1]);
    }
}

// The elements of all heads over positions begin .. end - 1 to to[j * pitch + element], by `threads` threads of which this
// one is the thread-th: as many heads and elements to a thread as leave work for four warps.
template <int PITCH>
DEVICE void unit_elements(const UnitShared &sh, int HS, int hd, int begin, int end, unsigned moved, float *to, int pitch,
                          int heads, int thread, int threads) {
    if (HS == 1) {  // there are always more threads than elements
        float acc[1];
        if (thread >= hd) return;
        unit_chain<1, PITCH>(sh, thread, 0, begin, end, moved, acc);
        to[unit_element_at(thread, hd)] = acc[0];
        return;
    }
    if (HS * hd >= 1024 && HS == UNIT_HEADS) {
        unit_value_rows<4, PITCH>(sh, HS, hd, end, to, pitch, heads, thread / 32, threads / 32);
        return;
    }
    if (HS * hd >= 512 && HS >= 4) {
        unit_value_rows<2, PITCH>(sh, HS, hd, end, to, pitch, heads, thread / 32, threads / 32);
        return;
    }
    int j0 = 0, at = thread;
#pragma unroll 1
    for (;; at += threads) {
#pragma unroll 1
        for (; at >= hd; at -= hd) j0 += 2;
        if (j0 >= HS) break;
        float acc[2], *const first = to + j0 * pitch + unit_element_at(at, hd);
        unit_chain<2, PITCH>(sh, at, j0, begin, end, moved, acc);
        if (j0 < heads) first[0] = acc[0];
        if (j0 + 1 < heads) first[pitch] = acc[1];
    }
}

// The partial states of the unit's heads: sums of values and of exponentials, and the maximum.
// states: f32[heads, hd + 4], of this chunk.
template <int PITCH>
DEVICE void unit_states(const AttentionArgs &a, const UnitShared &sh, const Unit &u, int HS, int count, float *states) {
    const int hd = a.hd, pitch = hd + 4, end = (count + UNIT_STEP - 1) / UNIT_STEP * UNIT_STEP;
#if KESTREL_FAST
    if (HS * hd <= UNIT_THREADS / 2) {  // too few elements for the block: two halves of the positions, in the place of c
        const int half = UNIT_THREADS / 2, part = threadIdx.x / half, cut = end / (2 * UNIT_STEP) * UNIT_STEP;
        unit_elements<PITCH>(sh, HS, hd, part * cut, part == 0 ? cut : end, 0u, sh.c + part * half, hd, HS,
                             threadIdx.x % half, half);
        __syncthreads();
        for (int i = threadIdx.x; i < u.heads * hd; i += UNIT_THREADS)
            states[i / hd * pitch + i % hd] = sh.c[i] + sh.c[half + i];
    } else {
        unit_elements<PITCH>(sh, HS, hd, 0, end, 0u, states, pitch, u.heads, threadIdx.x, UNIT_THREADS);
    }
    for (int j = warp_id(); j < u.heads; j += UNIT_WARPS) {
        float l = 0.0f;
        for (int t = lane_id(); t < count; t += 32) l += sh.p[j * UNIT_PITCH + t];
        l = warp_sum_f32(l);
        if (lane_id() == 0) states[j * pitch + hd + 1] = l;
    }
#else
    const unsigned moved = unit_moved_sixteens(sh, HS, end);
    unit_elements<PITCH>(sh, HS, hd, 0, end, moved, states, pitch, u.heads, threadIdx.x, UNIT_THREADS);
    const int j = UNIT_THREADS - 1 - (int)threadIdx.x;  // threads that have no element, if there are any
    if (j < u.heads) states[j * pitch + hd + 1] = unit_sum(sh, j, moved);
#endif
    const int k = (int)threadIdx.x - 5 * 32;  // of a warp that has less to do
    if (k >= 0 && k < u.heads) states[k * pitch + hd] = sh.max[k];
}
