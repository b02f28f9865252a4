// The sums over V of a chunk, in integers (contract section 7): codes of 15 bits times V of 8, on tensor cores. A matrix of
// sixteen rows holds the codes of eight heads as bytes, the high ones in rows 0 to 7, the low ones behind them; a column is an
// element of V. Which position has which place in a sum makes no difference, so both sides take the one that costs them least.
#pragma once

#include "forms.cuh"

#define CHUNK 256
#define STRIPE 32  // positions that are a lane each of a warp, and of the contract's sum of exponentials
#define STRIPES (CHUNK / STRIPE)

// Codes of a chunk, u32[8 heads, CODES_PITCH, 4]: of lane l of a head the words high bytes of stripes 0 to 3, low bytes of the
// same, high bytes of 4 to 7, low bytes of the same: so they are what a thread of mma_u8_s8 takes of the matrix.
#define CODES_PITCH (STRIPE + 4)  // uint4: spreads the heads over the banks
#define CODES_BYTES (8 * CODES_PITCH * 16)
DEVICE unsigned *codes_at(unsigned *codes, int head, int lane) {  // head: any, eight to a set of codes
    return codes + 4 * (head * CODES_PITCH + lane);
}

// Codes of I stripes from `first` on, a multiple of I: the low halves of c, where `mask` is not 0; codes: of their lane.
template <int I> DEVICE void store_codes(unsigned *codes, int first, const unsigned (&c)[I], unsigned mask) {
    unsigned *const words = codes + first / 4 * 2;
    if constexpr (I >= 4) {
#pragma unroll
        for (int i = 0; i < I; i += 4) {
            const unsigned a = __byte_perm(c[i], c[i + 1], 0x5140), b = __byte_perm(c[i + 2], c[i + 3], 0x5140);
            *(uint2 *)(words + i / 2) = make_uint2(__byte_perm(a, b, 0x7632) & mask, __byte_perm(a, b, 0x5410) & mask);
        }
    } else {
#pragma unroll
        for (int i = 0; i < I; i++) {
            unsigned char *const at = (unsigned char *)words + first % 4 + i;
            at[0] = (unsigned char)((c[i] & mask) >> 8);
            at[4] = (unsigned char)(c[i] & mask);
        }
    }
}

// Where unit `at` of 16 bytes of K or V at position t lies, in rows of hd bytes: rows of whole 64 bytes change the order of their
// units, so that eight lanes touch every bank once: those that read the same unit of eight positions, those that read four
// units of two (mma_s8), and those that name the rows of a matrix of load_halves (ValueTile).
DEVICE int row_place(int hd, int t, int at) {
    const int mask = (hd & 63) != 0 ? 0 : (hd & 127) != 0 ? 3 : 7;
    const int turn = (t << 2 & 4) | (t & 2) | ((t >> 2 ^ t >> 5) & 1);
    return t * hd + 16 * (at ^ (turn & mask));
}

// Sixteen elements of V, all positions, as a warp multiplies them.
struct ValueTile {
    unsigned words[STRIPES][4];  // of lanes 4 * step to 4 * step + 3 of all stripes: elements 2g of stripes 0 to 3, of 4 to 7,
                                 // elements 2g + 1 likewise, of lane c for thread 4g+c

    // v8: i8[CHUNK, hd] by row_place; unit: the elements are those from 16 * unit on.
    DEVICE_MEMBER void load(const signed char *v8, int hd, int unit) {
        // Row r of matrix q: of lane r / 2, stripe 2 * q + r % 2.
        const int q = lane_id() / 8, r = lane_id() % 8;
        const int first = r / 2 + STRIPE * (2 * q + r % 2);
        const signed char *const even = v8 + row_place(hd, first, unit), *const odd = v8 + row_place(hd, first + 4, unit);
#pragma unroll
        for (int step = 0; step < STRIPES; step++) {
            unsigned halves[4];
            load_halves(halves, (step % 2 == 0 ? even : odd) + step / 2 * 8 * hd);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                words[step][i] = __byte_perm(halves[2 * i], halves[2 * i + 1], 0x6420);
                words[step][2 + i] = __byte_perm(halves[2 * i], halves[2 * i + 1], 0x7531);
            }
        }
    }

    // Thread 4g+c gets the sums of head g for the tile's elements 4c to 4c+3. codes: of eight heads; those of a head that is
    // not there may be anything.
    DEVICE_MEMBER void sums(const unsigned *codes, int (&dots)[4]) const {
        const uint4 *const a = (const uint4 *)codes + lane_id() / 4 * CODES_PITCH + lane_id() % 4;
        int d[2][2][4] = {};  // even and odd steps, even and odd elements: four chains side by side
#pragma unroll
        for (int step = 0; step < STRIPES; step++) {
            const uint4 v = a[4 * step];
            const unsigned bytes[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int odd = 0; odd < 2; odd++) mma_u8_s8(d[step % 2][odd], bytes, words[step] + 2 * odd);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int odd = i % 2, column = i / 2;
            dots[i] = 256 * (d[0][odd][column] + d[1][odd][column]) + (d[0][odd][2 + column] + d[1][odd][2 + column]);
        }
    }
};

DEVICE float4 scaled_sums(const int (&dots)[4], float d) {
    return make_float4((float)dots[0] * d, (float)dots[1] * d, (float)dots[2] * d, (float)dots[3] * d);
}
