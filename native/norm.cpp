// rms_norm and qk_norm, contract section 4: the order of their sums, element by element.
#include "../kernels/contract.cuh"
#include "ops.h"

namespace kestrel {
namespace {

float inverse_rms(float ss, int d, float eps) { return 1.0f / sqrt_f32(ss / static_cast<float>(d) + eps); }

// x: f32[d]. A term to each block of 8, then one to each element of the tail.
float sum_of_blocks(const float *x, int d) {
    const int blocks = d / 8;
    float lane[32] = {};
    for (int j = 0; j < blocks; j++) {
        float square[8];
        for (int k = 0; k < 8; k++) square[k] = x[8 * j + k] * x[8 * j + k];
        lane[j % 32] += hsum8(square);
    }
    for (int i = 0; i < d % 8; i++) lane[(blocks + i) % 32] += x[8 * blocks + i] * x[8 * blocks + i];
    return hsum32(lane);
}

// x: f32[hd]. A term to each element.
float sum_of_squares(const float *x, int hd) {
    float lane[32] = {};
    for (int i = 0; i < hd; i++) lane[i % 32] += x[i] * x[i];
    return hsum32(lane);
}

}  // namespace

void rms_norm_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const RmsNormArgs *>(args);
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        const float *x = a.x + m * a.d;
        float *out = a.out + m * a.d;
        const float r = inverse_rms(sum_of_blocks(x, a.d), a.d, a.eps);
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
            const float r = inverse_rms(sum_of_squares(x, a.hd), a.hd, a.eps);
            for (int i = 0; i < a.hd; i++) x[i] = (x[i] * r) * a.w[i];
        }
    }
}

bool qk_norm_serial(const void *args) {
    const auto &a = *static_cast<const QkNormArgs *>(args);
    return static_cast<int64_t>(a.M) * a.heads * a.hd <= kSerialElements;
}

}  // namespace kestrel
