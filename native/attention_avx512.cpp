#include "attention_form.h"

namespace kestrel {

void attention_avx512(const void *args, ThreadContext &context) { attention_form(args, context); }

}  // namespace kestrel
