// Compares a unary function with expected results computed elsewhere, over consecutive bit patterns.
#include "expert_rows.cuh"

// which: 0 expf_ucrt, 1 cosf_ucrt, 2 sinf_ucrt, 3 and 4 the latter two by cos_or_sin_ucrt, 5 reciprocal,
// 6 root, 7 silu_form.
__device__ float value(int which, float x) {
    switch (which) {
    case 0: return expf_ucrt(x);
    case 1: return cosf_ucrt(x);
    case 2: return sinf_ucrt(x);
    case 5: return reciprocal(x);
    case 6: return root(x);
    case 7: return silu_form(x);
    default: return cos_or_sin_ucrt(x, which == 3);
    }
}

// One NaN is as good as another, unless the function says which.
__device__ bool differ(float y, unsigned expected, bool any_nan) {
    return f32_bits(y) != expected && !(any_nan && y != y && (expected & 0x7fffffffu) > KESTREL_INF_BITS);
}

// counts: [0] how many differ, [1] the lowest input that does.
extern "C" __global__ void k_sweep(int which, unsigned first, unsigned n, const unsigned *expected, unsigned *counts) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const float x = __uint_as_float(first + i);
        const float y = value(which, x);
        if (differ(y, expected[i], which > 4)) {
            atomicAdd(&counts[0], 1u);
            atomicMin(&counts[1], first + i);
        }
    }
}

// a / b as store_result divides where is_plain_quotient says so. counts: as above, [2] how many it is not for.
extern "C" __global__ void k_sweep_quotients(const float *a, const float *b, unsigned n, const unsigned *expected,
                                             unsigned *counts) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const float y = with_sign_of(quotient_of_any(a[i], b[i], reciprocal(b[i])), a[i]);
        if (!is_plain_quotient(a[i], b[i])) {
            atomicAdd(&counts[2], 1u);
        } else if (differ(y, expected[i], true)) {
            atomicAdd(&counts[0], 1u);
            atomicMin(&counts[1], i);
        }
    }
}

// The first seed's table: y[0] CUDA's expf, y[1] (float)exp((double)x), y[2] expf_ucrt, y[3] rsqrtf(-x), y[4] 1/sqrtf(-x).
extern "C" __global__ void k_seed_table(const float *x, int n, float *y) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        y[i] = expf(x[i]);
        y[n + i] = (float)exp((double)x[i]);
        y[2 * n + i] = expf_ucrt(x[i]);
        y[3 * n + i] = rsqrtf(-x[i]);
        y[4 * n + i] = 1.0f / sqrtf(-x[i]);
    }
}
