// The router's choice for one row, by a whole block; contract section 8.
#pragma once

#include "forms.cuh"

// Shared memory of a block that chooses; kestrel/launch.py computes the same size.
struct ChoiceShared {
    unsigned *keys;  // u32[E rounded up to 8]
    int *ids;        // i32[T rounded up to 4]: the chosen experts by rank
    float *p_all;    // f32[E rounded up to 4]: exponentials of all experts
    float *p;        // f32[T rounded up to 4]: of the chosen ones, then their weights
    float *lanes;    // f32[8]
    int *finite;     // i32[32]: of each warp
};

DEVICE int choice_shared_bytes(int E, int T) {
    return 4 * ((E + 7) / 8 * 8 + (E + 3) / 4 * 4 + 2 * ((T + 3) / 4 * 4) + 8 + 32);
}

DEVICE ChoiceShared choice_shared(unsigned char *base, int E, int T) {
    ChoiceShared sh;
    sh.keys = (unsigned *)base;
    sh.ids = (int *)(sh.keys + (E + 7) / 8 * 8);
    sh.p_all = (float *)(sh.ids + (T + 3) / 4 * 4);
    sh.p = sh.p_all + (E + 3) / 4 * 4;
    sh.lanes = sh.p + (T + 3) / 4 * 4;
    sh.finite = (int *)(sh.lanes + 8);
    return sh;
}

// Integers in the order of the logits: +0 and -0 share one, NaN is above all, and none is 0.
DEVICE unsigned rank_key(float logit) {
    const unsigned u = f32_bits(logit), magnitude = u & 0x7fffffffu;
    const unsigned key = magnitude == 0 ? 0x80000000u : u ^ ((unsigned)((int)u >> 31) | 0x80000000u);
    return magnitude > KESTREL_INF_BITS ? 0xffffffffu : key;
}

// sh.ids from the logits, f32[E] in global memory (written by another block or kernel). Each expert counts who ranks
// before it (larger key, or equal key and lower index), which gives its rank without a sort. A warp takes sixteen
// experts, two lanes to each, which take turns at the quads of keys. Ends with a barrier.
DEVICE void block_choose(const float *logits, int E, int T, const ChoiceShared &sh) {
    const int padded = (E + 7) / 8 * 8, half = lane_id() / 16;
#pragma unroll 1
    for (int e = threadIdx.x; e < padded; e += blockDim.x) sh.keys[e] = e < E ? rank_key(load_l2(logits + e)) : 0u;
    __syncthreads();
    const uint4 *const keys = (const uint4 *)sh.keys + half;
#pragma unroll 1
    for (int first = 16 * warp_id(); first < E; first += 16 * warp_count()) {
        const int e = first + lane_id() % 16;
        const unsigned mine = sh.keys[e < E ? e : 0], own = (unsigned)(e + 4 - 4 * half);
        unsigned count[4] = {0, 0, 0, 0};  // minus the number of those that rank before e
#pragma unroll 4
        for (int i = 0; i < padded / 8; i++) {
            const uint4 k = keys[2 * i];  // of experts 8 * i + 4 * half and the three behind it
            const unsigned at = (unsigned)(8 * i + 4);
            count[0] = minus_less(count[0], mine, at, k.x, own);
            count[1] = minus_less(count[1], mine, at + 1u, k.y, own);
            count[2] = minus_less(count[2], mine, at + 2u, k.z, own);
            count[3] = minus_less(count[3], mine, at + 3u, k.w, own);
        }
        int rank = -(int)(count[0] + count[1] + count[2] + count[3]);
        rank += __shfl_xor_sync(FULL_WARP, rank, 16);
        if (half == 0 && e < E && rank < T) sh.ids[rank] = e;
    }
    __syncthreads();
}

// The same choice by one warp, for up to 128 experts and 32 ranks: ids, i32[count]. A lane holds four neighbouring experts in
// rank order and puts its best one forward; each round takes the best of those, of equal ones that of the lowest lane. That some
// are equal is rare, and to see who is the lowest takes as long as to find the best: so a first pass takes all that are equal,
// and where there were several, a second one chooses again. No barrier at the end.
#define WARP_CHOOSE_EXPERTS 128
#define WARP_CHOOSE_RANKS 32
DEVICE bool warp_can_choose(int E, int T) { return E <= WARP_CHOOSE_EXPERTS && T <= WARP_CHOOSE_RANKS; }

// The logits of this lane's experts, for warp_choose.
DEVICE float4 lane_logits(const float *logits, int E) {
    const int lane = lane_id();
    if (E % 4 == 0) return load_l2((const float4 *)logits + (4 * lane < E ? lane : 0));
    float4 v;
    v.x = load_l2(logits + (4 * lane < E ? 4 * lane : 0));
    v.y = load_l2(logits + (4 * lane + 1 < E ? 4 * lane + 1 : 0));
    v.z = load_l2(logits + (4 * lane + 2 < E ? 4 * lane + 2 : 0));
    v.w = load_l2(logits + (4 * lane + 3 < E ? 4 * lane + 3 : 0));
    return v;
}

// A lane's experts, best first.
struct LaneExperts {
    unsigned key[4], order;  // order: a nibble for each key, whose it is

    DEVICE_MEMBER LaneExperts(float4 v, int E) {
        key[0] = rank_key(v.x), key[1] = rank_key(v.y), key[2] = rank_key(v.z), key[3] = rank_key(v.w);
        order = 0x3210u;
#pragma unroll
        for (int j = 0; j < 4; j++) key[j] = 4 * lane_id() + j < E ? key[j] : 0u;  // below every expert's
        // A merge of two sorted pairs: up to the last step whatever is compared lies in the order of its index.
        sort(0, 1, key[1] > key[0], 0x0011u);
        sort(2, 3, key[3] > key[2], 0x1100u);
        sort(0, 2, key[2] > key[0], 0x0101u);
        sort(1, 3, key[3] > key[1], 0x1010u);
        sort(1, 2, key[2] > key[1] || (key[2] == key[1] && (order >> 8 & 0xfu) < (order >> 4 & 0xfu)), 0x0110u);
    }
    DEVICE_MEMBER void sort(int i, int j, bool swap, unsigned flip) {
        const unsigned a = key[i], b = key[j];
        key[i] = swap ? b : a;
        key[j] = swap ? a : b;
        // flip has ones where the nibbles of i and j lie
        const unsigned x = (order >> 4 * i ^ order >> 4 * j) & 0xfu;
        order ^= swap ? x * flip : 0u;
    }
    // Takes the best one away, whose index is returned.
    DEVICE_MEMBER int take() {
        const int e = 4 * lane_id() + (int)(order & 3u);
        key[0] = key[1], key[1] = key[2], key[2] = key[3], key[3] = 0;
        order >>= 4;
        return e;
    }
};

DEVICE void warp_choose(float4 v, int E, int count, int *ids) {
    LaneExperts own(v, E);
    unsigned ties = 0;
#pragma unroll 1
    for (int t = 0; t < count; t++) {
        const unsigned best = __reduce_max_sync(FULL_WARP, own.key[0]);
        const bool mine = own.key[0] == best;
        const unsigned equal = __ballot_sync(FULL_WARP, mine);
        ties |= equal & (equal - 1);
        if (mine) ids[t] = own.take();
    }
    if (__builtin_expect(ties == 0, 1)) return;
    __syncwarp();
    own = LaneExperts(v, E);
#pragma unroll 1
    for (int t = 0; t < count; t++) {
        const unsigned best = __reduce_max_sync(FULL_WARP, own.key[0]);
        const unsigned equal = __ballot_sync(FULL_WARP, own.key[0] == best);
        if (__ffs((int)equal) - 1 == lane_id()) ids[t] = own.take();  // of equal ones the lowest index
    }
}

// The choice of row 0 and its weights to global memory, by the warp whose warp_choose left all ranks in `ids`. v: lane_logits;
// memory: f32[E rounded up to 4]. The logits come from the lanes: behind a stage's weights a load would take long.
DEVICE void warp_store_choice(const RouterTopkArgs &a, float4 v, const int *ids, float *memory) {
    const int lane = lane_id();
    const float mine[4] = {v.x, v.y, v.z, v.w};
    bool finite = true;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (4 * lane + j >= a.E) continue;
        memory[4 * lane + j] = mine[j];
        finite = finite && (f32_bits(mine[j]) & KESTREL_INF_BITS) != KESTREL_INF_BITS;
    }
    __syncwarp();
    finite = __all_sync(FULL_WARP, finite);
    const int id = ids[lane < a.T ? lane : 0];
    const float r_max = memory[ids[0]], p = exp_form(memory[id] - r_max);
    float denominator;
    if (a.norm_topk_prob) {
        denominator = __shfl_sync(FULL_WARP, p, 0);
#pragma unroll 1
        for (int t = 1; t < a.T; t++) denominator += __shfl_sync(FULL_WARP, p, t);  // rank order
    } else {
        float sum = 0.0f;
#pragma unroll 1
        for (int e = lane; e < a.E && lane < 8; e += 8) sum += exp_form(memory[e] - r_max);
        denominator = group_hsum8(sum);  // of lanes 0 to 7
        denominator = __shfl_sync(FULL_WARP, denominator, 0);
    }
    if (lane < a.T) {
        a.ids[lane] = id;
        a.weights[lane] = finite ? p / denominator : f32_from_bits(KESTREL_NAN_BITS);
    }
}

// The weights of the ids that block_choose left, of row m, to sh.p. Ends with a barrier.
DEVICE void block_choice_weights(const RouterTopkArgs &a, int m, const ChoiceShared &sh) {
    const float *const logits = a.logits + (long long)m * a.E;  // f32[E]
    const float r_max = load_l2(logits + sh.ids[0]);
    bool finite = true;
#pragma unroll 1
    for (int e = threadIdx.x; e < a.E; e += blockDim.x) {
        const float logit = load_l2(logits + e);
        finite = finite && (f32_bits(logit) & KESTREL_INF_BITS) != KESTREL_INF_BITS;
        if (!a.norm_topk_prob) sh.p_all[e] = exp_form(logit - r_max);
    }
#pragma unroll 1
    for (int t = threadIdx.x; t < a.T; t += blockDim.x) sh.p[t] = exp_form(load_l2(logits + sh.ids[t]) - r_max);
    finite = __all_sync(FULL_WARP, finite);
    if (lane_id() == 0) sh.finite[warp_id()] = finite;
    __syncthreads();
    if (a.norm_topk_prob) {
        if (threadIdx.x == 0) {
            float sum = sh.p[0];
#pragma unroll 1
            for (int t = 1; t < a.T; t++) sum += sh.p[t];  // rank order
            sh.lanes[0] = sum;
        }
    } else if (threadIdx.x < 8) {
        float sum = 0.0f;
#pragma unroll 1
        for (int e = threadIdx.x; e < a.E; e += 8) sum += sh.p_all[e];
        sh.lanes[threadIdx.x] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < warp_count(); w++) finite = finite && sh.finite[w];
    const float denominator = a.norm_topk_prob ? sh.lanes[0] : hsum8(sh.lanes);
#pragma unroll 1
    for (int t = threadIdx.x; t < a.T; t += blockDim.x)
        sh.p[t] = finite ? sh.p[t] / denominator : f32_from_bits(KESTREL_NAN_BITS);
    __syncthreads();
}

// Stores ids and weights of row m.
DEVICE void block_store_choice(const RouterTopkArgs &a, int m, const ChoiceShared &sh) {
    for (int t = threadIdx.x; t < a.T; t += blockDim.x) {
        a.ids[(long long)m * a.T + t] = sh.ids[t];
        a.weights[(long long)m * a.T + t] = sh.p[t];
    }
}
