// The attention stage of a decode step (M = 1) in two launches: k_attn_stage makes the partial states of all chunks, from
// the raw Q, K and V rows on; k_attn_merge merges them left to right, a block to 32 elements of a head, and quantises the
// result. Two launches, because on a GPU the end of a launch is the cheapest way to wait for all blocks.
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

// Element `first` + lane of head h of the result, `value` over the sum of exponentials, and the a8 of its group, by a warp.
DEVICE void store_result(const AttentionStageArgs &st, int h, int first, float value, float sum) {
    const int hd = st.attn.hd, element = h * hd + first + lane_id();
    const bool real = first + lane_id() < hd;
    const float out = real ? value / sum : 0.0f;
    if (real) st.attn.out[element] = out;
    if (st.has_a8) {  // hd is a multiple of 32
        const A8Scale scale = a8_scale_quick(__reduce_max_sync(FULL_WARP, f32_bits(out) & 0x7fffffffu));
        const int code = scale.zero ? 0 : a8_code(out, scale.inv);
        const int codes = __reduce_add_sync(FULL_WARP, code);
        st.a8.q[element] = (signed char)code;
        if (lane_id() == 0) {
            st.a8.d[element / 32] = scale.d;
            st.a8.gsum[element / 32] = codes;
        }
    }
}

// The results of a unit whose chunk is the only one, from its states in shared memory, f32[heads, hd + 4].
DEVICE void store_unit(const AttentionStageArgs &st, const Unit &u, const float *states) {
    const int hd = st.attn.hd, parts = (hd + 31) / 32;
    int j = 0, part = warp_id();
#pragma unroll 1
    while (true) {
#pragma unroll 1
        for (; part >= parts; part -= parts) j++;
        if (j >= u.heads) break;
        const float *const state = states + j * (hd + 4);
        store_result(st, u.h0 + j, 32 * part, state[32 * part + lane_id() < hd ? 32 * part + lane_id() : 0], state[hd + 1]);
        part += UNIT_WARPS;
    }
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
    const float inverse_hd = 1.0f / (float)a.hd;
    const bool maker = unit_makers(HS) == 0 || warp_id() < unit_makers(HS);  // of rows, which come from the launch before
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
            float *states = u.chunks == 1 ? sh.s : partial_state(a, chunk, 0, u.h0);  // alone, in the place of its scores
            settle(states);  // ahead of the wait
            unit_fetch(a, sh, 16 * W, quads, slot0, u.kv, cached);
            float ks = 0.0f, vs = 0.0f;
            if ((int)threadIdx.x < cached) {
                const long long row = (slot0 + threadIdx.x) * a.nkv + u.kv;
                ks = load_l2(a.ks + row);
                vs = load_l2(a.vs + row);
            }
            if (chunk == u.slot) {
                const bool has_new =
                    u.slots == u.chunks ? u.slot == u.chunks - 1 : (u.chunks - 1 - u.slot) % u.slots == 0;
                const int rows = has_new ? HS + 2 : HS;
                RowSource source = unit_row_source<W / 4>(st, u, HS, warp_id(), rows);
                settle(source.at);  // ahead of the wait for what lies there
                settle(source.has);
                if (!waited) {
                    unit_angles(st.rope, pos, sh.angle);
                    __syncthreads();
                    if (maker) {
                        start_next();
                        wait_for_previous();
                        waited = true;
                    }
                }
                RowValues<W / 4> x = unit_row_load<W / 4>(source, a.hd);
#pragma unroll 1
                for (int row = warp_id(); row < rows; row += UNIT_WARPS) {
                    RowWeights<W / 4> weights = first_weights;
                    if (row >= UNIT_WARPS) {
                        weights = unit_row_weights<W / 4>(st, HS, row);
                        x = unit_row_load<W / 4>(unit_row_source<W / 4>(st, u, HS, row, rows), a.hd);
                    }
                    unit_row(st, sh, u, HS, row, x, weights, inverse_hd, t_new, u.slot == 0, has_new && u.first_of_kv);
                }
            }
            if ((int)threadIdx.x < cached) sh.ks[threadIdx.x] = ks;  // not earlier: it may take long to come
            if ((int)threadIdx.x != t_new) sh.vs[threadIdx.x] = vs;
            unit_transpose(sh, 16 * W, a.hd, quads, cached);
            if (!waited) {  // V is turned ahead of the wait
                start_next();
                wait_for_previous();
                waited = true;
            }
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
            if (HS == 1) {
                unit_softmax_one(sh, count, unit_score(sh, a.hd, threadIdx.x));
            } else {
                unit_scores<W>(sh, HS, a.hd, count);
                __syncthreads();
                unit_softmax_many(sh, HS, count, (count + UNIT_STEP - 1) / UNIT_STEP * UNIT_STEP);
            }
            __syncthreads();
            unit_states<16 * W>(a, sh, u, HS, count, states);
            __syncthreads();
            if (u.chunks == 1) {
                store_unit(st, u, sh.s);
                if (item + blocks < groups) __syncthreads();  // the next unit's squares take the place of these states
            }
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

// Four chunks of a merge: factors of what is merged and of the chunk, the chunk's sum; one element of its state.
struct MergeGroup {
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
    start_next();  // ahead of the wait: see port.cuh
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
        if (own < count) {
            // One factor is the exponential of the difference, the other exp(0), or NaN of an infinity.
            const float e = exp_form(-fabsf(right - before));
            const bool moved = right > before;
            const float larger = moved ? right : before;
            const float one = fabsf(larger) < f32_from_bits(KESTREL_INF_BITS) ? 1.0f : f32_from_bits(KESTREL_NAN_BITS);
            factors[own] = make_float4(moved ? e : one, moved ? one : e, sum, 0.0f);
        }
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
            MergeGroup even, odd;
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
    if (warp_id() == 0) store_result(st, h, first, acc, l);
}

// Grid: along x a block to every 32 elements of a head, along y the heads. Threads: a multiple of 32. Dynamic shared: as for
// merge_part.
KERNEL LAUNCH_BOUNDS(256) void FORM(k_attn_merge)(const AttentionStageArgs a) {
    DYNAMIC_SHARED(shared);
    touch_exp_table();
    const int chunks = load_l2(a.attn.pos) / CHUNK + 1;  // as in attention_stage
    if (chunks == 1) {  // its units have stored the result themselves
        start_next();
        wait_for_previous();
        return;
    }
    merge_part(a, shared, blockIdx.y, blockIdx.x, chunks);
}
