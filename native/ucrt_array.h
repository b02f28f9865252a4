// expf_ucrt, cosf_ucrt and sinf_ucrt over arrays, and the exhaustive comparison of their forms.
#pragma once

#include <cstddef>
#include <cstdint>

#include "op.h"

namespace kestrel {

using UcrtArrayFunction = void (*)(const float *x, float *y, size_t n);

struct UcrtForm {
    UcrtArrayFunction expf, cosf, sinf;
};

extern const UcrtForm ucrt_form_scalar;      // fma by library call, where the CPU or the compiler has none
extern const UcrtForm ucrt_form_scalar_fma;  // the same source with the fma instruction
extern const UcrtForm ucrt_form_joined;      // cosf and sinf by cos_or_sin_ucrt
extern const UcrtForm ucrt_form_joined_fma;
extern const UcrtForm ucrt_form_avx2;
extern const UcrtForm ucrt_form_avx512;

struct UcrtSweep {
    uint64_t inputs;        // compared
    uint64_t different;     // inputs where the two forms differ in a bit
    uint32_t first;         // the lowest such input
    uint64_t nan_faults;    // inputs where `a` breaks the NaN rule: NaN (for cosf and sinf infinities too) gives
                            // 0x7fc00000, nothing else gives a NaN
    uint64_t order_faults;  // neighbouring inputs whose results of `a` fall; counted for increasing functions
};

struct UcrtComparison {
    UcrtArrayFunction a, b;
    bool infinities_give_nan;
    uint32_t step;     // of the 2^32 inputs, every step-th
    uint32_t b_below;  // blocks of inputs whose magnitudes all have bits from this on are evaluated by `a` only
};

UcrtSweep ucrt_sweep(const UcrtComparison &comparison, int threads);

}  // namespace kestrel
