// Stages of the FFN of a decode step (M = 1), dense or of experts; stages.cu says what a stage is. Each kernel exists in
// both forms: k_x and k_x_fast.
#include "block_norm.cuh"
#include "router.cuh"
#include "stage_args.h"
#include "warp_rows.cuh"

// Norm, a8, router logits (four experts to a block, by its first warp) and, in the last block to finish, the choice.
// Dynamic shared: NormShared, then bf16[4, H + 8], or what block_router_topk needs.
KERNEL void FORM(k_norm_router)(const NormRouterArgs a) {
    DYNAMIC_SHARED(shared);
    __shared__ unsigned arrived;
    const NormShared sh = norm_shared(shared, a.norm.d);
    unsigned short *const tile = (unsigned short *)(sh.q + a.norm.d);  // bf16[4, H], rows `pitch` apart
    const Weight &w = a.mm.w[0];
    const int pitch = w.k + 8;  // spreads the four rows over the banks
    for (int first = 4 * blockIdx.x; first < w.n; first += 4 * gridDim.x) {
        const int rows = w.n - first < 4 ? w.n - first : 4;
        const unsigned short *const source = (const unsigned short *)w.codes + (long long)first * w.k;
        for (int i = threadIdx.x; i < rows * (w.k / 8); i += blockDim.x)
            copy_async_16(tile + i / (w.k / 8) * pitch + 8 * (i % (w.k / 8)), source + 8 * i);
        if (first == 4 * (int)blockIdx.x) {  // once; block_rms_norm waits
            prefetch_ranges(a.next);
            start_next();
            block_norm_a8(a.norm, 0, sh);
            if (blockIdx.x == 0) store_norm_a8(a.norm, a.a8, sh, 0);
        }
        copy_wait_all();
        __syncthreads();
        if (warp_id() == 0) {
            const int slot = lane_id() / 8, l = lane_id() % 8;
            float acc = 0.0f;
            if (slot < rows) {
#pragma unroll 16
                for (int k = l; k < w.k; k += 8) acc = fma_f32(bf16_to_f32(tile[slot * pitch + k]), sh.x[k], acc);
            }
            const float y = group_hsum8(acc);
            if (slot < rows && l == 0) a.mm.y[first + slot] = y;
        }
        __syncthreads();
    }
    if (!last_block_to_arrive(a.counter, gridDim.x, &arrived)) return;
    block_router_topk(a.topk, 0, (float *)shared);
}

// Grid (F / 32, T): a block makes one group of 32 elements of h for one chosen expert, and its a8. A warp takes R
// gate rows and the matching up rows at a time. With ids null (a dense FFN) the matrices are taken as they are.
template <int U, int R> DEVICE void gate_up(const GateUpArgs &a, float *h) {
    wait_for_previous();  // the first load needs the expert
    start_next();
    const int F = a.swiglu.F, t = blockIdx.y, lane = lane_id();
    const long long expert = a.mm.ids != nullptr ? a.mm.ids[t] : 0;
    const int groups = a.mm.w[0].k / 32;
    const long long in_row = a.mm.per_slot ? t : 0;
    const A8Row in = {a.mm.xq + in_row * a.mm.w[0].k, a.mm.xd + in_row * groups, a.mm.gsum + in_row * groups};
    const float *const x = a.mm.x + in_row * a.mm.w[0].k;
    for (int g = blockIdx.x; g < F / 32; g += gridDim.x) {
        // The rows of this warp's later turns come to L2 while the first turn's travel to registers.
        for (int first = R * (warp_id() + warp_count()); first < 32; first += R * warp_count()) {
            const long long n = expert * F + 32 * g + first;
            prefetch_rows(a.mm.w[0], n, R);
            prefetch_rows(a.mm.w[1], n, R);
        }
        for (int first = R * warp_id(); first < 32; first += R * warp_count()) {
            const long long n = expert * F + 32 * g + first;
            WarpRows<U, R> gate, up;
            gate.begin(a.mm.w[0], n, R);
            up.begin(a.mm.w[1], n, R);
            float gate_y[R], up_y[R];
            gate.finish(a.mm.w[0], n, R, in, x, gate_y);
            up.finish(a.mm.w[1], n, R, in, x, up_y);
            float mine_gate = 0.0f, mine_up = 0.0f;  // lane r takes row r
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (lane == r) {
                    mine_gate = gate_y[r];
                    mine_up = up_y[r];
                }
            }
            if (lane < R) h[first + lane] = (mine_gate / (1.0f + exp_form(-mine_gate))) * mine_up;
        }
        __syncthreads();
        if (warp_id() == 0) {
            const long long out = (long long)t * (F / 32) + g;  // group of h
            warp_a8_one(h, a.a8, out);
            a.swiglu.h[32 * out + lane] = h[lane];
        }
        __syncthreads();
    }
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_gate_up_u2)(const GateUpArgs a) {
    __shared__ __align__(16) float h[32];
    gate_up<2, 2>(a, h);
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_gate_up_u4)(const GateUpArgs a) {
    __shared__ __align__(16) float h[32];
    gate_up<4, 1>(a, h);
}

// A warp to an output row: slot s takes the experts of ranks s, s+4, ...; then they are combined in rank order and
// added to x. Dynamic shared: f32[warps, T].
KERNEL LAUNCH_BOUNDS(256) void FORM(k_moe_down)(const MoeDownArgs a) {
    DYNAMIC_SHARED(shared);
    wait_for_previous();  // the first load needs the experts
    start_next();
    const int T = a.mm.T, lane = lane_id(), slot = lane / 8, l = lane % 8;
    float *const ys = (float *)shared + warp_id() * T;
    const Weight &w = a.mm.w[0];
    const int groups = w.k / 32;
    for (int n = blockIdx.x * warp_count() + warp_id(); n < w.n; n += gridDim.x * warp_count()) {
        for (int t0 = 0; t0 < T; t0 += 8) {
            float acc[2] = {0.0f, 0.0f};
            InputRows<1> in[2];
            long long row[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int t = t0 + 4 * i + slot;
                const long long at = t < T ? t : 0;
                row[i] = (long long)a.mm.ids[at] * w.n + n;
                in[i] = {{a.mm.x + at * w.k}, {a.mm.xq + at * w.k},
                         {a.mm.xd + at * groups}, {a.mm.gsum + at * groups}};
            }
            if (w.wtype == KESTREL_Q4LOCAL) {
                // Both experts of the slot in flight together.
                const unsigned char *const codes = (const unsigned char *)w.codes;
                const int g_end0 = t0 + slot < T ? groups : 0, g_end1 = t0 + 4 + slot < T ? groups : 0;
                for (int g0 = l; g0 < groups; g0 += 32) {
                    uint4 c[2][4];
                    unsigned short s[2][4];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
#pragma unroll
                        for (int u = 0; u < 4; u++) {
                            const int g = g0 + 8 * u;
                            if (g < (i ? g_end1 : g_end0)) {
                                c[i][u] = load_streaming(codes + (row[i] * groups + g) * 16);
                                s[i][u] = load_streaming_u16(w.scale + row[i] * groups + g);
                            }
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 2; i++) {
#pragma unroll
                        for (int u = 0; u < 4; u++) {
                            const int g = g0 + 8 * u;
                            if (g < (i ? g_end1 : g_end0)) {
                                const uint4 *const q = (const uint4 *)(in[i].xq[0] + 32ll * g);
                                const int dot = dot_q4(c[i][u], q[0], q[1], in[i].gsum[0][g]);
                                acc[i] = fma_f32((float)dot, half_to_float(s[i][u]) * in[i].xd[0][g], acc[i]);
                            }
                        }
                    }
                }
            } else {
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (t0 + 4 * i + slot < T) weight_row<1, false>(w, row[i], in[i], l, acc + i);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int t = t0 + 4 * i + slot;
                const float y = group_hsum8(acc[i]);
                if (l == 0 && t < T) ys[t] = y;
            }
        }
        __syncwarp();
        if (lane == 0) {
            float acc = 0.0f;
            for (int t = 0; t < T; t++) acc = fma_f32(a.combine.weights[t], ys[t], acc);  // rank order
            a.combine.out[n] = acc;
            a.add.x[n] = a.add.x[n] + acc;
        }
        __syncwarp();
    }
}
