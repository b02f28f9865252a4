// rope, contract section 5: half-split pairs (i, i + hd/2), every product and sum rounded.
#include "../kernels/ucrt.cuh"
#include "ops.h"

namespace kestrel {

void rope_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const RopeArgs *>(args);
    const int half = a.hd / 2;
    float *c = static_cast<float *>(context.scratch(2 * sizeof(float) * half));  // f32[hd/2]
    float *s = c + half;                                                         // f32[hd/2]
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        for (int i = 0; i < half; i++) {
            const float angle = static_cast<float>(a.pos[m]) * a.inv_freq[i];
            c[i] = cosf_ucrt(angle) * a.factor;
            s[i] = sinf_ucrt(angle) * a.factor;
        }
        for (int h = 0; h < a.heads; h++) {
            float *x = a.x + m * a.ld + static_cast<int64_t>(h) * a.hd;
            for (int i = 0; i < half; i++) {
                const float x0 = x[i], x1 = x[i + half];
                x[i] = x0 * c[i] - x1 * s[i];
                x[i + half] = x1 * c[i] + x0 * s[i];
            }
        }
    }
}

bool rope_serial(const void *args) {
    const auto &a = *static_cast<const RopeArgs *>(args);
    return static_cast<int64_t>(a.M) * a.heads * a.hd <= kSerialElements;
}

}  // namespace kestrel
