// quantize_a8 and kv_append, contract sections 2 and 6.
#include "quantize.h"

#include "ops.h"

namespace kestrel {
namespace {

// x: f32[n] -> q: i8[n]; returns the scale.
float quantize_row(const float *x, int n, signed char *q, int *sum) {
    unsigned amax = 0;
    for (int i = 0; i < n; i++) {
        const unsigned magnitude = f32_bits(x[i]) & 0x7fffffffu;
        amax = magnitude > amax ? magnitude : amax;
    }
    const A8Scale s = a8_scale(amax);
    *sum = 0;
    for (int i = 0; i < n; i++) {
        const int code = s.zero ? 0 : a8_code(x[i], s.inv);
        q[i] = static_cast<signed char>(code);
        *sum += code;
    }
    return s.d;
}

}  // namespace

void quantize_a8_scalar(const void *args, ThreadContext &context) { run_quantize_a8(args, context, quantize_row); }

void kv_append_scalar(const void *args, ThreadContext &context) { run_kv_append(args, context, quantize_row); }

bool quantize_a8_serial(const void *args) {
    const auto &a = *static_cast<const QuantizeA8Args *>(args);
    return static_cast<int64_t>(a.M) * a.K <= kSerialElements;
}

bool kv_append_serial(const void *args) {
    const auto &a = *static_cast<const KvAppendArgs *>(args);
    return 2 * static_cast<int64_t>(a.M) * a.nkv * a.hd <= kSerialElements;
}

}  // namespace kestrel
