// matmul at the AVX-512 level: the form without VNNI, and the choice between the two.
#define KESTREL_VNNI 0
#include "matmul_avx512.h"

namespace kestrel {

const MatmulForm matmul_form_avx512 = {run_avx512, workspace_avx512};

namespace {

const MatmulForm &chosen_form() { return use_vnni ? matmul_form_avx512vnni : matmul_form_avx512; }

}  // namespace

void matmul_avx512(const void *args, ThreadContext &context) {
    run_matmul(*static_cast<const MatmulArgs *>(args), chosen_form(), context);
}

void moe_matmul_avx512(const void *args, ThreadContext &context) {
    run_moe_matmul(*static_cast<const MoeMatmulArgs *>(args), chosen_form(), context);
}

}  // namespace kestrel
