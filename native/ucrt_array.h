// expf_ucrt, cosf_ucrt and sinf_ucrt over arrays.
#pragma once

#include <cstddef>

namespace kestrel {

void expf_ucrt_array(const float *x, float *y, size_t n);
void cosf_ucrt_array(const float *x, float *y, size_t n);
void sinf_ucrt_array(const float *x, float *y, size_t n);

}  // namespace kestrel
