// matmul, AVX-512 form (F, BW, VL, DQ): contract section 3 with the bits of matmul.cpp. Included by matmul_avx512.cpp and,
// with KESTREL_VNNI 1, by matmul_avx512vnni.cpp; the two differ in how bytes are multiplied and added.
//
// Few input rows ("row form"): two weight rows at a time, a 512-bit vector holds the contract's 8 lanes of both.
// Many input rows ("tile form"): 16 weight rows are unpacked once into an interleaved tile, vector lanes are weight rows.
#pragma once

// GCC's own intrinsics read an undefined register on purpose, and warn of it once inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <algorithm>

#include "lane_sums.h"
#include "matmul.h"

namespace kestrel {
namespace {

constexpr bool kVnni = KESTREL_VNNI;
constexpr int kRowFormInputs = 4;  // most input rows of the row form
constexpr int kTileInputs = 6;     // input rows that one pass over two tiles serves

// ---- helpers ---------------------------------------------------------------------------------------------------------

inline __m128i load128(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
inline __m512i load512(const void *p) { return _mm512_loadu_si512(p); }

// Products of unsigned and signed bytes are kept in "units" of 32 bits, each the sum of neighbouring products: one i32
// with VNNI, else two i16 that finish_units() adds.
inline __m512i add_units(__m512i a, __m512i b) { return kVnni ? _mm512_add_epi32(a, b) : _mm512_add_epi16(a, b); }

inline __m512i finish_units(__m512i units) { return kVnni ? units : _mm512_madd_epi16(units, _mm512_set1_epi16(1)); }

// units + u * s. Without VNNI |u * s| summed over pairs must stay within 16 bits: u <= 15 and at most 8 pairs.
inline __m512i multiply_add_u4(__m512i units, __m512i u, __m512i s) {
#if KESTREL_VNNI
    return _mm512_dpbusd_epi32(units, u, s);
#else
    return _mm512_add_epi16(units, _mm512_maddubs_epi16(u, s));
#endif
}

// What a q8local code is turned into before multiply_add_i8: code + 128 as u8 with VNNI, the code itself without.
inline __m512i prepare_q8(__m512i codes) { return kVnni ? _mm512_xor_si512(codes, _mm512_set1_epi8(-128)) : codes; }

// i32 sums + w * q over groups of four bytes, with w from prepare_q8; |q| <= 127.
inline __m512i multiply_add_i8(__m512i sums, __m512i w, __m512i q) {
#if KESTREL_VNNI
    return _mm512_dpbusd_epi32(sums, w, q);
#else
    // |w| (unsigned, so that -128 is 128) times q with w's sign; a pair is at most 2 * 128 * 127 = 32512.
    const __m512i signed_q = _mm512_mask_sub_epi8(q, _mm512_movepi8_mask(w), _mm512_setzero_si512(), q);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_q);
    return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

// What the code's bias adds to a dot of a group, per unit of gsum.
constexpr int bias(int wtype) { return wtype == KESTREL_Q4LOCAL ? 8 : kVnni ? 128 : 0; }

// ---- row form --------------------------------------------------------------------------------------------------------

// The 16 dots of a block (8 groups) of two rows come out of the adding tree in an order of their own. Slot s holds lane
// lane_of_slot(s) of row A (row_of_slot 0) or B (1).
template <int WType>
constexpr int lane_of_slot(int s) {
    return WType == KESTREL_Q4LOCAL ? s / 4 + 4 * (s % 2) : 2 * (s % 4) + s / 4 % 2;
}
template <int WType>
constexpr int row_of_slot(int s) {
    return WType == KESTREL_Q4LOCAL ? s % 4 / 2 : s / 8;
}

// One block of 8 groups of an input row, arranged for the row form; d and offset in slot order, for both rows.
struct alignas(64) InputBlock {
    signed char q[256];  // q4local: elements 0..15 of groups 0..7, then elements 16..31; q8local: as in the input
    float d[16];
    int offset[16];  // bias * gsum
};

// input row -> InputBlock[ceil(G/8)]; slots without a group are zero.
template <int WType>
void arrange_input(int groups, const signed char *q, const float *d, const int *gsum, InputBlock *blocks) {
    for (int first = 0; first < groups; first += 8, blocks++) {
        const int count = std::min(groups - first, 8);
        if (count < 8) std::memset(blocks, 0, sizeof *blocks);
        for (int i = 0; i < count; i++) {
            const signed char *source = q + 32 * (first + i);
            if (WType == KESTREL_Q4LOCAL) {
                std::memcpy(blocks->q + 16 * i, source, 16);
                std::memcpy(blocks->q + 128 + 16 * i, source + 16, 16);
            } else {
                std::memcpy(blocks->q + 32 * i, source, 32);
            }
        }
        for (int slot = 0; slot < 16; slot++) {
            const int lane = lane_of_slot<WType>(slot);
            if (lane >= count) continue;
            blocks->d[slot] = d[first + lane];
            blocks->offset[slot] = bias(WType) * gsum[first + lane];
        }
    }
}

// Adds the four units of each 128-bit quarter of v[i] to unit i of that quarter.
inline __m512i reduce_units(__m512i v0, __m512i v1, __m512i v2, __m512i v3, __m512i (*add)(__m512i, __m512i)) {
    const __m512i a = add(_mm512_unpacklo_epi32(v0, v1), _mm512_unpackhi_epi32(v0, v1));  // [0 1 0 1]
    const __m512i b = add(_mm512_unpacklo_epi32(v2, v3), _mm512_unpackhi_epi32(v2, v3));  // [2 3 2 3]
    return add(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));                 // [0 1 2 3]
}

inline __m512i add_i32(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }

// 64 bytes of codes, the 32-bit words outside `words` read as zero and not touched.
template <bool Masked>
inline __m512i load_codes(const char *p, __mmask16 words) {
    return Masked ? _mm512_maskz_loadu_epi32(words, p) : load512(p);
}

// Dots of one block of rows A and B with C inputs. The tail (Masked) has `count` groups.
template <int C, bool Masked>
inline void dots_q4(const char *a, const char *b, int count, const InputBlock *const *in, __m512i *dot) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i parts[C][4];  // [A groups 0..3, A 4..7, B 0..3, B 4..7]: 128-bit quarter i is the i-th of four groups
    for (int v = 0; v < 4; v++) {
        const int p = v % 2, groups = std::min(std::max(count - 4 * p, 0), 4);
        const __m512i bytes = load_codes<Masked>((v < 2 ? a : b) + 64 * p, static_cast<__mmask16>((1u << 4 * groups) - 1));
        const __m512i lo = _mm512_and_si512(bytes, low);
        const __m512i hi = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
        for (int c = 0; c < C; c++) {
            const __m512i units = multiply_add_u4(_mm512_setzero_si512(), lo, load512(in[c]->q + 64 * p));
            parts[c][v] = multiply_add_u4(units, hi, load512(in[c]->q + 128 + 64 * p));
        }
    }
    // Without VNNI |unit half| <= 4 * 15 * 127 = 7620, so that the four that are added still fit 16 bits.
    for (int c = 0; c < C; c++)
        dot[c] = finish_units(reduce_units(parts[c][0], parts[c][1], parts[c][2], parts[c][3], add_units));
}

template <int C, bool Masked>
inline void dots_q8(const char *a, const char *b, int count, const InputBlock *const *in, __m512i *dot) {
    __m512i parts[C][8];  // [A groups 0-1, 2-3, 4-5, 6-7, B likewise]: a group is two 128-bit quarters
    for (int v = 0; v < 8; v++) {
        const int p = v % 4, groups = std::min(std::max(count - 2 * p, 0), 2);
        const __m512i bytes = load_codes<Masked>((v < 4 ? a : b) + 64 * p, static_cast<__mmask16>((1u << 8 * groups) - 1));
        const __m512i w = prepare_q8(bytes);
        for (int c = 0; c < C; c++)
            parts[c][v] = multiply_add_i8(_mm512_setzero_si512(), w, load512(in[c]->q + 64 * p));
    }
    for (int c = 0; c < C; c++) {
        const __m512i ra = reduce_units(parts[c][0], parts[c][1], parts[c][2], parts[c][3], add_i32);
        const __m512i rb = reduce_units(parts[c][4], parts[c][5], parts[c][6], parts[c][7], add_i32);
        dot[c] = _mm512_add_epi32(_mm512_shuffle_i32x4(ra, rb, _MM_SHUFFLE(2, 0, 2, 0)),
                                  _mm512_shuffle_i32x4(ra, rb, _MM_SHUFFLE(3, 1, 3, 1)));
    }
}

// What orders slots, found once per task.
template <int WType>
struct Slots {
    __m256i scales;       // 16-bit places in [A's 8 scales, B's 8 scales], by slot
    __m512i lanes;        // slots in the order [A lanes 0..7, B lanes 0..7]
    int tail;             // groups of the last, incomplete block, 0..7
    __mmask16 tail_slots; // slots that have a group there

    explicit Slots(int groups) : tail(groups % 8), tail_slots(0) {
        alignas(64) short scale_place[16];
        alignas(64) int slot_of_lane[16];
        for (int s = 0; s < 16; s++) {
            const int lane = lane_of_slot<WType>(s), row = row_of_slot<WType>(s);
            scale_place[s] = static_cast<short>(8 * row + lane);
            slot_of_lane[8 * row + lane] = s;
            if (lane < tail) tail_slots = static_cast<__mmask16>(tail_slots | 1u << s);
        }
        scales = _mm256_load_si256(reinterpret_cast<const __m256i *>(scale_place));
        lanes = _mm512_load_si512(slot_of_lane);
    }

    // f32 scales in slot order of `count` groups from a and b on.
    template <bool Masked>
    __m512 load_scales(const unsigned short *a, const unsigned short *b) const {
        const auto mask = static_cast<__mmask8>((1u << tail) - 1);
        const __m128i bits_a = Masked ? _mm_maskz_loadu_epi16(mask, a) : load128(a);
        const __m128i bits_b = Masked ? _mm_maskz_loadu_epi16(mask, b) : load128(b);
        const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bits_a), bits_b, 1);
        return _mm512_cvtph_ps(_mm256_permutexvar_epi16(scales, both));
    }
};

template <int WType, int C>
void rows_quantised(const MatmulTask &task, const MatmulInput &input, char *workspace) {
    constexpr bool q4 = WType == KESTREL_Q4LOCAL;
    constexpr int block_bytes = q4 ? 128 : 256;
    const int groups = task.w.k / 32, blocks = groups / 8, stride = (groups + 7) / 8;
    auto *arranged = reinterpret_cast<InputBlock *>(workspace);  // [C][stride]
    for (int c = 0; c < C; c++) {
        const int64_t in = task.in_row[c];
        arrange_input<WType>(groups, input.xq + in * task.w.k, input.xd + in * groups, input.gsum + in * groups,
                             arranged + c * stride);
    }
    const Slots<WType> slots(groups);
    const int64_t row_bytes = static_cast<int64_t>(groups) * (q4 ? 16 : 32);

    for (int n = task.begin; n < task.end; n += 2) {
        const int second = n + 1 < task.end ? n + 1 : n;  // a last row alone is computed twice and stored once
        const char *a = static_cast<const char *>(task.w.codes) + n * row_bytes;
        const char *b = static_cast<const char *>(task.w.codes) + second * row_bytes;
        const unsigned short *scale_a = task.w.scale + static_cast<int64_t>(n) * groups;
        const unsigned short *scale_b = task.w.scale + static_cast<int64_t>(second) * groups;
        __m512 acc[C];
        __m512i dot[C];
        const InputBlock *in[C];
        for (int c = 0; c < C; c++) acc[c] = _mm512_setzero_ps();
        for (int block = 0; block < blocks; block++) {
            for (int c = 0; c < C; c++) in[c] = arranged + c * stride + block;
            // The same block of the next two rows: the hardware stops at page ends and restarts at each array.
            for (int line = 0; line < block_bytes; line += 64) {
                _mm_prefetch(a + 2 * row_bytes + line, _MM_HINT_T0);
                _mm_prefetch(b + 2 * row_bytes + line, _MM_HINT_T0);
            }
            if (block % 4 == 0) {
                _mm_prefetch(reinterpret_cast<const char *>(scale_a + 2 * groups), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char *>(scale_b + 2 * groups), _MM_HINT_T0);
            }
            if (q4)
                dots_q4<C, false>(a, b, 8, in, dot);
            else
                dots_q8<C, false>(a, b, 8, in, dot);
            const __m512 scales = slots.template load_scales<false>(scale_a, scale_b);
            for (int c = 0; c < C; c++) {
                const __m512i exact = _mm512_sub_epi32(dot[c], load512(in[c]->offset));
                const __m512 ws = _mm512_mul_ps(scales, _mm512_load_ps(in[c]->d));
                acc[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), ws, acc[c]);
            }
            a += block_bytes, b += block_bytes, scale_a += 8, scale_b += 8;
        }
        if (slots.tail != 0) {
            for (int c = 0; c < C; c++) in[c] = arranged + c * stride + blocks;
            if (q4)
                dots_q4<C, true>(a, b, slots.tail, in, dot);
            else
                dots_q8<C, true>(a, b, slots.tail, in, dot);
            const __m512 scales = slots.template load_scales<true>(scale_a, scale_b);
            for (int c = 0; c < C; c++) {
                const __m512i exact = _mm512_sub_epi32(dot[c], load512(in[c]->offset));
                const __m512 ws = _mm512_mul_ps(scales, _mm512_load_ps(in[c]->d));
                // Lanes without a group keep their value, whatever the padding multiplies to.
                acc[c] = _mm512_mask3_fmadd_ps(_mm512_cvtepi32_ps(exact), ws, acc[c], slots.tail_slots);
            }
        }
        for (int c = 0; c < C; c++) {
            const __m512 lanes = _mm512_permutexvar_ps(slots.lanes, acc[c]);
            float *y = task.y + task.out_row[c] * task.ldy;
            y[n] = hsum8(_mm512_castps512_ps256(lanes));
            if (second != n) y[second] = hsum8(_mm512_extractf32x8_ps(lanes, 1));
        }
    }
}

// ---- bf16 ------------------------------------------------------------------------------------------------------------

// 16 bf16 to f32.
inline __m512 widen_bf16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// lanes[h]: lanes 16h .. 16h+15.
inline float hsum32(const __m512 (&lanes)[2]) {
    const __m512 b = _mm512_add_ps(lanes[0], lanes[1]);
    return hsum8(_mm256_add_ps(_mm512_castps512_ps256(b), _mm512_extractf32x8_ps(b, 1)));
}

// R weight rows times C inputs; the lanes k mod 32 of the contract are two vectors. 2 * R * C independent chains of fma.
template <int R, int C>
inline void block_bf16(const MatmulTask &task, const float *const *x, int n, int c0) {
    const int64_t k = task.w.k, full = k / 32 * 32;
    const auto *w = static_cast<const unsigned short *>(task.w.codes) + n * k;
    __m512 acc[R][C][2];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c][0] = acc[r][c][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < full; i += 32) {
        for (int h = 0; h < 2; h++) {
            const int64_t at = i + 16 * h;
            __m512 xs[C];
            for (int c = 0; c < C; c++) xs[c] = _mm512_loadu_ps(x[c] + at);
            for (int r = 0; r < R; r++) {
                const void *bits = w + r * k + at;
                const __m512 ws = widen_bf16(_mm256_loadu_si256(static_cast<const __m256i *>(bits)));
                for (int c = 0; c < C; c++) acc[r][c][h] = _mm512_fmadd_ps(ws, xs[c], acc[r][c][h]);
            }
        }
    }
    for (int h = 0; h < 2 && full + 16 * h < k; h++) {
        const int64_t at = full + 16 * h;
        const auto there = static_cast<__mmask16>((1u << std::min<int64_t>(k - at, 16)) - 1);
        for (int r = 0; r < R; r++) {
            const __m512 ws = widen_bf16(_mm256_maskz_loadu_epi16(there, w + r * k + at));
            for (int c = 0; c < C; c++) {
                const __m512 xs = _mm512_maskz_loadu_ps(there, x[c] + at);
                // Lanes past the row keep their value.
                acc[r][c][h] = _mm512_mask3_fmadd_ps(ws, xs, acc[r][c][h], there);
            }
        }
    }
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) task.y[task.out_row[c0 + c] * task.ldy + n + r] = hsum32(acc[r][c]);
}

template <int C>
void inputs_bf16(const MatmulTask &task, const MatmulInput &input, int c0, int begin, int end) {
    constexpr int R = C == 4 ? 2 : 4;  // 8 or 16 of the 32 registers are accumulators
    const float *x[C];
    for (int c = 0; c < C; c++) x[c] = input.x + static_cast<int64_t>(task.in_row[c0 + c]) * task.w.k;
    int n = begin;
    for (; n + R <= end; n += R) block_bf16<R, C>(task, x, n, c0);
    for (; n < end; n++) block_bf16<1, C>(task, x, n, c0);
}

void run_bf16(const MatmulTask &task, const MatmulInput &input) {
    const int step = task.count <= 4 ? task.end - task.begin : 64;  // 64 rows stay in cache over all inputs
    for (int begin = task.begin; begin < task.end; begin += step) {
        const int end = std::min(begin + step, task.end);
        int c = 0;
        for (; c + 4 <= task.count; c += 4) inputs_bf16<4>(task, input, c, begin, end);
        for (; c + 2 <= task.count; c += 2) inputs_bf16<2>(task, input, c, begin, end);
        if (c < task.count) inputs_bf16<1>(task, input, c, begin, end);
    }
}

// ---- tile form -------------------------------------------------------------------------------------------------------

// 16 weight rows, interleaved: for group g and step s (elements 4s .. 4s+3), 64 bytes = 16 rows x 4 elements.
struct Tile {
    unsigned char *codes;  // [G, 8 steps, 16 rows, 4]: u8 0..15 for q4local, prepare_q8 of i8 for q8local
    float *scale;          // [G, 16 rows]
};

// Rows first .. first+rows-1 (rows <= 16); missing rows repeat the last one, their results are not stored.
void make_tile(const Weight &w, int first, int rows, const Tile &tile) {
    const int groups = w.k / 32;
    const bool q4 = w.wtype == KESTREL_Q4LOCAL;
    const int group_bytes = q4 ? 16 : 32;
    const char *codes[16];
    const unsigned short *scale[16];
    for (int r = 0; r < 16; r++) {
        const int64_t row = first + std::min(r, rows - 1);
        codes[r] = static_cast<const char *>(w.codes) + row * groups * group_bytes;
        scale[r] = w.scale + row * groups;
    }
    const __m512i low = _mm512_set1_epi8(15);
    for (int g = 0; g < groups; g++) {
        unsigned char *out = tile.codes + 512 * static_cast<int64_t>(g);
        for (int half = 0; half < (q4 ? 1 : 2); half++) {
            // 16 rows x 16 bytes -> 4 vectors of 16 rows x 4 bytes: a 4 x 4 transposition of 32-bit words in each quarter.
            __m512i v[4];
            for (int r = 0; r < 4; r++) {
                const int64_t at = static_cast<int64_t>(group_bytes) * g + 16 * half;
                __m512i rows4 = _mm512_castsi128_si512(load128(codes[r] + at));
                rows4 = _mm512_inserti32x4(rows4, load128(codes[r + 4] + at), 1);
                rows4 = _mm512_inserti32x4(rows4, load128(codes[r + 8] + at), 2);
                v[r] = _mm512_inserti32x4(rows4, load128(codes[r + 12] + at), 3);
            }
            const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
            const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
            const __m512i words[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c),
                                      _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)};
            for (int s = 0; s < 4; s++) {
                if (q4) {
                    _mm512_store_si512(out + 64 * s, _mm512_and_si512(words[s], low));
                    _mm512_store_si512(out + 64 * (s + 4), _mm512_and_si512(_mm512_srli_epi16(words[s], 4), low));
                } else {
                    _mm512_store_si512(out + 256 * half + 64 * s, prepare_q8(words[s]));
                }
            }
        }
        alignas(32) unsigned short bits[16];
        for (int r = 0; r < 16; r++) bits[r] = scale[r][g];
        _mm512_store_ps(tile.scale + 16 * g,
                        _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(bits))));
    }
}

inline __m512i broadcast4(const signed char *p) {
    int word;
    std::memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

// T tiles (16 weight rows each) times inputs c0 .. c0+C-1; `rows` results of each input are stored.
template <int WType, int T, int C>
void tiles_times(const MatmulTask &task, const MatmulInput &input, const Tile *tile, int *offset, int first, int rows,
                 int c0) {
    constexpr bool q4 = WType == KESTREL_Q4LOCAL;
    const int groups = task.w.k / 32;
    const signed char *q[C];
    const float *d[C];
    for (int c = 0; c < C; c++) {
        const int64_t in = task.in_row[c0 + c];
        q[c] = input.xq + in * task.w.k;
        d[c] = input.xd + in * groups;
        for (int g = 0; g < groups; g++) offset[c * groups + g] = bias(WType) * input.gsum[in * groups + g];
    }
    __m512 lanes[T][C][8];  // lane l of the contract, for 16 weight rows
    for (int l = 0; l < 8; l++) {
        __m512 acc[T][C];
        for (int t = 0; t < T; t++)
            for (int c = 0; c < C; c++) acc[t][c] = _mm512_setzero_ps();
        for (int g = l; g < groups; g += 8) {
            __m512i sum[T][C];
            for (int t = 0; t < T; t++)
                for (int c = 0; c < C; c++) sum[t][c] = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int s = 0; s < 8; s++) {
                __m512i w[T];
                for (int t = 0; t < T; t++)
                    w[t] = _mm512_load_si512(tile[t].codes + 512 * static_cast<int64_t>(g) + 64 * s);
                for (int c = 0; c < C; c++) {
                    const __m512i x = broadcast4(q[c] + 32 * g + 4 * s);
                    for (int t = 0; t < T; t++) {
                        sum[t][c] = q4 ? multiply_add_u4(sum[t][c], w[t], x) : multiply_add_i8(sum[t][c], w[t], x);
                        asm("" : "+v"(sum[t][c]));  // else the compiler regroups the sums and spills the parts
                    }
                }
            }
            for (int t = 0; t < T; t++) {
                const __m512 scale = _mm512_load_ps(tile[t].scale + 16 * g);
                for (int c = 0; c < C; c++) {
                    __m512i dot = q4 ? finish_units(sum[t][c]) : sum[t][c];
                    if (bias(WType) != 0) dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(offset[c * groups + g]));
                    const __m512 ws = _mm512_mul_ps(scale, _mm512_set1_ps(d[c][g]));
                    acc[t][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), ws, acc[t][c]);
                }
            }
        }
        for (int t = 0; t < T; t++)
            for (int c = 0; c < C; c++) lanes[t][c][l] = acc[t][c];
    }
    for (int c = 0; c < C; c++) {
        for (int t = 0; t < T; t++) {
            const __m512 *a = lanes[t][c];
            const __m512 lo0 = _mm512_add_ps(a[0], a[4]), lo1 = _mm512_add_ps(a[1], a[5]);
            const __m512 lo2 = _mm512_add_ps(a[2], a[6]), lo3 = _mm512_add_ps(a[3], a[7]);
            const __m512 y = _mm512_add_ps(_mm512_add_ps(lo0, lo1), _mm512_add_ps(lo2, lo3));
            const int stored = std::min(rows - 16 * t, 16);
            float *out = task.y + task.out_row[c0 + c] * task.ldy + first + 16 * t;
            _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1u << stored) - 1), y);
        }
    }
}

template <int WType, int T>
void tiles_times_all(const MatmulTask &task, const MatmulInput &input, const Tile *tile, int *offset, int first,
                     int rows) {
    int c = 0;
    for (; c + kTileInputs <= task.count; c += kTileInputs)
        tiles_times<WType, T, kTileInputs>(task, input, tile, offset, first, rows, c);
    switch (task.count - c) {
        case 5: tiles_times<WType, T, 5>(task, input, tile, offset, first, rows, c); break;
        case 4: tiles_times<WType, T, 4>(task, input, tile, offset, first, rows, c); break;
        case 3: tiles_times<WType, T, 3>(task, input, tile, offset, first, rows, c); break;
        case 2: tiles_times<WType, T, 2>(task, input, tile, offset, first, rows, c); break;
        case 1: tiles_times<WType, T, 1>(task, input, tile, offset, first, rows, c); break;
        default: break;
    }
}

template <int WType>
void run_tiles(const MatmulTask &task, const MatmulInput &input, char *workspace) {
    const int64_t k = task.w.k, groups = k / 32;
    Tile tile[2];
    for (int t = 0; t < 2; t++) {
        tile[t].codes = reinterpret_cast<unsigned char *>(workspace) + 16 * k * t;
        tile[t].scale = reinterpret_cast<float *>(workspace + 32 * k) + 16 * groups * t;
    }
    int *offset = reinterpret_cast<int *>(workspace + 32 * k + 128 * groups);  // [kTileInputs, G]
    for (int first = task.begin; first < task.end; first += 32) {
        const int rows = std::min(32, task.end - first);
        make_tile(task.w, first, std::min(rows, 16), tile[0]);
        if (rows > 16) {
            make_tile(task.w, first + 16, rows - 16, tile[1]);
            tiles_times_all<WType, 2>(task, input, tile, offset, first, rows);
        } else {
            tiles_times_all<WType, 1>(task, input, tile, offset, first, rows);
        }
    }
}

// ---- choice ----------------------------------------------------------------------------------------------------------

template <int WType>
void run_quantised(const MatmulTask &task, const MatmulInput &input, char *workspace) {
    switch (task.count) {
        case 1: return rows_quantised<WType, 1>(task, input, workspace);
        case 2: return rows_quantised<WType, 2>(task, input, workspace);
        case 3: return rows_quantised<WType, 3>(task, input, workspace);
        case 4: return rows_quantised<WType, 4>(task, input, workspace);
        default: return run_tiles<WType>(task, input, workspace);
    }
}

void run_avx512(const MatmulTask &task, const MatmulInput &input, char *workspace) {
    if (task.count == 0 || task.begin >= task.end) return;
    switch (task.w.wtype) {
        case KESTREL_Q4LOCAL: return run_quantised<KESTREL_Q4LOCAL>(task, input, workspace);
        case KESTREL_Q8LOCAL: return run_quantised<KESTREL_Q8LOCAL>(task, input, workspace);
        default: return run_bf16(task, input);
    }
}

size_t workspace_avx512(int k, int count) {
    const size_t groups = k / 32;
    const size_t arranged = std::min(count, kRowFormInputs) * ((groups + 7) / 8) * sizeof(InputBlock);
    const size_t tile = 32 * static_cast<size_t>(k) + 128 * groups + kTileInputs * groups * sizeof(int);
    return round_up(count > kRowFormInputs ? std::max(arranged, tile) : arranged, 64);
}

}  // namespace
}  // namespace kestrel
