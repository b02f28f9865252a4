// The attention stage of a decode step (M = 1) in two launches: k_attn_stage makes the partial states of all chunks, from
// the raw Q, K and V rows on; k_attn_merge merges them left to right, a block to a head, and quantises the result. Two
// launches, because on a GPU the end of a launch is the cheapest way to wait for all blocks.
#include "attention_chains.cuh"
#include "warp_rows.cuh"

// Query heads of a unit, as a power of two: fewer, and so more units, as long as every unit finds a block of its own. Any
// cut gives the same bits.
DEVICE int unit_heads_log2(int per_kv, int nkv, int chunks, int blocks) {
    int log2 = 0;
    while ((1 << log2) < UNIT_HEADS && (1 << log2) < per_kv && nkv * ((per_kv + (1 << log2) - 1) >> log2) * chunks > blocks)
        log2++;
    return log2;
}

template <int W> DEVICE void attention_stage(const AttentionStageArgs &st, unsigned char *shared, int block, int blocks) {
    const AttentionArgs &a = st.attn;
    const UnitShared sh = unit_shared(shared, a.hd, 16 * W);
    touch_exp_table();
    const int pos = load_l2(a.pos);  // written by a launch that has ended when the one before this one starts the next
    const int per_kv = a.nh / a.nkv, log2 = unit_heads_log2(per_kv, a.nkv, pos / CHUNK + 1, blocks);
    const int HS = 1 << log2, parts = (per_kv + HS - 1) >> log2, groups = a.nkv * parts;
    Unit u;
    u.pos = pos;
    u.chunks = pos / CHUNK + 1;
    u.base = load_l2(a.base);
    u.slots = blocks >= groups * u.chunks ? u.chunks : blocks < groups ? 1 : blocks / groups;
    const RowWeights<W / 4> first_weights = unit_row_weights<W / 4>(st, HS, warp_id());
    const UnitQuads quads = unit_quads(HS, a.hd);
    bool waited = false;
#pragma unroll 1
    for (int item = block; item < groups * u.slots; item += blocks) {  // once, if there are blocks enough
        u.slot = item / groups;
        const int group = item - u.slot * groups;
        u.kv = group / parts;
        const int first = (group - u.kv * parts) * HS;  // query head of the KV head
        u.h0 = u.kv * per_kv + first;
        u.heads = per_kv - first < HS ? per_kv - first : HS;
        u.first_of_kv = first == 0;
#pragma unroll 1
        for (int chunk = u.slot; chunk < u.chunks; chunk += u.slots) {
            const int begin = chunk * CHUNK;
            const int count = pos + 1 - begin < CHUNK ? pos + 1 - begin : CHUNK;
            const int t_new = pos - begin;  // past the chunk unless it is the last
            const int cached = t_new < CHUNK ? t_new : CHUNK;
            const long long slot0 = u.base + begin;
            unit_fetch(a, sh, 16 * W, quads, slot0, u.kv, cached);
            float ks = 0.0f, vs = 0.0f;
            if ((int)threadIdx.x < cached) {
                const long long row = (slot0 + threadIdx.x) * a.nkv + u.kv;
                ks = load_l2(a.ks + row);
                vs = load_l2(a.vs + row);
            }
            if (chunk == u.slot) {
                if (!waited) {
                    unit_angles(st.rope, pos, sh.angle);
                    prefetch_ranges(st.next);
                    __syncthreads();
                    wait_for_previous();
                    start_next();
                    waited = true;
                }
                const bool has_new =
                    u.slots == u.chunks ? u.slot == u.chunks - 1 : (u.chunks - 1 - u.slot) % u.slots == 0;
#pragma unroll 1
                for (int row = warp_id(); row < (has_new ? HS + 2 : HS); row += UNIT_WARPS) {
                    RowWeights<W / 4> weights = first_weights;
                    if (row >= UNIT_WARPS) weights = unit_row_weights<W / 4>(st, HS, row);
                    unit_row(st, sh, u, HS, row, weights, t_new, u.slot == 0, has_new && u.first_of_kv);
                }
            }
            if ((int)threadIdx.x < cached) sh.ks[threadIdx.x] = ks;  // not earlier: it may take long to come
            if ((int)threadIdx.x != t_new) sh.vs[threadIdx.x] = vs;
            unit_transpose(sh, 16 * W, a.hd, quads, cached);
            __syncthreads();
            if (t_new < CHUNK) {  // the new row takes its place
                unit_place_value(sh, 16 * W, a.hd, t_new);
                if (chunk != u.slot) {  // its K has not been there since the row was made
                    if ((int)threadIdx.x == t_new) {
                        sh.ks[t_new] = sh.new_scale[0];
                        sh.vs[t_new] = sh.new_scale[1];
                    }
                    for (int e = threadIdx.x; e < a.hd; e += UNIT_THREADS)
                        sh.k8[unit_place(a.hd, t_new, e / 16) + e % 16] = sh.new_row[e];
                    __syncthreads();
                }
            }
            unit_scores<W>(sh, HS, a.hd, count);
            if (HS == 1) {
                unit_softmax_one(sh, count);
            } else {
                __syncthreads();
                unit_softmax_many(sh, HS, count, (count + UNIT_STEP - 1) / UNIT_STEP * UNIT_STEP);
            }
            __syncthreads();
            unit_states<16 * W>(a, sh, u, HS, chunk, count);
            __syncthreads();
        }
    }
}

// 256 threads. Dynamic shared: UnitShared. For head sizes up to 128, and up to 256.
KERNEL LAUNCH_BOUNDS(UNIT_THREADS, 2) void FORM(k_attn_stage)(const AttentionStageArgs a) {
    DYNAMIC_SHARED(shared);
    attention_stage<8>(a, shared, blockIdx.x, gridDim.x);
}
KERNEL LAUNCH_BOUNDS(UNIT_THREADS, 1) void FORM(k_attn_stage_wide)(const AttentionStageArgs a) {
    DYNAMIC_SHARED(shared);
    attention_stage<16>(a, shared, blockIdx.x, gridDim.x);
}

#define MERGE_CHUNKS 64  // chunks whose states a block has in shared memory

// out[h] = merge of the chunks of head h, and its a8 where the head is made of groups. The states travel all at once;
// the first warp works out the factors, a lane to a chunk; then a thread to an element. Shared: f32[MERGE_CHUNKS, 4],
// f32[MERGE_CHUNKS, hd + 4].
DEVICE void merge_head(const AttentionStageArgs &st, unsigned char *shared, int h, int chunks) {
    const AttentionArgs &a = st.attn;
    const int pitch = a.hd + 4, lane = lane_id();
    float4 *const factors = (float4 *)shared;  // of the merged chunks and of the one that comes, its sum, unused
    float *const states = (float *)(factors + MERGE_CHUNKS);
    const float *const source = partial_state(a, 0, 0, h);
    const long long stride = (long long)a.nh * pitch;  // floats from chunk to chunk
    float acc[2] = {0.0f, 0.0f}, l = 0.0f, m = MINUS_INFINITY;  // of elements threadIdx.x and threadIdx.x + blockDim.x
#pragma unroll 1
    for (int c0 = 0; c0 < chunks; c0 += MERGE_CHUNKS) {
        const int count = chunks - c0 < MERGE_CHUNKS ? chunks - c0 : MERGE_CHUNKS;
        const int units = pitch / 4;  // of 16 bytes
        __syncthreads();
        for (int i = threadIdx.x; i < count * units; i += blockDim.x)
            copy_async_16(states + 4 * i, source + (c0 + i / units) * stride + i % units * 4);
        copy_wait_all();
        __syncthreads();
        if (warp_id() == 0) {
            for (int b0 = 0; b0 < count; b0 += 32) {
                const int c = b0 + lane;
                const float *const state = states + c * pitch + a.hd;
                const float right = c < count ? state[0] : MINUS_INFINITY;
                float merged = right > m ? right : m;
                for (int step = 1; step < 32; step <<= 1) {
                    const float left = __shfl_up_sync(FULL_WARP, merged, step);
                    if (lane >= step) merged = merged > left ? merged : left;
                }
                float before = __shfl_up_sync(FULL_WARP, merged, 1);
                if (lane == 0) before = m;
                if (c < count)
                    factors[c] = make_float4(exp_form(before - merged), exp_form(right - merged), state[1], 0.0f);
                m = __shfl_sync(FULL_WARP, merged, 31);
            }
        }
        __syncthreads();
        int first = 0;
        if (c0 == 0) {  // the first chunk is taken as it is
            first = 1;
            l = factors[0].z;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int element = threadIdx.x + i * blockDim.x;
                if (element < a.hd) acc[i] = states[element];
            }
        }
#pragma unroll 4
        for (int c = first; c < count; c++) {
            const float4 f = factors[c];
            l = merge_one(l, f.z, f.x, f.y);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int element = threadIdx.x + i * blockDim.x;
                if (element < a.hd) acc[i] = merge_one(acc[i], states[c * pitch + element], f.x, f.y);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int element = threadIdx.x + i * blockDim.x, first = element - lane;
        if (first >= a.hd) break;  // whole warps
        const bool real = element < a.hd;
        const float out = real ? acc[i] / l : 0.0f;
        if (real) a.out[(long long)h * a.hd + element] = out;
        if (st.has_a8) {  // hd is a multiple of 32: a warp is a group
            const A8Scale scale = a8_scale(group_max_u32(f32_bits(out) & 0x7fffffffu, 32));
            const int code = scale.zero ? 0 : a8_code(out, scale.inv);
            const int sum = group_sum_s32(code, 32);
            st.a8.q[h * a.hd + element] = (signed char)code;
            if (lane == 0) {
                st.a8.d[(h * a.hd + first) / 32] = scale.d;
                st.a8.gsum[(h * a.hd + first) / 32] = sum;
            }
        }
    }
}

// Grid: any number of blocks, one for each head at best. Threads: a multiple of 32, at least hd / 2. Dynamic shared: as
// for merge_head.
KERNEL LAUNCH_BOUNDS(256) void FORM(k_attn_merge)(const AttentionStageArgs a) {
    DYNAMIC_SHARED(shared);
    touch_exp_table();
    const int chunks = load_l2(a.attn.pos) / CHUNK + 1;  // as in attention_stage
    wait_for_previous();
    start_next();
    for (int h = blockIdx.x; h < a.attn.nh; h += gridDim.x) merge_head(a, shared, h, chunks);
}
