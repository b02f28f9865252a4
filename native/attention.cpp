// attention, contract section 7, as it is written there: one row and head at a time, one chunk after the other.
#include "attention.h"

#include "ops.h"

namespace kestrel {
namespace {

void quantize_query(const float *q, int hd, signed char *q8, float *qd) {
    unsigned amax = 0;
    for (int i = 0; i < hd; i++) {
        const unsigned magnitude = f32_bits(q[i]) & 0x7fffffffu;
        amax = magnitude > amax ? magnitude : amax;
    }
    const A8Scale s = a8_scale(amax);
    *qd = s.d;
    for (int i = 0; i < hd; i++) q8[i] = static_cast<signed char>(s.zero ? 0 : a8_code(q[i], s.inv));
}

// The state of one head over `count` positions, which are a chunk or its beginning.
void attend_chunk(const AttentionArgs &a, const signed char *q8, float qs, int64_t slot0, int count, int kv_head,
                  AttentionState *state) {
    const int hd = a.hd;
    const int64_t row0 = slot0 * a.nkv + kv_head;
    float m = f32_from_bits(0xff800000u), s[kAttentionChunk], w[kAttentionChunk], lane[kSumLanes] = {};
    for (int t = 0; t < count; t++) {
        const int64_t row = row0 + static_cast<int64_t>(t) * a.nkv;
        int dot = 0;
        for (int i = 0; i < hd; i++) dot += q8[i] * a.kq[row * hd + i];
        s[t] = static_cast<float>(dot) * (qs * a.ks[row]);
        m = s[t] > m ? s[t] : m;
    }
    unsigned largest = 0;
    for (int t = 0; t < count; t++) {
        const float p = expf_ucrt(s[t] - m);
        lane[t % kSumLanes] += p;
        w[t] = p * a.vs[row0 + static_cast<int64_t>(t) * a.nkv];
        const unsigned magnitude = f32_bits(w[t]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const ValueScale scale = value_scale(largest);
    int code[kAttentionChunk];
    for (int t = 0; t < count; t++) code[t] = scale.zero ? 0 : value_code(w[t], scale.up);
    for (int i = 0; i < hd; i++) {
        const signed char *v8 = a.vq + row0 * hd + i;
        int sum = 0;
        for (int t = 0; t < count; t++) sum += code[t] * v8[static_cast<int64_t>(t) * a.nkv * hd];
        state->acc[i] = static_cast<float>(sum) * scale.d;
    }
    state->m = m;
    state->l = hsum32(lane);
}

}  // namespace

void attention_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const AttentionArgs *>(args);
    const int hd = a.hd, heads_per_kv = a.nh / a.nkv;
    float *memory = static_cast<float *>(context.scratch(2 * sizeof(float) * hd + hd));
    auto *q8 = reinterpret_cast<signed char *>(memory + 2 * hd);
    AttentionState total{0, 0, memory}, chunk{0, 0, memory + hd};
    const int64_t items = static_cast<int64_t>(a.M) * a.nh;
    for (int64_t item = context.next_chunk(); item < items; item = context.next_chunk()) {
        const int64_t m = item / a.nh;
        const int h = static_cast<int>(item % a.nh), kv_head = h / heads_per_kv;
        float qd;
        quantize_query(a.q + m * a.ld + static_cast<int64_t>(h) * hd, hd, q8, &qd);
        const float qs = qd * a.qscale;
        const int positions = a.pos[m] + 1;
        for (int begin = 0; begin < positions; begin += kAttentionChunk) {
            const int count = positions - begin < kAttentionChunk ? positions - begin : kAttentionChunk;
            attend_chunk(a, q8, qs, static_cast<int64_t>(a.base[m]) + begin, count, kv_head,
                         begin == 0 ? &total : &chunk);
            if (begin > 0) merge_attention(&total, chunk, hd);
        }
        float *out = a.out + (m * a.nh + h) * hd;
        for (int i = 0; i < hd; i++) out[i] = total.acc[i] / total.l;
    }
}

bool attention_serial(const void *) { return false; }

}  // namespace kestrel
