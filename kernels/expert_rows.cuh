// What the FFN's stages share: the dot of a q4local group (contract section 3), its input row in shared memory, and h and its
// a8 (section 9).
#pragma once

#include "block_norm.cuh"
#include "stage_args.h"
#include "warp_rows.cuh"

// (f32)(sum of (code - 8) * q) over one q4local group, exact as a conversion is; `bias` is q4_bias of the sum of q. The high
// nibbles stay where they are, so the sum is sixteen times the dot: below 2^22 in magnitude, and added to the bits of
// 1.5 * 2^23 it makes the bits of that number plus itself.
DEVICE int q4_bias(int gsum) { return 0x4b400000 - 128 * gsum; }
DEVICE float q4_dot(uint4 c, uint4 lo, uint4 hi, int bias) {
    const unsigned low = 0x0f0f0f0fu, high = 0xf0f0f0f0u;
    int first = dot_u8_s8(c.x & low, lo.x, 0), second = dot_u8_s8(c.x & high, hi.x, bias);
    first = dot_u8_s8(c.y & low, lo.y, first), second = dot_u8_s8(c.y & high, hi.y, second);
    first = dot_u8_s8(c.z & low, lo.z, first), second = dot_u8_s8(c.z & high, hi.z, second);
    first = dot_u8_s8(c.w & low, lo.w, first), second = dot_u8_s8(c.w & high, hi.w, second);
    return fma_f32(f32_from_bits((unsigned)(16 * first + second)), 0.0625f, -786432.0f);
}

// An a8 row of whole steps (a step is eight groups) in shared memory. The two halves of the groups lie apart, so that
// neighbouring lanes read neighbouring 16 bytes.
struct StagedRow {
    uint4 *lo, *hi;  // [G]: elements 0..15 and 16..31 of each group
    float *d;        // f32[G]
    int *gsum;       // i32[G]

    DEVICE_MEMBER static int bytes(int groups) { return 40 * groups; }

    DEVICE_MEMBER void open(unsigned char *memory, int groups) {
        lo = (uint4 *)memory;
        hi = lo + groups;
        d = (float *)(hi + groups);
        gsum = (int *)(d + groups);
    }

    // As copy_units. G is a multiple of 8.
    DEVICE_MEMBER void copy(const A8Row &in, int groups, int threads) const {
        const int codes = 2 * groups, scales = codes + groups / 4;
        copy_units(
            codes + groups / 2, threads, [&](int i) { return in.unit(i, groups); },
            [&](int i) {
                uint4 *const word = i < scales ? (uint4 *)d + (i - codes) : (uint4 *)gsum + (i - scales);
                return i < codes ? (i & 1 ? hi : lo) + i / 2 : word;
            });
    }
};

// h of one element is silu of its gate, times up.
#if KESTREL_FAST
DEVICE float silu_form(float gate) { return gate / (1.0f + exp_form(-gate)); }
#else
// gate / (1 + expf_ucrt(-gate)) without a branch. Above 30 the exponential is lost in the sum; below -30 both sides are scaled,
// so that the inverse keeps its digits; where the exponential is infinite, the quotient is -0, but of an infinity NaN.
DEVICE float silu_form(float gate) {
    const float down = gate < -30.0f ? 5.4210109e-20f : 1.0f;  // 2^-64
    const float b = (1.0f + expf_ucrt_within(-gate, EXPF_UCRT_TABLE)) * down;
    float y = with_sign_of(quotient(gate * down, b, reciprocal(b)), gate);
    y = gate > 30.0f ? gate : y;
    return gate <= -88.7228394f ? -(gate - gate) : y;
}
#endif
DEVICE float swiglu_element(float gate, float up) { return silu_form(gate) * up; }

// a8 of one group by a warp, lane i holding element i, as group `g` of the op's output.
DEVICE void warp_a8_element(float v, const QuantizeA8Args &a8, long long g) {
    const A8Scale s = a8_scale_quick(__reduce_max_sync(FULL_WARP, f32_bits(v) & 0x7fffffffu));
    const int code = s.zero ? 0 : a8_code(v, s.inv);
    a8.q[32 * g + lane_id()] = (signed char)code;
    const int sum = __reduce_add_sync(FULL_WARP, code);
    if (lane_id() == 0) {
        a8.d[g] = s.d;
        a8.gsum[g] = sum;
    }
}
