// Every op of kestrel/ops.py: its argument struct and its form for each ISA level.
#include <cstring>

#include "ops.h"

namespace kestrel {
namespace {

#define KESTREL_OP(name, Args) \
    { #name, sizeof(Args), {name##_scalar, name##_avx2, name##_avx512}, name##_serial }
// No form of its own beyond AVX2, or beyond scalar.
#define KESTREL_OP_AVX2(name, Args) \
    { #name, sizeof(Args), {name##_scalar, name##_avx2, name##_avx2}, name##_serial }
#define KESTREL_OP_SCALAR(name, Args) \
    { #name, sizeof(Args), {name##_scalar, name##_scalar, name##_scalar}, name##_serial }

const OpEntry kOps[] = {
    KESTREL_OP_SCALAR(embed, EmbedArgs),
    KESTREL_OP_AVX2(rms_norm, RmsNormArgs),
    KESTREL_OP(quantize_a8, QuantizeA8Args),
    KESTREL_OP(matmul, MatmulArgs),
    KESTREL_OP_AVX2(qk_norm, QkNormArgs),
    KESTREL_OP(rope, RopeArgs),
    KESTREL_OP(kv_append, KvAppendArgs),
    KESTREL_OP(attention, AttentionArgs),
    KESTREL_OP_SCALAR(add, AddArgs),
    KESTREL_OP(swiglu, SwigluArgs),
    KESTREL_OP_SCALAR(router_topk, RouterTopkArgs),
    KESTREL_OP(moe_matmul, MoeMatmulArgs),
    KESTREL_OP(moe_combine, MoeCombineArgs),
    KESTREL_OP_SCALAR(argmax, ArgmaxArgs),
    KESTREL_OP_SCALAR(l2_hash, L2HashArgs),
};

}  // namespace

const OpEntry *find_op(const char *name) {
    for (const OpEntry &entry : kOps)
        if (std::strcmp(entry.name, name) == 0) return &entry;
    return nullptr;
}

}  // namespace kestrel
