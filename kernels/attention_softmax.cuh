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

// This lane's scores of I stripes from `first` on. s: f32[CHUNK], of which there are `count`.
template <int I> DEVICE void stripe_scores(const float *s, int first, int count, float (&x)[I]) {
#pragma unroll
    for (int i = 0; i < I; i++) {
        const int t = STRIPE * (first + i) + lane_id();
        x[i] = t < count ? s[t] : MINUS_INFINITY;
    }
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

// What becomes of a lane's scores of I stripes, from `first` on.
template <int I> struct Softened {
    float p[I], w[I];  // exponential and weight; +0 past the positions

    // m: the head's maximum; vs: f32[CHUNK], +0 past the positions.
    DEVICE_MEMBER void make(const float (&s)[I], int first, float m, const float *vs, int count) {
#pragma unroll
        for (int i = 0; i < I; i++) {
            const int t = STRIPE * (first + i) + lane_id();
            const float e = exp_form(s[i] - m);
            p[i] = t < count ? e : 0.0f;
            w[i] = p[i] * vs[t];
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
    // scale: of all positions of the head; codes: of this lane (codes_at). No weight is negative: a scale of V never is.
    DEVICE_MEMBER void store(const ValueScale &scale, unsigned *codes, int first) const {
        unsigned c[I];
#pragma unroll
        for (int i = 0; i < I; i++) c[i] = scale.zero ? 0u : (unsigned)value_code(w[i], scale.up);
        store_codes(codes, first, c);
    }
};

// The state of a head in a chunk, less its sums over V: maximum, sum of exponentials, scale of the codes.
struct HeadState {
    float m, l, d;
};

// All of it by one warp. s: f32[CHUNK]; codes: those of the head's lane 0.
DEVICE HeadState soften_head(const float *s, const float *vs, int count, unsigned *codes) {
    HeadState state;
    float score[STRIPES];
    stripe_scores(s, 0, count, score);
    state.m = head_max(score);
    Softened<STRIPES> x;
    x.make(score, 0, state.m, vs, count);
    const ValueScale scale = value_scale(x.largest());
    x.store(scale, codes_at(codes, 0, lane_id()), 0);
    float lane = 0.0f;
#pragma unroll
    for (int i = 0; i < STRIPES; i++) lane += x.p[i];
    state.l = warp_hsum32(lane);
    state.d = scale.d;
    return state;
}
