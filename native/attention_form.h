// attention in vector form, contract section 7: the bits of the position-by-position loop, because dots are integers,
// the running maximum is exact in any order, every exponential stands alone, and a rescale happens only where the
// maximum moves. Only l and acc are chains over positions, and acc has hd of them.
#include "attention.h"
#include "ops.h"
#include "simd.h"

namespace kestrel {
namespace {

constexpr int kChunk = kAttentionChunk;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroup = 4;  // query heads that share a pass over their KV head

// What one query head knows of a chunk.
struct HeadChunk {
    alignas(64) float p[kChunk];  // first the scores, then the scores less the running maximum, then their exponentials
    alignas(64) float w[kChunk];  // p * vs
    alignas(64) float c[kChunk];  // the rescale at positions where the maximum moved, undefined elsewhere
};

struct Workspace {
    HeadChunk head[kMaxGroup];
    alignas(64) float ks[kChunk], vs[kChunk];
    alignas(64) unsigned char moved[kChunk];  // bit g: the maximum of head g moved at this position
    alignas(64) signed char q8[kMaxGroup][kMaxHeadDim];
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

// Scores of one head, in h->p; positions count..next multiple of 16 get -inf.
void score(const signed char *q8, float qs, const signed char *k8, int64_t k_stride, int hd, int count, const float *ks,
           HeadChunk *h) {
    const float lowest = -__builtin_inff();
    for (int t = 0; t < count; t += 8) {
        const signed char *rows[8];
        for (int i = 0; i < 8; i++) rows[i] = k8 + (t + i < count ? t + i : count - 1) * k_stride;
        const __m256 dot = _mm256_cvtepi32_ps(dot_8_rows(q8, rows, hd));
        const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(qs), _mm256_load_ps(ks + t));
        _mm256_store_ps(h->p + t, _mm256_mul_ps(dot, scale));
    }
    for (int t = count; t < kChunk && (t % kLanes != 0 || t == count); t++) h->p[t] = lowest;
}

// From scores to exponentials relative to the running maximum; marks where it moved. Returns the last maximum.
float running_max_and_exp(int count, int bit, Workspace *ws) {
    HeadChunk *h = &ws->head[bit];
    float m = -__builtin_inff();
    for (int t = 0; t < count; t += kLanes) {
        const VF s = load(h->p + t);
        if (greater(s, broadcast(m)) == 0) {  // a NaN moves nothing, as in s > m
            store(h->p + t, sub(s, broadcast(m)));
            continue;
        }
        for (int i = t; i < t + kLanes && i < count; i++) {
            const float si = h->p[i];
            if (si > m) {
                h->c[i] = expf_ucrt(m - si);
                ws->moved[i] = static_cast<unsigned char>(ws->moved[i] | 1u << bit);
                m = si;
            }
            h->p[i] = si - m;
        }
    }
    for (int t = 0; t < count; t += kLanes) {
        const VF p = expf_ucrt_vector(load(h->p + t));
        store(h->p + t, p);
        store(h->w + t, mul(p, load(ws->vs + t)));
    }
    return m;
}

// acc[i] over all positions for V * kLanes elements from i0 of G heads; with l for the first elements only.
template <int G, int V>
void accumulate(const Workspace &ws, const signed char *v8, int64_t v_stride, int count, int i0, bool with_l,
                AttentionState *state) {
    VF acc[G][V];
    float l[G];
    for (int g = 0; g < G; g++) {
        l[g] = 0.0f;
        for (int v = 0; v < V; v++) acc[g][v] = zero();
    }
    for (int t = 0; t < count; t++) {
        if (__builtin_expect(ws.moved[t] != 0, 0)) {
            for (int g = 0; g < G; g++) {
                if (!(ws.moved[t] >> g & 1)) continue;
                l[g] *= ws.head[g].c[t];
                for (int v = 0; v < V; v++) acc[g][v] = mul(acc[g][v], broadcast(ws.head[g].c[t]));
            }
        }
        VF value[V];
        for (int v = 0; v < V; v++) value[v] = load_i8(v8 + t * v_stride + i0 + v * kLanes);
        for (int g = 0; g < G; g++) {
            const VF w = broadcast(ws.head[g].w[t]);
            for (int v = 0; v < V; v++) acc[g][v] = fma(w, value[v], acc[g][v]);
            l[g] += ws.head[g].p[t];
        }
    }
    for (int g = 0; g < G; g++) {
        if (with_l) state[g].l = l[g];
        for (int v = 0; v < V; v++) store(state[g].acc + i0 + v * kLanes, acc[g][v]);
    }
}

template <int G>
void accumulate_all(const Workspace &ws, const signed char *v8, int64_t v_stride, int count, int hd,
                    AttentionState *state) {
    // Enough accumulators in flight to hide the latency of fma, few enough to stay in registers.
    constexpr int kWide = G == 1 ? 8 : G <= 3 ? 4 : 2;
    int i = 0;
    for (; i + kWide * kLanes <= hd; i += kWide * kLanes)
        accumulate<G, kWide>(ws, v8, v_stride, count, i, i == 0, state);
    if (kWide > 4 && i + 4 * kLanes <= hd) {
        accumulate<G, 4>(ws, v8, v_stride, count, i, i == 0, state);
        i += 4 * kLanes;
    }
    if (kWide > 2 && i + 2 * kLanes <= hd) {
        accumulate<G, 2>(ws, v8, v_stride, count, i, i == 0, state);
        i += 2 * kLanes;
    }
    for (; i < hd; i += kLanes) accumulate<G, 1>(ws, v8, v_stride, count, i, i == 0, state);
}

// The states of `group` query heads, whose codes and scales are in ws, over one chunk of one KV head.
void attend_chunk(const AttentionArgs &a, int64_t slot0, int count, int kv_head, int group, Workspace *ws,
                  AttentionState *state) {
    const int64_t stride = static_cast<int64_t>(a.nkv) * a.hd;
    const signed char *k8 = a.kq + (slot0 * a.nkv + kv_head) * a.hd, *v8 = a.vq + (slot0 * a.nkv + kv_head) * a.hd;
    for (int t = 0; t < count; t++) {
        ws->ks[t] = a.ks[(slot0 + t) * a.nkv + kv_head];
        ws->vs[t] = a.vs[(slot0 + t) * a.nkv + kv_head];
        ws->moved[t] = 0;
    }
    for (int t = count; t < kChunk && (t % 16 != 0 || t == count); t++) ws->ks[t] = ws->vs[t] = 0.0f;
    for (int g = 0; g < group; g++) {
        score(ws->q8[g], ws->qs[g], k8, stride, a.hd, count, ws->ks, &ws->head[g]);
        state[g].m = running_max_and_exp(count, g, ws);
    }
    switch (group) {
        case 1: return accumulate_all<1>(*ws, v8, stride, count, a.hd, state);
        case 2: return accumulate_all<2>(*ws, v8, stride, count, a.hd, state);
        case 3: return accumulate_all<3>(*ws, v8, stride, count, a.hd, state);
        default: return accumulate_all<4>(*ws, v8, stride, count, a.hd, state);
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
    if (a.hd % 16 != 0 || a.hd > kMaxHeadDim) return attention_scalar(args, context);
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
