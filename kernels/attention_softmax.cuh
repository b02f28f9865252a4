// One head's positions of a chunk, from scores to the codes of its weights (contract section 7), by warps. Lane l has positions
// l, l + 32, ...: one of each stripe, those that a lane of the contract's sum adds up.
#pragma once

#include "attention_values.cuh"

#define MINUS_INFINITY f32_from_bits(0xff800000u)

// Integer dots of up to 256 products of codes are below 2^22: begun from here they are the bits of floats that are 1.5 * 2^23 too
// large, and a subtraction makes them right. A conversion takes several times as long.
#define DOT_BIAS 0x4b400000
DEVICE float biased_dot(int dot) { return f32_from_bits((unsigned)dot) - 12582912.0f; }

// Floats that are not NaN as numbers of the same order, and back. -0 comes before +0; which of the two a maximum is makes
// no difference to an exponential.
DEVICE unsigned order_key(float x) { return f32_bits(x) ^ ((unsigned)((int)f32_bits(x) >> 31) | 0x80000000u); }
DEVICE float of_order_key(unsigned key) {
    return f32_from_bits(key ^ (~(unsigned)((int)key >> 31) | 0x80000000u));
}
// Over the lanes of a warp, ignoring NaN.
DEVICE unsigned warp_max_key(float x) { return __reduce_max_sync(FULL_WARP, order_key(fmaxf(x, MINUS_INFINITY))); }

// This lane's part of I stripes of f32[CHUNK] from `first` on.
template <int I> DEVICE void load_stripes(const float *from, int first, float (&x)[I]) {
    from += STRIPE * first + lane_id();
#pragma unroll
    for (int i = 0; i < I; i++) x[i] = from[STRIPE * i];
}

// The maximum of all positions of a head, by one warp.
DEVICE float head_max(const float (&s)[STRIPES]) {
    float m[STRIPES];
#pragma unroll
    for (int i = 0; i < STRIPES; i++) m[i] = s[i];
#pragma unroll
    for (int half = STRIPES / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; i++) m[i] = fmaxf(m[i], m[i + half]);
    }
    return of_order_key(warp_max_key(m[0]));
}

// What becomes of a lane's scores of I stripes. Past the positions scores are -inf and scales of V +0, and so are exponentials
// and weights, unless all scores are NaN or -inf: then all exponentials are NaN, and so is the state.
template <int I> struct Softened {
    float p[I], w[I];  // exponential and weight

    // m: the head's maximum; table: of exp_down.
    DEVICE_MEMBER void make(const float (&s)[I], float m, const float (&vs)[I], const unsigned long long *table) {
#pragma unroll
        for (int i = 0; i < I; i++) {
            p[i] = exp_down(s[i] - m, table);
            w[i] = p[i] * vs[i];
        }
    }
    // Over the warp.
    DEVICE_MEMBER unsigned largest() const {
        unsigned most = 0u;
#pragma unroll
        for (int i = 0; i < I; i++) {
            const unsigned magnitude = f32_bits(w[i]) & 0x7fffffffu;
            most = magnitude > most ? magnitude : most;
        }
        return __reduce_max_sync(FULL_WARP, most);
    }
    // scale: of all positions of the head; codes: of this lane (codes_at), from its stripe `first` on. No weight is negative,
    // because no scale of V is. The code of value_code is the low half of a float's bits; clamped ahead of the rounding it is
    // the same.
    DEVICE_MEMBER void store(const ValueScale &scale, unsigned *codes, int first) const {
        unsigned halves[I];
#pragma unroll
        for (int i = 0; i < I; i++) halves[i] = f32_bits(fminf(w[i] * scale.up, 32767.0f) + 12582912.0f);
        store_codes(codes, first, halves, scale.zero ? 0u : 0xffffffffu);
    }
};

// The sum of all exponentials of a head, by one warp; every lane gets it. None is -0, so nothing has to be added to +0.
DEVICE float stripes_sum(const float (&p)[STRIPES]) {
    float lane = p[0];
#pragma unroll
    for (int i = 1; i < STRIPES; i++) lane += p[i];
    return warp_hsum32(lane);
}

// The state of a head in a chunk, less its sums over V: maximum, sum of exponentials, scale of the codes.
struct HeadState {
    float m, l, d;
};

// Scores to codes and state by one warp. s, vs: f32[CHUNK], -inf and +0 past the positions; codes: those of the head's lane 0.
DEVICE HeadState soften_head(const float *s, const float *vs, const unsigned long long *table, unsigned *codes) {
    HeadState state;
    float score[STRIPES], scale_v[STRIPES];
    load_stripes(s, 0, score);
    load_stripes(vs, 0, scale_v);
    state.m = head_max(score);
    Softened<STRIPES> x;
    x.make(score, state.m, scale_v, table);
    const ValueScale scale = value_scale(x.largest());
    x.store(scale, codes_at(codes, 0, lane_id()), 0);
    state.l = stripes_sum(x.p);
    state.d = scale.d;
    return state;
}
