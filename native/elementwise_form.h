// swiglu, moe_combine and rope in vector form: each output is computed by the scalar form's operations.
#include "ops.h"
#include "simd.h"

namespace kestrel {
namespace {

void swiglu_row(const float *g, const float *u, float *h, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
        const VF gate = load(g + i);
        const VF denominator = add(broadcast(1.0f), expf_ucrt_vector(negate(gate)));
        store(h + i, mul(div(gate, denominator), load(u + i)));
    }
    for (; i < end; i++) h[i] = (g[i] / (1.0f + expf_ucrt(-g[i]))) * u[i];
}

void swiglu_form(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const SwigluArgs *>(args);
    const int64_t F = a.F;
    int64_t begin, end;
    context.split(a.R * F, 64, &begin, &end);
    while (begin < end) {
        const int64_t r = begin / F, stop = (r + 1) * F < end ? (r + 1) * F : end;
        swiglu_row(a.gu + 2 * r * F, a.gu + (2 * r + 1) * F, a.h + r * F, begin - r * F, stop - r * F);
        begin = stop;
    }
}

void moe_combine_form(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const MoeCombineArgs *>(args);
    const int64_t H = a.H, T = a.T;
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        const float *y = a.y + m * T * H, *w = a.weights + m * T;
        int64_t i = 0;
        for (; i + kLanes <= H; i += kLanes) {
            VF acc = zero();
            for (int64_t t = 0; t < T; t++) acc = fma(broadcast(w[t]), load(y + t * H + i), acc);
            store(a.out + m * H + i, acc);
        }
        for (; i < H; i++) {
            float acc = 0.0f;
            for (int64_t t = 0; t < T; t++) acc = fma_f32(w[t], y[t * H + i], acc);
            a.out[m * H + i] = acc;
        }
    }
}

void rope_form(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const RopeArgs *>(args);
    const int half = a.hd / 2, padded = (half + kDoubles - 1) / kDoubles * kDoubles;
    float *angle = static_cast<float *>(context.scratch(3 * sizeof(float) * padded));  // f32[padded]
    float *c = angle + padded, *s = c + padded;                                        // f32[padded] each
    for (int i = half; i < padded; i++) angle[i] = 0.0f;
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        for (int i = 0; i < half; i++) angle[i] = static_cast<float>(a.pos[m]) * a.inv_freq[i];
        for (int i = 0; i < padded; i += kDoubles) cos_sin_ucrt_vector(angle + i, c + i, s + i);
        for (int i = 0; i < half; i++) {
            c[i] *= a.factor;
            s[i] *= a.factor;
        }
        for (int h = 0; h < a.heads; h++) {
            float *x0 = a.x + m * a.ld + static_cast<int64_t>(h) * a.hd, *x1 = x0 + half;
            int i = 0;
            for (; i + kLanes <= half; i += kLanes) {
                const VF v0 = load(x0 + i), v1 = load(x1 + i), vc = load(c + i), vs = load(s + i);
                store(x0 + i, sub(mul(v0, vc), mul(v1, vs)));
                store(x1 + i, add(mul(v1, vc), mul(v0, vs)));
            }
            for (; i < half; i++) {
                const float v0 = x0[i], v1 = x1[i];
                x0[i] = v0 * c[i] - v1 * s[i];
                x1[i] = v1 * c[i] + v0 * s[i];
            }
        }
    }
}

}  // namespace
}  // namespace kestrel
