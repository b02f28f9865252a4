// The scalar source with the fma instruction: as a form to sweep, because the library call of the baseline form is too
// slow for 2^32 inputs. Not vectorised by the compiler, so that it stays a form of its own.
#pragma GCC optimize("no-tree-vectorize")

#include "../kernels/ucrt.cuh"
#include "ucrt_array.h"

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

}  // namespace

const UcrtForm ucrt_form_scalar_fma = {expf_array, cosf_array, sinf_array};
const UcrtForm ucrt_form_joined_fma = {expf_array, joined_cosf_array, joined_sinf_array};

}  // namespace kestrel
