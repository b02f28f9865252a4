#include "ucrt_array.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "../kernels/ucrt.cuh"
#include "fpenv.h"

namespace kestrel {
namespace {

void expf_array(const float *x, float *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = expf_ucrt(x[i]);
}
void cosf_array(const float *x, float *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = cosf_ucrt(x[i]);
}
void sinf_array(const float *x, float *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = sinf_ucrt(x[i]);
}

// Input number i in increasing order of value: -NaN, -inf .. -0, +0 .. +inf, NaN.
uint32_t in_order(uint32_t i) { return i & 0x80000000u ? i & 0x7fffffffu : ~i; }

constexpr uint64_t kInputs = uint64_t{1} << 32;
constexpr int kBlock = 4096;

void sweep_block(UcrtArrayFunction a, UcrtArrayFunction b, bool infinities_give_nan, uint64_t first, uint64_t step,
                 UcrtSweep *out) {
    float x[kBlock], ya[kBlock], yb[kBlock];
    int n = 0;
    for (uint64_t i = first; n < kBlock && i < kInputs; i += step) x[n++] = f32_from_bits(in_order(static_cast<uint32_t>(i)));
    a(x, ya, n);
    b(x, yb, n);
    out->inputs += n;
    for (int i = 0; i < n; i++) {
        const uint32_t u = f32_bits(x[i]), magnitude = u & 0x7fffffffu, ua = f32_bits(ya[i]);
        const bool gives_nan = infinities_give_nan ? magnitude >= KESTREL_INF_BITS : magnitude > KESTREL_INF_BITS;
        out->nan_faults += gives_nan != (ua == KESTREL_NAN_BITS) || (!gives_nan && ya[i] != ya[i]);
        out->order_faults += i > 0 && ya[i] < ya[i - 1];
        if (ua != f32_bits(yb[i])) {
            out->different++;
            out->first = std::min(out->first, u);
        }
    }
}

}  // namespace

const UcrtForm ucrt_form_scalar = {expf_array, cosf_array, sinf_array};

UcrtSweep ucrt_sweep(UcrtArrayFunction a, UcrtArrayFunction b, bool infinities_give_nan, uint32_t step, int threads) {
    std::vector<UcrtSweep> parts(threads, UcrtSweep{0, 0, 0xffffffffu, 0, 0});
    std::vector<std::thread> workers;
    std::atomic<uint64_t> next{0};
    // Blocks share their last input with the next one, so that the order is checked across them.
    const uint64_t span = static_cast<uint64_t>(kBlock - 1) * step;
    for (int t = 0; t < threads; t++) {
        workers.emplace_back([&, t] {
            FpenvGuard guard;
            for (uint64_t first = span * next.fetch_add(1); first < kInputs; first = span * next.fetch_add(1))
                sweep_block(a, b, infinities_give_nan, first, step, &parts[t]);
        });
    }
    for (auto &worker : workers) worker.join();
    UcrtSweep total{0, 0, 0xffffffffu, 0, 0};
    for (const UcrtSweep &part : parts) {
        total.inputs += part.inputs;
        total.different += part.different;
        total.first = std::min(total.first, part.first);
        total.nan_faults += part.nan_faults;
        total.order_faults += part.order_faults;
    }
    return total;
}

}  // namespace kestrel
