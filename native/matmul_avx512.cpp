#include "matmul.h"

namespace kestrel {

void matmul_avx512(const void *args, ThreadContext &context) { matmul_scalar(args, context); }
void moe_matmul_avx512(const void *args, ThreadContext &context) { moe_matmul_scalar(args, context); }

}  // namespace kestrel
