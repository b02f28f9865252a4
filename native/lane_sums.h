// hsum8 and hsum32 of contract section 0, of lanes in vector registers. For *_avx2.cpp and *_avx512.cpp.
#pragma once

#include <immintrin.h>

namespace kestrel {
namespace {

// (lo[0] + lo[1]) + (lo[2] + lo[3]) with lo[k] = a[k] + a[k+4].
inline float hsum8(__m256 a) {
    const __m128 lo = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 pairs = _mm_add_ps(lo, _mm_movehdup_ps(lo));  // [lo0+lo1, ., lo2+lo3, .]
    return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehl_ps(pairs, pairs)));
}

// lanes[v]: lanes 8v .. 8v+7.
inline float hsum32(const __m256 (&lanes)[4]) {
    return hsum8(_mm256_add_ps(_mm256_add_ps(lanes[0], lanes[2]), _mm256_add_ps(lanes[1], lanes[3])));
}

}  // namespace
}  // namespace kestrel
