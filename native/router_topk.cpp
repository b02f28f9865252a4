// router_topk, contract section 8.
#include "../kernels/ucrt.cuh"
#include "ops.h"

namespace kestrel {
namespace {

// Order of the router: logit descending, then index ascending; NaN above everything.
bool ranks_before(float a, int ia, float b, int ib) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a != b) return a > b;
    return ia < ib;
}

// r: f32[E] -> ids: i32[T], w: f32[T]; both in rank order.
void route(const float *r, int E, int T, bool norm_topk_prob, int *ids, float *w) {
    for (int rank = 0; rank < T; rank++) {
        int best = -1;
        for (int i = 0; i < E; i++) {
            // Ranked already, exactly when it does not come after the last chosen one.
            if (rank > 0 && !ranks_before(r[ids[rank - 1]], ids[rank - 1], r[i], i)) continue;
            if (best < 0 || ranks_before(r[i], i, r[best], best)) best = i;
        }
        ids[rank] = best;
    }
    const float r_max = r[ids[0]];
    for (int rank = 0; rank < T; rank++) w[rank] = expf_ucrt(r[ids[rank]] - r_max);
    float sum;
    if (norm_topk_prob) {
        sum = w[0];
        for (int rank = 1; rank < T; rank++) sum += w[rank];
    } else {
        float lanes[8] = {};
        for (int i = 0; i < E; i++) lanes[i % 8] += expf_ucrt(r[i] - r_max);
        sum = hsum8(lanes);
    }
    bool finite = true;  // of every logit: one that is not would otherwise only take its expert out of the model
    for (int i = 0; i < E; i++) finite = finite && (f32_bits(r[i]) & 0x7f800000u) != 0x7f800000u;
    for (int rank = 0; rank < T; rank++) w[rank] = finite ? w[rank] / sum : f32_from_bits(0x7fc00000u);
}

}  // namespace

void router_topk_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const RouterTopkArgs *>(args);
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++)
        route(a.logits + m * a.E, a.E, a.T, a.norm_topk_prob != 0, a.ids + m * a.T, a.weights + m * a.T);
}

bool router_topk_serial(const void *args) {
    const auto &a = *static_cast<const RouterTopkArgs *>(args);
    return static_cast<int64_t>(a.M) * a.E * a.T <= kSerialElements;
}

}  // namespace kestrel
