// Norms, contract section 4. Squares and results are computed by all threads; what the contract orders are the sums of a
// warp's lanes.
#include "block_norm.cuh"

// A block per row, grid-stride. Dynamic shared: NormShared.
DEVICE void rms_norm_rows(const RmsNormArgs &a, unsigned char *shared) {
    const NormShared sh = norm_shared(shared, a.d);
    for (int m = blockIdx.x; m < a.M; m += gridDim.x) {
        float *const out = a.out + (long long)m * a.d;  // f32[d]
        block_rms_norm(a.x + (long long)m * a.d, a.spread, a.w, a.d, a.eps, sh);
        for (int i = threadIdx.x; i < a.d; i += blockDim.x) out[i] = sh.x[i];
        __syncthreads();
    }
}

// A block takes blockDim.y heads at a time, a warp (blockDim.x is 32) to a head, a lane to each of the contract's; the heads
// of all rows are numbered m * heads + h.
DEVICE void qk_norm_heads(const QkNormArgs &a) {
    const long long total = (long long)a.M * a.heads;
    for (long long head = (long long)blockIdx.x * blockDim.y + threadIdx.y; head < total;
         head += (long long)gridDim.x * blockDim.y) {
        float *const x = a.x + head / a.heads * a.ld + head % a.heads * a.hd;  // f32[hd]
        float sum = 0.0f;
        for (int i = threadIdx.x; i < a.hd; i += 32) sum += x[i] * x[i];
        const float r = inverse_sqrt(warp_hsum32(sum) / (float)a.hd + a.eps);
        for (int i = threadIdx.x; i < a.hd; i += 32) x[i] = (x[i] * r) * a.w[i];
    }
}

#if !KESTREL_FAST

KERNEL void k_rms_norm_cpu(const RmsNormArgs a) {
    DYNAMIC_SHARED(shared);
    rms_norm_rows(a, shared);
}
KERNEL void k_qk_norm_cpu(const QkNormArgs a) { qk_norm_heads(a); }

#else  // KESTREL_FAST

KERNEL void k_rms_norm_fast(const RmsNormArgs a) {
    DYNAMIC_SHARED(shared);
    rms_norm_rows(a, shared);
}
KERNEL void k_qk_norm_fast(const QkNormArgs a) { qk_norm_heads(a); }

#endif
