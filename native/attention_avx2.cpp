#include "attention_form.h"

namespace kestrel {

void attention_avx2(const void *args, ThreadContext &context) { attention_form(args, context); }

}  // namespace kestrel
