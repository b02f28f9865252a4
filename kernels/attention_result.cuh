// What both ways of merging chunks share: a chunk's factors, and the result of a head and its a8 (contract sections 2 and 7).
#pragma once

#include "attention_chunk.cuh"

// Factors of what is merged, whose maximum is `before`, and of a chunk with maximum `right`, whose sum comes along: one is the
// exponential of the difference, the other exp(0), or NaN of an infinity.
DEVICE float4 merge_factors_of(float before, float right, float sum) {
    const float e = exp_form(-fabsf(right - before));
    const bool moved = right > before;
    const float larger = moved ? right : before;
    const float one = fabsf(larger) < f32_from_bits(KESTREL_INF_BITS) ? 1.0f : f32_from_bits(KESTREL_NAN_BITS);
    return make_float4(moved ? e : one, moved ? one : e, sum, 0.0f);
}

// The maximum of what is merged ahead of a lane's chunk, by a warp, lanes being neighbouring chunks. right: the chunk's, -inf
// where there is none; m: the maximum of all chunks before, and then of these, too.
DEVICE float merged_before(float right, float &m) {
    float merged = right;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) merged = fmaxf(merged, __shfl_up_sync(FULL_WARP, merged, step));
    const float left = __shfl_up_sync(FULL_WARP, merged, 1), before = lane_id() == 0 ? m : fmaxf(m, left);
    m = fmaxf(m, __shfl_sync(FULL_WARP, merged, 31));
    return before;
}

// Element `first` + lane of head h of the result, `value` over the sum of exponentials, and the a8 of its group, by a warp. Where
// a value is not for quotient_of_any, all of it is done a second time, with divisions.
DEVICE void store_result(const AttentionStageArgs &st, int hd, int h, int first, float value, float sum) {
    const int element = h * hd + first + lane_id();
    const bool real = first + lane_id() < hd;
#if KESTREL_FAST
    float out = real ? value / sum : 0.0f;
    const bool plain = true;
#else
    float out = real ? with_sign_of(quotient_of_any(value, sum, reciprocal(sum)), value) : 0.0f;
    const bool plain = !real || is_plain_quotient(value, sum);
#endif
#pragma unroll 1
    for (bool again = false;; again = true) {
        if (real) st.attn.out[element] = out;
        if (st.has_a8) {  // hd is a multiple of 32
            const A8Scale scale = a8_scale_quick(__reduce_max_sync(FULL_WARP, f32_bits(out) & 0x7fffffffu));
            const int code = scale.zero ? 0 : a8_code(out, scale.inv);
            const int codes = __reduce_add_sync(FULL_WARP, code);
            st.a8.q[element] = (signed char)code;
            if (lane_id() == 0) {
                st.a8.d[element / 32] = scale.d;
                st.a8.gsum[element / 32] = codes;
            }
        }
        if (__all_sync(FULL_WARP, plain) || again) break;
        out = real ? value / sum : 0.0f;
    }
}
