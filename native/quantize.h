// The loops of quantize_a8 and kv_append around a form's row function.
#pragma once

#include "../kernels/contract.cuh"
#include "op.h"

namespace kestrel {

// x: f32[n] -> q: i8[n] and the sum of the codes; returns the scale d.
using QuantizeRow = float (*)(const float *x, int n, signed char *q, int *sum);

static inline void run_quantize_a8(const void *args, ThreadContext &context, QuantizeRow quantize_row) {
    const auto &a = *static_cast<const QuantizeA8Args *>(args);
    const int64_t groups = a.K / 32;
    int64_t begin, end;
    context.split(a.M * groups, 16, &begin, &end);
    for (int64_t g = begin; g < end; g++) a.d[g] = quantize_row(a.x + 32 * g, 32, a.q + 32 * g, a.gsum + g);
}

static inline void run_kv_append(const void *args, ThreadContext &context, QuantizeRow quantize_row) {
    const auto &a = *static_cast<const KvAppendArgs *>(args);
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        const int64_t slot = static_cast<int64_t>(a.base[m]) + a.pos[m];
        for (int h = 0; h < a.nkv; h++) {
            const int64_t row = slot * a.nkv + h, in = m * a.ld + static_cast<int64_t>(h) * a.hd;
            int sum;
            a.ks[row] = quantize_row(a.k + in, a.hd, a.kq + row * a.hd, &sum);
            a.vs[row] = quantize_row(a.v + in, a.hd, a.vq + row * a.hd, &sum);
        }
    }
}

}  // namespace kestrel
