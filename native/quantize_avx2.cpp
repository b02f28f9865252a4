#include "quantize_form.h"

namespace kestrel {

void quantize_a8_avx2(const void *args, ThreadContext &context) { run_quantize_a8(args, context, quantize_row); }
void kv_append_avx2(const void *args, ThreadContext &context) { run_kv_append(args, context, quantize_row); }

}  // namespace kestrel
