// argmax, contract section 10: the lowest index of the largest logit; -1 where a logit is not finite.
#include "../kernels/contract.cuh"
#include "ops.h"

namespace kestrel {

void argmax_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const ArgmaxArgs *>(args);
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        const float *x = a.logits + m * a.V;
        int best = 0;
        bool finite = true;
        for (int i = 0; i < a.V; i++) {
            finite = finite && (f32_bits(x[i]) & 0x7fffffffu) < KESTREL_INF_BITS;
            if (x[i] > x[best]) best = i;
        }
        a.ids[m] = finite ? best : -1;
    }
}

bool argmax_serial(const void *args) { return static_cast<const ArgmaxArgs *>(args)->M == 1; }

}  // namespace kestrel
