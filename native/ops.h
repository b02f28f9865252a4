// The entry points of every op, by name and form: <op>_scalar, <op>_avx2, <op>_avx512, and <op>_serial. A new op is
// declared here and listed in op_table.cpp; an op without a form of its own for a level lists a lower one there.
#pragma once

#include "op.h"

namespace kestrel {

#define KESTREL_DECLARE_OP(name)                           \
    void name##_scalar(const void *, ThreadContext &);     \
    void name##_avx2(const void *, ThreadContext &);       \
    void name##_avx512(const void *, ThreadContext &);     \
    bool name##_serial(const void *)

KESTREL_DECLARE_OP(embed);
KESTREL_DECLARE_OP(rms_norm);
KESTREL_DECLARE_OP(quantize_a8);
KESTREL_DECLARE_OP(matmul);
KESTREL_DECLARE_OP(qk_norm);
KESTREL_DECLARE_OP(rope);
KESTREL_DECLARE_OP(kv_append);
KESTREL_DECLARE_OP(attention);
KESTREL_DECLARE_OP(add);
KESTREL_DECLARE_OP(swiglu);
KESTREL_DECLARE_OP(router_topk);
KESTREL_DECLARE_OP(moe_matmul);
KESTREL_DECLARE_OP(moe_combine);
KESTREL_DECLARE_OP(argmax);
KESTREL_DECLARE_OP(l2_hash);

#undef KESTREL_DECLARE_OP

// Work below this many elements is done by one thread: handing it to others costs more than it saves.
constexpr int64_t kSerialElements = 16384;

}  // namespace kestrel
