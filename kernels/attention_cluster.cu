// The attention stage of a decode step (M = 1) for a few chunks, in thread block clusters: the blocks of a cluster make the
// states of the chunks of a few query heads of one KV head (a head group), hand them to each other through distributed shared
// memory, and each merges a share of the group's elements and stores the result and its a8. Other cases: attention_stage.cu,
// attention_merge.cu.
#include "attention_states.cuh"

#define SHARE_PITCH 36  // f32 of a chunk in a part: 32 elements, maximum, sum of exponentials, two unused

// A part is 32 elements of a head, or what is left of it. Part q of a group, those of its first head first, is merged by warp
// q / size of block q % size.
struct GroupParts {
    int of_head, all, size, most;  // most: parts of a block
    float *shares;                 // f32[chunks, most, SHARE_PITCH], in every block

    DEVICE_MEMBER GroupParts(float *memory, int heads, int hd, int blocks) {
        of_head = (hd + 31) / 32, all = heads * of_head, size = blocks;
        most = whole_quotient(all + size - 1, size);
        shares = memory;
    }
    DEVICE_MEMBER float *share(int chunk, int q) const {
        return shares + (chunk * most + whole_quotient(q, size)) * SHARE_PITCH;
    }

    // What hand_over sends to block `side` of a chunk, by all blocks together.
    DEVICE_MEMBER int bytes(int side, int hd) const {
        int quads = (all - side + size - 1) / size * (SHARE_PITCH / 4);
        if (hd % 32 != 0) {
#pragma unroll 1
            for (int q = side; q < all; q += size)
                if ((q + 1) % of_head == 0) quads -= (32 - hd % 32) / 4;  // the last part of a head
        }
        return 16 * quads;
    }

    // A chunk's states, f32[heads, hd + 4] in shared memory, to the blocks that merge them.
    DEVICE_MEMBER void hand_over(const float *states, int chunk, int hd, unsigned long long *gate) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < all * (SHARE_PITCH / 4); i += UNIT_THREADS) {
            const int q = i / (SHARE_PITCH / 4), quad = i - q * (SHARE_PITCH / 4), j = q / of_head;
            const int at = quad == 8 ? hd : 32 * (q - j * of_head) + 4 * quad;  // m, l behind the elements
            const float4 four = *(const float4 *)(states + j * (hd + 4) + (at < hd ? at : hd));
            if (at < hd || quad == 8) cluster_send((float4 *)share(chunk, q) + quad, q % size, four, gate);
        }
    }

    // Merges the chunks of this warp's parts, left to right, lanes being chunks, then elements, and stores the results.
    DEVICE_MEMBER void merge(const AttentionStageArgs &st, int hd, int h0, int chunks, int side) const {
        const int lane = lane_id();
#pragma unroll 1
        for (int q = side + size * warp_id(); q < all; q += size * UNIT_WARPS) {
            const int stride = most * SHARE_PITCH, j = q / of_head;
            const float *const first = share(0, q);
            const float *const end = first + (lane < chunks ? lane : 0) * stride + 32;
            float m = MINUS_INFINITY;
            const float right = lane < chunks ? end[0] : MINUS_INFINITY, before = merged_before(right, m);
            const float4 factor = merge_factors_of(before, right, end[1]);
            float acc = first[lane], l = first[33];
#pragma unroll 1
            for (int c = 1; c < chunks; c++) {
                const float a = __shfl_sync(FULL_WARP, factor.x, c), b = __shfl_sync(FULL_WARP, factor.y, c);
                acc = merge_one(acc, first[c * stride + lane], a, b);
                l = merge_one(l, __shfl_sync(FULL_WARP, factor.z, c), a, b);
            }
            store_result(st, hd, h0 + j, 32 * (q - j * of_head), acc, l);
        }
    }
};

// HD: the head size, where it is known. W: words of a head of 16 * W elements. gate: of the shares of all chunks.
template <int W, int HD>
DEVICE void attention_cluster(const AttentionClusterArgs &c, unsigned char *shared, unsigned long long *gate, int block) {
    const AttentionStageArgs &st = c.stage;
    const AttentionArgs &a = st.attn;
    const int hd = HD != 0 ? HD : a.hd, HS = c.heads;
    const int size = cluster_size(), side = cluster_rank(), cluster = whole_quotient(block, size);
    const UnitShared sh = unit_shared(shared, hd);
    if (warp_id() == 0) cluster_open(gate);
    cluster_begin();
    copy_exp_table(sh.exp_table);
    const int per_kv = whole_quotient(a.nh, a.nkv), groups = whole_quotient(per_kv + HS - 1, HS);
    Unit u;
    u.pos = load_l2(a.pos);  // of an earlier step, like the cache: allowed ahead of the wait
    u.chunks = u.pos / CHUNK + 1;
    u.base = load_l2(a.base);
    u.kv = whole_quotient(cluster, groups);
    const int head = (cluster - u.kv * groups) * HS;
    u.h0 = u.kv * per_kv + head;
    u.heads = per_kv - head < HS ? per_kv - head : HS;
    u.slot = side;
    u.slots = size;
    u.stores_q = side == 0;
    u.stores_kv = head == 0;
    const GroupParts parts((float *)(shared + c.behind), u.heads, hd, size);
    if (warp_id() == 0) cluster_expect(gate, u.chunks * parts.bytes(side, hd));
    UnitStart start = {HS, false};
    bool begun = false;  // the other blocks have
    unit_chunks<W, false>(st, sh, u, hd, start, [&](int) { return sh.s; }, [&](int chunk) {
        if (!begun) cluster_wait();
        begun = true;
        parts.hand_over(sh.s, chunk, hd, gate);
        __syncthreads();  // the next chunk's scores take the place of these states
    });
    if (!begun) {  // more blocks than chunks
        start_next();
        wait_for_previous();
        cluster_wait();
    }
    cluster_receive(gate, 0);  // a block that has all its shares may end: none of its own are waited for
    parts.merge(st, hd, u.h0, u.chunks, side);
}

// 256 threads. Dynamic shared: UnitShared, the shares of GroupParts. For head sizes of 128 and up to 128.
KERNEL LAUNCH_BOUNDS(UNIT_BOUND, 2) void FORM(k_attn_cluster_128)(const AttentionClusterArgs a) {
    __shared__ unsigned long long gate;
    DYNAMIC_SHARED(shared);
    attention_cluster<8, 128>(a, shared, &gate, blockIdx.x);
}
KERNEL LAUNCH_BOUNDS(UNIT_BOUND, 2) void FORM(k_attn_cluster)(const AttentionClusterArgs a) {
    __shared__ unsigned long long gate;
    DYNAMIC_SHARED(shared);
    attention_cluster<8, 0>(a, shared, &gate, blockIdx.x);
}
