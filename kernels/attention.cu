// Attention over the int8 KV cache, contract section 7. A block takes the query heads of one KV head (or some of them), which
// share the K and V rows it reads, and one or more chunks of 256 positions. Of a chunk the scores are made by all warps, the
// exponentials by a warp to a head, the sums over V by a warp to 16 elements. Chunks merge left to right: within the block when
// it walks all of them, otherwise by the last block of those heads, from partial states in `work`.
#include "attention_chunk.cuh"
#include "warp_rows.cuh"

// V rows of a chunk and their scales on their way to shared memory.
DEVICE void fetch_values(const AttentionArgs &a, const AttentionShared &sh, long long slot0, int kv, int count) {
    const int units = a.hd / 16, rows = blockDim.x / units;  // rows at a time; threads past them do nothing
    const int at = threadIdx.x % units, first = threadIdx.x / units;
    const signed char *const v = a.vq + (slot0 * a.nkv + kv) * a.hd + 16 * at;  // i8[.., hd] of position 0
    for (int t = first < rows ? first : count; t < count; t += rows)
        copy_async_16(sh.v8 + row_place(a.hd, t, at), v + (long long)t * a.nkv * a.hd);
    for (int t = threadIdx.x; t < CHUNK; t += blockDim.x) sh.vs[t] = t < count ? a.vs[(slot0 + t) * a.nkv + kv] : 0.0f;
}

// What a block computes. blockIdx.y names a KV head and a slice of its query heads. While a row has few chunks, the
// blocks along x split that slice further, so that more of them have work; the rest of x are the slots that share the
// chunks.
struct AttentionBlock {
    int m, kv, h0, heads;  // row, KV head, first query head, query heads (0: nothing to do)
    int first_of_kv;       // h0 is the first head of its KV head
    int slot, slots;       // takes chunks slot, slot + slots, ...
    int counter;           // of the blocks that share a merge
};

DEVICE AttentionBlock attention_block_of(const AttentionArgs &a, int chunks) {
    AttentionBlock b;
    const int per_kv = a.nh / a.nkv, slices = gridDim.y / a.nkv, slice_heads = (per_kv + slices - 1) / slices;
    int split = 1;
    while (split * 2 < slice_heads && chunks * split * 2 <= (int)gridDim.x) split *= 2;  // to two heads at least
    const int part_heads = (slice_heads + split - 1) / split, part = blockIdx.x % split;
    b.m = blockIdx.z;
    b.kv = blockIdx.y / slices;
    b.slots = gridDim.x / split;
    b.slot = blockIdx.x / split;
    const int in_slice = part * part_heads, first = blockIdx.y % slices * slice_heads + in_slice;
    const int left_in_slice = slice_heads - in_slice, left = per_kv - first;
    b.heads = part_heads < left_in_slice ? part_heads : left_in_slice;
    b.heads = b.heads < left ? b.heads : left;
    if (b.heads < 0 || b.slot >= b.slots) b.heads = 0;
    b.h0 = b.kv * per_kv + first;
    b.first_of_kv = first == 0;
    b.counter = b.m * a.nh + b.h0;  // heads of a block are its own
    return b;
}

// Scores to codes of V's weights, by a warp to a head, whose maximum and sum go to shared memory, merged (keep), or to a partial
// state.
DEVICE void chunk_softmax(const AttentionArgs &a, const AttentionShared &sh, const AttentionBlock &b, int chunk, bool keep) {
    for (int j = warp_id(); j < b.heads; j += warp_count()) {
        const HeadState state = soften_head(sh.s + j * CHUNK, sh.vs, sh.exp_table, codes_at(sh.codes, j, 0));
        if (lane_id() == 0) {
            sh.d[j] = state.d;
            if (!keep) {
                *(float2 *)(partial_state(a, chunk, b.m, b.h0 + j) + a.hd) = make_float2(state.m, state.l);
            } else if (chunk == 0) {
                sh.m[j] = state.m;
                sh.l[j] = state.l;
            } else {
                const float left = sh.m[j], merged = state.m > left ? state.m : left;
                sh.a[j] = exp_form(left - merged);
                sh.b[j] = exp_form(state.m - merged);
                sh.m[j] = merged;
                sh.l[j] = merge_one(sh.l[j], state.l, sh.a[j], sh.b[j]);
            }
        }
        __syncwarp();
    }
}

// Sums over V of one chunk, likewise, by a warp to 16 elements of eight heads at a time.
DEVICE void chunk_values(const AttentionArgs &a, const AttentionShared &sh, const AttentionBlock &b, int chunk, bool keep) {
    const int group = lane_id() / 4, part = lane_id() % 4;
    for (int unit = warp_id(); unit < a.hd / 16; unit += warp_count()) {
        ValueTile tile;
        tile.load(sh.v8, a.hd, unit);
        for (int j0 = 0; j0 < b.heads; j0 += 8) {
            int dots[4];
            tile.sums(codes_at(sh.codes, j0, 0), dots);
            const int j = j0 + group, at = 16 * unit + 4 * part;
            if (j < b.heads) {
                float4 acc = scaled_sums(dots, sh.d[j]);
                float4 *const run = (float4 *)(sh.run + j * a.hd + at);
                if (keep && chunk > 0) acc = merge_four(*run, acc, sh.a[j], sh.b[j]);
                *(keep ? run : (float4 *)(partial_state(a, chunk, b.m, b.h0 + j) + at)) = acc;
            }
        }
    }
}

DEVICE void attention_block(const AttentionArgs &a, unsigned char *shared) {
    const int pos = a.pos[blockIdx.z], chunks = pos / CHUNK + 1;
    const AttentionBlock b = attention_block_of(a, chunks);
    const bool single = chunks == 1;               // nothing to merge
    const bool keep = single || b.slots == 1;      // this block merges as it goes
    if (b.heads == 0 || (single && b.slot > 0)) return;  // the whole block
    const AttentionShared sh = attention_shared(shared, b.heads, a.hd);

    copy_exp_table(sh.exp_table);
    if (b.slot < chunks) quantize_queries(a, sh, a.q + (long long)b.m * a.ld + (long long)b.h0 * a.hd, a.hd, b.heads);
    for (int chunk = b.slot; chunk < chunks; chunk += b.slots) {
        const int begin = chunk * CHUNK;
        const int count = pos + 1 - begin < CHUNK ? pos + 1 - begin : CHUNK;
        const long long slot0 = (long long)a.base[b.m] + begin;
        fetch_values(a, sh, slot0, b.kv, count);
        __syncthreads();  // queries
        chunk_scores(a, sh, slot0, b.kv, count, b.heads);
        __syncthreads();
        chunk_softmax(a, sh, b, chunk, keep);
        copy_wait_all();
        __syncthreads();
        chunk_values(a, sh, b, chunk, keep);
        __syncthreads();
    }

    if (!keep) {
        // The last block of these heads to arrive sees every partial state and merges them.
        if (!last_block_to_arrive((unsigned *)a.work + b.counter, b.slots, sh.arrived)) return;
        merge_partials(a, sh, b.m, b.h0, b.heads, chunks);
    }
    for (int i = threadIdx.x; i < b.heads * a.hd; i += blockDim.x) {
        const float out = sh.run[i] / sh.l[i / a.hd];
        sh.run[i] = out;
        a.out[((long long)b.m * a.nh + b.h0) * a.hd + i] = out;
    }
}

// Grid (chunk slots, nkv * slices, M); hd is a multiple of 16 up to 256. Dynamic shared: AttentionShared.
#if KESTREL_FAST
#define k_attn_decode_online k_attn_fast
#endif
KERNEL LAUNCH_BOUNDS(512) void k_attn_decode_online(const AttentionArgs a) {
    DYNAMIC_SHARED(shared);
    attention_block(a, shared);
}
