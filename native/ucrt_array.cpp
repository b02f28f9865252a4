#include "ucrt_array.h"

#include "../kernels/ucrt.cuh"

namespace kestrel {

void expf_ucrt_array(const float *x, float *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = expf_ucrt(x[i]);
}
void cosf_ucrt_array(const float *x, float *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = cosf_ucrt(x[i]);
}
void sinf_ucrt_array(const float *x, float *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = sinf_ucrt(x[i]);
}

}  // namespace kestrel
