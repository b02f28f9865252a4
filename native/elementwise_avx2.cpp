#include "elementwise_form.h"

namespace kestrel {

void swiglu_avx2(const void *args, ThreadContext &context) { swiglu_form(args, context); }
void moe_combine_avx2(const void *args, ThreadContext &context) { moe_combine_form(args, context); }
void rope_avx2(const void *args, ThreadContext &context) { rope_form(args, context); }

}  // namespace kestrel
