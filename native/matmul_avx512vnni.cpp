// matmul, AVX-512 form with VNNI.
#define KESTREL_VNNI 1
#include "matmul_avx512.h"

namespace kestrel {

const MatmulForm matmul_form_avx512vnni = {run_avx512, workspace_avx512};

}  // namespace kestrel
