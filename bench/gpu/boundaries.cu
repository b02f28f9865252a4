// What lies between two dependent stages, without the stages: each step reads the 8 KB that all blocks of the step before
// wrote and writes its share of the next 8 KB. Once as a chain of launches, once as one kernel: with barriers over the grid, with
// a number for each block, with a number for each word, with barriers over clusters of eight blocks. And what it takes to read
// a layer's expert weights, cold.
#include "port.cuh"

#define FLOATS 2048  // exchanged from step to step

struct BoundaryArgs {
    float *rows;          // f32[2, FLOATS], or u64; room for u32[2, 1024] behind f32
    unsigned *counter;    // u32[1], zero
    const uint4 *weights; // of this launch, 16 * blocks * threads * READS bytes
    unsigned *sink;       // u32[1]
    int steps;
    int turn;             // which row is read
    int early;            // 1: the next launch may begin before this one has waited
    int ahead;            // 1: weights are asked for before the wait
};

DEVICE void exchange(const float *in, float *out, float *part) {
    const float4 a = load_l2((const float4 *)in + threadIdx.x), b = load_l2((const float4 *)in + 256 + threadIdx.x);
    const float sum = a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w;
    part[threadIdx.x] = sum;
    __syncthreads();
    const int share = FLOATS / gridDim.x + 1, first = blockIdx.x * share;
    if ((int)threadIdx.x < share && first + threadIdx.x < FLOATS)
        out[first + threadIdx.x] = part[(threadIdx.x + 17) % 256] * 1e-6f;
}

extern "C" __global__ void k_chain(const BoundaryArgs a) {
    __shared__ float part[256];
    if (a.early) start_next();
    wait_for_previous();
    if (!a.early) start_next();
    exchange(a.rows + a.turn * FLOATS, a.rows + (1 - a.turn) * FLOATS, part);
}

extern "C" __global__ void k_empty(const BoundaryArgs a) {
    wait_for_previous();
    start_next();
}

DEVICE void grid_barrier(unsigned *counter, unsigned target) {
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        unsigned seen;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        } while (seen < target);
    }
    __syncthreads();
}

extern "C" __global__ void k_persistent(const BoundaryArgs a) {
    __shared__ float part[256];
    for (int step = 0; step < a.steps; step++) {
        exchange(a.rows + step % 2 * FLOATS, a.rows + (step + 1) % 2 * FLOATS, part);
        grid_barrier(a.counter, (unsigned)((step + 1) * gridDim.x));
    }
}

extern "C" __global__ void k_persistent_empty(const BoundaryArgs a) {
    for (int step = 0; step < a.steps; step++) grid_barrier(a.counter, (unsigned)((step + 1) * gridDim.x));
}

// A row whose floats carry the number of the step that wrote them: u64[2, FLOATS], the number in the upper half. Whoever
// needs a float waits for its number; two rows are enough, for every block writes to each, and only when it has seen all of
// the other.
DEVICE unsigned long long tagged(float v, int step) {
    return (unsigned long long)(unsigned)step << 32 | __float_as_uint(v);
}
DEVICE void load_tagged(const unsigned long long *p, unsigned long long *v) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v[0]), "=l"(v[1]) : "l"(p) : "memory");
}
DEVICE void store_tagged(unsigned long long *p, unsigned long long v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

extern "C" __global__ void k_persistent_tagged(const BoundaryArgs a) {
    __shared__ float part[2][256];
    const int first = blockIdx.x * FLOATS / gridDim.x, end = (blockIdx.x + 1) * FLOATS / gridDim.x;
    for (int step = 0; step < a.steps; step++) {
        const unsigned long long *const in = (unsigned long long *)a.rows + step % 2 * FLOATS + 2 * threadIdx.x;
        unsigned long long v[8];
        bool there = false;
        while (!there) {
#pragma unroll
            for (int i = 0; i < 4; i++) load_tagged(in + 512 * i, v + 2 * i);
            there = true;
#pragma unroll
            for (int i = 0; i < 8; i++) there = there && (step == 0 || v[i] >> 32 == (unsigned)step);
        }
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += __uint_as_float((unsigned)v[i]);
        part[step % 2][threadIdx.x] = sum;
        __syncthreads();
        unsigned long long *const out = (unsigned long long *)a.rows + (step + 1) % 2 * FLOATS;
        if (first + (int)threadIdx.x < end)
            store_tagged(out + first + threadIdx.x, tagged(part[step % 2][(threadIdx.x + 17) % 256] * 1e-6f, step + 1));
    }
}

// A number of the step for each block instead: written behind its share, waited for ahead of the row.
extern "C" __global__ void k_persistent_flags(const BoundaryArgs a) {
    __shared__ float part[256];
    unsigned *const flags = (unsigned *)(a.rows + 2 * FLOATS);
    for (int step = 0; step < a.steps; step++) {
        for (int b = threadIdx.x; b < gridDim.x && step > 0; b += blockDim.x) {
            unsigned seen;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flags + step % 2 * 1024 + b) : "memory");
            } while (seen != (unsigned)step);
        }
        __syncthreads();
        exchange(a.rows + step % 2 * FLOATS, a.rows + (step + 1) % 2 * FLOATS, part);
        __syncthreads();
        if (threadIdx.x == 0)
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flags + (step + 1) % 2 * 1024 + blockIdx.x), "r"(step + 1) : "memory");
    }
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) k_cluster_empty(const BoundaryArgs a) {
    for (int step = 0; step < a.steps; step++) {
        asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

#define READS 26  // 16-byte loads of a thread: 132 x 256 threads read 14.06 MB

extern "C" __global__ void __launch_bounds__(256, 2) k_read(const BoundaryArgs a) {
    __shared__ float part[256];
    uint4 v[READS];
    const uint4 *const from = a.weights + blockIdx.x * blockDim.x * READS + threadIdx.x;
    if (!a.ahead) {
        wait_for_previous();
        start_next();
    }
#pragma unroll
    for (int i = 0; i < READS; i++) v[i] = load_streaming(from + i * blockDim.x);
    if (a.ahead) {
        wait_for_previous();
        start_next();
    }
    exchange(a.rows + a.turn * FLOATS, a.rows + (1 - a.turn) * FLOATS, part);
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < READS; i++) all ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    if (all == 0x12345678u) *a.sink = all;
}

extern "C" __global__ void k_touch(const BoundaryArgs a) {  // brings the weights of k_read to L2
    wait_for_previous();
    start_next();
    const long long bytes = 16ll * gridDim.x * blockDim.x * READS;
    for (long long at = 128ll * (blockIdx.x * blockDim.x + threadIdx.x); at < bytes; at += 128ll * gridDim.x * blockDim.x)
        prefetch_l2((const char *)a.weights + at);
}

// The weights of eight experts by bulk copies: block b % 16 of the sixteen of an expert reads its share of the expert's
// bytes, in `pieces` pieces of `piece` bytes, warps in turn. Dynamic shared: all of them.
struct ExpertReadArgs {
    BoundaryArgs chain;
    const unsigned char *experts;  // u8[experts, expert_bytes]
    const int *ids;                // i32[8]
    long long expert_bytes;
    int pieces, piece;
};

extern "C" __global__ void __launch_bounds__(256, 1) k_expert_read(const ExpertReadArgs a) {
    DYNAMIC_SHARED(shared);
    __shared__ unsigned long long gates[8];
    __shared__ float part[256];
    const int warp = warp_id(), mine = (a.pieces - warp + 7) / 8;
    const long long share = (long long)a.pieces * a.piece;
    const unsigned char *const from =
        a.experts + a.ids[blockIdx.x / 16] * a.expert_bytes + blockIdx.x % 16 * share;
    bulk_open(gates + warp);
    if (!a.chain.ahead) {
        wait_for_previous();
        start_next();
    }
    bulk_expect(gates + warp, mine * a.piece);
    for (int i = warp; i < a.pieces; i += 8)
        bulk_copy(shared + i * a.piece, from + (long long)i * a.piece, a.piece, gates + warp);
    if (a.chain.ahead) {
        wait_for_previous();
        start_next();
    }
    bulk_wait(gates + warp, 0);
    exchange(a.chain.rows + a.chain.turn * FLOATS, a.chain.rows + (1 - a.chain.turn) * FLOATS, part);
}
