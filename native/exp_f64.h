#pragma once

#include <cstddef>

namespace kestrel {

// exp in plain double operations in a fixed order, for sampling on the host: equal bits on every machine, whatever its
// math library. Within about 1 ULP; NaN gives NaN, +-inf as usual, results below 2^-1074 give 0.
double exp_f64(double x);

void exp_f64_array(const double *x, double *y, size_t n);

}  // namespace kestrel
