// What the forms of attention share: the running state of a range of positions, and how states merge.
#pragma once

#include "../kernels/ucrt.cuh"
#include "op.h"

namespace kestrel {

constexpr int kAttentionChunk = 256;  // positions, fixed by contract section 7
constexpr int kSumLanes = 32;         // of the sum of a chunk's exponentials, too

struct AttentionState {
    float m, l;
    float *acc;  // f32[hd]
};

// left = left merged with right, the chunks that follow it.
static inline void merge_attention(AttentionState *left, const AttentionState &right, int hd) {
    const float m = right.m > left->m ? right.m : left->m;
    const float a = expf_ucrt(left->m - m), b = expf_ucrt(right.m - m);
    left->l = fma_f32(right.l, b, left->l * a);
    for (int i = 0; i < hd; i++) left->acc[i] = fma_f32(right.acc[i], b, left->acc[i] * a);
    left->m = m;
}

}  // namespace kestrel
