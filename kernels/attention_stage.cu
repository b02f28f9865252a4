// The attention stage of a decode step (M = 1). A block makes the partial states of a chunk, or of several, for a few query
// heads of one KV head (a head group), from the raw Q, K and V rows on. The last block of a head group to be done merges its
// chunks left to right and quantises the result: nobody waits for another block, and no launch has to end before the next one
// merges. Where chunks are many, few blocks would have much to read: then attention_merge.cu merges in a launch of its own.
#include "attention_states.cuh"
#include "warp_rows.cuh"

// Query heads of a unit, as a power of two: fewer, and so more units, as long as every unit finds a block of its own. Any
// cut gives the same bits.
DEVICE int unit_heads_log2(int per_kv, int nkv, int chunks, int blocks) {
    int log2 = 0;
    while ((1 << log2) < UNIT_HEADS && (1 << log2) < per_kv && nkv * ((per_kv + (1 << log2) - 1) >> log2) * chunks > blocks)
        log2++;
    return log2;
}

// How the work is cut.
struct Cut {
    int HS, per_kv, parts;  // heads of a unit, of a KV head; head groups of a KV head
    int groups, slots;      // head groups of all; items of each: item i is of group i % groups, slot i / groups
};

DEVICE Cut cut_of(const AttentionArgs &a, int chunks, int blocks) {
    Cut cut;
    cut.per_kv = whole_quotient(a.nh, a.nkv);
    const int log2 = unit_heads_log2(cut.per_kv, a.nkv, chunks, blocks);
    cut.HS = 1 << log2;
    cut.parts = (cut.per_kv + cut.HS - 1) >> log2;
    cut.groups = a.nkv * cut.parts;
    cut.slots = blocks >= cut.groups * chunks ? chunks : blocks < cut.groups ? 1 : whole_quotient(blocks, cut.groups);
    return cut;
}

DEVICE void take_item(Unit &u, const Cut &cut, int item) {
    u.slot = whole_quotient(item, cut.groups);
    const int group = item - u.slot * cut.groups;
    u.kv = whole_quotient(group, cut.parts);
    const int first = (group - u.kv * cut.parts) * cut.HS;  // query head of the KV head
    u.h0 = u.kv * cut.per_kv + first;
    u.heads = cut.per_kv - first < cut.HS ? cut.per_kv - first : cut.HS;
    u.stores_q = u.slot == 0;
    u.stores_kv = first == 0;
}

#define MERGE_GROUP 4
#define MERGE_CHUNKS (MERGE_PITCH - MERGE_GROUP)  // of a round: what lies behind the last one is read, too

// Neighbouring chunks of a merge: four elements of their states.
struct MergeGroup {
    float4 x[MERGE_GROUP];

    // The first `count` of them, on their way from now on; states: of the first, `stride` floats from the next, and then
    // behind the group.
    DEVICE_MEMBER void load(const float *&states, long long stride, int count) {
#pragma unroll
        for (int i = 0; i < MERGE_GROUP; i++) {
            x[i] = load_l2_where(i < count, (const float4 *)states);
            states += stride;
            settle(states);  // a sum each, where the compiler would make products
        }
    }
    // factors: of the first, as merge_factors leaves them. Those of all are read ahead of the chain.
    DEVICE_MEMBER void merge(const float4 *factors, int count, float4 &acc, float &l) const {
#pragma unroll
        for (int i = 0; i < MERGE_GROUP; i++) {
            const float4 f = factors[i], merged = merge_four(acc, x[i], f.x, f.y);
            const float sum = merge_one(l, f.z, f.x, f.y);
            if (i < count) acc = merged, l = sum;
        }
    }
};

// Factors of `count` chunks of a head: of what is merged before the chunk and of the chunk itself; and its sum. By a warp, a
// lane to a chunk. m: the maximum of all chunks before, and then of these, too. end: maximum and sum of this lane's first
// chunk, from end_at, `stride` floats from those of the next.
DEVICE void merge_factors(float2 end, const float *end_at, long long stride, int count, float &m, float4 *factors) {
    const int lane = lane_id();
#pragma unroll 1
    for (int c = lane; c - lane < count; c += 32) {
        const bool real = c < count;
        const float right = real ? end.x : MINUS_INFINITY, sum = end.y;
        end_at += 32 * stride;
        if (c + 32 < count) end = load_l2((const float2 *)end_at);
        const float before = merged_before(right, m);
        if (real) factors[c] = merge_factors_of(before, right, sum);
    }
}

// Merges the states of all chunks of the unit's heads, left to right, into one: f32[heads, hd + 4], without maxima. A warp
// works out the factors of a head while the states travel, each straight to the thread that merges it, a thread to four
// elements. Chunks go by in rounds, and in two groups that take turns, both on their way at a time. A barrier lies ahead of this.
template <int W>
DEVICE void merge_chunks(const AttentionArgs &a, const UnitShared &sh, const Unit &u, int hd, float *merged) {
    const int pitch = hd + 4, items = u.heads * (hd / 4);
    const long long stride = (long long)a.nh * pitch;  // floats from chunk to chunk
    float4 *const factors = sh.factors;                // [heads, MERGE_PITCH]
    const int made = UNIT_WARPS - 1 - warp_id();       // the head whose factors this warp makes: the first ones have states
    const float *const states = partial_state(a, 0, 0, u.h0);
#pragma unroll 1
    for (int start = 0; start < 32 * W && start < items; start += UNIT_THREADS) {  // once, if W is 8
        const unsigned item = start + threadIdx.x, j = item / (unsigned)(hd / 4), at = 4 * item - j * hd;
        const float *end_at = states + made * pitch + hd + lane_id() * stride, *x_at = states + j * pitch + at;
        float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float l = 0.0f, m = MINUS_INFINITY;
#pragma unroll 1
        for (int c0 = 0; c0 < u.chunks; c0 += MERGE_CHUNKS) {
            const int count = u.chunks - c0 < MERGE_CHUNKS ? u.chunks - c0 : MERGE_CHUNKS;
            float2 end = make_float2(0.0f, 0.0f);
            if (made < u.heads && lane_id() < count) end = load_l2((const float2 *)end_at);
            const float4 *f = factors + j * MERGE_PITCH;
            const float *next = x_at;
            int left = (int)item < items ? count : 0;
            if (c0 == 0 && left > 0) {  // the first chunk is taken as it is
                acc = load_l2((const float4 *)next);
                next += stride;
                f++;
                left--;
            }
            MergeGroup even, odd;
            even.load(next, stride, left);
            odd.load(next, stride, left - MERGE_GROUP);
            if (c0 > 0 || start > 0) __syncthreads();  // all have read the factors before these
            if (made < u.heads) merge_factors(end, end_at, stride, count, m, factors + made * MERGE_PITCH);
            end_at += MERGE_CHUNKS * stride;
            x_at += MERGE_CHUNKS * stride;
            __syncthreads();
            if (c0 == 0 && (int)item < items) l = f[-1].z;
#pragma unroll 1
            while (left > 0) {
                even.merge(f, left, acc, l);
                left -= MERGE_GROUP;
                if (left <= 0) break;
                even.load(next, stride, left - MERGE_GROUP);
                odd.merge(f + MERGE_GROUP, left, acc, l);
                left -= MERGE_GROUP;
                odd.load(next, stride, left - MERGE_GROUP);
                f += 2 * MERGE_GROUP;
            }
        }
        if ((int)item < items) {
            *(float4 *)(merged + j * pitch + at) = acc;
            if (at == 0) merged[j * pitch + hd + 1] = l;
        }
    }
    __syncthreads();
}

// What is left when a block has made the states of all its items: of each head group the last block to get here merges the
// chunks. Behind all of the units, so that neither takes registers from the other. u, item: the block's last one.
template <int W>
DEVICE void merge_items(const AttentionStageArgs &st, const UnitShared &sh, Unit u, int hd, int item, int blocks) {
#pragma unroll 1
    for (;;) {
        if (last_block_to_arrive((unsigned *)st.attn.work + u.h0, u.slots, sh.arrived)) {
            merge_chunks<W>(st.attn, sh, u, hd, sh.s);
            store_unit(st, u, hd, sh.s);
        }
        item -= blocks;
        if (item < 0) break;
        settle(u.chunks);  // the cut is made anew: kept, it would take registers from the merge
        take_item(u, cut_of(st.attn, u.chunks, blocks), item);
    }
}

// HD: the head size, where it is known. W: words of a head of 16 * W elements.
template <int W, int HD> DEVICE void attention_stage(const AttentionStageArgs &st, unsigned char *shared, int block, int blocks) {
    const AttentionArgs &a = st.attn;
    const int hd = HD != 0 ? HD : a.hd;
    const UnitShared sh = unit_shared(shared, hd);
    copy_exp_table(sh.exp_table);
    Unit u;
    u.pos = load_l2(a.pos);  // of an earlier step, like the cache: allowed ahead of the wait
    u.chunks = u.pos / CHUNK + 1;
    u.base = load_l2(a.base);
    const Cut cut = cut_of(a, u.chunks, blocks);
    u.slots = cut.slots;
    UnitStart start = {cut.HS, false};
    int item = block;
#pragma unroll 1
    for (; item < cut.groups * cut.slots; item += blocks) {  // once, if there are blocks enough
        take_item(u, cut, item);
        const auto states_of = [&](int chunk) {
            return u.chunks == 1 ? sh.s : partial_state(a, chunk, 0, u.h0);  // alone, in the place of its scores
        };
        unit_chunks<W, true>(st, sh, u, hd, start, states_of, [](int) {});
        if (u.chunks == 1) {
            store_unit(st, u, hd, sh.s);
            if (item + blocks < cut.groups) __syncthreads();  // the next unit's squares take the place of these states
        }
    }
    if (st.merges && u.chunks > 1 && item > block) merge_items<W>(st, sh, u, hd, item - blocks, blocks);
}

// 256 threads. Dynamic shared: UnitShared, with st.ahead i8[CHUNK, hd] more. For head sizes of 128, up to 128, and up to 256.
KERNEL LAUNCH_BOUNDS(UNIT_BOUND, 2) void FORM(k_attn_stage_128)(const AttentionStageArgs a) {
    DYNAMIC_SHARED(shared);
    attention_stage<8, 128>(a, shared, blockIdx.x, gridDim.x);
}
KERNEL LAUNCH_BOUNDS(UNIT_BOUND, 2) void FORM(k_attn_stage)(const AttentionStageArgs a) {
    DYNAMIC_SHARED(shared);
    attention_stage<8, 0>(a, shared, blockIdx.x, gridDim.x);
}
KERNEL LAUNCH_BOUNDS(UNIT_THREADS, 1) void FORM(k_attn_stage_wide)(const AttentionStageArgs a) {
    DYNAMIC_SHARED(shared);
    attention_stage<16, 0>(a, shared, blockIdx.x, gridDim.x);
}
