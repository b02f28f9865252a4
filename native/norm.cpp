// rms_norm and qk_norm, contract section 4: the order of their sums, element by element.
#include "../kernels/contract.cuh"
#include "ops.h"

namespace kestrel {
namespace {

float inverse_rms(float ss, int d, float eps) { return 1.0f / sqrt_f32(ss / static_cast<float>(d) + eps); }

// x: f32[d]. Blocks of 8, then the tail one by one.
float sum_of_squares_by_8(const float *x, int d) {
    const int d8 = d & ~7;
    float ss = 0.0f;
    for (int b = 0; b < d8; b += 8) {
        float lo[4];
        for (int k = 0; k < 4; k++) lo[k] = x[b + k] * x[b + k] + x[b + k + 4] * x[b + k + 4];
        ss += (lo[0] + lo[1]) + (lo[2] + lo[3]);
    }
    for (int i = d8; i < d; i++) ss += x[i] * x[i];
    return ss;
}

}  // namespace

void rms_norm_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const RmsNormArgs *>(args);
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        const float *x = a.x + m * a.d;
        float *out = a.out + m * a.d;
        const float r = inverse_rms(sum_of_squares_by_8(x, a.d), a.d, a.eps);
        for (int i = 0; i < a.d; i++) out[i] = (x[i] * r) * a.w[i];
    }
}

bool rms_norm_serial(const void *args) {
    const auto &a = *static_cast<const RmsNormArgs *>(args);
    return static_cast<int64_t>(a.M) * a.d <= kSerialElements;
}

void qk_norm_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const QkNormArgs *>(args);
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        for (int h = 0; h < a.heads; h++) {
            float *x = a.x + m * a.ld + static_cast<int64_t>(h) * a.hd;
            float ss = 0.0f;
            for (int i = 0; i < a.hd; i++) ss += x[i] * x[i];
            const float r = inverse_rms(ss, a.hd, a.eps);
            for (int i = 0; i < a.hd; i++) x[i] = (x[i] * r) * a.w[i];
        }
    }
}

bool qk_norm_serial(const void *args) {
    const auto &a = *static_cast<const QkNormArgs *>(args);
    return static_cast<int64_t>(a.M) * a.heads * a.hd <= kSerialElements;
}

}  // namespace kestrel
