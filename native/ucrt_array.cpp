#include "ucrt_array.h"

#include <algorithm>
#include <atomic>
#include <cstring>
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
void joined_cosf_array(const float *x, float *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = cos_or_sin_ucrt(x[i], true);
}
void joined_sinf_array(const float *x, float *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = cos_or_sin_ucrt(x[i], false);
}

// Input number i in increasing order of value: -NaN, -inf .. -0, +0 .. +inf, NaN.
inline uint32_t in_order(uint32_t i) { return i ^ (0x80000000u | ((i >> 31) - 1)); }

constexpr uint64_t kInputs = uint64_t{1} << 32;
constexpr int kBlock = 4096;

// Loops without branches, which the compiler turns into vectors; details only where something was found.
void sweep_block(const UcrtComparison &c, uint64_t first, UcrtSweep *out) {
    const uint64_t step = c.step;
    float x[kBlock], ya[kBlock], yb[kBlock];
    const uint64_t left = (kInputs - first + step - 1) / step;
    const int n = left < kBlock ? static_cast<int>(left) : kBlock;
    for (int i = 0; i < n; i++)
        x[i] = f32_from_bits(in_order(static_cast<uint32_t>(first) + i * static_cast<uint32_t>(step)));
    c.a(x, ya, n);
    // Inputs are in order, so that the smallest magnitude of a block stands at one of its ends.
    const uint32_t least = std::min(f32_bits(x[0]) & 0x7fffffffu, f32_bits(x[n - 1]) & 0x7fffffffu);
    if (least < c.b_below) c.b(x, yb, n);
    else std::memcpy(yb, ya, sizeof yb);
    out->inputs += n;
    const uint32_t first_nan = KESTREL_INF_BITS + !c.infinities_give_nan;
    uint32_t difference = 0, nan_faults = 0, order_faults = 0;
    for (int i = 0; i < n; i++) {
        const uint32_t magnitude = f32_bits(x[i]) & 0x7fffffffu, result = f32_bits(ya[i]);
        const uint32_t gives_nan = magnitude >= first_nan, is_nan = (result & 0x7fffffffu) > KESTREL_INF_BITS;
        nan_faults += (gives_nan != is_nan) | (is_nan & (result != KESTREL_NAN_BITS));
        difference |= result ^ f32_bits(yb[i]);
    }
    for (int i = 1; i < n; i++) order_faults += ya[i] < ya[i - 1];
    out->nan_faults += nan_faults;
    out->order_faults += order_faults;
    for (int i = 0; difference != 0 && i < n; i++) {
        if (f32_bits(ya[i]) == f32_bits(yb[i])) continue;
        out->different++;
        out->first = std::min(out->first, f32_bits(x[i]));
    }
}

}  // namespace

const UcrtForm ucrt_form_scalar = {expf_array, cosf_array, sinf_array};
const UcrtForm ucrt_form_joined = {expf_array, joined_cosf_array, joined_sinf_array};

UcrtSweep ucrt_sweep(const UcrtComparison &c, int threads) {
    std::vector<UcrtSweep> parts(threads, UcrtSweep{0, 0, 0xffffffffu, 0, 0});
    std::vector<std::thread> workers;
    std::atomic<uint64_t> next{0};
    // Blocks share their last input with the next one, so that the order is checked across them.
    const uint64_t span = static_cast<uint64_t>(kBlock - 1) * c.step;
    for (int t = 0; t < threads; t++) {
        workers.emplace_back([&, t] {
            FpenvGuard guard;
            for (uint64_t first = span * next.fetch_add(1); first < kInputs; first = span * next.fetch_add(1))
                sweep_block(c, first, &parts[t]);
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
