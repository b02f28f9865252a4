// The end of a step: the greedy choice (contract section 10), alone or with the final norm and the head matrix.
#include "q4_stream.cuh"

// The better of two (value, index): larger value, then lower index. Order-free, so any reduction tree gives the same.
DEVICE void take_better(float &value, int &index, float other, int other_index) {
    if (other_index >= 0 && (index < 0 || other > value || (other == value && other_index < index))) {
        value = other;
        index = other_index;
    }
}

// Best value and index, and the largest magnitude, over the block; the result is in thread 0. Ends with a barrier.
DEVICE void block_best(float &value, int &index, unsigned &magnitude) {
    __shared__ float values[32];
    __shared__ int indices[32];
    __shared__ unsigned largest[32];
    magnitude = group_max_u32(magnitude, 32);
    for (int step = 16; step > 0; step >>= 1) {
        const float other = __shfl_xor_sync(FULL_WARP, value, step);
        const int other_index = __shfl_xor_sync(FULL_WARP, index, step);
        take_better(value, index, other, other_index);
    }
    if (lane_id() == 0) {
        values[warp_id()] = value;
        indices[warp_id()] = index;
        largest[warp_id()] = magnitude;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < warp_count(); w++) {
            take_better(value, index, values[w], indices[w]);
            magnitude = largest[w] > magnitude ? largest[w] : magnitude;
        }
    }
    __syncthreads();
}

#if !KESTREL_FAST

#define ARGMAX_ROWS 8     // rows and blocks of a row that a launch of several blocks may have; kestrel/launch.py knows
#define ARGMAX_BLOCKS 64  // them, too

// What the blocks of a row found, and how many of them are done: zero between launches, which never overlap.
static __device__ float argmax_value[ARGMAX_ROWS][ARGMAX_BLOCKS];
static __device__ int argmax_index[ARGMAX_ROWS][ARGMAX_BLOCKS];
static __device__ unsigned argmax_magnitude[ARGMAX_ROWS][ARGMAX_BLOCKS];
static __device__ unsigned argmax_arrived[ARGMAX_ROWS];

// Grid (blocks of a row, rows), rows strided; blockDim.x a multiple of 32. The last block of a row to finish joins what
// all of them found. -1 when any logit of the row is NaN or infinite.
KERNEL LAUNCH_BOUNDS(1024) void k_argmax(const ArgmaxArgs a) {
    __shared__ unsigned arrived;
    wait_for_previous();
    start_next();
    for (int m = blockIdx.y; m < a.M; m += gridDim.y) {
        const float *const logits = a.logits + (long long)m * a.V;  // f32[V]
        float value = 0.0f;
        int index = -1;
        unsigned magnitude = 0;  // of the largest |logit|, as bits: tells whether all are finite
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < a.V; i += gridDim.x * blockDim.x) {
            const float v = logits[i];
            const unsigned u = f32_bits(v) & 0x7fffffffu;
            magnitude = u > magnitude ? u : magnitude;
            take_better(value, index, v, i);
        }
        block_best(value, index, magnitude);
        if (gridDim.x > 1) {
            const int slot = blockIdx.y;
            if (threadIdx.x == 0) {
                argmax_value[slot][blockIdx.x] = value;
                argmax_index[slot][blockIdx.x] = index;
                argmax_magnitude[slot][blockIdx.x] = magnitude;
            }
            if (!last_block_to_arrive(&argmax_arrived[slot], gridDim.x, &arrived)) continue;
            value = 0.0f;
            index = -1;
            magnitude = 0;
            for (int b = threadIdx.x; b < (int)gridDim.x; b += blockDim.x) {
                take_better(value, index, load_l2(&argmax_value[slot][b]), load_l2(&argmax_index[slot][b]));
                const unsigned other = load_l2(&argmax_magnitude[slot][b]);
                magnitude = other > magnitude ? other : magnitude;
            }
            block_best(value, index, magnitude);
        }
        if (threadIdx.x == 0) a.ids[m] = magnitude >= KESTREL_INF_BITS ? -1 : index;
    }
}

#endif

#define HEAD_BLOCKS 1024  // of a launch, at most; kestrel/stages/matmul.py knows it, too

// What the blocks of a head found, and how many of them are done: zero between launches, which never overlap.
static __device__ float head_value[HEAD_BLOCKS];
static __device__ int head_index[HEAD_BLOCKS];
static __device__ unsigned head_magnitude[HEAD_BLOCKS];
static __device__ unsigned head_arrived;

// Logits, and the best of those that this lane has stored.
struct BestRows {
    float *y;
    float value;
    int index;           // -1: none yet
    unsigned magnitude;  // of the largest |logit|, as bits

    DEVICE_MEMBER void open(const RowUnit &, int) {}
    DEVICE_MEMBER void close(const RowUnit &at, int row, float mine) {
        if ((unsigned)row >= (unsigned)at.rows) return;
        const int n = at.out + row;
        y[n] = mine;
        const unsigned u = f32_bits(mine) & 0x7fffffffu;
        magnitude = u > magnitude ? u : magnitude;
        take_better(value, index, mine, n);
    }
};

// The best of the head's row from those of all threads: the last block to finish joins what all of them found.
DEVICE void join_best(const HeadArgs &a, BestRows &best, int block, int blocks, unsigned *arrived) {
    bool joined = blocks == 1;
    while (true) {
        block_best(best.value, best.index, best.magnitude);
        if (joined) break;
        if (threadIdx.x == 0) {
            head_value[block] = best.value;
            head_index[block] = best.index;
            head_magnitude[block] = best.magnitude;
        }
        if (!last_block_to_arrive(&head_arrived, blocks, arrived)) return;
        best.value = 0.0f;
        best.index = -1;
        best.magnitude = 0;
        for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
            take_better(best.value, best.index, load_l2(&head_value[b]), load_l2(&head_index[b]));
            const unsigned other = load_l2(&head_magnitude[b]);
            best.magnitude = other > best.magnitude ? other : best.magnitude;
        }
        joined = true;
    }
    if (threadIdx.x == 0) a.argmax.ids[0] = best.magnitude >= KESTREL_INF_BITS ? -1 : best.index;
}

// Norm, head matrix and greedy choice of one row. Every block norms the row for itself while its first weights travel, and
// keeps the best of its logits.
template <int U, int R, int FORMAT>
DEVICE void head(const HeadArgs &a, int block, int blocks, unsigned char *shared, unsigned *arrived) {
    const NormShared sh = norm_shared(shared, a.norm.d);
    const A8Row in = {sh.q, sh.d, sh.gsum};
    WarpUnits<WarpRows<U, R, FORMAT>> units;
    units.begin(a.mm, block, blocks);
    if (FORMAT == KESTREL_Q8LOCAL || a.has_a8) {
        block_norm_a8(a.norm, a.a8, 0, sh, FORMAT != KESTREL_Q8LOCAL, norm_part(a.norm.d, block, blocks));
    } else {
        block_rms_norm(a.norm.x, a.norm.spread, a.norm.w, a.norm.d, a.norm.eps, sh);
        for (int i = block * blockDim.x + threadIdx.x; i < a.norm.d; i += blocks * blockDim.x) a.norm.out[i] = sh.x[i];
    }
    BestRows best = {a.mm.y, 0.0f, -1, 0};
    units.finish(a.mm, in, sh.x, best);
    join_best(a, best, block, blocks, arrived);
}

// The same of q4local or q8local rows of whole steps, CODES bytes to a group.
template <int CODES>
DEVICE void head_stream(const HeadArgs &a, int block, int blocks, unsigned char *shared, unsigned *arrived) {
    MatrixStream<4, CODES> stream(a.mm);
    SplitRow in;
    float *const terms = (float *)in.open(stream.begin(shared, a.stream, block, blocks), a.norm.d);
    const NormPart part = norm_part(a.norm.d, block, blocks);
    norm_a8_row<1>(a.norm, a.a8, terms, in, part);
    BestRows best = {a.mm.y, 0.0f, -1, 0};
    stream.finish(in, best);
    store_groups(a.a8, in, part);
    join_best(a, best, block, blocks, arrived);
}

// Dynamic shared, u, r: as in stages.cu. Each has a _fast form, too.
KERNEL LAUNCH_BOUNDS(512, 2) void FORM(k_head_q4)(const HeadArgs a) {
    DYNAMIC_SHARED(shared);
    __shared__ unsigned arrived;
    head_stream<16>(a, blockIdx.x, gridDim.x, shared, &arrived);
}
KERNEL LAUNCH_BOUNDS(512, 2) void FORM(k_head_q8)(const HeadArgs a) {
    DYNAMIC_SHARED(shared);
    __shared__ unsigned arrived;
    head_stream<32>(a, blockIdx.x, gridDim.x, shared, &arrived);
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_head_q8_u2r4)(const HeadArgs a) {
    DYNAMIC_SHARED(shared);
    __shared__ unsigned arrived;
    head<2, 4, KESTREL_Q8LOCAL>(a, blockIdx.x, gridDim.x, shared, &arrived);
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_head_bf16_u2r4)(const HeadArgs a) {
    DYNAMIC_SHARED(shared);
    __shared__ unsigned arrived;
    head<2, 4, KESTREL_BF16>(a, blockIdx.x, gridDim.x, shared, &arrived);
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_head_any_u2r4)(const HeadArgs a) {
    DYNAMIC_SHARED(shared);
    __shared__ unsigned arrived;
    head<2, 4, ANY_FORMAT>(a, blockIdx.x, gridDim.x, shared, &arrived);
}
