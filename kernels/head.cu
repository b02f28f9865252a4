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

// A block per row, grid-stride; blockDim.x a multiple of 32. -1 when any logit of the row is NaN or infinite.
KERNEL LAUNCH_BOUNDS(1024) void k_argmax(const ArgmaxArgs a) {
    __shared__ float values[32];
    __shared__ int indices[32];
    __shared__ unsigned largest[32];
    wait_for_previous();
    start_next();
    const int lane = lane_id(), warp = warp_id();
    for (int m = blockIdx.x; m < a.M; m += gridDim.x) {
        const float *const logits = a.logits + (long long)m * a.V;  // f32[V]
        float value = 0.0f;
        int index = -1;
        unsigned magnitude = 0;  // of the largest |logit|, as bits: tells whether all are finite
        for (int i = threadIdx.x; i < a.V; i += blockDim.x) {
            const float v = logits[i];
            const unsigned u = f32_bits(v) & 0x7fffffffu;
            magnitude = u > magnitude ? u : magnitude;
            take_better(value, index, v, i);
        }
        magnitude = group_max_u32(magnitude, 32);
        for (int step = 16; step > 0; step >>= 1) {
            const float other = __shfl_xor_sync(FULL_WARP, value, step);
            const int other_index = __shfl_xor_sync(FULL_WARP, index, step);
            take_better(value, index, other, other_index);
        }
        if (lane == 0) {
            values[warp] = value;
            indices[warp] = index;
            largest[warp] = magnitude;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < warp_count(); w++) {
                take_better(value, index, values[w], indices[w]);
                magnitude = largest[w] > magnitude ? largest[w] : magnitude;
            }
            a.ids[m] = magnitude >= KESTREL_INF_BITS ? -1 : index;
        }
        __syncthreads();
    }
}

#endif
