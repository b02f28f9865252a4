// embed: row ids[m] of the table, contract section 9. value = scale * code, one rounded multiply; bf16 exact.
#include "../kernels/contract.cuh"
#include "ops.h"

namespace kestrel {
namespace {

void embed_row(const Weight &w, int64_t row, float *x) {
    if (w.wtype == KESTREL_BF16) {
        const auto *bits = static_cast<const unsigned short *>(w.codes) + row * w.k;
        for (int i = 0; i < w.k; i++) x[i] = bf16_to_f32(bits[i]);
        return;
    }
    const int64_t groups = w.k / 32;
    const unsigned short *scale = w.scale + row * groups;
    for (int64_t g = 0; g < groups; g++) {
        const float s = f16_to_f32(scale[g]);
        float *out = x + 32 * g;
        if (w.wtype == KESTREL_Q4LOCAL) {
            const auto *codes = static_cast<const unsigned char *>(w.codes) + (row * groups + g) * 16;
            for (int j = 0; j < 16; j++) {
                out[j] = s * static_cast<float>((codes[j] & 15) - 8);
                out[j + 16] = s * static_cast<float>((codes[j] >> 4) - 8);
            }
        } else {
            const auto *codes = static_cast<const signed char *>(w.codes) + (row * groups + g) * 32;
            for (int j = 0; j < 32; j++) out[j] = s * static_cast<float>(codes[j]);
        }
    }
}

}  // namespace

void embed_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const EmbedArgs *>(args);
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) embed_row(a.w, a.ids[m], a.x + m * a.w.k);
}

bool embed_serial(const void *args) {
    const auto &a = *static_cast<const EmbedArgs *>(args);
    return static_cast<int64_t>(a.M) * a.w.k <= kSerialElements;
}

}  // namespace kestrel
