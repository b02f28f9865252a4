#include "exp_f64.h"

#include "../kernels/ucrt.cuh"

namespace kestrel {

double exp_f64(double x) {
    if (x != x) return f64_from_bits(0x7ff8000000000000ull);
    if (x > 709.782712893384) return f64_from_bits(0x7ff0000000000000ull);
    if (x < -745.1332191019412) return 0.0;
    // x = n * ln2/64 + r: n has at most 17 bits and the high part of ln2/64 ends in 20 zero bits, so n * high is exact,
    // and so is the difference.
    const int n = f64_to_int_rn(x * 0x1.71547652b82fep+6);
    const double dn = n;
    const double r = (x - dn * 0x1.62e42fefp-7) - dn * 0x1.473de6af278edp-40;
    // exp(r) - 1 for |r| <= ln2/128, Taylor to r^7: the next term is below 2^-70.
    double p = 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = r + p * (r * r);
    const double t = f64_from_bits(EXPF_UCRT_TABLE[n & 63]);
    const double y = t + t * p;
    // Two exact steps of scaling down, one rounding where the result is subnormal; up first by half near the top.
    const int m = n >> 6;
    const auto power = [](int e) { return f64_from_bits((unsigned long long)(e + 1023) << 52); };
    if (m < -1021) return y * power(m + 64) * power(-64);
    if (m > 1022) return y * power(m - 1) * 2.0;
    return y * power(m);
}

void exp_f64_array(const double *x, double *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = exp_f64(x[i]);
}

}  // namespace kestrel
