// The exact and the fast form of what the contract orders or defines. The same kernels compile twice: with
// KESTREL_FAST they become *_fast kernels, which promise no bits: hardware exp, rsqrt, sine and tree sums.
#pragma once

#include "port.cuh"
#include "ucrt.cuh"

#if KESTREL_FAST

#define FORM(kernel) kernel##_fast

DEVICE float exp_form(float x) { return expf(x); }
DEVICE float exp_down(float x, const unsigned long long *) { return expf(x); }
DEVICE float inverse_sqrt(float x) { return rsqrtf(x); }
// The hardware sine is only good near zero: turns are taken off by hand, 2 pi in two parts.
DEVICE float within_a_turn(float angle) {
    const float turns = rint_f32(angle * 0.15915494309189535f);
    return fma_f32(turns, 1.7484555e-7f, fma_f32(turns, -6.2831855f, angle));
}
DEVICE void touch_exp_table() {}
DEVICE void copy_exp_table(unsigned long long *) {}
DEVICE float cos_form(float x) { return cosf(within_a_turn(x)); }
DEVICE float sin_form(float x) { return sinf(within_a_turn(x)); }
DEVICE float cos_or_sin_form(float x, bool cosine) { return cosine ? cos_form(x) : sin_form(x); }

#else

#define FORM(kernel) kernel

DEVICE float exp_form(float x) { return expf_ucrt(x); }
// The same of x that are not positive, with any NaN of a NaN; -104 gives +0, too. table: copy_exp_table's.
DEVICE float exp_down(float x, const unsigned long long *table) { return expf_ucrt_within(max_or_nan(x, -104.0f), table); }
// Brings the table of exp_form near before the first value that needs it is there.
DEVICE void touch_exp_table() {
    if (threadIdx.x < 64 && threadIdx.x % 16 == 0) touch_l1(EXPF_UCRT_TABLE + threadIdx.x);
}
// The table in shared memory, u64[64], for a kernel that has many to read: behind a barrier.
DEVICE void copy_exp_table(unsigned long long *table) {
    for (unsigned i = threadIdx.x; i < 64; i += blockDim.x) table[i] = EXPF_UCRT_TABLE[i];
}
DEVICE float inverse_sqrt(float x) { return 1.0f / sqrt_f32(x); }
DEVICE float cos_form(float x) { return cosf_ucrt(x); }
DEVICE float sin_form(float x) { return sinf_ucrt(x); }
DEVICE float cos_or_sin_form(float x, bool cosine) { return cos_or_sin_ucrt(x, cosine); }

#endif
