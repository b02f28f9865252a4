// The fast kernels under kernels/, compiled for the CUDA shim: their logic is tested here, their speed on a GPU.
#include "simt_kernels.h"

#define KESTREL_FAST 1
#include "../kernels/attention.cu"
#include "../kernels/attention_cluster.cu"
#include "../kernels/attention_merge.cu"
#include "../kernels/attention_stage.cu"
#include "../kernels/elementwise.cu"
#include "../kernels/gate_up_stage.cu"
#include "../kernels/head.cu"
#include "../kernels/norm.cu"
#include "../kernels/rope_kv.cu"
#include "../kernels/moe_experts.cu"
#include "../kernels/moe_stages.cu"
#include "../kernels/stages.cu"

namespace simt {

const std::vector<Kernel> &fast_kernels() {
    static const std::vector<Kernel> table = {
        SIMT_KERNEL(k_rms_norm_fast, RmsNormArgs),
        SIMT_KERNEL(k_qk_norm_fast, QkNormArgs),
        SIMT_KERNEL(k_rope_fast, RopeArgs),
        SIMT_KERNEL(k_swiglu_fast, SwigluArgs),
        SIMT_KERNEL(k_attn_fast, AttentionArgs),
        SIMT_KERNEL(k_attn_cluster_fast, AttentionClusterArgs),
        SIMT_KERNEL(k_attn_cluster_128_fast, AttentionClusterArgs),
        SIMT_KERNEL(k_attn_stage_fast, AttentionStageArgs),
        SIMT_KERNEL(k_attn_stage_128_fast, AttentionStageArgs),
        SIMT_KERNEL(k_attn_stage_wide_fast, AttentionStageArgs),
        SIMT_KERNEL(k_attn_merge_fast, AttentionStageArgs),
        SIMT_KERNEL(k_norm_a8_fast, NormA8Args),
        SIMT_KERNEL(k_norm_matmul_q4_fast, NormMatmulArgs),
        SIMT_KERNEL(k_norm_matmul_any_u2r4_fast, NormMatmulArgs),
        SIMT_KERNEL(k_norm_matmul_any_u4r2_fast, NormMatmulArgs),
        SIMT_KERNEL(k_matmul_add_q4_fast, MatmulAddArgs),
        SIMT_KERNEL(k_matmul_add_any_u2r4_fast, MatmulAddArgs),
        SIMT_KERNEL(k_matmul_add_any_u4r2_fast, MatmulAddArgs),
        SIMT_KERNEL(k_head_q4_fast, HeadArgs),
        SIMT_KERNEL(k_head_q8_u2r4_fast, HeadArgs),
        SIMT_KERNEL(k_head_q8_fast, HeadArgs),
        SIMT_KERNEL(k_head_bf16_u2r4_fast, HeadArgs),
        SIMT_KERNEL(k_head_any_u2r4_fast, HeadArgs),
        SIMT_KERNEL(k_norm_router_fast, NormRouterArgs),
        SIMT_KERNEL(k_gate_up_any_fast, GateUpArgs),
        SIMT_KERNEL(k_norm_gate_up_fast, NormGateUpArgs),
        SIMT_KERNEL(k_moe_gate_up_any_fast, GateUpArgs),
        SIMT_KERNEL(k_moe_gate_up_fast, GateUpArgs),
        SIMT_KERNEL(k_moe_down_fast, MoeDownArgs),
        SIMT_KERNEL(k_moe_down_any_fast, MoeDownArgs),
    };
    return table;
}

}  // namespace simt
