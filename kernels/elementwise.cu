// Ops without a sum that needs an order: embedding rows, a8 quantisation, residual adds, SwiGLU.
#include "block_norm.cuh"

#if !KESTREL_FAST

// Grid (columns, M); each thread takes every (gridDim.x * blockDim.x)-th column. Contract sections 1 and 9.
KERNEL void k_embed(const EmbedArgs a) {
    wait_for_previous();
    start_next();
    const int m = blockIdx.y, k = a.w.k, groups = k / 32;
    const long long row = a.ids[m];
    float *const x = a.x + (long long)m * k;  // f32[K]
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < k; i += gridDim.x * blockDim.x) {
        const int at = KESTREL_SPREAD_AT(i, a.spread);
        if (a.w.wtype == KESTREL_BF16) {
            x[at] = bf16_to_f32(((const unsigned short *)a.w.codes)[row * k + i]);
            continue;
        }
        const long long g = row * groups + i / 32;
        const float scale = f16_to_f32(a.w.scale[g]);
        int code;
        if (a.w.wtype == KESTREL_Q8LOCAL) {
            code = ((const signed char *)a.w.codes)[g * 32 + i % 32];
        } else {  // byte j of a group: element j in the low nibble, j + 16 in the high
            const int byte = ((const unsigned char *)a.w.codes)[g * 16 + i % 16];
            code = (i % 32 < 16 ? byte & 15 : byte >> 4) - 8;
        }
        x[at] = scale * (float)code;
    }
}

// Eight lanes to a group, four elements to a lane; groups are numbered m * G + g, grid-stride. Contract section 2.
KERNEL void k_quantize_a8(const QuantizeA8Args a) {
    const long long total = (long long)a.M * (a.K / 32);
    const int lane = lane_id(), part = lane % 8;
    const long long stride = (long long)gridDim.x * warp_count() * 4;
    // Whole warps leave the loop together, so that the shuffles see all lanes.
    for (long long first = ((long long)blockIdx.x * warp_count() + warp_id()) * 4; first < total; first += stride) {
        const long long g = first + lane / 8;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (g < total) {
            const float4 x = *(const float4 *)(a.x + g * 32 + part * 4);
            v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
        }
        float d;
        int sum;
        const unsigned packed = a8_group(v, &d, &sum);
        if (g < total) {
            ((unsigned *)a.q)[g * 8 + part] = packed;
            if (part == 0) {
                a.d[g] = d;
                a.gsum[g] = sum;
            }
        }
    }
}

// Grid-stride over n.
KERNEL void k_add(const AddArgs a) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += (long long)gridDim.x * blockDim.x)
        a.out[KESTREL_SPREAD_AT(i, a.spread)] = a.x[KESTREL_SPREAD_AT(i, a.spread)] + a.y[i];
}

#endif

// Grid (columns, rows); rows stride over gridDim.y. Also k_swiglu_fast.
KERNEL void FORM(k_swiglu)(const SwigluArgs a) {
    for (int row = blockIdx.y; row < a.R; row += gridDim.y) {
        const float *const gate = a.gu + (long long)row * 2 * a.F;  // f32[F]
        const float *const up = gate + a.F;                         // f32[F]
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < a.F; i += gridDim.x * blockDim.x) {
            const float g = gate[i];
            a.h[(long long)row * a.F + i] = (g / (1.0f + exp_form(-g))) * up[i];
        }
    }
}
