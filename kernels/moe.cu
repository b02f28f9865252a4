// Mixture of experts: router (contract section 8), the chosen experts' matrices (section 3), their combination (section 9).
#include "ucrt.cuh"
#include "matvec.cuh"

#if !KESTREL_FAST

// Whether expert i (logit a) ranks before expert j (logit b): larger logit, then lower index; NaN below everything.
DEVICE bool ranks_before(float a, int i, float b, int j) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan != b_nan) return b_nan;
    if (!a_nan && a != b) return a > b;
    return i < j;
}

// A block per row, grid-stride. Each expert counts who ranks before it, which gives its rank without a sort.
// Dynamic shared: f32[E] logits, f32[E] exponentials of all experts, i32[T] ids, f32[T] chosen exponentials, f32[8].
KERNEL void k_router_topk(const RouterTopkArgs a) {
    DYNAMIC_SHARED(shared);
    float *const logits = (float *)shared;
    float *const p_all = logits + a.E;
    int *const ids = (int *)(p_all + a.E);
    float *const p = (float *)(ids + a.T);
    float *const lanes = p + a.T;
    for (int m = blockIdx.x; m < a.M; m += gridDim.x) {
        for (int e = threadIdx.x; e < a.E; e += blockDim.x) logits[e] = a.logits[(long long)m * a.E + e];
        __syncthreads();
        for (int e = threadIdx.x; e < a.E; e += blockDim.x) {
            const float mine = logits[e];
            int rank = 0;
            for (int j = 0; j < a.E; j++) rank += ranks_before(logits[j], j, mine, e) ? 1 : 0;
            if (rank < a.T) ids[rank] = e;
        }
        __syncthreads();
        const float r_max = logits[ids[0]];
        for (int t = threadIdx.x; t < a.T; t += blockDim.x) p[t] = expf_ucrt(logits[ids[t]] - r_max);
        if (!a.norm_topk_prob)
            for (int e = threadIdx.x; e < a.E; e += blockDim.x) p_all[e] = expf_ucrt(logits[e] - r_max);
        __syncthreads();
        if (a.norm_topk_prob) {
            if (threadIdx.x == 0) {
                float sum = p[0];
                for (int t = 1; t < a.T; t++) sum += p[t];  // rank order
                lanes[0] = sum;
            }
        } else if (threadIdx.x < 8) {
            float sum = 0.0f;
            for (int e = threadIdx.x; e < a.E; e += 8) sum += p_all[e];
            lanes[threadIdx.x] = sum;
        }
        __syncthreads();
        const float denominator = a.norm_topk_prob ? lanes[0] : hsum8(lanes);
        for (int t = threadIdx.x; t < a.T; t += blockDim.x) {
            a.ids[(long long)m * a.T + t] = ids[t];
            a.weights[(long long)m * a.T + t] = p[t] / denominator;
        }
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
