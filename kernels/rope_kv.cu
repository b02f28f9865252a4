// RoPE and the KV cache, contract sections 5 and 6.
#include "forms.cuh"

// Grid (head slices, M). A block computes its row's angles once, then turns heads blockIdx.x, blockIdx.x + gridDim.x,
// ... Dynamic shared: f32[hd], cos then sin. Also k_rope_fast.
KERNEL void FORM(k_rope)(const RopeArgs a) {
    DYNAMIC_SHARED(shared);
    const int half = a.hd / 2, m = blockIdx.y;
    float *const cosine = (float *)shared;  // f32[hd/2]
    float *const sine = cosine + half;      // f32[hd/2]
    const float pos = (float)a.pos[m];
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const float angle = pos * a.inv_freq[i];
        cosine[i] = cos_form(angle) * a.factor;
        sine[i] = sin_form(angle) * a.factor;
    }
    __syncthreads();
    const int slice = (a.heads - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;  // heads of this block
    for (int j = threadIdx.x; j < slice * half; j += blockDim.x) {
        const int head = blockIdx.x + j / half * gridDim.x, i = j % half;
        float *const x = a.x + (long long)m * a.ld + head * a.hd;  // f32[hd]
        const float x0 = x[i], x1 = x[i + half], c = cosine[i], s = sine[i];
        x[i] = x0 * c - x1 * s;
        x[i + half] = x1 * c + x0 * s;
    }
}

#if !KESTREL_FAST

// A warp to a row of K or V; rows are numbered (m * nkv + head) * 2 + (0: K, 1: V), grid-stride.
KERNEL void k_kv_append(const KvAppendArgs a) {
    const int lane = lane_id();
    const long long total = 2ll * a.M * a.nkv;
    for (long long n = (long long)blockIdx.x * warp_count() + warp_id(); n < total; n += (long long)gridDim.x * warp_count()) {
        const int is_v = (int)(n & 1), head = (int)(n / 2 % a.nkv), m = (int)(n / 2 / a.nkv);
        const float *const x = (is_v ? a.v : a.k) + (long long)m * a.ld + head * a.hd;  // f32[hd]
        const long long slot = ((long long)a.base[m] + a.pos[m]) * a.nkv + head;
        signed char *const q = (is_v ? a.vq : a.kq) + slot * a.hd;  // i8[hd]
        unsigned amax = 0;
        for (int i = lane; i < a.hd; i += 32) {
            const unsigned u = f32_bits(x[i]) & 0x7fffffffu;
            amax = u > amax ? u : amax;
        }
        const A8Scale s = a8_scale(group_max_u32(amax, 32));
        for (int i = lane; i < a.hd; i += 32) q[i] = (signed char)(s.zero ? 0 : a8_code(x[i], s.inv));
        if (lane == 0) (is_v ? a.vs : a.ks)[slot] = s.d;
    }
}

#endif
