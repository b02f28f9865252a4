// The router's choice for one row, by a whole block; contract section 8.
#pragma once

#include "forms.cuh"

// Whether expert i (logit a) ranks before expert j (logit b): larger logit, then lower index; NaN above everything.
DEVICE bool ranks_before(float a, int i, float b, int j) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a != b) return a > b;
    return i < j;
}

// Row m. Each expert counts who ranks before it, which gives its rank without a sort.
// shared: f32[E] logits, f32[E] exponentials of all experts, i32[T] ids, f32[T] chosen exponentials, f32[8].
DEVICE void block_router_topk(const RouterTopkArgs &a, int m, float *shared) {
    float *const logits = shared;
    float *const p_all = logits + a.E;
    int *const ids = (int *)(p_all + a.E);
    float *const p = (float *)(ids + a.T);
    float *const lanes = p + a.T;
    for (int e = threadIdx.x; e < a.E; e += blockDim.x) logits[e] = load_l2(a.logits + (long long)m * a.E + e);
    __syncthreads();
    bool finite = true;  // of every logit; T <= E, so each thread that stores a weight has looked
    for (int e = threadIdx.x; e < a.E; e += blockDim.x) {
        const float mine = logits[e];
        int rank = 0;
        for (int j = 0; j < a.E; j++) {
            rank += ranks_before(logits[j], j, mine, e) ? 1 : 0;
            finite = finite && (f32_bits(logits[j]) & 0x7f800000u) != 0x7f800000u;
        }
        if (rank < a.T) ids[rank] = e;
    }
    __syncthreads();
    const float r_max = logits[ids[0]];
    for (int t = threadIdx.x; t < a.T; t += blockDim.x) p[t] = exp_form(logits[ids[t]] - r_max);
    if (!a.norm_topk_prob)
        for (int e = threadIdx.x; e < a.E; e += blockDim.x) p_all[e] = exp_form(logits[e] - r_max);
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
        a.weights[(long long)m * a.T + t] = finite ? p[t] / denominator : f32_from_bits(0x7fc00000u);
    }
    __syncthreads();
}
