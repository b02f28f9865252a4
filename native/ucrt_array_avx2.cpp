#include "ucrt_array_form.h"

namespace kestrel {

const UcrtForm ucrt_form_avx2 = {expf_array, cosf_array, sinf_array};

}  // namespace kestrel
