// Mixture of experts: router (contract section 8), the chosen experts' matrices (section 3), their combination (section 9).
#include "matvec.cuh"
#include "router.cuh"

#if !KESTREL_FAST

// A block per row, grid-stride. Dynamic shared: see block_router_topk.
KERNEL void k_router_topk(const RouterTopkArgs a) {
    DYNAMIC_SHARED(shared);
    for (int m = blockIdx.x; m < a.M; m += gridDim.x) block_router_topk(a, m, (float *)shared);
}

// Grid (weight rows, M * T), both strided: the concatenated rows of the expert that slot m * T + t chose.
KERNEL void k_moe_matmul(const MoeMatmulArgs a) {
    const int lane = lane_id(), slot = lane / 8, l = lane % 8;
    const int total = a.w[0].n + (a.n_w > 1 ? a.w[1].n : 0);
    const int k = a.w[0].k, groups = k / 32;
    const long long stride = (long long)gridDim.x * warp_count() * 4;
    for (int mt = blockIdx.y; mt < a.M * a.T; mt += gridDim.y) {
        const long long expert = a.ids[mt];
        const long long at = a.per_slot ? mt : mt / a.T;
        InputRows<1> in;
        in.x[0] = a.x + at * k;
        in.xq[0] = a.xq + at * k;
        in.xd[0] = a.xd + at * groups;
        in.gsum[0] = a.gsum + at * groups;
        for (long long first = ((long long)blockIdx.x * warp_count() + warp_id()) * 4; first < total; first += stride) {
            const int row = (int)first + slot;
            const bool second = row >= a.w[0].n;
            float acc[1] = {0.0f};
            if (row < total) {
                if (second)
                    weight_row<1>(a.w[1], expert * a.w[1].n + (row - a.w[0].n), in, l, acc);
                else
                    weight_row<1>(a.w[0], expert * a.w[0].n + row, in, l, acc);
            }
            const float y = group_hsum8(acc[0]);
            if (row < total && l == 0) a.y[(long long)mt * total + row] = y;
        }
    }
}

// Grid (columns, M), both strided; ranks ascending.
KERNEL void k_moe_combine(const MoeCombineArgs a) {
    for (int m = blockIdx.y; m < a.M; m += gridDim.y) {
        const float *const weights = a.weights + (long long)m * a.T;  // f32[T]
        const float *const y = a.y + (long long)m * a.T * a.H;        // f32[T, H]
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < a.H; i += gridDim.x * blockDim.x) {
            float acc = 0.0f;
            for (int t = 0; t < a.T; t++) acc = fma_f32(weights[t], y[(long long)t * a.H + i], acc);
            a.out[(long long)m * a.H + i] = acc;
        }
    }
}

#endif
