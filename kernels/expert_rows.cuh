// q4local rows of the FFN by way of shared memory: asynchronous copies keep many rows in flight without a register for
// any of them, and long before the row that they are multiplied with is there. The arithmetic is that of warp_rows.cuh
// (contract section 3).
#pragma once

#include "block_norm.cuh"
#include "stage_args.h"
#include "warp_rows.cuh"

// Groups of an a8 row in a thread's registers. `bias` starts a group's integer dot so that its bits are those of a float:
// an integer below 2^22 in magnitude, added to the bits of 1.5 * 2^23, is that number plus the integer.
template <int U> struct InputGroups {
    uint4 lo[U], hi[U];
    float d[U];
    int bias[U];

    // Groups first, first + 8, ...; written by another kernel. Past the row it is the last group again, whose products
    // nobody adds: what no branch surrounds, the compiler interleaves.
    DEVICE_MEMBER void load(const A8Row &in, int first, int groups) {
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int g = first + 8 * u < groups ? first + 8 * u : groups - 1;
            const uint4 *const q = (const uint4 *)in.q + 2 * g;
            lo[u] = load_l2(q);
            hi[u] = load_l2(q + 1);
            d[u] = load_l2(in.d + g);
            bias[u] = 0x4b400000 - 8 * load_l2(in.gsum + g);
        }
    }

    // (f32)dot of group u of this row and a q4local group: exact, as a conversion is.
    DEVICE_MEMBER float dot(int u, uint4 c) const {
        const unsigned nibbles = 0x0f0f0f0fu;
        int sum = bias[u];
        sum = __dp4a((int)(c.x & nibbles), (int)lo[u].x, sum);
        sum = __dp4a((int)(c.y & nibbles), (int)lo[u].y, sum);
        sum = __dp4a((int)(c.z & nibbles), (int)lo[u].z, sum);
        sum = __dp4a((int)(c.w & nibbles), (int)lo[u].w, sum);
        sum = __dp4a((int)(c.x >> 4 & nibbles), (int)hi[u].x, sum);
        sum = __dp4a((int)(c.y >> 4 & nibbles), (int)hi[u].y, sum);
        sum = __dp4a((int)(c.z >> 4 & nibbles), (int)hi[u].z, sum);
        sum = __dp4a((int)(c.w >> 4 & nibbles), (int)hi[u].w, sum);
        return f32_from_bits((unsigned)sum) - 12582912.0f;
    }
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

// A warp's memory for `depth` runs of neighbouring rows of two q4local matrices (the same rows of both): pairs. A run is
// asked for in at most four steps, each a group of copies. A slot of the warp computes U neighbouring steps of a row,
// eight groups each, then the running sums go from slot to slot, as in warp_rows.cuh; TREE: they are summed as a tree, for
// the fast forms.
template <int U, bool TREE> struct PairRing {
    unsigned char *base;  // [depth][2]: codes u8[pairs, G, 16], scales f16[pairs, G], rounded up to 16 bytes
    int groups, pairs, bytes;
    int step, steps;  // pairs of a step, steps of a run

    DEVICE_MEMBER static int run_bytes(int groups, int pairs) {  // of one matrix
        return pairs * groups * 16 + (pairs * groups * 2 + 15) / 16 * 16;
    }

    DEVICE_MEMBER void open(unsigned char *memory, int row_groups, int row_pairs) {
        base = memory;
        groups = row_groups;
        pairs = row_pairs;
        bytes = run_bytes(groups, pairs);
        step = (pairs + 3) / 4;
        steps = step > 0 ? (pairs + step - 1) / step : 0;
    }

    // Asks for step s of the run whose first row is n; half of the lanes for each matrix.
    DEVICE_MEMBER void ask(const Weight *w, long long n, int turn, int s) {
        const int side = lane_id() / 16, first = s * step, rows = pairs - first < step ? pairs - first : step;
        unsigned char *const to = base + (2 * turn + side) * bytes;
        const long long g = (n + first) * groups;
        const unsigned char *const codes = (const unsigned char *)(side ? w[1].codes : w[0].codes);
        copy_rows(to + first * groups * 16, codes + g * 16, rows * groups, to + (pairs * 16 + first * 2) * groups,
                  (side ? w[1].scale : w[0].scale) + g, rows * groups, lane_id() % 16, 16);
    }

    // This lane's first group of super-step `super`.
    DEVICE_MEMBER int first_group(int super) const { return 8 * U * (4 * super + lane_id() / 8) + lane_id() % 8; }

    // y: f32[2], pair j times the input, valid in lanes 0..7. `held` are the groups of super-step 0; longer rows load
    // theirs into it as they go.
    DEVICE_MEMBER void pair(int turn, int j, const A8Row &in, InputGroups<U> &held, float *y) {
        const unsigned char *const codes = base + 2 * turn * bytes + j * groups * 16;
        const unsigned char *const scale = base + 2 * turn * bytes + (pairs * 16 + j * 2) * groups;
        float acc[2] = {0.0f, 0.0f};
        for (int super = 0; super * 32 * U < groups; super++) {
            const int first = first_group(super);
            if (groups > 32 * U) held.load(in, first, groups);
            float dot[2][U], ws[2][U];
#pragma unroll
            for (int u = 0; u < U; u++) {
                const int g = first + 8 * u < groups ? first + 8 * u : groups - 1;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    dot[i][u] = held.dot(u, *(const uint4 *)(codes + i * bytes + 16 * g));
                    ws[i][u] = half_to_float(*(const unsigned short *)(scale + i * bytes + 2 * g)) * held.d[u];
                }
            }
            // Turn t matters in slot t alone, which got its sums from slot t - 1; the others add to sums that nobody reads.
#pragma unroll
            for (int hand = 0; hand < (TREE ? 1 : 4); hand++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
#pragma unroll
                    for (int u = 0; u < U; u++)
                        if (first + 8 * u < groups) acc[i] = fma_f32(dot[i][u], ws[i][u], acc[i]);
                }
                if (!TREE) {
#pragma unroll
                    for (int i = 0; i < 2; i++) acc[i] = __shfl_sync(FULL_WARP, acc[i], (lane_id() + 24) & 31);
                }
            }
        }
        y[0] = TREE ? warp_sum_f32(acc[0]) : group_hsum8(acc[0]);
        y[1] = TREE ? warp_sum_f32(acc[1]) : group_hsum8(acc[1]);
    }
};
