// The second launch of attention in a decode step (M = 1) where chunks are many: merges the partial states that k_attn_stage
// left, left to right, a block to 32 elements of a head, and quantises the result.
#include "attention_result.cuh"

// Four chunks of a merge: factors of what is merged and of the chunk, the chunk's sum; one element of its state.
struct PartGroup {
    float4 f[4];
    float x[4];

    DEVICE_MEMBER void load(const float4 *factors, const float *states) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[i] = factors[i];
            x[i] = states[32 * i];
        }
    }
    // The first `count` of them.
    DEVICE_MEMBER void merge(int count, float &acc, float &l) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i >= count) continue;
            acc = merge_one(acc, x[i], f[i].x, f[i].y);
            l = merge_one(l, f[i].z, f[i].x, f[i].y);
        }
    }
};

// Elements 32 * part to 32 * part + 31 of head h, and their a8 where the head is made of groups: the states travel all at
// once; a thread to a chunk works out the factors; then a lane to an element. Chunks go by as many as there are threads.
// Shared: f32[threads + 8, 4], f32[threads + 8, 32], f32[warps]; the chain reads eight chunks past the last. Waits for the
// launch before, when all addresses are there.
DEVICE void merge_part(const AttentionStageArgs &st, unsigned char *shared, int h, int part, int chunks) {
    const AttentionArgs &a = st.attn;
    const int lane = lane_id(), threads = blockDim.x, first = 32 * part, own = threadIdx.x;
    const int units = (a.hd - first < 32 ? a.hd - first : 32) / 4;  // of 16 bytes
    float4 *const factors = (float4 *)shared;  // of the merged chunks and of the one that comes, its sum, unused
    float *const states = (float *)(factors + threads + 8);
    float *const totals = states + 32 * (threads + 8);
    const float *const source = partial_state(a, 0, 0, h);
    const long long stride = (long long)a.nh * (a.hd + 4);  // floats from chunk to chunk
    const float *end_at = source + own * stride + a.hd;                    // of this thread's chunk
    const float *copy_at = source + own / 8 * stride + first + own % 8 * 4;  // what it copies of every threads / 8 chunks
    const long long step = threads / 8 * stride;
    float acc = 0.0f, l = 0.0f;  // of the first warp's lanes
    float m = MINUS_INFINITY;    // of the chunks before these
    start_next();
    wait_for_previous((const void *)((unsigned long long)end_at | (unsigned long long)copy_at));
#pragma unroll 1
    for (int c0 = 0; c0 < chunks; c0 += threads) {
        const int count = chunks - c0 < threads ? chunks - c0 : threads;
        float right = MINUS_INFINITY, sum = 0.0f;
        if (own < count) {
            const float4 end = load_l2((const float4 *)end_at);
            right = end.x, sum = end.y;
        }
        if (own % 8 < units) {
            const float *at = copy_at;
#pragma unroll 1
            for (int c = own / 8; c < count; c += threads / 8, at += step)
                copy_async_16(states + 32 * c + own % 8 * 4, at);
        }
        end_at += threads * stride;
        copy_at += threads * stride;
        float merged = right;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) merged = fmaxf(merged, __shfl_up_sync(FULL_WARP, merged, step));
        if (lane == 31) totals[warp_id()] = merged;
        float before = __shfl_up_sync(FULL_WARP, merged, 1);
        if (lane == 0) before = MINUS_INFINITY;
        __syncthreads();
        before = fmaxf(before, m);
#pragma unroll 1
        for (int v = 0; v < warp_count(); v++) {
            const float total = totals[v];
            if (v < warp_id()) before = fmaxf(before, total);
            m = fmaxf(m, total);
        }
        if (own < count) factors[own] = merge_factors_of(before, right, sum);
        copy_wait_all();
        __syncthreads();
        if (warp_id() == 0) {
            const float4 *f = factors;
            const float *x = states + lane;
            int left = count;
            if (c0 == 0) {  // the first chunk is taken as it is
                acc = *x;
                l = f->z;
                f++;
                x += 32;
                left--;
            }
            PartGroup even, odd;
            even.load(f, x);
#pragma unroll 1
            for (; left > 0; left -= 8) {
                odd.load(f + 4, x + 128);
                even.merge(left, acc, l);
                f += 8;
                x += 256;
                even.load(f, x);
                odd.merge(left - 4, acc, l);
            }
        }
        if (c0 + threads < chunks) __syncthreads();
    }
    if (warp_id() == 0) store_result(st, st.attn.hd, h, first, acc, l);
}

// Grid: along x a block to every 32 elements of a head, along y the heads. Threads: a multiple of 32. Dynamic shared: as for
// merge_part.
KERNEL LAUNCH_BOUNDS(256) void FORM(k_attn_merge)(const AttentionStageArgs a) {
    DYNAMIC_SHARED(shared);
    touch_exp_table();
    const int chunks = load_l2(a.attn.pos) / CHUNK + 1;  // as in attention_stage
    if (chunks == 1) {  // the unit has stored the result itself
        start_next();
        wait_for_previous();
        return;
    }
    merge_part(a, shared, blockIdx.y, blockIdx.x, chunks);
}
