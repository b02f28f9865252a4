// q4local rows of the FFN. Down: by way of shared memory, asynchronous copies keep many rows in flight long before the row
// that they are multiplied with is there. Gate and up: all of a warp's rows in flight at once, in registers. The
// arithmetic is that of contract section 3.
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

// Groups of an a8 row in a thread's registers.
template <int U> struct InputGroups {
    uint4 lo[U], hi[U];
    float d[U];
    int bias[U];

    // Groups first, first + 8, ... of the row of `groups` that begins at group `row` of `in`; written by another kernel. Past
    // the row it is the last group again, whose products nobody adds: what no branch surrounds, the compiler interleaves.
    DEVICE_MEMBER void load(const A8Row &in, int row, int first, int groups) {
#pragma unroll
        for (int u = 0; u < U; u++) {
            const unsigned g = (unsigned)(row + (first + 8 * u < groups ? first + 8 * u : groups - 1));
            const uint4 *const q = (const uint4 *)in.q + 2 * g;
            lo[u] = load_l2(q);
            hi[u] = load_l2(q + 1);
            d[u] = load_l2(in.d + g);
            bias[u] = q4_bias(load_l2(in.gsum + g));
        }
    }

    DEVICE_MEMBER float dot(int u, uint4 c) const { return q4_dot(c, lo[u], hi[u], bias[u]); }
};

// Copies `chunks` times 16 bytes and `scales` f16 numbers from global to (aligned) shared memory by `lanes` lanes, this one
// being the lane-th. They are there for this lane after the wait for its copies, for others after a barrier behind that.
DEVICE void copy_rows(unsigned char *to, const unsigned char *codes, int chunks, unsigned char *scale_to,
                      const unsigned short *scale, int scales, int lane, int lanes) {
#pragma unroll 4
    for (int i = lane; i < chunks; i += lanes) copy_async_16(to + 16 * i, codes + 16 * i);
    if ((((unsigned long long)scale | (unsigned long long)scale_to) & 15) == 0 && scales % 8 == 0) {
#pragma unroll 1
        for (int i = lane; i < scales / 8; i += lanes) copy_async_16(scale_to + 16 * i, scale + 8 * i);
    } else {
#pragma unroll 1
        for (int i = lane; i < scales; i += lanes) ((unsigned short *)scale_to)[i] = load_streaming_u16(scale + i);
    }
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

    // The whole block asks for the row, or its first `threads` threads; it is there after copy_wait_all and a barrier.
    DEVICE_MEMBER void ask(const A8Row &in, int groups) const { ask(in, groups, blockDim.x); }
    DEVICE_MEMBER void ask(const A8Row &in, int groups, int threads) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < 2 * groups + groups / 2; i += threads) {
            const int j = 4 * (i - 2 * groups);
            if (j < 0)
                copy_async_16((i & 1 ? hi : lo) + i / 2, in.q + 16 * i);
            else if (j < groups)
                copy_async_16(d + j, in.d + j);
            else
                copy_async_16(gsum + j - groups, in.gsum + j - groups);
        }
    }
};

// h of one element.
DEVICE float swiglu_element(float gate, float up) { return (gate / (1.0f + exp_form(-gate))) * up; }

// a8 of one group by a warp, lane i holding element i, as group `g` of the op's output.
DEVICE void warp_a8_element(float v, const QuantizeA8Args &a8, long long g) {
    const A8Scale s = a8_scale(__reduce_max_sync(FULL_WARP, f32_bits(v) & 0x7fffffffu));
    const int code = s.zero ? 0 : a8_code(v, s.inv);
    a8.q[32 * g + lane_id()] = (signed char)code;
    const int sum = __reduce_add_sync(FULL_WARP, code);
    if (lane_id() == 0) {
        a8.d[g] = s.d;
        a8.gsum[g] = sum;
    }
}
