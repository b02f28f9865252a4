// Every exact kernel under kernels/, compiled for the CUDA shim from the same text that NVRTC compiles.
#include "simt_kernels.h"

#define KESTREL_FAST 0
#include "../kernels/attention.cu"
#include "../kernels/attention_cluster.cu"
#include "../kernels/attention_merge.cu"
#include "../kernels/attention_stage.cu"
#include "../kernels/elementwise.cu"
#include "../kernels/gate_up_stage.cu"
#include "../kernels/head.cu"
#include "../kernels/l2_hash.cu"
#include "../kernels/matvec.cu"
#include "../kernels/moe.cu"
#include "../kernels/norm.cu"
#include "../kernels/rope_kv.cu"
#include "../kernels/moe_experts.cu"
#include "../kernels/moe_stages.cu"
#include "../kernels/stages.cu"

namespace simt {

const std::vector<Kernel> &exact_kernels() {
    static const std::vector<Kernel> table = {
        SIMT_KERNEL(k_embed, EmbedArgs),
        SIMT_KERNEL(k_rms_norm_cpu, RmsNormArgs),
        SIMT_KERNEL(k_quantize_a8, QuantizeA8Args),
        SIMT_KERNEL(k_matmul, MatmulArgs),
        SIMT_KERNEL(k_matmul_m2, MatmulArgs),
        SIMT_KERNEL(k_matmul_m4, MatmulArgs),
        SIMT_KERNEL(k_matmul_m8, MatmulArgs),
        SIMT_KERNEL(k_matmul_tiled, MatmulArgs),
        SIMT_KERNEL(k_moe_matmul_tiled, MoeMatmulArgs),
        SIMT_KERNEL(k_qk_norm_cpu, QkNormArgs),
        SIMT_KERNEL(k_rope, RopeArgs),
        SIMT_KERNEL(k_kv_append, KvAppendArgs),
        SIMT_KERNEL(k_attn_decode_online, AttentionArgs),
        SIMT_KERNEL(k_add, AddArgs),
        SIMT_KERNEL(k_swiglu, SwigluArgs),
        SIMT_KERNEL(k_router_topk, RouterTopkArgs),
        SIMT_KERNEL(k_moe_matmul, MoeMatmulArgs),
        SIMT_KERNEL(k_moe_combine, MoeCombineArgs),
        SIMT_KERNEL(k_argmax, ArgmaxArgs),
        SIMT_KERNEL(k_l2_hash, L2HashArgs),
        SIMT_KERNEL(k_l2_hash_many, L2HashManyArgs),
        SIMT_KERNEL(k_l2_hash_long, L2HashLongArgs),
        SIMT_KERNEL(k_norm_a8, NormA8Args),
        SIMT_KERNEL(k_norm_matmul_q4, NormMatmulArgs),
        SIMT_KERNEL(k_norm_matmul_any_u2r4, NormMatmulArgs),
        SIMT_KERNEL(k_norm_matmul_any_u4r2, NormMatmulArgs),
        SIMT_KERNEL(k_matmul_add_q4, MatmulAddArgs),
        SIMT_KERNEL(k_matmul_add_any_u2r4, MatmulAddArgs),
        SIMT_KERNEL(k_matmul_add_any_u4r2, MatmulAddArgs),
        SIMT_KERNEL(k_head_q4, HeadArgs),
        SIMT_KERNEL(k_head_q8_u2r4, HeadArgs),
        SIMT_KERNEL(k_head_q8, HeadArgs),
        SIMT_KERNEL(k_head_bf16_u2r4, HeadArgs),
        SIMT_KERNEL(k_head_any_u2r4, HeadArgs),
        SIMT_KERNEL(k_norm_router, NormRouterArgs),
        SIMT_KERNEL(k_gate_up_any, GateUpArgs),
        SIMT_KERNEL(k_norm_gate_up, NormGateUpArgs),
        SIMT_KERNEL(k_moe_gate_up_any, GateUpArgs),
        SIMT_KERNEL(k_moe_gate_up, GateUpArgs),
        SIMT_KERNEL(k_moe_down, MoeDownArgs),
        SIMT_KERNEL(k_moe_down_any, MoeDownArgs),
        SIMT_KERNEL(k_attn_cluster, AttentionClusterArgs),
        SIMT_KERNEL(k_attn_cluster_128, AttentionClusterArgs),
        SIMT_KERNEL(k_attn_stage, AttentionStageArgs),
        SIMT_KERNEL(k_attn_stage_128, AttentionStageArgs),
        SIMT_KERNEL(k_attn_stage_wide, AttentionStageArgs),
        SIMT_KERNEL(k_attn_merge, AttentionStageArgs),
    };
    return table;
}

}  // namespace simt
