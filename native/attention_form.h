// attention in vector form, contract section 7: the bits of the scalar form, because dots, maxima and the sums over V are
// integers or have no order, every exponential stands alone, and the 32 lanes of a chunk's sum are lanes here, too.
#include "attention.h"
#include "ops.h"
#include "simd.h"

namespace kestrel {
namespace {

constexpr int kChunk = kAttentionChunk;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroup = 4;  // query heads that share a pass over their KV head
constexpr int kBlock = 32;   // positions whose V rows stay in the first-level cache while the elements take turns
constexpr int kElements = 2 * kLanes;  // of a head, in one vector of i16

// What one query head knows of a chunk. Behind the chunk's positions, up to a multiple of kSumLanes, stand zeros.
struct HeadChunk {
    alignas(64) float s[kChunk];  // the scores, then their exponentials p, then the weights p * vs
    alignas(64) short code[kChunk];
    float d;
};

struct Workspace {
    HeadChunk head[kMaxGroup];
    alignas(64) float ks[kChunk], vs[kChunk];
    alignas(64) signed char q8[kMaxGroup][kMaxHeadDim];
    alignas(64) int sum[kMaxGroup][kMaxHeadDim];  // of codes times V
    float qs[kMaxGroup];
};

float quantize_query(const float *q, int hd, signed char *q8) {
    VI amax = zero_i32();
    for (int i = 0; i < hd; i += kLanes) amax = max_i32(amax, magnitude_bits(load(q + i)));
    const A8Scale s = a8_scale(static_cast<unsigned>(max_across(amax)));
    for (int i = 0; i < hd; i += kLanes)
        store_i8(q8 + i, s.zero ? zero_i32() : to_code(mul(load(q + i), broadcast(s.inv))));
    return s.d;
}

// Sums over each of 8 vectors of i32[8]: lane t is the sum of v[t].
inline __m256i sums_of_8(const __m256i *v) {
    const __m256i s01 = _mm256_hadd_epi32(v[0], v[1]), s23 = _mm256_hadd_epi32(v[2], v[3]);
    const __m256i s45 = _mm256_hadd_epi32(v[4], v[5]), s67 = _mm256_hadd_epi32(v[6], v[7]);
    const __m256i s0123 = _mm256_hadd_epi32(s01, s23), s4567 = _mm256_hadd_epi32(s45, s67);
    return _mm256_add_epi32(_mm256_permute2x128_si256(s0123, s4567, 0x20),
                            _mm256_permute2x128_si256(s0123, s4567, 0x31));
}

// dots: i32[8] of q8 with the key rows t = 0..7. Codes lie in -127..127, so that pairs of |q| * (k with the sign of q)
// stay below 2^15 in the i16 sums.
inline __m256i dot_8_rows(const signed char *q8, const signed char *const *k8, int hd) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[8];
    for (int t = 0; t < 8; t++) sum[t] = _mm256_setzero_si256();
    int i = 0;
    for (; i + 32 <= hd; i += 32) {
        const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(q8 + i)), magnitude = _mm256_abs_epi8(q);
        for (int t = 0; t < 8; t++) {
            const __m256i k = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(k8[t] + i));
            const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(k, q));
            sum[t] = _mm256_add_epi32(sum[t], _mm256_madd_epi16(pairs, ones));
        }
    }
    if (i < hd) {  // 16 more
        const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i *>(q8 + i)), magnitude = _mm_abs_epi8(q);
        for (int t = 0; t < 8; t++) {
            const __m128i k = _mm_loadu_si128(reinterpret_cast<const __m128i *>(k8[t] + i));
            const __m128i pairs = _mm_maddubs_epi16(magnitude, _mm_sign_epi8(k, q));
            sum[t] = _mm256_add_epi32(
                sum[t], _mm256_zextsi128_si256(_mm_madd_epi16(pairs, _mm256_castsi256_si128(ones))));
        }
    }
    return sums_of_8(sum);
}

// Scores of `group` heads; the heads take turns within eight positions, while those lie in the first-level cache.
void score(const signed char *k8, int64_t k_stride, int hd, int count, int group, Workspace *ws) {
    for (int t = 0; t < count; t += 8) {
        const signed char *rows[8];
        for (int i = 0; i < 8; i++) rows[i] = k8 + (t + i < count ? t + i : count - 1) * k_stride;
        for (int g = 0; g < group; g++) {
            const __m256 dot = _mm256_cvtepi32_ps(dot_8_rows(ws->q8[g], rows, hd));
            const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(ws->qs[g]), _mm256_load_ps(ws->ks + t));
            _mm256_store_ps(ws->head[g].s + t, _mm256_mul_ps(dot, scale));
        }
    }
}

// From the scores of a head to the codes of its weights, with the m and l of its state.
void weigh(int count, const float *vs, HeadChunk *h, AttentionState *state) {
    const int padded = (count + kSumLanes - 1) / kSumLanes * kSumLanes;
    const float lowest = -__builtin_inff();
    for (int t = count; t < padded; t++) h->s[t] = lowest;
    VF top = broadcast(lowest);
    for (int t = 0; t < count; t += kLanes) top = max_number(load(h->s + t), top);
    alignas(64) float lane[kSumLanes];
    store(lane, top);
    state->m = lane[0];
    for (int i = 1; i < kLanes; i++) state->m = lane[i] > state->m ? lane[i] : state->m;
    for (int t = 0; t < count; t += kLanes)
        store(h->s + t, expf_ucrt_vector(sub(load(h->s + t), broadcast(state->m))));
    for (int t = count; t < padded; t++) h->s[t] = 0.0f;

    constexpr int kVectors = kSumLanes / kLanes;
    VF sum[kVectors];
    VI largest = zero_i32();
    for (int v = 0; v < kVectors; v++) sum[v] = zero();
    for (int t = 0; t < padded; t += kSumLanes) {
        for (int v = 0; v < kVectors; v++) {
            const VF p = load(h->s + t + v * kLanes), w = mul(p, load(vs + t + v * kLanes));
            sum[v] = add(sum[v], p);
            largest = max_i32(largest, magnitude_bits(w));
            store(h->s + t + v * kLanes, w);
        }
    }
    for (int v = 0; v < kVectors; v++) store(lane + v * kLanes, sum[v]);
    state->l = hsum32(lane);
    const ValueScale scale = value_scale(static_cast<unsigned>(max_across(largest)));
    h->d = scale.d;
    for (int t = 0; t < padded; t += kLanes)  // 32768, the one code too large, is saturated
        store_i16(h->code + t, scale.zero ? zero() : mul(load(h->s + t), broadcast(scale.up)));
}

// Where the vector of elements whose sums stand at i begins in a head: the last may overlap the one before it.
inline int first_element(int i, int hd) { return i + kElements <= hd ? i : hd - kElements; }

// Adds positions t..end to the sums at i of U vectors of elements of G heads. Two positions at a time: their codes are a pair
// of i16, and so are their values of an element.
template <int G, int U>
void add_values(Workspace *ws, const signed char *v8, int64_t v_stride, int t, int end, int i, int hd) {
    const int element = U > 1 ? i : first_element(i, hd);
    VI low[G][U], high[G][U];
    for (int g = 0; g < G; g++) {
        for (int u = 0; u < U; u++) {
            low[g][u] = load_i32(ws->sum[g] + i + u * kElements);
            high[g][u] = load_i32(ws->sum[g] + i + u * kElements + kLanes);
        }
    }
    for (; t < end; t += 2) {
        const signed char *row = v8 + t * v_stride + element, *next = t + 1 < end ? row + v_stride : row;  // its code is 0
        for (int u = 0; u < U; u++) {
            const VI a = load_i8_as_i16(row + u * kElements), b = load_i8_as_i16(next + u * kElements);
            const VI first = pairs_low(a, b), second = pairs_high(a, b);
            for (int g = 0; g < G; g++) {
                int pair;
                __builtin_memcpy(&pair, ws->head[g].code + t, sizeof(pair));
                const VI codes = broadcast_i32(pair);
                low[g][u] = add_i32(low[g][u], dot_pairs(codes, first));
                high[g][u] = add_i32(high[g][u], dot_pairs(codes, second));
            }
        }
    }
    for (int g = 0; g < G; g++) {
        for (int u = 0; u < U; u++) {
            store_i32(ws->sum[g] + i + u * kElements, low[g][u]);
            store_i32(ws->sum[g] + i + u * kElements + kLanes, high[g][u]);
        }
    }
}

// acc of G heads over all positions.
template <int G>
void sum_values(Workspace *ws, const signed char *v8, int64_t v_stride, int count, int hd, AttentionState *state) {
    constexpr int kWide = G == 1 ? 4 : G == 2 ? 2 : 1;  // few enough sums to stay in registers
    for (int g = 0; g < G; g++)
        for (int i = 0; i < kMaxHeadDim; i += kLanes) store_i32(ws->sum[g] + i, zero_i32());
    for (int t = 0; t < count; t += kBlock) {
        const int end = t + kBlock < count ? t + kBlock : count;
        int i = 0;
        for (; i + kWide * kElements <= hd; i += kWide * kElements) add_values<G, kWide>(ws, v8, v_stride, t, end, i, hd);
        if (kWide > 2 && i + 2 * kElements <= hd) {
            add_values<G, 2>(ws, v8, v_stride, t, end, i, hd);
            i += 2 * kElements;
        }
        for (; i < hd; i += kElements) add_values<G, 1>(ws, v8, v_stride, t, end, i, hd);
    }
    for (int g = 0; g < G; g++) {
        const VF d = broadcast(ws->head[g].d);
        for (int i = 0; i < hd; i += kElements) {
            VI low = load_i32(ws->sum[g] + i), high = load_i32(ws->sum[g] + i + kLanes);
            in_order(&low, &high);
            float *acc = state[g].acc + first_element(i, hd);
            store(acc, mul(from_i32(low), d));
            store(acc + kLanes, mul(from_i32(high), d));
        }
    }
}

// The states of `group` query heads, whose codes and scales are in ws, over one chunk of one KV head.
void attend_chunk(const AttentionArgs &a, int64_t slot0, int count, int kv_head, int group, Workspace *ws,
                  AttentionState *state) {
    const int64_t stride = static_cast<int64_t>(a.nkv) * a.hd;
    const signed char *k8 = a.kq + (slot0 * a.nkv + kv_head) * a.hd, *v8 = a.vq + (slot0 * a.nkv + kv_head) * a.hd;
    for (int t = 0; t < count; t++) {
        ws->ks[t] = a.ks[(slot0 + t) * a.nkv + kv_head];
        ws->vs[t] = a.vs[(slot0 + t) * a.nkv + kv_head];
    }
    for (int t = count; t % kSumLanes != 0; t++) ws->ks[t] = ws->vs[t] = 0.0f;
    score(k8, stride, a.hd, count, group, ws);
    for (int g = 0; g < group; g++) weigh(count, ws->vs, &ws->head[g], &state[g]);
    switch (group) {
        case 1: return sum_values<1>(ws, v8, stride, count, a.hd, state);
        case 2: return sum_values<2>(ws, v8, stride, count, a.hd, state);
        case 3: return sum_values<3>(ws, v8, stride, count, a.hd, state);
        default: return sum_values<4>(ws, v8, stride, count, a.hd, state);
    }
}

// Some heads of one row; all query heads of an item read the same KV head.
struct Item {
    int64_t row;
    int head, kv_head, group;
};

// How the heads of a row are cut into items: `parts` for each KV head, of at most `group` query heads.
struct Grouping {
    int group, parts, per_kv;

    Grouping(int heads, int kv_heads, int most)
        : group(most), parts((heads / kv_heads + most - 1) / most), per_kv(heads / kv_heads) {}
    int64_t items_per_row(int kv_heads) const { return static_cast<int64_t>(kv_heads) * parts; }
    Item item(int64_t index, int kv_heads) const {
        const int64_t row = index / items_per_row(kv_heads), rest = index % items_per_row(kv_heads);
        const int kv_head = static_cast<int>(rest / parts), first = static_cast<int>(rest % parts) * group;
        return {row, kv_head * per_kv + first, kv_head, per_kv - first < group ? per_kv - first : group};
    }
};

void load_queries(const AttentionArgs &a, const Item &item, Workspace *ws) {
    for (int g = 0; g < item.group; g++) {
        const float *q = a.q + item.row * a.ld + static_cast<int64_t>(item.head + g) * a.hd;
        ws->qs[g] = quantize_query(q, a.hd, ws->q8[g]) * a.qscale;
    }
}

void write_out(const AttentionArgs &a, int64_t row, int head, const AttentionState &state) {
    float *out = a.out + (row * a.nh + head) * a.hd;
    for (int i = 0; i < a.hd; i += kLanes) store(out + i, div(load(state.acc + i), broadcast(state.l)));
}

int chunk_length(const AttentionArgs &a, int64_t row, int chunk) {
    const int rest = a.pos[row] + 1 - chunk * kChunk;
    return rest < kChunk ? rest : kChunk;
}

// Many items: each thread takes whole items and merges their chunks as it goes.
void attend_items(const AttentionArgs &a, const Grouping &grouping, ThreadContext &context) {
    const size_t floats = static_cast<size_t>(2 * kMaxGroup) * a.hd;
    char *memory = static_cast<char *>(context.scratch(sizeof(Workspace) + floats * sizeof(float)));
    auto *ws = reinterpret_cast<Workspace *>(memory);
    float *acc = reinterpret_cast<float *>(memory + sizeof(Workspace));
    AttentionState total[kMaxGroup], chunk[kMaxGroup];
    for (int g = 0; g < kMaxGroup; g++) {
        total[g].acc = acc + g * a.hd;
        chunk[g].acc = acc + (kMaxGroup + g) * a.hd;
    }
    const int64_t items = a.M * grouping.items_per_row(a.nkv);
    for (int64_t i = context.next_chunk(); i < items; i = context.next_chunk()) {
        // The last rows of a prompt have the most positions: they go first.
        const Item item = grouping.item(items - 1 - i, a.nkv);
        load_queries(a, item, ws);
        const int chunks = a.pos[item.row] / kChunk + 1;
        for (int c = 0; c < chunks; c++) {
            attend_chunk(a, static_cast<int64_t>(a.base[item.row]) + c * kChunk, chunk_length(a, item.row, c),
                         item.kv_head, item.group, ws, c == 0 ? total : chunk);
            for (int g = 0; c > 0 && g < item.group; g++) merge_attention(&total[g], chunk[g], a.hd);
        }
        for (int g = 0; g < item.group; g++) write_out(a, item.row, item.head + g, total[g]);
    }
}

// Few items, such as one row with a long past: threads share the chunks of an item, then merge in order.
void attend_chunks(const AttentionArgs &a, const Grouping &grouping, int max_chunks, ThreadContext &context) {
    const int64_t heads = static_cast<int64_t>(a.M) * a.nh;
    // f32[M, nh, chunks, hd], then m and l as f32[M, nh, chunks] each.
    auto *acc = static_cast<float *>(
        context.shared_scratch(sizeof(float) * heads * max_chunks * (static_cast<size_t>(a.hd) + 2)));
    float *max_of = acc + heads * max_chunks * a.hd, *sum_of = max_of + heads * max_chunks;
    auto *ws = static_cast<Workspace *>(context.scratch(sizeof(Workspace)));
    const int64_t items = a.M * grouping.items_per_row(a.nkv);
    for (int64_t i = context.next_chunk(); i < items * max_chunks; i = context.next_chunk()) {
        const Item item = grouping.item(i / max_chunks, a.nkv);
        const int c = static_cast<int>(i % max_chunks);
        if (c * kChunk > a.pos[item.row]) continue;
        load_queries(a, item, ws);
        AttentionState state[kMaxGroup];
        int64_t at[kMaxGroup];
        for (int g = 0; g < item.group; g++) {
            at[g] = (item.row * a.nh + item.head + g) * max_chunks + c;
            state[g].acc = acc + at[g] * a.hd;
        }
        attend_chunk(a, static_cast<int64_t>(a.base[item.row]) + c * kChunk, chunk_length(a, item.row, c), item.kv_head,
                     item.group, ws, state);
        for (int g = 0; g < item.group; g++) {
            max_of[at[g]] = state[g].m;
            sum_of[at[g]] = state[g].l;
        }
    }
    context.barrier();
    int64_t begin, end;
    context.split(heads, 1, &begin, &end);
    for (int64_t h = begin; h < end; h++) {
        const int64_t row = h / a.nh, first = h * max_chunks;
        AttentionState total{max_of[first], sum_of[first], acc + first * a.hd};
        for (int c = 1; c <= a.pos[row] / kChunk; c++)
            merge_attention(&total, {max_of[first + c], sum_of[first + c], acc + (first + c) * a.hd}, a.hd);
        write_out(a, row, static_cast<int>(h % a.nh), total);
    }
}

void attention_form(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const AttentionArgs *>(args);
    if (a.hd % 16 != 0 || a.hd < kElements || a.hd > kMaxHeadDim) return attention_scalar(args, context);
    int max_chunks = 1;
    for (int m = 0; m < a.M; m++) max_chunks = a.pos[m] / kChunk + 1 > max_chunks ? a.pos[m] / kChunk + 1 : max_chunks;
    // Every thread decides alike. Whole items when they keep the threads busy, else chunks, else smaller groups too.
    const int most = a.nh / a.nkv < kMaxGroup ? a.nh / a.nkv : kMaxGroup;
    const int64_t wanted = 4 * static_cast<int64_t>(context.count);
    Grouping grouping(a.nh, a.nkv, most);
    const int64_t items = a.M * grouping.items_per_row(a.nkv);
    if (context.count == 1 || items >= wanted || max_chunks == 1) {
        for (int group = most; group > 1 && context.count > 1 && a.M * grouping.items_per_row(a.nkv) < wanted;)
            grouping = Grouping(a.nh, a.nkv, group = (group + 1) / 2);
        attend_items(a, grouping, context);
    } else {
        for (int group = most; group > 1 && a.M * grouping.items_per_row(a.nkv) * max_chunks < wanted;)
            grouping = Grouping(a.nh, a.nkv, group = (group + 1) / 2);
        attend_chunks(a, grouping, max_chunks, context);
    }
}

}  // namespace
}  // namespace kestrel
