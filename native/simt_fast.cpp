// The fast kernels under kernels/, compiled for the CUDA shim: their logic is tested here, their speed on a GPU.
#include "simt_kernels.h"

#define KESTREL_FAST 1
#include "../kernels/elementwise.cu"
#include "../kernels/norm.cu"
#include "../kernels/rope_kv.cu"

namespace simt {

const std::vector<Kernel> &fast_kernels() {
    static const std::vector<Kernel> table = {
        SIMT_KERNEL(k_rms_norm_fast, RmsNormArgs),
        SIMT_KERNEL(k_qk_norm_fast, QkNormArgs),
        SIMT_KERNEL(k_rope_fast, RopeArgs),
        SIMT_KERNEL(k_swiglu_fast, SwigluArgs),
    };
    return table;
}

}  // namespace simt
