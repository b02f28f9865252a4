// rms_norm and qk_norm with AVX2. The chain of the sum of squares stays as it is; squares and block sums are vectors.
#include "ops.h"
#include "simd.h"

namespace kestrel {
namespace {

float inverse_rms(float ss, int d, float eps) { return 1.0f / sqrt_f32(ss / static_cast<float>(d) + eps); }

// lo[k] + hi[k] of a block of 8 squares.
inline __m128 folded_squares(const float *x) {
    const __m256 v = _mm256_loadu_ps(x), squares = _mm256_mul_ps(v, v);
    return _mm_add_ps(_mm256_castps256_ps128(squares), _mm256_extractf128_ps(squares, 1));
}

float sum_of_squares_by_8(const float *x, int d) {
    float ss = 0.0f;
    int b = 0;
    for (; b + 32 <= d; b += 32) {
        // (s0 + s1) and (s2 + s3) of four blocks, then their sums: lane i is the sum of block i.
        const __m128 pairs01 = _mm_hadd_ps(folded_squares(x + b), folded_squares(x + b + 8));
        const __m128 pairs23 = _mm_hadd_ps(folded_squares(x + b + 16), folded_squares(x + b + 24));
        alignas(16) float sums[4];
        _mm_store_ps(sums, _mm_hadd_ps(pairs01, pairs23));
        for (int i = 0; i < 4; i++) ss += sums[i];
    }
    for (; b + 8 <= d; b += 8) {
        const __m128 s = folded_squares(x + b), pairs = _mm_hadd_ps(s, s);
        ss += _mm_cvtss_f32(_mm_hadd_ps(pairs, pairs));
    }
    for (; b < d; b++) ss += x[b] * x[b];
    return ss;
}

// x: f32[d] -> out = (x * r) * w; out may be x.
void scale_row(const float *x, float r, const float *w, float *out, int d) {
    int i = 0;
    for (; i + kLanes <= d; i += kLanes) store(out + i, mul(mul(load(x + i), broadcast(r)), load(w + i)));
    for (; i < d; i++) out[i] = (x[i] * r) * w[i];
}

}  // namespace

void rms_norm_avx2(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const RmsNormArgs *>(args);
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        const float *x = a.x + m * a.d;
        scale_row(x, inverse_rms(sum_of_squares_by_8(x, a.d), a.d, a.eps), a.w, a.out + m * a.d, a.d);
    }
}

void qk_norm_avx2(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const QkNormArgs *>(args);
    constexpr int kHeads = 4;  // chains in flight: one alone waits for every add
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        for (int h = 0; h < a.heads; h += kHeads) {
            float *x = a.x + m * a.ld + static_cast<int64_t>(h) * a.hd;
            const int heads = a.heads - h < kHeads ? a.heads - h : kHeads;
            // Missing heads repeat the last one; their sums are not used.
            const float *row[kHeads];
            for (int j = 0; j < kHeads; j++) row[j] = x + static_cast<int64_t>(j < heads ? j : heads - 1) * a.hd;
            float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
            for (int i = 0; i < a.hd; i++) {
                s0 += row[0][i] * row[0][i];
                s1 += row[1][i] * row[1][i];
                s2 += row[2][i] * row[2][i];
                s3 += row[3][i] * row[3][i];
            }
            const float ss[kHeads] = {s0, s1, s2, s3};
            for (int j = 0; j < heads; j++) {
                float *head = x + static_cast<int64_t>(j) * a.hd;
                scale_row(head, inverse_rms(ss[j], a.hd, a.eps), a.w, head, a.hd);
            }
        }
    }
}

}  // namespace kestrel
