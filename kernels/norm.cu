// Norms, contract section 4. Squares and results are computed by all threads; what the contract orders, the chain of
// block sums or of squares, is walked by one thread over shared memory.
#include "block_norm.cuh"

// A block per row, grid-stride. Dynamic shared: NormShared.
DEVICE void rms_norm_rows(const RmsNormArgs &a, unsigned char *shared) {
    const NormShared sh = norm_shared(shared, a.d);
    for (int m = blockIdx.x; m < a.M; m += gridDim.x) {
        float *const out = a.out + (long long)m * a.d;  // f32[d]
        block_rms_norm(a.x + (long long)m * a.d, a.w, a.d, a.eps, sh);
        for (int i = threadIdx.x; i < a.d; i += blockDim.x) out[i] = sh.x[i];
        __syncthreads();
    }
}

#if !KESTREL_FAST

KERNEL void k_rms_norm_cpu(const RmsNormArgs a) {
    DYNAMIC_SHARED(shared);
    rms_norm_rows(a, shared);
}

// A block takes blockDim.y heads at a time, blockDim.x threads to a head; the heads of all rows are numbered m * heads + h.
// Dynamic shared: f32[blockDim.y][hd + 4].
KERNEL void k_qk_norm_cpu(const QkNormArgs a) {
    DYNAMIC_SHARED(shared);
    const int pitch = a.hd + 4;  // keeps rows 16-byte aligned (hd is a multiple of 4)
    float *const squares = (float *)shared + threadIdx.y * pitch;  // f32[hd], then r
    const long long total = (long long)a.M * a.heads;
    for (long long first = (long long)blockIdx.x * blockDim.y; first < total; first += (long long)gridDim.x * blockDim.y) {
        const long long head = first + threadIdx.y;
        const bool active = head < total;
        float *const x = active ? a.x + head / a.heads * a.ld + head % a.heads * a.hd : nullptr;  // f32[hd]
        if (active)
            for (int i = threadIdx.x; i < a.hd; i += blockDim.x) squares[i] = x[i] * x[i];
        __syncthreads();
        // The chains of all heads of the block run side by side in its first threads.
        const int linear = threadIdx.y * blockDim.x + threadIdx.x;
        if (linear < (int)blockDim.y && first + linear < total) {
            float *const mine = (float *)shared + linear * pitch;
            const float ss = ordered_sum(mine, a.hd, 0.0f);
            mine[a.hd] = inverse_sqrt(ss / (float)a.hd + a.eps);
        }
        __syncthreads();
        if (active) {
            const float r = squares[a.hd];
            for (int i = threadIdx.x; i < a.hd; i += blockDim.x) x[i] = (x[i] * r) * a.w[i];
        }
        __syncthreads();
    }
}

#else  // KESTREL_FAST

KERNEL void k_rms_norm_fast(const RmsNormArgs a) {
    DYNAMIC_SHARED(shared);
    rms_norm_rows(a, shared);
}

// Same launch as k_qk_norm_cpu, with blockDim.x = 32: a warp to a head.
KERNEL void k_qk_norm_fast(const QkNormArgs a) {
    const long long total = (long long)a.M * a.heads;
    for (long long head = (long long)blockIdx.x * blockDim.y + threadIdx.y; head < total;
         head += (long long)gridDim.x * blockDim.y) {
        float *const x = a.x + head / a.heads * a.ld + head % a.heads * a.hd;  // f32[hd]
        float ss = 0.0f;
        for (int i = threadIdx.x; i < a.hd; i += 32) ss += x[i] * x[i];
        const float r = inverse_sqrt(warp_sum_f32(ss) / (float)a.hd + a.eps);
        for (int i = threadIdx.x; i < a.hd; i += 32) x[i] = x[i] * r * a.w[i];
    }
}

#endif
