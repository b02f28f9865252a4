// Matrix times rows, contract section 3: four weight rows to a warp, eight threads to a row (see matvec.cuh). Exact
// and fast mode share it: the order costs nothing.
#include "tile.cuh"

// Grid (weight rows, input row tiles), both strided. MT input rows share each weight that is read.
template <int MT> DEVICE void matmul_rows(const MatmulArgs &a) {
    const int lane = lane_id(), slot = lane / 8, l = lane % 8;
    int total = 0;
    for (int i = 0; i < a.n_w; i++) total += a.w[i].n;
    const int k = a.w[0].k, groups = k / 32;
    const long long stride = (long long)gridDim.x * warp_count() * 4;
    // Whole warps leave the loops together, so that the shuffles of hsum8 see all lanes.
    for (long long first = ((long long)blockIdx.x * warp_count() + warp_id()) * 4; first < total; first += stride) {
        const int row = (int)first + slot;  // over the concatenated outputs
        Weight w = a.w[0];
        int n = row;
#pragma unroll
        for (int i = 1; i < 3; i++) {
            if (i < a.n_w && n >= w.n) {
                n -= w.n;
                w = a.w[i];
            }
        }
        for (int m0 = blockIdx.y * MT; m0 < a.M; m0 += gridDim.y * MT) {
            InputRows<MT> in;
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const long long at = m0 + m < a.M ? m0 + m : a.M - 1;
                in.x[m] = a.x + at * k;
                in.xq[m] = a.xq + at * k;
                in.xd[m] = a.xd + at * groups;
                in.gsum[m] = a.gsum + at * groups;
            }
            float acc[MT];
#pragma unroll
            for (int m = 0; m < MT; m++) acc[m] = 0.0f;
            if (row < total) weight_row<MT>(w, n, in, l, acc);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const float y = group_hsum8(acc[m]);
                if (row < total && l == 0 && m0 + m < a.M) a.y[(long long)(m0 + m) * total + row] = y;
            }
        }
    }
}

#if !KESTREL_FAST
// The number is the input rows that share a load; the results do not depend on it.
KERNEL void k_matmul(const MatmulArgs a) {
    wait_for_previous();
    start_next();
    matmul_rows<1>(a);
}
KERNEL void k_matmul_m2(const MatmulArgs a) { matmul_rows<2>(a); }
KERNEL void k_matmul_m4(const MatmulArgs a) { matmul_rows<4>(a); }
KERNEL void k_matmul_m8(const MatmulArgs a) { matmul_rows<8>(a); }

// Many input rows, quantised weights. Grid (32-column tiles / warps, row tiles of 16), both strided: a warp to a tile.
KERNEL LAUNCH_BOUNDS(128) void k_matmul_tiled(const MatmulArgs a) {
    wait_for_previous();
    start_next();
    int total = 0, tiles = 0;
    for (int i = 0; i < a.n_w; i++) {
        total += a.w[i].n;
        tiles += (a.w[i].n + TILE_COLUMNS - 1) / TILE_COLUMNS;
    }
    const int k = a.w[0].k, groups = k / 32;
    for (int unit = blockIdx.x * warp_count() + warp_id(); unit < tiles; unit += gridDim.x * warp_count()) {
        // Tiles do not cross matrices.
        Weight w = a.w[0];
        int tile = unit, out = 0;
#pragma unroll
        for (int i = 1; i < 3; i++) {
            const int of_this = (w.n + TILE_COLUMNS - 1) / TILE_COLUMNS;
            if (i < a.n_w && tile >= of_this) {
                tile -= of_this;
                out += w.n;
                w = a.w[i];
            }
        }
        const int n0 = tile * TILE_COLUMNS, valid = w.n - n0 < TILE_COLUMNS ? w.n - n0 : TILE_COLUMNS;
        for (int m0 = 16 * blockIdx.y; m0 < a.M; m0 += 16 * gridDim.y) {
            TileRows in;
            float *outs[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int m = m0 + lane_id() / 4 + 8 * i;
                const long long at = m < a.M ? m : a.M - 1;
                in.q[i] = a.xq + at * k;
                in.d[i] = a.xd + at * groups;
                in.gsum[i] = a.gsum + at * groups;
                outs[i] = m < a.M ? a.y + at * total + out + n0 : nullptr;
            }
            float y[4][4];
            tile_16x32(w, n0, valid, in, y);
            store_tile(y, valid, outs[0], outs[1]);
        }
    }
}
#endif
