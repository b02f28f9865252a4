// Argument structs of the fused stages: the structs of the ops that a stage joins, by value. kestrel/stages/args.py
// repeats the layout. A stage runs one row (M = 1), leaves the bits of its ops in every buffer that a tap reads, and
// leaves alone the buffers between its ops that nothing else reads.
#pragma once

#include "op_args.h"

// How q4local rows are streamed (Q4Stream in q4_stream.cuh).
struct StreamArgs {
    int streams;  // warps of a block that take rows
    int pieces;   // in the ring of each
    int steps;    // of 256 elements of each row, in a piece
    int reserved;
};

// rms_norm, quantize_a8.
struct NormA8Args {
    RmsNormArgs norm;
    QuantizeA8Args a8;
};

// rms_norm, quantize_a8, matmul.
struct NormMatmulArgs {
    RmsNormArgs norm;
    QuantizeA8Args a8;
    MatmulArgs mm;
    StreamArgs stream;  // q4local
};

// matmul, add: out = x + y.
struct MatmulAddArgs {
    MatmulArgs mm;
    AddArgs add;
    StreamArgs stream;  // q4local
    int staged;         // 0 | 1, other forms: every block copies the input row to shared memory
    int reserved;
};

// rms_norm, quantize_a8, matmul by gate and up, swiglu, quantize_a8 (h_a8): q4local.
struct NormGateUpArgs {
    RmsNormArgs norm;
    QuantizeA8Args a8;
    MatmulArgs mm;
    SwigluArgs swiglu;
    QuantizeA8Args h_a8;
    StreamArgs stream;
};

// rms_norm, quantize_a8 (has_a8), matmul by one matrix, argmax.
struct HeadArgs {
    RmsNormArgs norm;
    QuantizeA8Args a8;
    MatmulArgs mm;
    ArgmaxArgs argmax;
    StreamArgs stream;  // q4local
    int has_a8;         // 0 | 1
    int reserved;
};

// qk_norm of q and k (has_norm), rope, kv_append, attention, quantize_a8 of the result (has_a8).
struct AttentionStageArgs {
    QkNormArgs q_norm, k_norm;
    RopeArgs rope;
    KvAppendArgs kv;
    AttentionArgs attn;
    QuantizeA8Args a8;
    float *normed;  // f32[nh + nkv, hd]: q and k after the norm, for taps: attn.copies, or else a place in attn.work
    float *roped;   // f32[nh + nkv, hd]: q and k after RoPE, likewise
    int has_norm;   // 0 | 1
    int has_a8;     // 0 | 1
    int merges;     // 0 | 1: k_attn_stage merges the chunks, too
    int ahead;      // 0 | 1: its blocks have room for V of two chunks
};

// The same by clusters.
struct AttentionClusterArgs {
    AttentionStageArgs stage;
    int heads;   // query heads of a cluster, at most: 1, 2, 4 or 8
    int behind;  // bytes of UnitShared; room for `Tuning.cluster_chunks` chunks lies behind them
};

// rms_norm, quantize_a8, matmul by the bf16 router.
struct NormRouterArgs {
    RmsNormArgs norm;
    QuantizeA8Args a8;
    MatmulArgs mm;
    int rows;  // of the router, to a block: 1 to 4
    int reserved;
};

// The choice of router_topk (experts), moe_matmul by gate and up (dense: matmul), swiglu, quantize_a8 (not k_moe_gate_up).
struct GateUpArgs {
    MoeMatmulArgs mm;
    SwigluArgs swiglu;
    QuantizeA8Args a8;
    RouterTopkArgs topk;
};

// router_topk, quantize_a8 of mm.x (k_moe_down alone), moe_matmul by down, moe_combine, add.
struct MoeDownArgs {
    MoeMatmulArgs mm;
    MoeCombineArgs combine;
    AddArgs add;
    RouterTopkArgs topk;
    int rows;  // of an expert's matrix, to a block: a multiple of 4, no more than threads
    int spread;  // of mm.x, for k_moe_down
};
