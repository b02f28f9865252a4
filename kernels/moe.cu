// Mixture of experts: router (contract section 8), the chosen experts' matrices (section 3), their combination
// (section 9).
#include "router.cuh"
#include "tile.cuh"

#if !KESTREL_FAST

// A block per row, grid-stride. Dynamic shared: ChoiceShared.
KERNEL void k_router_topk(const RouterTopkArgs a) {
    DYNAMIC_SHARED(shared);
    const ChoiceShared sh = choice_shared(shared, a.E, a.T);
    for (int m = blockIdx.x; m < a.M; m += gridDim.x) {
        block_choose(a.logits + (long long)m * a.E, a.E, a.T, sh);
        block_choice_weights(a, m, sh);
        block_store_choice(a, m, sh);
        __syncthreads();
    }
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

// Many input rows, quantised weights. Grid (32-column tiles / warps, experts), both strided: a block gathers the slots
// m * T + t that chose its expert, sixteen at a time, and a warp takes a tile of columns.
KERNEL LAUNCH_BOUNDS(128) void k_moe_matmul_tiled(const MoeMatmulArgs a) {
    __shared__ int slots[16];
    __shared__ int found, resume;
    wait_for_previous();
    start_next();
    const int total = a.w[0].n + (a.n_w > 1 ? a.w[1].n : 0), all = a.M * a.T;
    const int tiles0 = (a.w[0].n + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int tiles = tiles0 + (a.n_w > 1 ? (a.w[1].n + TILE_COLUMNS - 1) / TILE_COLUMNS : 0);
    const int k = a.w[0].k, groups = k / 32;
    for (int expert = blockIdx.y; expert < a.E; expert += gridDim.y) {
        int next = 0;  // first slot not looked at yet; the same in every thread
        while (next < all) {
            // The next sixteen slots of this expert, ascending, by the first warp.
            if (warp_id() == 0) {
                int count = 0, at = next;
                while (at < all && count < 16) {
                    const int slot = at + lane_id();
                    const unsigned mine = __ballot_sync(FULL_WARP, slot < all && a.ids[slot] == expert);
                    const int before = __popc(mine & ((1u << lane_id()) - 1u));
                    if (mine >> lane_id() & 1u && count + before < 16) slots[count + before] = slot;
                    const int taken = __popc(mine);
                    if (count + taken > 16) {  // go on after the sixteenth
                        __syncwarp();
                        at = slots[15] + 1;
                        count = 16;
                    } else {
                        count += taken;
                        at += 32;
                    }
                }
                if (lane_id() == 0) {
                    found = count;
                    resume = at;
                }
            }
            __syncthreads();
            const int count = found;
            next = resume;
            if (count > 0) {
                for (int unit = blockIdx.x * warp_count() + warp_id(); unit < tiles; unit += gridDim.x * warp_count()) {
                    const bool is_second = unit >= tiles0;
                    const Weight &w = is_second ? a.w[1] : a.w[0];
                    const int n0 = (is_second ? unit - tiles0 : unit) * TILE_COLUMNS;
                    const int valid = w.n - n0 < TILE_COLUMNS ? w.n - n0 : TILE_COLUMNS;
                    TileRows in;
                    float *outs[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int row = lane_id() / 4 + 8 * i;
                        const int slot = slots[row < count ? row : 0];
                        const long long at = a.per_slot ? slot : slot / a.T;
                        in.q[i] = a.xq + at * k;
                        in.d[i] = a.xd + at * groups;
                        in.gsum[i] = a.gsum + at * groups;
                        outs[i] = row < count ? a.y + (long long)slot * total + (is_second ? a.w[0].n : 0) + n0 : nullptr;
                    }
                    float y[4][4];
                    tile_16x32(w, (long long)expert * w.n + n0, valid, in, y);
                    store_tile(y, valid, outs[0], outs[1]);
                }
            }
            __syncthreads();
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
