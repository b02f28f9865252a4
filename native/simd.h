// One vocabulary for the AVX2 and the AVX-512 forms: the same form source is compiled once for each. Include only from
// *_avx2.cpp and *_avx512.cpp. Everything has internal linkage, so that no code with these instructions can be picked
// by the linker for a file that must run without them.
#pragma once

#include <immintrin.h>

#include "../kernels/ucrt.cuh"

namespace kestrel {
namespace {

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using VF = __m512;   // f32[kLanes]
using VI = __m512i;  // i32[kLanes]
using Mask = __mmask16;

inline VF load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, VF v) { _mm512_storeu_ps(p, v); }
inline VF broadcast(float x) { return _mm512_set1_ps(x); }
inline VF zero() { return _mm512_setzero_ps(); }
inline VF add(VF a, VF b) { return _mm512_add_ps(a, b); }
inline VF sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
inline VF mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
inline VF div(VF a, VF b) { return _mm512_div_ps(a, b); }
inline VF fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
inline VF negate(VF a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
inline VI bits(VF a) { return _mm512_castps_si512(a); }
inline VI magnitude_bits(VF a) { return _mm512_and_si512(bits(a), _mm512_set1_epi32(0x7fffffff)); }
inline VI max_i32(VI a, VI b) { return _mm512_max_epi32(a, b); }
inline int max_across(VI a) { return _mm512_reduce_max_epi32(a); }
inline int sum_across(VI a) { return _mm512_reduce_add_epi32(a); }
inline VI add_i32(VI a, VI b) { return _mm512_add_epi32(a, b); }
inline VI zero_i32() { return _mm512_setzero_si512(); }
inline VI load_i32(const int *p) { return _mm512_loadu_si512(p); }
inline void store_i32(int *p, VI a) { _mm512_storeu_si512(p, a); }
inline VF from_i32(VI a) { return _mm512_cvtepi32_ps(a); }
// Nearest even, clamped to +-127; |a| < 2^31.
inline VI to_code(VF a) {
    return _mm512_max_epi32(_mm512_min_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
}
inline void store_i8(signed char *p, VI a) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(a));
}
inline VF max_number(VF a, VF m) { return _mm512_max_ps(a, m); }  // m where a is NaN
// f32[kLanes], |a| < 2^31, to i16: nearest even, saturated.
inline void store_i16(short *p, VF a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
}
// Sums of products of i16 pairs: two rows of 2 * kLanes i8 as pairs (a[i], b[i]), in an order that in_order undoes.
inline VI load_i8_as_i16(const signed char *p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline VI pairs_low(VI a, VI b) { return _mm512_unpacklo_epi16(a, b); }
inline VI pairs_high(VI a, VI b) { return _mm512_unpackhi_epi16(a, b); }
inline VI dot_pairs(VI a, VI b) { return _mm512_madd_epi16(a, b); }
inline VI broadcast_i32(int x) { return _mm512_set1_epi32(x); }
inline void in_order(VI *low, VI *high) {
    const VI a = *low, b = *high;
    *low = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), b);
    *high = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), b);
}

// f32[8] in double, the width at which expf, cosf and sinf work.
using VD = __m512d;
constexpr int kDoubles = 8;
inline VD widen(const float *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
inline void narrow(float *p, VD v) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
inline VD broadcast_f64(unsigned long long u) { return _mm512_castsi512_pd(_mm512_set1_epi64((long long)u)); }
inline VD add(VD a, VD b) { return _mm512_add_pd(a, b); }
inline VD sub(VD a, VD b) { return _mm512_sub_pd(a, b); }
inline VD mul(VD a, VD b) { return _mm512_mul_pd(a, b); }
inline VD fma(VD a, VD b, VD c) { return _mm512_fmadd_pd(a, b, c); }
inline VD fnma(VD a, VD b, VD c) { return _mm512_fnmadd_pd(a, b, c); }  // c - a*b
inline VD magnitude(VD a) { return _mm512_andnot_pd(_mm512_set1_pd(-0.0), a); }
inline VD sign_of(VD a) { return _mm512_and_pd(a, _mm512_set1_pd(-0.0)); }
inline VD flip(VD a, VD sign) { return _mm512_xor_pd(a, sign); }
inline VD select_less(VD a, VD b, VD yes, VD no) {  // a < b ? yes : no
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), no, yes);
}
using VN = __m256i;  // i32[kDoubles]
inline VN round_i32(VD a) { return _mm512_cvtpd_epi32(a); }
inline VN truncate_i32(VD a) { return _mm512_cvttpd_epi32(a); }
inline VD from_i32(VN n) { return _mm512_cvtepi32_pd(n); }
inline VN and_i32(VN n, int bits) { return _mm256_and_si256(n, _mm256_set1_epi32(bits)); }
inline VN add_i32(VN n, int x) { return _mm256_add_epi32(n, _mm256_set1_epi32(x)); }
inline VD lookup(const unsigned long long *table, VN index) {
    return _mm512_i32gather_pd(index, reinterpret_cast<const double *>(table), 8);
}
inline VD power_of_two(VN e) {  // 2^e, e in the normal range
    return _mm512_castsi512_pd(
        _mm512_slli_epi64(_mm512_cvtepi32_epi64(_mm256_add_epi32(e, _mm256_set1_epi32(1023))), 52));
}
inline VN shift_right_6(VN n) { return _mm256_srai_epi32(n, 6); }
inline bool any_magnitude_from(const float *x, int bits) {  // of f32[kDoubles]
    const __m256i u = _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x)), _mm256_set1_epi32(0x7fffffff));
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(u, _mm256_set1_epi32(bits - 1))) != 0;
}
// All ones in lane i where bit `bit` of n[i] is set, as a sign bit alone (-0.0) or as a blend mask.
inline VD sign_from_bit(VN n, int bit) {
    return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_cvtepi32_epi64(_mm256_srli_epi32(n, bit)), 63));
}
inline VD select_sign(VD sign, VD yes, VD no) {  // by the sign bit
    return _mm512_mask_blend_pd(_mm512_movepi64_mask(_mm512_castpd_si512(sign)), no, yes);
}

// Lanes where the value lies outside [low, high] or is NaN are replaced.
inline VF clamp_domain(VF x, float low, float high, Mask *outside) {
    const Mask inside = _mm512_cmp_ps_mask(x, _mm512_set1_ps(low), _CMP_GE_OQ) &
                        _mm512_cmp_ps_mask(x, _mm512_set1_ps(high), _CMP_LE_OQ);
    *outside = static_cast<Mask>(~inside);
    return _mm512_maskz_mov_ps(inside, x);
}
inline bool any(Mask m) { return m != 0; }
inline VF select(Mask m, VF yes, VF no) { return _mm512_mask_blend_ps(m, no, yes); }
inline Mask greater_mask(VF a, VF b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask unordered_mask(VF a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }

inline VD low_half(VF x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
inline VD high_half(VF x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
inline VF join(VD low, VD high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}

#elif defined(__AVX2__)

constexpr int kLanes = 8;
using VF = __m256;   // f32[kLanes]
using VI = __m256i;  // i32[kLanes]
using Mask = __m256;

inline VF load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, VF v) { _mm256_storeu_ps(p, v); }
inline VF broadcast(float x) { return _mm256_set1_ps(x); }
inline VF zero() { return _mm256_setzero_ps(); }
inline VF add(VF a, VF b) { return _mm256_add_ps(a, b); }
inline VF sub(VF a, VF b) { return _mm256_sub_ps(a, b); }
inline VF mul(VF a, VF b) { return _mm256_mul_ps(a, b); }
inline VF div(VF a, VF b) { return _mm256_div_ps(a, b); }
inline VF fma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
inline VF negate(VF a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
inline VI bits(VF a) { return _mm256_castps_si256(a); }
inline VI magnitude_bits(VF a) { return _mm256_and_si256(bits(a), _mm256_set1_epi32(0x7fffffff)); }
inline VI max_i32(VI a, VI b) { return _mm256_max_epi32(a, b); }
inline int max_across(VI a) {
    __m128i v = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}
inline int sum_across(VI a) {
    __m128i v = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}
inline VI add_i32(VI a, VI b) { return _mm256_add_epi32(a, b); }
inline VI zero_i32() { return _mm256_setzero_si256(); }
inline VI load_i32(const int *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
inline void store_i32(int *p, VI a) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), a); }
inline VF from_i32(VI a) { return _mm256_cvtepi32_ps(a); }
// Nearest even, clamped to +-127; |a| < 2^31.
inline VI to_code(VF a) {
    return _mm256_max_epi32(_mm256_min_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127)), _mm256_set1_epi32(-127));
}
inline void store_i8(signed char *p, VI a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(words, words));
}
inline VF max_number(VF a, VF m) { return _mm256_max_ps(a, m); }  // m where a is NaN
// f32[kLanes], |a| < 2^31, to i16: nearest even, saturated.
inline void store_i16(short *p, VF a) {
    const __m256i n = _mm256_cvtps_epi32(a);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p),
                     _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1)));
}
// Sums of products of i16 pairs: two rows of 2 * kLanes i8 as pairs (a[i], b[i]), in an order that in_order undoes.
inline VI load_i8_as_i16(const signed char *p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline VI pairs_low(VI a, VI b) { return _mm256_unpacklo_epi16(a, b); }
inline VI pairs_high(VI a, VI b) { return _mm256_unpackhi_epi16(a, b); }
inline VI dot_pairs(VI a, VI b) { return _mm256_madd_epi16(a, b); }
inline VI broadcast_i32(int x) { return _mm256_set1_epi32(x); }
inline void in_order(VI *low, VI *high) {
    const VI a = *low, b = *high;
    *low = _mm256_permute2x128_si256(a, b, 0x20);
    *high = _mm256_permute2x128_si256(a, b, 0x31);
}

// f32[4] in double, the width at which expf, cosf and sinf work.
using VD = __m256d;
constexpr int kDoubles = 4;
inline VD widen(const float *p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
inline void narrow(float *p, VD v) { _mm_storeu_ps(p, _mm256_cvtpd_ps(v)); }
inline VD broadcast_f64(unsigned long long u) { return _mm256_castsi256_pd(_mm256_set1_epi64x((long long)u)); }
inline VD add(VD a, VD b) { return _mm256_add_pd(a, b); }
inline VD sub(VD a, VD b) { return _mm256_sub_pd(a, b); }
inline VD mul(VD a, VD b) { return _mm256_mul_pd(a, b); }
inline VD fma(VD a, VD b, VD c) { return _mm256_fmadd_pd(a, b, c); }
inline VD fnma(VD a, VD b, VD c) { return _mm256_fnmadd_pd(a, b, c); }  // c - a*b
inline VD magnitude(VD a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a); }
inline VD sign_of(VD a) { return _mm256_and_pd(a, _mm256_set1_pd(-0.0)); }
inline VD flip(VD a, VD sign) { return _mm256_xor_pd(a, sign); }
inline VD select_less(VD a, VD b, VD yes, VD no) {  // a < b ? yes : no
    return _mm256_blendv_pd(no, yes, _mm256_cmp_pd(a, b, _CMP_LT_OQ));
}
using VN = __m128i;  // i32[kDoubles]
inline VN round_i32(VD a) { return _mm256_cvtpd_epi32(a); }
inline VN truncate_i32(VD a) { return _mm256_cvttpd_epi32(a); }
inline VD from_i32(VN n) { return _mm256_cvtepi32_pd(n); }
inline VN and_i32(VN n, int bits) { return _mm_and_si128(n, _mm_set1_epi32(bits)); }
inline VN add_i32(VN n, int x) { return _mm_add_epi32(n, _mm_set1_epi32(x)); }
inline VD lookup(const unsigned long long *table, VN index) {
    return _mm256_i32gather_pd(reinterpret_cast<const double *>(table), index, 8);
}
inline VD power_of_two(VN e) {  // 2^e, e in the normal range
    return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_cvtepi32_epi64(_mm_add_epi32(e, _mm_set1_epi32(1023))), 52));
}
inline VN shift_right_6(VN n) { return _mm_srai_epi32(n, 6); }
inline bool any_magnitude_from(const float *x, int bits) {  // of f32[kDoubles]
    const __m128i u = _mm_and_si128(_mm_castps_si128(_mm_loadu_ps(x)), _mm_set1_epi32(0x7fffffff));
    return _mm_movemask_epi8(_mm_cmpgt_epi32(u, _mm_set1_epi32(bits - 1))) != 0;
}
// The sign bit alone (-0.0) in lane i where bit `bit` of n[i] is set.
inline VD sign_from_bit(VN n, int bit) {
    return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_cvtepi32_epi64(_mm_srli_epi32(n, bit)), 63));
}
inline VD select_sign(VD sign, VD yes, VD no) { return _mm256_blendv_pd(no, yes, sign); }  // by the sign bit

// Lanes where the value lies outside [low, high] or is NaN are replaced.
inline VF clamp_domain(VF x, float low, float high, Mask *outside) {
    const Mask inside = _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(low), _CMP_GE_OQ),
                                      _mm256_cmp_ps(x, _mm256_set1_ps(high), _CMP_LE_OQ));
    *outside = _mm256_xor_ps(inside, _mm256_castsi256_ps(_mm256_set1_epi32(-1)));
    return _mm256_and_ps(inside, x);
}
inline bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
inline VF select(Mask m, VF yes, VF no) { return _mm256_blendv_ps(no, yes, m); }
inline Mask greater_mask(VF a, VF b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Mask unordered_mask(VF a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }

inline VD low_half(VF x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
inline VD high_half(VF x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
inline VF join(VD low, VD high) { return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low)); }

#else
#error "simd.h is for *_avx2.cpp and *_avx512.cpp"
#endif

// expf_ucrt of contract section 11 for x in [-104, 88.7228394], operation by operation as in kernels/ucrt.cuh.
inline VD exp_core(VD x) {
    const VN n = round_i32(mul(x, broadcast_f64(0x40571547652b82feull)));
    const VD r = fnma(from_i32(n), broadcast_f64(0x3f862e42fefa39efull), x);
    const VD z = mul(r, r);
    const VD p = fma(fma(r, broadcast_f64(0x3fc5555555555555ull), broadcast_f64(0x3fe0000000000000ull)), z, r);
    const VD t = lookup(EXPF_UCRT_TABLE, and_i32(n, 63));
    return mul(power_of_two(shift_right_6(n)), fma(t, p, t));
}

inline VF expf_ucrt_vector(VF x) {
    Mask outside;
    const VF inside = clamp_domain(x, -104.0f, 88.7228394f, &outside);
    VF y = join(exp_core(low_half(inside)), exp_core(high_half(inside)));
    if (__builtin_expect(any(outside), 0)) {
        y = select(outside, zero(), y);
        y = select(greater_mask(x, broadcast(88.7228394f)), broadcast(__builtin_inff()), y);
        y = select(unordered_mask(x), broadcast(f32_from_bits(KESTREL_NAN_BITS)), y);
    }
    return y;
}

inline VD sin_poly_vector(VD r, VD z) {
    VD p = fma(z, broadcast_f64(0x3ec71de3a556c734ull), broadcast_f64(0xbf2a01a01a01a01aull));
    p = fma(p, z, broadcast_f64(0x3f81111111111111ull));
    p = fma(p, z, broadcast_f64(0xbfc5555555555555ull));
    return fma(p, mul(r, z), r);
}

inline VD cos_poly_vector(VD z) {
    VD p = fma(z, broadcast_f64(0xbe927e4fb7789f5cull), broadcast_f64(0x3efa01a01a01a019ull));
    p = fma(p, z, broadcast_f64(0xbf56c16c16c16c16ull));
    p = fma(p, z, broadcast_f64(0x3fa5555555555555ull));
    const VD one = broadcast_f64(0x3ff0000000000000ull), half = broadcast_f64(0x3fe0000000000000ull);
    return fma(p, mul(z, z), sub(one, mul(half, z)));
}

// cosf_ucrt and sinf_ucrt of kDoubles angles at a time. c, s: f32[kDoubles], either may be null.
inline void cos_sin_ucrt_vector(const float *x, float *c, float *s) {
    if (any_magnitude_from(x, 0x4b800456)) {  // beyond the fast reduction of sinf, or not finite
        for (int i = 0; i < kDoubles; i++) {
            if (c != nullptr) c[i] = cosf_ucrt(x[i]);
            if (s != nullptr) s[i] = sinf_ucrt(x[i]);
        }
        return;
    }
    const VD one = broadcast_f64(0x3ff0000000000000ull), half = broadcast_f64(0x3fe0000000000000ull);
    const VD xd = widen(x), ax = magnitude(xd);
    // Below pi/4 n is 0 and r is |x| itself, so that one path serves both ranges.
    const VN n = truncate_i32(fma(ax, broadcast_f64(0x3fe45f306dc9c883ull), half));
    const VD dn = from_i32(n);
    const VD r = sub(fnma(dn, broadcast_f64(0x3ff921fb54400000ull), ax), mul(dn, broadcast_f64(0x3dd0b4611a626331ull)));
    const VD z = mul(r, r);
    const VD sine = sin_poly_vector(r, z), cosine = cos_poly_vector(z);
    const VD odd = sign_from_bit(n, 0);
    const VD tiny = broadcast_f64(0x3f20000000000000ull), small = broadcast_f64(0x3f80000000000000ull);  // 2^-13, 2^-7
    if (c != nullptr) {
        VD y = flip(select_sign(odd, sine, cosine), sign_from_bit(add_i32(n, 1), 1));
        y = select_less(ax, small, fnma(mul(xd, half), xd, one), y);
        narrow(c, select_less(ax, tiny, one, y));
    }
    if (s != nullptr) {
        VD y = flip(flip(select_sign(odd, cosine, sine), sign_from_bit(n, 1)), sign_of(xd));
        const VD cube = mul(mul(xd, xd), xd);
        y = select_less(ax, small, fnma(cube, broadcast_f64(0x3fc5555555555555ull), xd), y);
        narrow(s, select_less(ax, tiny, xd, y));
    }
}

}  // namespace
}  // namespace kestrel
