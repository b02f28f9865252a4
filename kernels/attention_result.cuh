// The result of attention for a head and its a8, from merged states (contract sections 2 and 7).
#pragma once

#include "block_norm.cuh"
#include "stage_args.h"

// Element `first` + lane of head h of the result, `value` over the sum of exponentials, and the a8 of its group, by a warp.
DEVICE void store_result(const AttentionStageArgs &st, int h, int first, float value, float sum) {
    const int hd = st.attn.hd, element = h * hd + first + lane_id();
    const bool real = first + lane_id() < hd;
    const float out = real ? value / sum : 0.0f;
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
}
