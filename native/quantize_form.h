// The row function of quantize_a8 and kv_append in vector form.
#include "ops.h"
#include "quantize.h"
#include "simd.h"

namespace kestrel {
namespace {

float quantize_row(const float *x, int n, signed char *q, int *sum) {
    VI amax = zero_i32();
    unsigned tail_amax = 0;
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) amax = max_i32(amax, magnitude_bits(load(x + i)));
    for (; i < n; i++) {
        const unsigned magnitude = f32_bits(x[i]) & 0x7fffffffu;
        tail_amax = magnitude > tail_amax ? magnitude : tail_amax;
    }
    const auto vector_amax = static_cast<unsigned>(max_across(amax));
    const A8Scale s = a8_scale(vector_amax > tail_amax ? vector_amax : tail_amax);
    if (s.zero) {
        __builtin_memset(q, 0, static_cast<size_t>(n));
        *sum = 0;
        return s.d;
    }
    VI sums = zero_i32();
    const VF inv = broadcast(s.inv);
    for (i = 0; i + kLanes <= n; i += kLanes) {
        const VI code = to_code(mul(load(x + i), inv));
        store_i8(q + i, code);
        sums = add_i32(sums, code);
    }
    int total = sum_across(sums);
    for (; i < n; i++) {
        const int code = a8_code(x[i], s.inv);
        q[i] = static_cast<signed char>(code);
        total += code;
    }
    *sum = total;
    return s.d;
}

}  // namespace
}  // namespace kestrel
