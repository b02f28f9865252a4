// Stages of the FFN of a decode step (M = 1); stages.cu says what a stage is. Three launches make the FFN of experts, each from
// what the one or the two before it wrote: norm and router logits; the choice, gate, up and SwiGLU; down, combination and
// residual. The first is here, and the forms of the others for any weights; for q4local they are in moe_experts.cu. Of a
// dense FFN the form of gate and up for any weights is here, q4local's in gate_up_stage.cu. Each kernel exists in both forms:
// k_x and k_x_fast.
#include "expert_rows.cuh"
#include "router.cuh"

// ---- norm, router logits ----

// One bf16 row of the router into shared memory, by a warp. Exact form: lane l's weights l, l + 8, ... as neighbours, so
// that its chain reads eight of them at a time; tile: bf16[8][8 * pitch].
DEVICE void stage_router_row(const Weight &w, int row, uint4 *tile, int pitch) {
    const uint4 *const source = (const uint4 *)((const unsigned short *)w.codes + (long long)row * w.k);
    const int steps = w.k / 8;  // of 16 bytes: a weight for each lane
#if KESTREL_FAST
    for (int i = lane_id(); i < steps; i += 32) tile[i] = load_once(source + i);
    (void)pitch;
#else
    // A thread transposes eight steps times eight lanes.
    for (int unit = lane_id(); 8 * unit < steps; unit += 32) {
        uint4 in[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            in[j] = 8 * unit + j < steps ? load_once(source + 8 * unit + j) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int l = 0; l < 8; l += 2) {
            unsigned word[8];  // lanes l and l + 1 of each step
#pragma unroll
            for (int j = 0; j < 8; j++) word[j] = l == 0 ? in[j].x : l == 2 ? in[j].y : l == 4 ? in[j].z : in[j].w;
            tile[l * pitch + unit] =
                make_uint4(__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[2], word[3], 0x5410),
                           __byte_perm(word[4], word[5], 0x5410), __byte_perm(word[6], word[7], 0x5410));
            tile[(l + 1) * pitch + unit] =
                make_uint4(__byte_perm(word[0], word[1], 0x7632), __byte_perm(word[2], word[3], 0x7632),
                           __byte_perm(word[4], word[5], 0x7632), __byte_perm(word[6], word[7], 0x7632));
        }
    }
#endif
}

DEVICE float two_steps(unsigned weights, float x0, float x1, float acc) {
    acc = fma_f32(f32_from_bits(weights << 16), x0, acc);
    return fma_f32(f32_from_bits(weights & 0xffff0000u), x1, acc);
}

// Floats of a lane's elements l, l + 8, ... of a row in shared memory: read by 16 bytes, no two lanes meet in a bank.
DEVICE int lane_pitch(int d) { return ((d / 8 + 3) / 4 | 1) * 4; }

// Logits of up to four rows, first row `first`, from the tile. x: f32[k] (fast), or f32[8, lane_pitch(k)], a lane's elements
// side by side.
DEVICE void router_logits(const MatmulArgs &mm, int first, int rows, const uint4 *tile, int pitch, const float *x) {
    const int k = mm.w[0].k;
#if KESTREL_FAST
    for (int r = warp_id(); r < rows; r += warp_count()) {
        const uint4 *const w = tile + r * 8 * pitch;
        float sum = 0.0f;
#pragma unroll 4
        for (int i = lane_id(); i < k / 8; i += 32) {
            const uint4 c = w[i];
            const float4 lo = *(const float4 *)(x + 8 * i), hi = *(const float4 *)(x + 8 * i + 4);
            sum += f32_from_bits(c.x << 16) * lo.x + f32_from_bits(c.x & 0xffff0000u) * lo.y;
            sum += f32_from_bits(c.y << 16) * lo.z + f32_from_bits(c.y & 0xffff0000u) * lo.w;
            sum += f32_from_bits(c.z << 16) * hi.x + f32_from_bits(c.z & 0xffff0000u) * hi.y;
            sum += f32_from_bits(c.w << 16) * hi.z + f32_from_bits(c.w & 0xffff0000u) * hi.w;
        }
        sum = warp_sum_f32(sum);
        if (lane_id() == 0) mm.y[first + r] = sum;
    }
#else
    if (warp_id() != 0) return;
    const int slot = lane_id() / 8, l = lane_id() % 8;
    const uint4 *const w = tile + ((slot < rows ? slot : 0) * 8 + l) * pitch;
    const float4 *const terms = (const float4 *)(x + l * lane_pitch(k));
    float acc = 0.0f;
    // One fma waits for the one before it: the next eight terms are asked for ahead of these. k is a multiple of 32.
    const int last = k >= 64 ? k / 64 - 1 : 0;
    uint4 c = w[0];
    float4 lo = terms[0], hi = k >= 64 ? terms[1] : lo;
#pragma unroll 4
    for (int unit = 0; unit < k / 64; unit++) {
        const int next = unit < last ? unit + 1 : last;
        const uint4 next_c = w[next];
        const float4 next_lo = terms[2 * next], next_hi = terms[2 * next + 1];
        acc = two_steps(c.x, lo.x, lo.y, acc);
        acc = two_steps(c.y, lo.z, lo.w, acc);
        acc = two_steps(c.z, hi.x, hi.y, acc);
        acc = two_steps(c.w, hi.z, hi.w, acc);
        c = next_c, lo = next_lo, hi = next_hi;
    }
    if (k % 64 != 0) {
        c = w[k / 64], lo = terms[k / 32 - 1];
        acc = two_steps(c.x, lo.x, lo.y, acc);
        acc = two_steps(c.y, lo.z, lo.w, acc);
    }
    const float y = group_hsum8(acc);
    if (slot < rows && l == 0) mm.y[first + slot] = y;
#endif
}

// A part of the norm and of its a8 to global memory, by a warp, from the row in shared memory.
DEVICE void warp_store_part(const RmsNormArgs &norm, const QuantizeA8Args &a8, const float *x, NormPart part) {
    const int end = part.end / 4 < norm.d / 32 ? part.end / 4 : norm.d / 32, eighth = lane_id() % 8;
    for (int first = part.first / 4; first < end; first += 4) {
        const int g = first + lane_id() / 8;
        float4 x4 = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (g < end) x4 = ((const float4 *)x)[8 * g + eighth];
        const float v[4] = {x4.x, x4.y, x4.z, x4.w};
        float d;
        int sum;
        const unsigned packed = a8_group(v, &d, &sum);
        if (g < end) {
            ((float4 *)norm.out)[8 * g + eighth] = x4;
            ((unsigned *)a8.q)[8 * g + eighth] = packed;
            if (eighth == 0) {
                a8.d[g] = d;
                a8.gsum[g] = sum;
            }
        }
    }
}

// Every block norms the row for itself and makes the logits of `a.rows` experts, its weights staged ahead of the wait.
DEVICE void norm_router(const NormRouterArgs &a, int block, int blocks, unsigned char *shared) {
    const Weight &w = a.mm.w[0];
    const int pitch = (w.k / 8 + 7) / 8 | 1;  // of a lane, in 16 bytes: odd, so that no two lanes meet in a bank
    uint4 *const tile = (uint4 *)shared;      // [rows][8][pitch]
    float *const by_lane = (float *)(tile + a.rows * 8 * pitch);  // f32[8, lane_pitch(d)]
    const NormShared sh = norm_shared((unsigned char *)(by_lane + 8 * lane_pitch(a.norm.d)), a.norm.d);
    if (32 * (int)threadIdx.x < a.norm.d) prefetch_l2(a.norm.w + 32 * threadIdx.x);
    int first = a.rows * block;
    for (int r = warp_id(); r < a.rows && first + r < w.n; r += warp_count())
        stage_router_row(w, first + r, tile + r * 8 * pitch, pitch);
    const int d = a.norm.d / 32 * 32;  // as it is: the compiler drops what a tail would need
    NormRow<1> row;
    const float r = norm_scale(a.norm.x, a.norm.w, d, a.norm.eps, sh.terms, row, true);  // lets the next kernel begin, waits
#pragma unroll 1
    for (int span = 0; span < d / 8; span += row.span_size()) {
        if (span > 0) {
            row.load_row(a.norm.x, span, d / 8, true);
            row.load_weights(a.norm.w, span, d / 8, true);
        }
        const int eight = row.eight(span, 0);
        float out[8];
        row.result(0, r, out);
        if (eight >= d / 8) continue;
        store_eight(sh.x + 8 * eight, out);
#if !KESTREL_FAST
#pragma unroll
        for (int l = 0; l < 8; l++) by_lane[l * lane_pitch(d) + eight] = out[l];
#endif
    }
    __syncthreads();
    if (warp_id() == warp_count() - 1) warp_store_part(a.norm, a.a8, sh.x, norm_part(a.norm.d, block, blocks));
    while (first < w.n) {
        router_logits(a.mm, first, w.n - first < a.rows ? w.n - first : a.rows, tile, pitch, KESTREL_FAST ? sh.x : by_lane);
        first += a.rows * blocks;
        if (first >= w.n) break;
        __syncthreads();
        for (int r = warp_id(); r < a.rows && first + r < w.n; r += warp_count())
            stage_router_row(w, first + r, tile + r * 8 * pitch, pitch);
        __syncthreads();
    }
}

// Dynamic shared: bf16[rows, 8, 8 * pitch], f32[8, lane_pitch(d)], NormShared.
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_norm_router)(const NormRouterArgs a) {
    DYNAMIC_SHARED(shared);
    norm_router(a, blockIdx.x, gridDim.x, shared);
}

// ---- gate, up, SwiGLU, a8 ----

// A unit is one group of 32 elements of h of one chosen expert, and its a8: 32 gate and 32 up rows, which a block's warps
// share. experts: every block chooses for itself from the logits, and the last unit, of rank T, stores the choice and its
// weights (at best a block does nothing else); otherwise the matrices are one FFN's.
struct GateUpUnits {
    int per_expert, units;
    int unit, rank, part;  // the block's current unit: part `part` of the expert of rank `rank`

    DEVICE_MEMBER GateUpUnits(const GateUpArgs &a, bool experts, int block) {
        per_expert = a.swiglu.F / 32;
        units = experts ? a.mm.T * per_expert + 1 : per_expert;
        unit = block;
        rank = experts ? (int)((unsigned)block / (unsigned)per_expert) : 0;
        part = block - rank * per_expert;
    }

    DEVICE_MEMBER bool more() const { return unit < units; }
    DEVICE_MEMBER bool stores() const { return unit == units - 1; }  // experts

    DEVICE_MEMBER void advance(int blocks) {
        unit += blocks;
#pragma unroll 1
        for (part += blocks; part >= per_expert && unit < units; part -= per_expert) rank++;
    }
};

// Any format and length.
template <bool EXPERTS> DEVICE void gate_up_any(const GateUpArgs &a, int block, int blocks, unsigned char *shared) {
    const int lane = lane_id(), E = EXPERTS ? a.topk.E : 0, T = EXPERTS ? a.topk.T : 0;
    GateUpUnits own(a, EXPERTS, block);
    const int first = 32 * warp_id() / warp_count(), pairs = 32 * (warp_id() + 1) / warp_count() - first;
    float *const h = (float *)shared;  // f32[2, 32]: units in turn
    const ChoiceShared choice = choice_shared((unsigned char *)(h + 64), E, T);
    const A8Row in = {a.mm.xq, a.mm.xd, a.mm.gsum};
    touch_exp_table();
    wait_for_previous();
    if (EXPERTS) block_choose(a.topk.logits, E, T, choice);
    start_next();
    int turn = 0;
    for (; own.more(); own.advance(blocks), turn ^= 1) {
        if (EXPERTS && own.stores()) {
            block_choice_weights(a.topk, 0, choice);
            block_store_choice(a.topk, 0, choice);
            break;
        }
        const long long expert = EXPERTS ? choice.ids[own.rank] : 0;
        const long long row = expert * a.swiglu.F + 32 * own.part + first;
        float mine[2] = {0.0f, 0.0f};  // gate and up of pair `lane`
#pragma unroll 1
        for (int j = 0; j < pairs; j += 4) {
            const int rows = pairs - j < 4 ? pairs - j : 4;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                WarpRows<2, 4> four;
                float y[4];
                four.begin(a.mm.w[i], row + j, rows);
                four.finish(a.mm.w[i], row + j, rows, in, a.mm.x, y);
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float sum = __shfl_sync(FULL_WARP, y[r], 0);
                    if (lane == j + r) mine[i] = sum;
                }
            }
        }
        if (lane < pairs) h[32 * turn + first + lane] = swiglu_element(mine[0], mine[1]);
        __syncthreads();
        if (warp_id() == 0) {
            const float value = h[32 * turn + lane];
            a.swiglu.h[32 * own.unit + lane] = value;
            warp_a8_element(value, a.a8, own.unit);
        }
    }
}

// Dynamic shared: f32[2, 32], ChoiceShared (experts).
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_gate_up_any)(const GateUpArgs a) {
    DYNAMIC_SHARED(shared);
    gate_up_any<false>(a, blockIdx.x, gridDim.x, shared);
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_moe_gate_up_any)(const GateUpArgs a) {
    DYNAMIC_SHARED(shared);
    gate_up_any<true>(a, blockIdx.x, gridDim.x, shared);
}

// ---- down, combination, residual ----

// Shared memory of the down stage behind ChoiceShared; kestrel/stages/moe.py computes the same size.
struct DownAnyShared {
    float *p;  // f32[T rounded up to 4]: the experts' weights
    float *y;  // f32[T, rows]

    DEVICE_MEMBER DownAnyShared(unsigned char *base, int T) {
        p = (float *)base;
        y = p + (T + 3) / 4 * 4;
    }
};

// Any quantised format, read where it lies. A block takes `a.rows` neighbouring rows of every chosen expert, a slot of eight
// lanes to a row; then each row is combined in rank order and added to x.
DEVICE void moe_down_any(const MoeDownArgs &a, int block, unsigned char *shared) {
    const Weight &w = a.mm.w[0];
    const int T = a.mm.T, rows = a.rows, groups = w.k / 32, slot = lane_id() / 8, quads = rows / 4;
    const int n = block * rows, count = w.n - n < rows ? w.n - n : rows;
    const ChoiceShared choice = choice_shared(shared, a.topk.E, T);
    const DownAnyShared sh(shared + choice_shared_bytes(a.topk.E, T), T);
    block_choose(a.topk.logits, a.topk.E, T, choice);
    wait_for_previous();
    start_next();
    for (int t = threadIdx.x; t < T; t += blockDim.x) sh.p[t] = load_l2(a.combine.weights + t);
    // Warps take quads of rows in turn: those of the expert of rank 0, of rank 1, ...
#pragma unroll 1
    for (int item = warp_id(); item < T * quads; item += warp_count()) {
        const int t = item / quads, row = 4 * (item - t * quads) + slot;
        const int g = t * groups;
        const InputRows<1> one = {{nullptr}, {a.mm.xq + 32ll * g}, {a.mm.xd + g}, {a.mm.gsum + g}};
        float acc = 0.0f;
        if (row < count) weight_row<1, false>(w, (long long)choice.ids[t] * w.n + n + row, one, lane_id() % 8, &acc);
        acc = group_hsum8(acc);
        if (lane_id() % 8 == 0) sh.y[t * rows + row] = acc;
    }
    __syncthreads();
    if ((int)threadIdx.x < count) {  // rows are no more than threads
        float acc = 0.0f;
        for (int t = 0; t < T; t++) acc = fma_f32(sh.p[t], sh.y[t * rows + threadIdx.x], acc);  // rank order
        a.combine.out[n + threadIdx.x] = acc;
        a.add.out[n + threadIdx.x] = load_l2(a.add.x + n + threadIdx.x) + acc;
    }
}

// Grid: a block for each `a.rows` rows. Dynamic shared: ChoiceShared, DownAnyShared.
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_moe_down_any)(const MoeDownArgs a) {
    DYNAMIC_SHARED(shared);
    moe_down_any(a, blockIdx.x, shared);
}
