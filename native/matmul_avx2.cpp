// matmul, AVX2 + FMA + F16C form: contract section 3 with the bits of matmul.cpp.
//
// Few input rows ("row form"): one weight row at a time, vector lanes are the contract's lanes (groups g mod 8).
// Many input rows ("tile form"): 8 weight rows are unpacked once into an interleaved tile, vector lanes are weight rows,
// and the contract's 8 lanes are walked one after the other, so that no horizontal sum is needed.
#include <immintrin.h>

#include <algorithm>

#include "lane_sums.h"
#include "matmul.h"

namespace kestrel {
namespace {

constexpr int kRowFormInputs = 3;  // most input rows of the row form
constexpr int kTileInputs = 3;     // input rows that one pass over the tiles serves
constexpr int kPrefetchRows = 8;   // of bf16, between what is read and what is asked for

// ---- helpers ---------------------------------------------------------------------------------------------------------

inline __m256i load256(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
inline __m128i load128(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }

// All ones in the first `count` of 8 32-bit lanes.
inline __m256i lane_mask(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// One block of 8 groups of an input row, arranged for the row form. The 8 dots of a block come out of the adding tree
// in an order of their own, kLaneOfSlot; d and offset are kept in that order.
struct alignas(64) InputBlock {
    signed char q[256];  // q4local: elements 0..15 of groups 0..7, then elements 16..31; q8local: as in the input
    float d[8];
    int offset[8];  // 8 * gsum for q4local, 0 for q8local
};

constexpr int kLaneOfSlotQ4[8] = {0, 2, 4, 6, 1, 3, 5, 7};
constexpr int kLaneOfSlotQ8[8] = {0, 1, 2, 3, 4, 5, 6, 7};

// input row -> InputBlock[ceil(G/8)]; slots without a group are zero.
void arrange_input(int wtype, int groups, const signed char *q, const float *d, const int *gsum, InputBlock *blocks) {
    const int *lane_of_slot = wtype == KESTREL_Q4LOCAL ? kLaneOfSlotQ4 : kLaneOfSlotQ8;
    for (int first = 0; first < groups; first += 8, blocks++) {
        const int count = std::min(groups - first, 8);
        if (count < 8) std::memset(blocks, 0, sizeof *blocks);
        for (int i = 0; i < count; i++) {
            const signed char *source = q + 32 * (first + i);
            if (wtype == KESTREL_Q4LOCAL) {
                std::memcpy(blocks->q + 16 * i, source, 16);
                std::memcpy(blocks->q + 128 + 16 * i, source + 16, 16);
            } else {
                std::memcpy(blocks->q + 32 * i, source, 32);
            }
        }
        for (int slot = 0; slot < 8; slot++) {
            const int lane = lane_of_slot[slot];
            if (lane >= count) continue;
            blocks->d[slot] = d[first + lane];
            blocks->offset[slot] = wtype == KESTREL_Q4LOCAL ? 8 * gsum[first + lane] : 0;
        }
    }
}

// Byte shuffle that takes scales (f16) of lanes 0..7, `skip` places into the source vector, to slot order.
inline __m128i scale_shuffle(const int *lane_of_slot, int skip) {
    alignas(16) signed char control[16];
    for (int slot = 0; slot < 8; slot++) {
        const int place = lane_of_slot[slot] + skip;
        control[2 * slot] = static_cast<signed char>(place < 8 ? 2 * place : -1);
        control[2 * slot + 1] = static_cast<signed char>(place < 8 ? 2 * place + 1 : -1);
    }
    return _mm_load_si128(reinterpret_cast<const __m128i *>(control));
}

// ---- row form, q4local -----------------------------------------------------------------------------------------------

// Adds the four 32-bit units of each half of v[i] to unit i of that half (units are i32 or pairs of i16).
inline __m256i reduce_units(__m256i v0, __m256i v1, __m256i v2, __m256i v3, __m256i (*add)(__m256i, __m256i)) {
    const __m256i a = add(_mm256_unpacklo_epi32(v0, v1), _mm256_unpackhi_epi32(v0, v1));  // [0 1 0 1]
    const __m256i b = add(_mm256_unpacklo_epi32(v2, v3), _mm256_unpackhi_epi32(v2, v3));  // [2 3 2 3]
    return add(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));                 // [0 1 2 3]
}

inline __m256i add_i16(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
inline __m256i add_i32(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }

// Sums 16-bit parts of 8 groups to one 32-bit dot each. v[p] holds group 2p in its low half, group 2p+1 in its high
// half; result lanes are kLaneOfSlotQ4. |part| <= 4 * 15 * 127 = 7620, so that four of them still fit 16 bits.
inline __m256i reduce_q4(__m256i v0, __m256i v1, __m256i v2, __m256i v3) {
    return _mm256_madd_epi16(reduce_units(v0, v1, v2, v3, add_i16), _mm256_set1_epi16(1));
}

inline __m256i parts_q4(__m256i lo, __m256i hi, const InputBlock &in, int p) {
    return _mm256_add_epi16(_mm256_maddubs_epi16(lo, load256(in.q + 32 * p)),
                            _mm256_maddubs_epi16(hi, load256(in.q + 128 + 32 * p)));
}

// Dots of one weight block with C inputs: P pairs of groups from codes, the last pair under `last_mask` when Masked.
template <int C, int P, bool Masked>
inline void dots_q4(const unsigned char *codes, __m256i last_mask, const InputBlock *const *in, __m256i *dot) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i parts[C][4];
    for (int p = 0; p < 4; p++) {
        if (p < P) {
            const __m256i bytes = Masked && p == P - 1
                                      ? _mm256_maskload_epi32(reinterpret_cast<const int *>(codes + 32 * p), last_mask)
                                      : load256(codes + 32 * p);
            const __m256i lo = _mm256_and_si256(bytes, low);
            const __m256i hi = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
            for (int c = 0; c < C; c++) parts[c][p] = parts_q4(lo, hi, *in[c], p);
        } else {
            for (int c = 0; c < C; c++) parts[c][p] = _mm256_setzero_si256();
        }
    }
    for (int c = 0; c < C; c++) dot[c] = reduce_q4(parts[c][0], parts[c][1], parts[c][2], parts[c][3]);
}

// fma of one block into an accumulator: acc + (f32)(dot - offset) * (scale * d), the product scale * d rounded.
inline __m256 accumulate(__m256 acc, __m256i dot, __m256 scale, const InputBlock &in) {
    const __m256i exact = _mm256_sub_epi32(dot, load256(in.offset));
    const __m256 ws = _mm256_mul_ps(scale, _mm256_load_ps(in.d));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), ws, acc);
}

// Everything about the last, incomplete block of a row, found once per task.
struct Tail {
    int count;            // groups, 0..7
    __m256i code_mask;    // 32-bit lanes of the last pair of groups that exist (q4local)
    __m256i slot_mask;    // slots that have a group
    __m128i shuffle;      // of the tail's scales to slot order
    bool copy_scales;     // a row has fewer than 8 scales: no 16-byte load stays inside it

    Tail(int groups, const int *lane_of_slot) : count(groups % 8) {
        code_mask = lane_mask(count % 2 ? 4 : 8);
        alignas(32) int mask[8];
        for (int slot = 0; slot < 8; slot++) mask[slot] = lane_of_slot[slot] < count ? -1 : 0;
        slot_mask = _mm256_load_si256(reinterpret_cast<const __m256i *>(mask));
        copy_scales = groups < 8;
        shuffle = scale_shuffle(lane_of_slot, copy_scales ? 0 : 8 - count);
    }

    // f32 scales of the tail in slot order; `end` is one past the row's last scale.
    __m256 scales(const unsigned short *end) const {
        __m128i bits;
        if (copy_scales) {
            alignas(16) unsigned short copy[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            std::memcpy(copy, end - count, count * sizeof(unsigned short));
            bits = _mm_load_si128(reinterpret_cast<const __m128i *>(copy));
        } else {
            bits = load128(end - 8);
        }
        return _mm256_cvtph_ps(_mm_shuffle_epi8(bits, shuffle));
    }
};

template <int C>
inline void tail_dots_q4(const unsigned char *codes, const Tail &tail, const InputBlock *const *in, __m256i *dot) {
    switch ((tail.count + 1) / 2) {
        case 1: dots_q4<C, 1, true>(codes, tail.code_mask, in, dot); break;
        case 2: dots_q4<C, 2, true>(codes, tail.code_mask, in, dot); break;
        case 3: dots_q4<C, 3, true>(codes, tail.code_mask, in, dot); break;
        default: dots_q4<C, 4, true>(codes, tail.code_mask, in, dot); break;
    }
}

// ---- row form, q8local -----------------------------------------------------------------------------------------------

// 8 partial sums of one group: |w| (unsigned, so that -128 is 128) times q with w's sign; q is never -128, so the sign
// flips exactly, and a pair is at most 2 * 128 * 127 = 32512.
inline __m256i parts_q8(__m256i w, __m256i q) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

template <int C>
inline void dots_q8(const signed char *codes, int groups, const InputBlock *const *in, __m256i *dot) {
    for (int c = 0; c < C; c++) {
        __m256i v[8];
        for (int i = 0; i < 8; i++)
            v[i] = i < groups ? parts_q8(load256(codes + 32 * i), load256(in[c]->q + 32 * i)) : _mm256_setzero_si256();
        const __m256i a = reduce_units(v[0], v[1], v[2], v[3], add_i32);  // low and high half to be added
        const __m256i b = reduce_units(v[4], v[5], v[6], v[7], add_i32);
        dot[c] = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
    }
}

template <int WType, int C>
inline void dots(const char *codes, const InputBlock *const *in, __m256i *dot) {
    if (WType == KESTREL_Q4LOCAL)
        dots_q4<C, 4, false>(reinterpret_cast<const unsigned char *>(codes), _mm256_setzero_si256(), in, dot);
    else
        dots_q8<C>(reinterpret_cast<const signed char *>(codes), 8, in, dot);
}

template <int WType, int C>
inline void tail_dots(const char *codes, const Tail &tail, const InputBlock *const *in, __m256i *dot) {
    if (WType == KESTREL_Q4LOCAL)
        tail_dots_q4<C>(reinterpret_cast<const unsigned char *>(codes), tail, in, dot);
    else
        dots_q8<C>(reinterpret_cast<const signed char *>(codes), tail.count, in, dot);
}

// ---- row form --------------------------------------------------------------------------------------------------------

// What a task's rows share.
template <int WType>
struct RowTask {
    static constexpr int kGroupBytes = WType == KESTREL_Q4LOCAL ? 16 : 32;

    const char *codes;            // of row 0
    const unsigned short *scale;  // of row 0
    int groups;
    const InputBlock *arranged;  // [C, ceil(groups / 8)]
    Tail tail;
    __m128i shuffle;  // of 8 scales to slot order

    RowTask(const Weight &w, const InputBlock *arranged_input)
        : codes(static_cast<const char *>(w.codes)), scale(w.scale), groups(w.k / 32), arranged(arranged_input),
          tail(groups, slots()), shuffle(scale_shuffle(slots(), 0)) {}

    static const int *slots() { return WType == KESTREL_Q4LOCAL ? kLaneOfSlotQ4 : kLaneOfSlotQ8; }
};

// Asks for what the next R rows hold at block b of row r: the hardware stops at page ends and restarts at each array.
template <int GroupBytes>
inline void prefetch_block(const char *codes, const unsigned short *scale, int b) {
    for (int line = 0; line < 8 * GroupBytes; line += 64) _mm_prefetch(codes + line, _MM_HINT_T0);
    if (b % 4 == 0) _mm_prefetch(reinterpret_cast<const char *>(scale), _MM_HINT_T0);  // 4 blocks of scales a line
}

// Rows n .. n+R-1 times C inputs: accumulators in slot order. The rows' loads and chains of fma overlap.
template <int WType, int R, int C>
inline void accumulate_rows(const RowTask<WType> &t, int64_t n, __m256 (&acc)[R][C]) {
    const int blocks = t.groups / 8, stride = (t.groups + 7) / 8;
    const int64_t row_bytes = static_cast<int64_t>(t.groups) * t.kGroupBytes;
    const char *codes = t.codes + n * row_bytes;
    const unsigned short *scale = t.scale + n * t.groups;
    const InputBlock *in[C];
    __m256i dot[C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = _mm256_setzero_ps();
    for (int b = 0; b < blocks; b++, codes += 8 * t.kGroupBytes, scale += 8) {
        for (int c = 0; c < C; c++) in[c] = t.arranged + c * stride + b;
        for (int r = 0; r < R; r++) {
            prefetch_block<RowTask<WType>::kGroupBytes>(codes + (R + r) * row_bytes, scale + (R + r) * t.groups, b);
            dots<WType, C>(codes + r * row_bytes, in, dot);
            const __m256 scales = _mm256_cvtph_ps(_mm_shuffle_epi8(load128(scale + r * t.groups), t.shuffle));
            for (int c = 0; c < C; c++) acc[r][c] = accumulate(acc[r][c], dot[c], scales, *in[c]);
        }
    }
    if (t.tail.count != 0) {
        for (int c = 0; c < C; c++) in[c] = t.arranged + c * stride + blocks;
        for (int r = 0; r < R; r++) {
            tail_dots<WType, C>(codes + r * row_bytes, t.tail, in, dot);
            const __m256 scales = t.tail.scales(scale + r * t.groups + t.tail.count);
            // Lanes without a group keep their value, whatever the padding multiplies to.
            for (int c = 0; c < C; c++)
                acc[r][c] = _mm256_blendv_ps(acc[r][c], accumulate(acc[r][c], dot[c], scales, *in[c]),
                                             _mm256_castsi256_ps(t.tail.slot_mask));
        }
    }
}

// lo[0..3] of hsum8 for two rows in slot order: [a lo0, a lo2, b lo0, b lo2 | a lo1, a lo3, b lo1, b lo3] for q4local,
// where lanes 0 2 4 6 and 1 3 5 7 lie together; then the pairs (lo0 + lo1, lo2 + lo3) of a and of b.
template <int WType>
inline __m128 pair_sums(__m256 a, __m256 b) {
    if (WType == KESTREL_Q4LOCAL) {
        const __m256 lo = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
        return _mm_add_ps(_mm256_castps256_ps128(lo), _mm256_extractf128_ps(lo, 1));
    }
    return _mm_hadd_ps(_mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)),
                       _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1)));
}

template <int WType, int C>
void rows_quantised(const MatmulTask &task, const MatmulInput &input, char *workspace) {
    constexpr int R = C == 1 ? 4 : 1;  // more inputs give enough to overlap
    const int groups = task.w.k / 32;
    auto *arranged = reinterpret_cast<InputBlock *>(workspace);
    for (int c = 0; c < C; c++) {
        const int64_t in = task.in_row[c];
        arrange_input(WType, groups, input.xq + in * task.w.k, input.xd + in * groups,
                      WType == KESTREL_Q4LOCAL ? input.gsum + in * groups : nullptr,
                      arranged + c * ((groups + 7) / 8));
    }
    const RowTask<WType> t(task.w, arranged);
    int n = task.begin;
    for (; R == 4 && n + R <= task.end; n += R) {
        __m256 acc[R][C];
        accumulate_rows<WType, R, C>(t, n, acc);
        const __m128 first = pair_sums<WType>(acc[0][0], acc[1 % R][0]);
        const __m128 last = pair_sums<WType>(acc[2 % R][0], acc[3 % R][0]);
        _mm_storeu_ps(task.y + task.out_row[0] * task.ldy + n, _mm_hadd_ps(first, last));
    }
    for (; n < task.end; n++) {
        __m256 acc[1][C];
        accumulate_rows<WType, 1, C>(t, n, acc);
        for (int c = 0; c < C; c++) {
            const __m128 pairs = pair_sums<WType>(acc[0][c], acc[0][c]);
            task.y[task.out_row[c] * task.ldy + n] = _mm_cvtss_f32(_mm_hadd_ps(pairs, pairs));
        }
    }
}

// ---- bf16 ------------------------------------------------------------------------------------------------------------

// 8 bf16 to f32.
inline __m256 load_bf16(const unsigned short *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
}

// R weight rows times C inputs; the lanes k mod 32 of the contract are four vectors. Registers hold all four for one input; for
// several one at a time, over as many elements as stay in L1.
template <int R, int C>
inline void block_bf16(const MatmulTask &task, const float *const *x, int n, int c0) {
    constexpr int V = C == 1 ? 4 : 1;  // vectors at a time
    constexpr int64_t kNear = 512;
    const int64_t k = task.w.k, full = k / 32 * 32;
    const auto *w = static_cast<const unsigned short *>(task.w.codes) + n * k;
    __m256 acc[R][C][4];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            for (int v = 0; v < 4; v++) acc[r][c][v] = _mm256_setzero_ps();
    for (int64_t first = 0; first < full; first += kNear) {
        const int64_t end = std::min(first + kNear, full);
        for (int v = 0; v < 4; v += V) {
            __m256 sum[R][C][V];
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++)
                    for (int u = 0; u < V; u++) sum[r][c][u] = acc[r][c][v + u];
            for (int64_t i = first + 8 * v; i < end; i += 32) {
                for (int u = 0; u < V; u++) {
                    __m256 xs[C];
                    for (int c = 0; c < C; c++) xs[c] = _mm256_loadu_ps(x[c] + i + 8 * u);
                    for (int r = 0; r < R; r++) {
                        const unsigned short *row = w + r * k + i + 8 * u;
                        if (C == 1 && u == 0)
                            _mm_prefetch(reinterpret_cast<const char *>(row + kPrefetchRows * k), _MM_HINT_T0);
                        const __m256 ws = load_bf16(row);
                        for (int c = 0; c < C; c++) sum[r][c][u] = _mm256_fmadd_ps(ws, xs[c], sum[r][c][u]);
                    }
                }
            }
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++)
                    for (int u = 0; u < V; u++) acc[r][c][v + u] = sum[r][c][u];
        }
    }
    for (int v = 0; v < 4 && full + 8 * v < k; v++) {
        const int64_t first = full + 8 * v, count = std::min<int64_t>(k - first, 8);
        const __m256i mask = lane_mask(static_cast<int>(count));
        for (int r = 0; r < R; r++) {
            alignas(16) unsigned short copy[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            std::memcpy(copy, w + r * k + first, count * sizeof(unsigned short));
            const __m256 ws = load_bf16(copy);
            for (int c = 0; c < C; c++)
                acc[r][c][v] = _mm256_blendv_ps(
                    acc[r][c][v], _mm256_fmadd_ps(ws, _mm256_maskload_ps(x[c] + first, mask), acc[r][c][v]),
                    _mm256_castsi256_ps(mask));
        }
    }
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) task.y[task.out_row[c0 + c] * task.ldy + n + r] = hsum32(acc[r][c]);
}

template <int C>
void inputs_bf16(const MatmulTask &task, const MatmulInput &input, int c0, int begin, int end) {
    constexpr int R = C == 1 ? 2 : 4;
    const float *x[C];
    for (int c = 0; c < C; c++) x[c] = input.x + static_cast<int64_t>(task.in_row[c0 + c]) * task.w.k;
    int n = begin;
    for (; n + R <= end; n += R) block_bf16<R, C>(task, x, n, c0);
    for (; n < end; n++) block_bf16<1, C>(task, x, n, c0);
}

void run_bf16(const MatmulTask &task, const MatmulInput &input) {
    for (int begin = task.begin; begin < task.end; begin += 64) {  // 64 rows stay in cache over all inputs
        const int end = task.count <= 3 ? task.end : std::min(begin + 64, task.end);
        int c = 0;
        for (; c + 3 <= task.count; c += 3) inputs_bf16<3>(task, input, c, begin, end);
        if (task.count - c == 2) inputs_bf16<2>(task, input, c, begin, end);
        if (task.count - c == 1) inputs_bf16<1>(task, input, c, begin, end);
        if (end == task.end) break;
    }
}

// ---- tile form -------------------------------------------------------------------------------------------------------

// 8 weight rows, interleaved: for group g and step s (elements 4s .. 4s+3), 32 bytes = 8 rows x 4 elements.
struct Tile {
    unsigned char *codes;  // [G, 8 steps, 8 rows, 4]: u8 0..15 for q4local, i8 for q8local
    float *scale;          // [G, 8 rows]
};

// Rows first .. first+rows-1 (rows <= 8); missing rows repeat the last one, their results are not stored.
void make_tile(const Weight &w, int first, int rows, const Tile &tile) {
    const int groups = w.k / 32;
    const bool q4 = w.wtype == KESTREL_Q4LOCAL;
    const int row_bytes = groups * (q4 ? 16 : 32);
    const char *codes[8];
    const unsigned short *scale[8];
    for (int r = 0; r < 8; r++) {
        const int64_t row = first + std::min(r, rows - 1);
        codes[r] = static_cast<const char *>(w.codes) + row * row_bytes;
        scale[r] = w.scale + row * groups;
    }
    const __m256i low = _mm256_set1_epi8(15);
    for (int g = 0; g < groups; g++) {
        unsigned char *out = tile.codes + 256 * g;
        for (int half = 0; half < (q4 ? 1 : 2); half++) {
            // 8 rows x 16 bytes -> 4 vectors of 8 rows x 4 bytes: a 4 x 4 transposition of 32-bit words in each half.
            __m256i v[4];
            for (int r = 0; r < 4; r++)
                v[r] = _mm256_inserti128_si256(
                    _mm256_castsi128_si256(load128(codes[r] + (q4 ? 16 : 32) * g + 16 * half)),
                    load128(codes[r + 4] + (q4 ? 16 : 32) * g + 16 * half), 1);
            const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
            const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
            const __m256i words[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                                      _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
            for (int s = 0; s < 4; s++) {
                if (q4) {
                    _mm256_store_si256(reinterpret_cast<__m256i *>(out + 32 * s), _mm256_and_si256(words[s], low));
                    _mm256_store_si256(reinterpret_cast<__m256i *>(out + 32 * (s + 4)),
                                       _mm256_and_si256(_mm256_srli_epi16(words[s], 4), low));
                } else {
                    _mm256_store_si256(reinterpret_cast<__m256i *>(out + 128 * half + 32 * s), words[s]);
                }
            }
        }
        alignas(16) unsigned short bits[8];
        for (int r = 0; r < 8; r++) bits[r] = scale[r][g];
        _mm256_store_ps(tile.scale + 8 * g, _mm256_cvtph_ps(load128(bits)));
    }
}

inline __m256i broadcast4(const signed char *p) {
    int word;
    std::memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

// T tiles (8 weight rows each) times inputs c0 .. c0+C-1; `rows` results of each input are stored.
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
        if (q4)
            for (int g = 0; g < groups; g++) offset[c * groups + g] = 8 * input.gsum[in * groups + g];
    }
    __m256 lanes[T][C][8];  // lane l of the contract, for 8 weight rows
    for (int l = 0; l < 8; l++) {
        __m256 acc[T][C];
        for (int t = 0; t < T; t++)
            for (int c = 0; c < C; c++) acc[t][c] = _mm256_setzero_ps();
        for (int g = l; g < groups; g += 8) {
            __m256i sum[T][C];
            for (int t = 0; t < T; t++)
                for (int c = 0; c < C; c++) sum[t][c] = _mm256_setzero_si256();
            for (int s = 0; s < 8; s++) {
                __m256i w[T];
                for (int t = 0; t < T; t++)
                    w[t] = _mm256_load_si256(reinterpret_cast<const __m256i *>(tile[t].codes + 256 * g + 32 * s));
                for (int c = 0; c < C; c++) {
                    const __m256i x = broadcast4(q[c] + 32 * g + 4 * s);
                    for (int t = 0; t < T; t++) {
                        if (q4)  // eight pairs of at most 3810 fit 16 bits
                            sum[t][c] = _mm256_add_epi16(sum[t][c], _mm256_maddubs_epi16(w[t], x));
                        else
                            sum[t][c] = _mm256_add_epi32(sum[t][c], parts_q8(w[t], x));
                        asm("" : "+x"(sum[t][c]));  // else the compiler regroups the sums and spills the parts
                    }
                }
            }
            for (int t = 0; t < T; t++) {
                const __m256 scale = _mm256_load_ps(tile[t].scale + 8 * g);
                for (int c = 0; c < C; c++) {
                    __m256i dot = sum[t][c];
                    if (q4)
                        dot = _mm256_sub_epi32(_mm256_madd_epi16(dot, _mm256_set1_epi16(1)),
                                               _mm256_set1_epi32(offset[c * groups + g]));
                    const __m256 ws = _mm256_mul_ps(scale, _mm256_broadcast_ss(d[c] + g));
                    acc[t][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), ws, acc[t][c]);
                }
            }
        }
        for (int t = 0; t < T; t++)
            for (int c = 0; c < C; c++) lanes[t][c][l] = acc[t][c];
    }
    for (int c = 0; c < C; c++) {
        for (int t = 0; t < T; t++) {
            const __m256 *a = lanes[t][c];
            const __m256 lo0 = _mm256_add_ps(a[0], a[4]), lo1 = _mm256_add_ps(a[1], a[5]);
            const __m256 lo2 = _mm256_add_ps(a[2], a[6]), lo3 = _mm256_add_ps(a[3], a[7]);
            const __m256 y = _mm256_add_ps(_mm256_add_ps(lo0, lo1), _mm256_add_ps(lo2, lo3));
            float *out = task.y + task.out_row[c0 + c] * task.ldy + first + 8 * t;
            _mm256_maskstore_ps(out, lane_mask(rows - 8 * t), y);
        }
    }
}

template <int WType, int T>
void tiles_times_all(const MatmulTask &task, const MatmulInput &input, const Tile *tile, int *offset, int first,
                     int rows) {
    int c = 0;  // threes, then at most two twos: there are at least kRowFormInputs + 1 inputs
    for (; task.count - c == 3 || task.count - c > 4; c += 3)
        tiles_times<WType, T, 3>(task, input, tile, offset, first, rows, c);
    for (; c < task.count; c += 2) tiles_times<WType, T, 2>(task, input, tile, offset, first, rows, c);
}

template <int WType>
void run_tiles(const MatmulTask &task, const MatmulInput &input, char *workspace) {
    const int k = task.w.k, groups = k / 32;
    Tile tile[2];
    for (int t = 0; t < 2; t++) {
        tile[t].codes = reinterpret_cast<unsigned char *>(workspace) + 8 * k * t;
        tile[t].scale = reinterpret_cast<float *>(workspace + 16 * k) + 8 * groups * t;
    }
    int *offset = reinterpret_cast<int *>(workspace + 16 * k + 64 * groups);  // [kTileInputs, G]
    for (int first = task.begin; first < task.end; first += 16) {
        const int rows = std::min(16, task.end - first);
        make_tile(task.w, first, std::min(rows, 8), tile[0]);
        if (rows > 8) {
            make_tile(task.w, first + 8, rows - 8, tile[1]);
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
        default: return run_tiles<WType>(task, input, workspace);
    }
}

void run_avx2(const MatmulTask &task, const MatmulInput &input, char *workspace) {
    if (task.count == 0 || task.begin >= task.end) return;
    switch (task.w.wtype) {
        case KESTREL_Q4LOCAL: return run_quantised<KESTREL_Q4LOCAL>(task, input, workspace);
        case KESTREL_Q8LOCAL: return run_quantised<KESTREL_Q8LOCAL>(task, input, workspace);
        default: return run_bf16(task, input);
    }
}

size_t workspace_avx2(int k, int count) {
    const size_t groups = k / 32;
    const size_t arranged = std::min(count, kRowFormInputs) * ((groups + 7) / 8) * sizeof(InputBlock);
    const size_t tile = 16 * static_cast<size_t>(k) + 64 * groups + kTileInputs * groups * sizeof(int);
    return round_up(count > kRowFormInputs ? std::max(arranged, tile) : arranged, 64);
}

}  // namespace

const MatmulForm matmul_form_avx2 = {run_avx2, workspace_avx2};

void matmul_avx2(const void *args, ThreadContext &context) {
    run_matmul(*static_cast<const MatmulArgs *>(args), matmul_form_avx2, context);
}

void moe_matmul_avx2(const void *args, ThreadContext &context) {
    run_moe_matmul(*static_cast<const MoeMatmulArgs *>(args), matmul_form_avx2, context);
}

}  // namespace kestrel
