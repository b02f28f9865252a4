#include "layout.h"

#include "../kernels/op_args.h"

namespace kestrel {

#define MEMBER(name) {#name, offsetof(Struct, name), sizeof(Struct::name)}

std::vector<StructLayout> struct_layouts() {
    std::vector<StructLayout> layouts;
    {
        using Struct = Weight;
        layouts.push_back({"Weight", sizeof(Struct),
            {MEMBER(codes), MEMBER(scale), MEMBER(wtype), MEMBER(n), MEMBER(k), MEMBER(reserved)}});
    }
    {
        using Struct = EmbedArgs;
        layouts.push_back({"embed", sizeof(Struct), {MEMBER(w), MEMBER(ids), MEMBER(x), MEMBER(M), MEMBER(spread)}});
    }
    {
        using Struct = RmsNormArgs;
        layouts.push_back({"rms_norm", sizeof(Struct),
            {MEMBER(x), MEMBER(w), MEMBER(out), MEMBER(M), MEMBER(d), MEMBER(eps), MEMBER(spread)}});
    }
    {
        using Struct = QuantizeA8Args;
        layouts.push_back({"quantize_a8", sizeof(Struct),
            {MEMBER(x), MEMBER(q), MEMBER(d), MEMBER(gsum), MEMBER(M), MEMBER(K)}});
    }
    {
        using Struct = MatmulArgs;
        layouts.push_back({"matmul", sizeof(Struct),
            {MEMBER(w), MEMBER(x), MEMBER(xq), MEMBER(xd), MEMBER(gsum), MEMBER(y), MEMBER(n_w), MEMBER(M)}});
    }
    {
        using Struct = QkNormArgs;
        layouts.push_back({"qk_norm", sizeof(Struct),
            {MEMBER(x), MEMBER(w), MEMBER(M), MEMBER(heads), MEMBER(hd), MEMBER(ld), MEMBER(eps), MEMBER(reserved)}});
    }
    {
        using Struct = RopeArgs;
        layouts.push_back({"rope", sizeof(Struct),
            {MEMBER(x), MEMBER(pos), MEMBER(inv_freq), MEMBER(M), MEMBER(heads), MEMBER(hd), MEMBER(ld),
             MEMBER(factor), MEMBER(reserved)}});
    }
    {
        using Struct = KvAppendArgs;
        layouts.push_back({"kv_append", sizeof(Struct),
            {MEMBER(k), MEMBER(v), MEMBER(kq), MEMBER(ks), MEMBER(vq), MEMBER(vs), MEMBER(pos), MEMBER(base),
             MEMBER(M), MEMBER(nkv), MEMBER(hd), MEMBER(ld)}});
    }
    {
        using Struct = AttentionArgs;
        layouts.push_back({"attention", sizeof(Struct),
            {MEMBER(q), MEMBER(kq), MEMBER(ks), MEMBER(vq), MEMBER(vs), MEMBER(pos), MEMBER(base), MEMBER(out),
             MEMBER(work), MEMBER(copies), MEMBER(M), MEMBER(nh), MEMBER(nkv), MEMBER(hd), MEMBER(ld),
             MEMBER(qscale)}});
    }
    {
        using Struct = AddArgs;
        layouts.push_back({"add", sizeof(Struct),
            {MEMBER(x), MEMBER(y), MEMBER(out), MEMBER(n), MEMBER(spread), MEMBER(reserved)}});
    }
    {
        using Struct = SwigluArgs;
        layouts.push_back({"swiglu", sizeof(Struct), {MEMBER(gu), MEMBER(h), MEMBER(R), MEMBER(F)}});
    }
    {
        using Struct = RouterTopkArgs;
        layouts.push_back({"router_topk", sizeof(Struct),
            {MEMBER(logits), MEMBER(ids), MEMBER(weights), MEMBER(M), MEMBER(E), MEMBER(T), MEMBER(norm_topk_prob)}});
    }
    {
        using Struct = MoeMatmulArgs;
        layouts.push_back({"moe_matmul", sizeof(Struct),
            {MEMBER(w), MEMBER(ids), MEMBER(x), MEMBER(xq), MEMBER(xd), MEMBER(gsum), MEMBER(y), MEMBER(n_w),
             MEMBER(M), MEMBER(T), MEMBER(E), MEMBER(per_slot), MEMBER(reserved)}});
    }
    {
        using Struct = MoeCombineArgs;
        layouts.push_back({"moe_combine", sizeof(Struct),
            {MEMBER(y), MEMBER(weights), MEMBER(out), MEMBER(M), MEMBER(T), MEMBER(H), MEMBER(reserved)}});
    }
    {
        using Struct = ArgmaxArgs;
        layouts.push_back({"argmax", sizeof(Struct), {MEMBER(logits), MEMBER(ids), MEMBER(M), MEMBER(V)}});
    }
    {
        using Struct = L2HashArgs;
        layouts.push_back({"l2_hash", sizeof(Struct),
            {MEMBER(x), MEMBER(row0), MEMBER(row1), MEMBER(out), MEMBER(stride), MEMBER(M), MEMBER(bytes),
             MEMBER(is_f32), MEMBER(reserved)}});
    }
    return layouts;
}

}  // namespace kestrel
