// The greedy choice, contract section 10.
#include "port.cuh"

#if !KESTREL_FAST

// The better of two (value, index): larger value, then lower index. Order-free, so any reduction tree gives the same.
DEVICE void take_better(float &value, int &index, float other, int other_index) {
    if (other_index >= 0 && (index < 0 || other > value || (other == value && other_index < index))) {
        value = other;
        index = other_index;
    }
}

#define ARGMAX_ROWS 8     // rows and blocks of a row that a launch of several blocks may have; kestrel/launch.py knows
#define ARGMAX_BLOCKS 64  // them, too

// What the blocks of a row found, and how many of them are done: zero between launches, which never overlap.
static __device__ float argmax_value[ARGMAX_ROWS][ARGMAX_BLOCKS];
static __device__ int argmax_index[ARGMAX_ROWS][ARGMAX_BLOCKS];
static __device__ unsigned argmax_magnitude[ARGMAX_ROWS][ARGMAX_BLOCKS];
static __device__ unsigned argmax_arrived[ARGMAX_ROWS];

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
                take_better(value, index, load_l2(&argmax_value[slot][b]), argmax_index[slot][b]);
                magnitude = argmax_magnitude[slot][b] > magnitude ? argmax_magnitude[slot][b] : magnitude;
            }
            block_best(value, index, magnitude);
        }
        if (threadIdx.x == 0) a.ids[m] = magnitude >= KESTREL_INF_BITS ? -1 : index;
    }
}

#endif
