// rms_norm and qk_norm with AVX2: the contract's 32 lanes are four vectors.
#include "lane_sums.h"
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

// Sums of eight blocks of 8 squares, in their order.
inline __m256 block_sums(const float *x) {
    __m128 half[2];
    for (int h = 0; h < 2; h++, x += 32) {
        // (s0 + s1) and (s2 + s3) of four blocks, then their sums.
        const __m128 pairs01 = _mm_hadd_ps(folded_squares(x), folded_squares(x + 8));
        const __m128 pairs23 = _mm_hadd_ps(folded_squares(x + 16), folded_squares(x + 24));
        half[h] = _mm_hadd_ps(pairs01, pairs23);
    }
    return _mm256_set_m128(half[1], half[0]);
}

// The contract's lanes. What fills no vector goes by way of memory.
struct Lanes {
    __m256 v[4];  // lanes 8i .. 8i+7

    Lanes() { v[0] = v[1] = v[2] = v[3] = _mm256_setzero_ps(); }

    // Terms `first` .. first+count-1.
    template <class Term>
    void add(int first, int count, const Term &term) {
        if (count == 0) return;
        alignas(32) float lane[32];
        for (int i = 0; i < 4; i++) _mm256_store_ps(lane + 8 * i, v[i]);
        for (int j = first; j < first + count; j++) lane[j % 32] += term(j);
        for (int i = 0; i < 4; i++) v[i] = _mm256_load_ps(lane + 8 * i);
    }
};

// x: f32[d]. A term to each block of 8, then one to each element of the tail.
float sum_of_blocks(const float *x, int d) {
    const int blocks = d / 8, whole = blocks / 32 * 32;
    Lanes lanes;
    for (int j = 0; j < whole; j += 32)
        for (int i = 0; i < 4; i++) lanes.v[i] = _mm256_add_ps(lanes.v[i], block_sums(x + 8 * j + 64 * i));
    lanes.add(whole, blocks - whole, [&](int j) {
        const __m128 s = folded_squares(x + 8 * j), pairs = _mm_hadd_ps(s, s);
        return _mm_cvtss_f32(_mm_hadd_ps(pairs, pairs));
    });
    const float *tail = x + 7 * blocks;  // of term j: x[8 * blocks + (j - blocks)]
    lanes.add(blocks, d % 8, [&](int j) { return tail[j] * tail[j]; });
    return hsum32(lanes.v);
}

// x: f32[hd]. A term to each element.
float sum_of_squares(const float *x, int hd) {
    const int whole = hd / 32 * 32;
    Lanes lanes;
    for (int j = 0; j < whole; j += 32) {
        for (int i = 0; i < 4; i++) {
            const __m256 elements = _mm256_loadu_ps(x + j + 8 * i);
            lanes.v[i] = _mm256_add_ps(lanes.v[i], _mm256_mul_ps(elements, elements));
        }
    }
    lanes.add(whole, hd - whole, [&](int j) { return x[j] * x[j]; });
    return hsum32(lanes.v);
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
        scale_row(x, inverse_rms(sum_of_blocks(x, a.d), a.d, a.eps), a.w, a.out + m * a.d, a.d);
    }
}

void qk_norm_avx2(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const QkNormArgs *>(args);
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        for (int h = 0; h < a.heads; h++) {
            float *x = a.x + m * a.ld + static_cast<int64_t>(h) * a.hd;
            scale_row(x, inverse_rms(sum_of_squares(x, a.hd), a.hd, a.eps), a.w, x, a.hd);
        }
    }
}

}  // namespace kestrel
