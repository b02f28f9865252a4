// Sixteen input rows times 32 weight rows by one warp with int8 matrix instructions, for many input rows; contract
// section 3. A group of 32 is exactly one instruction's depth, so its dots come out whole; each thread then adds
// them, scaled, to the eight lanes' running sums of its own outputs, groups ascending.
#pragma once

#include "matvec.cuh"

#define TILE_COLUMNS 32  // weight rows of a warp

// The two input rows of a thread: rows lane/4 and lane/4 + 8 of the tile.
struct TileRows {
    const signed char *q[2];  // i8[K]
    const float *d[2];        // f32[G]
    const int *gsum[2];       // i32[G]
};

// y[j][0..3] for columns 8j + 2*(lane%4) and the next, of rows lane/4 (0, 1) and lane/4 + 8 (2, 3). n0: first weight
// row; `valid` of the 32 exist. w: q4local or q8local.
DEVICE void tile_16x32(const Weight &w, long long n0, int valid, const TileRows &in, float (*y)[4]) {
    const int groups = w.k / 32, own = lane_id() / 4, part = lane_id() % 4;
    const bool q4 = w.wtype == KESTREL_Q4LOCAL;
    const int group_bytes = q4 ? 16 : 32;
    const unsigned char *codes[4];    // of the weight row whose codes this thread feeds
    const unsigned short *scale[4];   // of the first of the two columns this thread sums
    int second[4];                    // offset of the other column's scales, 0 past the end
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int n = 8 * j + own < valid ? 8 * j + own : valid - 1;
        const int c0 = 8 * j + 2 * part < valid ? 8 * j + 2 * part : valid - 1, c1 = c0 + 1 < valid ? c0 + 1 : c0;
        codes[j] = (const unsigned char *)w.codes + (n0 + n) * groups * group_bytes + 4 * part;
        scale[j] = w.scale + (n0 + c0) * groups;
        second[j] = (c1 - c0) * groups;
    }
    float acc[8][4][4];
#pragma unroll
    for (int l = 0; l < 8; l++) {
#pragma unroll
        for (int i = 0; i < 16; i++) acc[l][i / 4][i % 4] = 0.0f;
    }
#pragma unroll 1
    for (int g0 = 0; g0 < groups; g0 += 8) {
#pragma unroll
        for (int l = 0; l < 8; l++) {
            const int g = g0 + l;
            if (g < groups) {
                const unsigned a[4] = {*(const unsigned *)(in.q[0] + 32 * g + 4 * part),
                                       *(const unsigned *)(in.q[1] + 32 * g + 4 * part),
                                       *(const unsigned *)(in.q[0] + 32 * g + 16 + 4 * part),
                                       *(const unsigned *)(in.q[1] + 32 * g + 16 + 4 * part)};
                const float d0 = in.d[0][g], d1 = in.d[1][g];
                const int start0 = q4 ? -8 * in.gsum[0][g] : 0, start1 = q4 ? -8 * in.gsum[1][g] : 0;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const unsigned word = *(const unsigned *)(codes[j] + g * group_bytes);
                    unsigned b[2];
                    b[0] = q4 ? word & 0x0f0f0f0fu : word;
                    b[1] = q4 ? word >> 4 & 0x0f0f0f0fu : *(const unsigned *)(codes[j] + g * group_bytes + 16);
                    int dots[4] = {start0, start0, start1, start1};
                    mma_s8(dots, a, b);
                    const float s0 = half_to_float(scale[j][g]), s1 = half_to_float(scale[j][second[j] + g]);
                    acc[l][j][0] = fma_f32((float)dots[0], s0 * d0, acc[l][j][0]);
                    acc[l][j][1] = fma_f32((float)dots[1], s1 * d0, acc[l][j][1]);
                    acc[l][j][2] = fma_f32((float)dots[2], s0 * d1, acc[l][j][2]);
                    acc[l][j][3] = fma_f32((float)dots[3], s1 * d1, acc[l][j][3]);
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float lanes[8] = {acc[0][j][i], acc[1][j][i], acc[2][j][i], acc[3][j][i],
                                    acc[4][j][i], acc[5][j][i], acc[6][j][i], acc[7][j][i]};
            y[j][i] = hsum8(lanes);
        }
    }
}

// Stores a tile: out0 and out1 are the output rows at column n0 of the tile's rows lane/4 and lane/4 + 8, null past
// the end.
DEVICE void store_tile(const float (*y)[4], int valid, float *out0, float *out1) {
    const int part = lane_id() % 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = 8 * j + 2 * part + i % 2;
            float *const out = i < 2 ? out0 : out1;
            if (out != nullptr && column < valid) out[column] = y[j][i];
        }
    }
}
