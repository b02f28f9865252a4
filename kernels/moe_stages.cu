// Stages of the FFN of a decode step (M = 1); stages.cu says what a stage is. Three launches make the FFN of experts, each from
// what the one or the two before it wrote: norm and router logits; the choice, gate, up and SwiGLU; down, combination and
// residual. The first is here, and the forms of the others for any weights; for q4local they are in moe_experts.cu. Of a
// dense FFN the form of gate and up for any weights is here, q4local's in gate_up_stage.cu. Each kernel exists in both forms:
// k_x and k_x_fast.
#include "expert_rows.cuh"
#include "router.cuh"

// ---- norm, router logits ----

#define ROUTER_ROWS 4  // of a block, at most; kestrel/stages/moe.py knows, too

// Shared memory of the router's stage for rows of k elements (k a multiple of 32), in units of 256 elements;
// kestrel/stages/moe.py computes the same size. A lane of a warp is a lane of the contract: of unit u lane l's weights
// l + 32 * j, j = 0..7, lie together in 16 bytes.
struct RouterShared {
    int units;     // of a row
    float *terms;  // f32[norm_terms(k)]: of norm_scale
    float *x;      // f32[256 * units]: the normalised row
    uint4 *tile;   // bf16[rows][units][32][8]; room for a unit behind them that is read for nothing, as one behind x is

    DEVICE_MEMBER RouterShared(unsigned char *base, int k) {
        units = (k + 255) / 256;
        terms = (float *)base;
        x = terms + norm_terms(k);
        tile = (uint4 *)(x + 256 * units);
    }
};

// `rows` bf16 rows of the router from `first` on into shared memory, by the whole block; there behind a barrier.
DEVICE void stage_router_rows(const Weight &w, int first, int rows, const RouterShared &sh) {
    const unsigned short *const source = (const unsigned short *)w.codes + (long long)first * w.k;
#pragma unroll 1
    for (int t = threadIdx.x; t < w.k / 8; t += blockDim.x) {
        uint4 eight[ROUTER_ROWS] = {};  // elements 8 * t .. 8 * t + 7 of each row: on their way together
#pragma unroll
        for (int r = 0; r < ROUTER_ROWS; r++)
            if (r < rows) eight[r] = load_once(source + (long long)r * w.k + 8 * t);
        // They are of lanes 8 * (t % 4) and on, of which each has its own 16 bytes.
        unsigned short *const at = (unsigned short *)(sh.tile + t / 32 * 32 + t % 4 * 8) + t / 4 % 8;
#pragma unroll
        for (int r = 0; r < ROUTER_ROWS; r++) {
            if (r >= rows) continue;
            const unsigned word[4] = {eight[r].x, eight[r].y, eight[r].z, eight[r].w};
#pragma unroll
            for (int i = 0; i < 8; i++)
                at[r * sh.units * 256 + 8 * i] = (unsigned short)(i % 2 == 0 ? word[i / 2] & 0xffffu : word[i / 2] >> 16);
        }
    }
}

// A lane's part of a unit, on its way to registers.
struct RouterUnit {
    uint4 w;
    float x[8];

    DEVICE_MEMBER void load(const uint4 *tile, const float *row, int unit) {
        w = tile[32 * unit];
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = row[256 * unit + 32 * j];
    }
};

// The fast form has four chains in the place of one.
#define ROUTER_CHAINS (KESTREL_FAST ? 4 : 1)

// The logit of one row, by a warp; every lane gets it. tile, x: the lane's first weights and element. One fma waits for the one
// before it: the next unit is asked for ahead of this one's chain, at the end for nothing.
DEVICE float router_logit(const uint4 *tile, const float *x, int k) {
    float acc[ROUTER_CHAINS] = {};
    auto add = [&](const RouterUnit &unit, int elements) {
        const unsigned word[4] = {unit.w.x, unit.w.y, unit.w.z, unit.w.w};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float weight = f32_from_bits(j % 2 == 0 ? word[j / 2] << 16 : word[j / 2] & 0xffff0000u);
            float &sum = acc[j % ROUTER_CHAINS];
            if (32 * j < elements) sum = fma_f32(weight, unit.x[j], sum);
        }
    };
    const int whole = k / 256;
    RouterUnit even, odd;
    even.load(tile, x, 0);
#pragma unroll 1
    for (int unit = 0; unit + 2 <= whole; unit += 2, tile += 64, x += 512) {
        odd.load(tile, x, 1);
        add(even, 256);
        even.load(tile, x, 2);
        add(odd, 256);
    }
    if (whole % 2 != 0) {
        odd.load(tile, x, 1);
        add(even, 256);
        even = odd;
    }
    if (k % 256 != 0) add(even, k % 256);
#pragma unroll
    for (int i = 1; i < ROUTER_CHAINS; i++) acc[0] += acc[i];
    return warp_hsum32(acc[0]);
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

// store_eight, halves in turn: of a warp's eights in shared memory no two lanes meet in a bank.
DEVICE void store_eight_apart(float *p, const float *v) {
    const bool swap = lane_id() & 4;
    const float4 lo = make_float4(v[0], v[1], v[2], v[3]), hi = make_float4(v[4], v[5], v[6], v[7]);
    ((float4 *)p)[swap] = swap ? hi : lo;
    ((float4 *)p)[!swap] = swap ? lo : hi;
}

// Every block norms the row for itself and makes the logits of `a.rows` experts, a warp to an expert, its weights staged ahead
// of the wait.
DEVICE void norm_router(const NormRouterArgs &a, int block, int blocks, unsigned char *shared) {
    const Weight &w = a.mm.w[0];
    const RouterShared sh(shared, w.k);
    int first = a.rows * block, rows = w.n - first < a.rows ? w.n - first : a.rows;
    if (32 * (int)threadIdx.x < a.norm.d) prefetch_l2(a.norm.w + 32 * threadIdx.x);
    stage_router_rows(w, first, rows, sh);
    const int d = a.norm.d / 32 * 32;  // as it is: the compiler drops what a tail would need
    // What is needed behind the norm, ahead of the wait: where this lane's part of the row, and of the weights of its warp's
    // first expert, will be; which experts; which part of the norm is to be stored.
    const float *x = sh.x + lane_id();
    const uint4 *mine = sh.tile + warp_id() * sh.units * 32 + lane_id();
    int warp = warp_id(), lane = lane_id(), next_weights = warp_count() * sh.units * 32;
    NormPart part = norm_part(a.norm.d, block, blocks);
    settle_shared(x);
    settle_shared(mine);
    settle(warp);
    settle(lane);
    settle(next_weights);
    settle(first);
    settle(rows);
    settle(part.first);
    settle(part.end);
    const auto logits = [&](bool real) {
        const uint4 *weights = mine;
        for (int i = warp; i < rows; i += warp_count(), weights += next_weights) {
            const float logit = router_logit(weights, x, w.k);
            if (lane == 0 && real) a.mm.y[first + i] = logit;
        }
    };
    NormRow<1> row = {};
    // This kernel begins long before its input is there: it goes through its code once with nothing, so that the multiprocessor
    // has the instructions when they count.
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        const bool real = pass == 1;
        const float r = norm_scale(a.norm.x, a.norm.spread, a.norm.w, d, a.norm.eps, sh.terms, row, true, real);
        int span = 0;
#pragma unroll 1
        do {
            if (span > 0 && real) {
                row.load_row(a.norm.x, a.norm.spread, span, d / 8, true);
                row.load_weights(a.norm.w, span, d / 8, true);
            }
            float out[8];
            row.result(0, r, out);
            if (row.eight(span, 0) < d / 8) store_eight_apart(sh.x + 8 * row.eight(span, 0), out);
            span += row.span_size();
        } while (span < d / 8);
        __syncthreads();
        logits(real);
        if (!real) __syncthreads();
    }
    if (warp == warp_count() - 1) warp_store_part(a.norm, a.a8, sh.x, part);
    for (first += a.rows * blocks; first < w.n; first += a.rows * blocks) {  // fewer blocks than rows
        rows = w.n - first < a.rows ? w.n - first : a.rows;
        __syncthreads();
        stage_router_rows(w, first, rows, sh);
        __syncthreads();
        logits(true);
    }
}

// Dynamic shared: RouterShared.
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
        const int at = KESTREL_SPREAD_AT(n + (int)threadIdx.x, a.add.spread);
        a.add.out[at] = load_l2(a.add.x + at) + acc;
    }
}

// Grid: a block for each `a.rows` rows. Dynamic shared: ChoiceShared, DownAnyShared.
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_moe_down_any)(const MoeDownArgs a) {
    DYNAMIC_SHARED(shared);
    moe_down_any(a, blockIdx.x, shared);
}
