// add, swiglu and moe_combine, contract section 9.
#include "../kernels/ucrt.cuh"
#include "ops.h"

namespace kestrel {

void add_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const AddArgs *>(args);
    int64_t begin, end;
    context.split(a.n, 1024, &begin, &end);
    for (int64_t i = begin; i < end; i++) a.out[i] = a.x[i] + a.y[i];
}

bool add_serial(const void *args) { return static_cast<const AddArgs *>(args)->n <= 4 * kSerialElements; }

void swiglu_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const SwigluArgs *>(args);
    int64_t begin, end;
    context.split(static_cast<int64_t>(a.R) * a.F, 64, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const int64_t r = i / a.F, f = i % a.F;
        const float g = a.gu[2 * r * a.F + f], u = a.gu[(2 * r + 1) * a.F + f];
        a.h[i] = (g / (1.0f + expf_ucrt(-g))) * u;
    }
}

bool swiglu_serial(const void *args) {
    const auto &a = *static_cast<const SwigluArgs *>(args);
    return static_cast<int64_t>(a.R) * a.F <= kSerialElements / 4;
}

void moe_combine_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const MoeCombineArgs *>(args);
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        for (int i = 0; i < a.H; i++) {
            float acc = 0.0f;
            for (int t = 0; t < a.T; t++) {
                const int64_t row = m * a.T + t;
                acc = fma_f32(a.weights[row], a.y[row * a.H + i], acc);
            }
            a.out[m * a.H + i] = acc;
        }
    }
}

bool moe_combine_serial(const void *args) {
    const auto &a = *static_cast<const MoeCombineArgs *>(args);
    return static_cast<int64_t>(a.M) * a.T * a.H <= 2 * kSerialElements;
}

}  // namespace kestrel
