// Attention over the int8 KV cache, contract section 7, in parallel with the bits of the serial form:
//   scores       integer dots, independent of each other
//   running max  a prefix maximum, associative and exact
//   exponentials independent, once the running max is known
//   sums         one fma chain per (head, element) over the positions of a chunk; it is multiplied by c where the max
//                moved (elsewhere c = 1) ; the sum of exponentials is a chain of its own
// A block takes the query heads of one KV head (or some of them), which share the K and V rows it reads, and one or
// more chunks of 256 positions. Chunks merge left to right: within the block when it walks all of them, otherwise by
// the last block of those heads, from partial states in `work`.
#include "attention_chunk.cuh"
#include "warp_rows.cuh"

// V rows of a chunk on their way to shared memory.
DEVICE void fetch_values(const AttentionArgs &a, const AttentionShared &sh, long long slot0, int kv, int count) {
    const int units = a.hd / 16, rows = blockDim.x / units;  // rows at a time; threads past them do nothing
    const int at = threadIdx.x % units * 16, first = threadIdx.x / units;
    const signed char *const v = a.vq + (slot0 * a.nkv + kv) * a.hd + at;  // i8[.., hd] of position 0
    for (int t = first < rows ? first : count; t < count; t += rows)
        copy_async_16(sh.v8 + t * a.hd + at, v + (long long)t * a.nkv * a.hd);
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

// The chains of one chunk: sums of exponentials and of values, kept in shared memory (keep) or as a partial state.
template <int DIMS, int HPT>
DEVICE void chunk_chains(const AttentionArgs &a, const AttentionShared &sh, const AttentionBlock &b, int chunk, int count,
                         bool keep) {
    const int parts = a.hd / DIMS, values = b.heads / HPT * parts;
    for (int item = threadIdx.x; item < values + b.heads; item += blockDim.x) {
        if (item >= values) {
            const int j = item - values;
            const float l = chunk_sum(sh.s + j * CHUNK, sh.c + j * CHUNK, sh.moved + j * (CHUNK / 32), count);
            if (keep) {
                sh.l[j] = chunk == 0 ? l : merge_one(sh.l[j], l, sh.a[j], sh.b[j]);
            } else {
                float *const state = partial_state(a, chunk, b.m, b.h0 + j);
                state[a.hd] = sh.max[j * CHUNK + count - 1];
                state[a.hd + 1] = l;
            }
            continue;
        }
        const int j = item / parts * HPT, at = DIMS * (item % parts);
        float acc[HPT][DIMS];
        chunk_values<DIMS, HPT>(sh.v8 + at, a.hd, sh.w + j * CHUNK, sh.c + j * CHUNK, sh.moved + j * (CHUNK / 32), count,
                                acc);
#pragma unroll
        for (int h = 0; h < HPT; h++) {
            float *const run = sh.run + (j + h) * a.hd + at;
            float *const state = keep ? run : partial_state(a, chunk, b.m, b.h0 + j + h) + at;
#pragma unroll
            for (int d = 0; d < DIMS; d++)
                state[d] = keep && chunk > 0 ? merge_one(run[d], acc[h][d], sh.a[j + h], sh.b[j + h]) : acc[h][d];
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

    if (b.slot < chunks) {
        quantize_queries(a, sh, a.q + (long long)b.m * a.ld + (long long)b.h0 * a.hd, a.hd, b.heads);
    }
    for (int chunk = b.slot; chunk < chunks; chunk += b.slots) {
        const int begin = chunk * CHUNK;
        const int count = pos + 1 - begin < CHUNK ? pos + 1 - begin : CHUNK;
        const long long slot0 = (long long)a.base[b.m] + begin;
        fetch_values(a, sh, slot0, b.kv, count);
        __syncthreads();  // queries
        chunk_scores(a, sh, slot0, b.kv, count, b.heads);
        __syncthreads();
        chunk_softmax(a, sh, slot0, b.kv, count, b.heads);
#if KESTREL_FAST
        __syncthreads();  // the maxima
#endif
        if (keep && (int)threadIdx.x < b.heads) {
            const float right = sh.max[threadIdx.x * CHUNK + count - 1];
            const float left = chunk == 0 ? MINUS_INFINITY : sh.m[threadIdx.x];
            const float merged = right > left ? right : left;
            sh.a[threadIdx.x] = exp_form(left - merged);
            sh.b[threadIdx.x] = exp_form(right - merged);
            sh.m[threadIdx.x] = merged;
        }
        copy_wait_all();
        __syncthreads();
        // Fewer, longer threads while there are enough of them for half of the block; shorter ones for few heads.
        const int quads = b.heads * a.hd / 4, half = blockDim.x / 2;
        if (b.heads % 2 == 0 && quads >= 2 * half)
            chunk_chains<4, 2>(a, sh, b, chunk, count, keep);
        else
            chunk_chains<2, 1>(a, sh, b, chunk, count, keep);
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
