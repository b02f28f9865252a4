// Stages of a decode step (M = 1): ops of one layer joined into one launch, because between short launches a GPU
// waits. The arithmetic is that of the single ops, from the same device functions. Each stage asks for its weights
// before it waits for anything else. Each kernel exists in both forms: k_x and k_x_fast.
#include "block_norm.cuh"
#include "stage_args.h"
#include "warp_rows.cuh"

// A block per row, grid-stride; any M. Dynamic shared: NormShared.
KERNEL void FORM(k_norm_a8)(const NormA8Args a) {
    DYNAMIC_SHARED(shared);
    const NormShared sh = norm_shared(shared, a.norm.d);
    start_next();  // block_rms_norm waits
    for (int m = blockIdx.x; m < a.norm.M; m += gridDim.x) {
        block_norm_a8(a.norm, m, sh);
        store_norm_a8(a.norm, a.a8, sh, m);
        __syncthreads();
    }
}

// Which matrix and which of its rows a warp's unit of R rows is: units do not cross matrices.
struct RowUnit {
    Weight w;
    int n, rows;  // first row within w, and how many (at most R; 0: past the end)
    int out;      // first row in the concatenated output
};

DEVICE RowUnit row_unit(const MatmulArgs &a, int unit, int R) {
    RowUnit at;
    at.w = a.w[0];
    at.out = 0;
#pragma unroll
    for (int i = 1; i < 3; i++) {
        const int units = (at.w.n + R - 1) / R;
        if (i < a.n_w && unit >= units) {
            unit -= units;
            at.out += at.w.n;
            at.w = a.w[i];
        }
    }
    at.n = unit * R;
    at.rows = at.w.n - at.n < R ? at.w.n - at.n : R;
    if (at.rows < 0) at.rows = 0;
    at.out += at.n;
    return at;
}

DEVICE int row_units(const MatmulArgs &a, int R) {
    int units = 0;
    for (int i = 0; i < a.n_w; i++) units += (a.w[i].n + R - 1) / R;
    return units;
}

// Every block norms the row for itself while its first weights travel; block 0 stores the norm and its a8.
template <int U, int R> DEVICE void norm_matmul(const NormMatmulArgs &a, unsigned char *shared) {
    const NormShared sh = norm_shared(shared, a.norm.d);
    const A8Row in = {sh.q, sh.d, sh.gsum};
    const int units = row_units(a.mm, R), stride = gridDim.x * warp_count();
    int unit = blockIdx.x * warp_count() + warp_id();
    WarpRows<U, R> rows;
    RowUnit at = row_unit(a.mm, unit, R);
    if (unit < units) rows.begin(at.w, at.n, at.rows);
    start_next();
    block_norm_a8(a.norm, 0, sh);
    if (blockIdx.x == 0) store_norm_a8(a.norm, a.a8, sh, 0);
    while (unit < units) {
        float y[R];
        rows.finish(at.w, at.n, at.rows, in, sh.x, y);
#pragma unroll
        for (int r = 0; r < R; r++)
            if (lane_id() == 0 && r < at.rows) a.mm.y[at.out + r] = y[r];
        unit += stride;
        if (unit < units) {
            at = row_unit(a.mm, unit, R);
            rows.begin(at.w, at.n, at.rows);
        }
    }
}

// Dynamic shared: NormShared. u: steps of a slot in flight, r: rows of a warp.
KERNEL LAUNCH_BOUNDS(256) void FORM(k_norm_matmul_u2r4)(const NormMatmulArgs a) {
    DYNAMIC_SHARED(shared);
    norm_matmul<2, 4>(a, shared);
}
KERNEL LAUNCH_BOUNDS(256) void FORM(k_norm_matmul_u4r2)(const NormMatmulArgs a) {
    DYNAMIC_SHARED(shared);
    norm_matmul<4, 2>(a, shared);
}

// y = w . a8 row, and x += y where there is a residual.
template <int U, int R> DEVICE void matmul_add(const MatmulAddArgs &a) {
    const A8Row in = {a.mm.xq, a.mm.xd, a.mm.gsum};
    const int units = row_units(a.mm, R);
    for (int unit = blockIdx.x * warp_count() + warp_id(); unit < units; unit += gridDim.x * warp_count()) {
        const RowUnit at = row_unit(a.mm, unit, R);
        WarpRows<U, R> rows;
        rows.begin(at.w, at.n, at.rows);
        wait_for_previous();  // in later turns, too, where it returns at once
        start_next();
        float y[R];
        rows.finish(at.w, at.n, at.rows, in, a.mm.x, y);
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (lane_id() == 0 && r < at.rows) {
                const int n = at.out + r;
                a.mm.y[n] = y[r];
                a.add.x[n] = a.add.x[n] + y[r];
            }
        }
    }
}
KERNEL LAUNCH_BOUNDS(256) void FORM(k_matmul_add_u2r4)(const MatmulAddArgs a) { matmul_add<2, 4>(a); }
KERNEL LAUNCH_BOUNDS(256) void FORM(k_matmul_add_u4r2)(const MatmulAddArgs a) { matmul_add<4, 2>(a); }
