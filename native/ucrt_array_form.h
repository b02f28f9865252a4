// expf, cosf and sinf over arrays in vector form.
#include "simd.h"
#include "ucrt_array.h"

namespace kestrel {
namespace {

void expf_array(const float *x, float *y, size_t n) {
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, expf_ucrt_vector(load(x + i)));
    for (; i < n; i++) y[i] = expf_ucrt(x[i]);
}

void cosf_array(const float *x, float *y, size_t n) {
    size_t i = 0;
    for (; i + kDoubles <= n; i += kDoubles) cos_sin_ucrt_vector(x + i, y + i, nullptr);
    for (; i < n; i++) y[i] = cosf_ucrt(x[i]);
}

void sinf_array(const float *x, float *y, size_t n) {
    size_t i = 0;
    for (; i + kDoubles <= n; i += kDoubles) cos_sin_ucrt_vector(x + i, nullptr, y + i);
    for (; i < n; i++) y[i] = sinf_ucrt(x[i]);
}

}  // namespace
}  // namespace kestrel
