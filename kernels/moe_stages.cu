// Stages of the FFN of a decode step (M = 1), dense or of experts; stages.cu says what a stage is. Three launches make
// the FFN of experts, each from what the one or the two before it wrote: norm and router logits; the choice, gate, up and
// SwiGLU; down, combination and residual. Each body takes its block and the number of blocks, and no result depends on
// either. Each kernel exists in both forms: k_x and k_x_fast.
#include "expert_rows.cuh"
#include "router.cuh"

// ---- norm, router logits ----

// One bf16 row of the router into shared memory, by a warp. Exact form: lane l's weights l, l + 8, ... as neighbours, so
// that its chain reads eight of them at a time; tile: bf16[8][8 * pitch].
DEVICE void stage_router_row(const Weight &w, int row, uint4 *tile, int pitch) {
    const uint4 *const source = (const uint4 *)((const unsigned short *)w.codes + (long long)row * w.k);
    const int steps = w.k / 8;  // of 16 bytes: a weight for each lane
#if KESTREL_FAST
    for (int i = lane_id(); i < steps; i += 32) tile[i] = load_streaming(source + i);
    (void)pitch;
#else
    // A thread transposes eight steps times eight lanes.
    for (int unit = lane_id(); 8 * unit < steps; unit += 32) {
        uint4 in[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            in[j] = 8 * unit + j < steps ? load_streaming(source + 8 * unit + j) : make_uint4(0, 0, 0, 0);
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

DEVICE float two_steps(unsigned weights, const float *x, float acc) {
    acc = fma_f32(f32_from_bits(weights << 16), x[0], acc);
    return fma_f32(f32_from_bits(weights & 0xffff0000u), x[1], acc);
}

// Logits of up to four rows, first row `first`, from the tile.
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
    float acc = 0.0f;
    x += l;
    // One fma waits for the one before it: the next eight terms are asked for ahead of these. k is a multiple of 32.
    const int last = k >= 64 ? k / 64 - 1 : 0;
    uint4 c = w[0];
    float terms[8];
#pragma unroll
    for (int j = 0; j < 8; j++) terms[j] = j < 4 || k >= 64 ? x[8 * j] : 0.0f;
#pragma unroll 4
    for (int unit = 0; unit < k / 64; unit++) {
        const int next = unit < last ? unit + 1 : last;
        const uint4 next_c = w[next];
        float next_terms[8];
#pragma unroll
        for (int j = 0; j < 8; j++) next_terms[j] = x[64 * next + 8 * j];
        acc = two_steps(c.x, terms, acc);
        acc = two_steps(c.y, terms + 2, acc);
        acc = two_steps(c.z, terms + 4, acc);
        acc = two_steps(c.w, terms + 6, acc);
        c = next_c;
#pragma unroll
        for (int j = 0; j < 8; j++) terms[j] = next_terms[j];
    }
    if (k % 64 != 0) {
        c = w[k / 64];
        for (int j = 0; j < 4; j++) terms[j] = x[k / 64 * 64 + 8 * j];
        acc = two_steps(c.x, terms, acc);
        acc = two_steps(c.y, terms + 2, acc);
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
    const NormShared sh = norm_shared(shared + 16 * a.rows * 8 * pitch, a.norm.d);
    if (32 * (int)threadIdx.x < a.norm.d) prefetch_l2(a.norm.w + 32 * threadIdx.x);
    int first = a.rows * block;
    for (int r = warp_id(); r < a.rows && first + r < w.n; r += warp_count())
        stage_router_row(w, first + r, tile + r * 8 * pitch, pitch);
    prefetch_ranges(a.next);
    const int d = a.norm.d / 32 * 32;  // as it is: the compiler drops what a tail would need
    block_rms_norm(a.norm.x, a.norm.w, d, a.norm.eps, sh);  // waits, lets the next kernel begin
    if (warp_id() == warp_count() - 1) warp_store_part(a.norm, a.a8, sh.x, norm_part(a.norm.d, block, blocks));
    while (first < w.n) {
        router_logits(a.mm, first, w.n - first < a.rows ? w.n - first : a.rows, tile, pitch, sh.x);
        first += a.rows * blocks;
        if (first >= w.n) break;
        __syncthreads();
        for (int r = warp_id(); r < a.rows && first + r < w.n; r += warp_count())
            stage_router_row(w, first + r, tile + r * 8 * pitch, pitch);
        __syncthreads();
    }
}

// Dynamic shared: bf16[rows, 8, 8 * pitch], NormShared.
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_norm_router)(const NormRouterArgs a) {
    DYNAMIC_SHARED(shared);
    norm_router(a, blockIdx.x, gridDim.x, shared);
}

// ---- gate, up, SwiGLU, a8 ----

// A unit is one group of 32 elements of h of one chosen expert, and its a8: 32 gate and 32 up rows, which a block's warps
// share. EXPERTS: every block chooses for itself from the logits, and the last unit, of rank T, stores the choice and its
// weights (at best a block does nothing else); otherwise the matrices are one FFN's, and their rows are asked for ahead of
// the wait.
struct GateUpUnits {
    int per_expert, units, count;  // count: ranks that the block's units need
    int unit, rank, part;          // the block's current unit: part `part` of the expert of rank `rank`

    DEVICE_MEMBER GateUpUnits(const GateUpArgs &a, bool experts, int block, int blocks) {
        per_expert = a.swiglu.F / 32;
        units = experts ? a.mm.T * per_expert + 1 : per_expert;
        unit = block;
        rank = experts ? (int)((unsigned)block / (unsigned)per_expert) : 0;
        part = block - rank * per_expert;
        count = rank + 1;
        if (units > blocks) {  // then every block has a unit
            const unsigned last = (unsigned)(units - 1 - (int)((unsigned)(units - 1 - block) % (unsigned)blocks));
            count = (int)(last / (unsigned)per_expert) + 1;
        }
        if (experts && count > a.mm.T) count = a.mm.T;
    }

    DEVICE_MEMBER bool more() const { return unit < units; }
    DEVICE_MEMBER bool stores() const { return unit == units - 1; }  // experts

    DEVICE_MEMBER void advance(int blocks) {
        unit += blocks;
#pragma unroll 1
        for (part += blocks; part >= per_expert && unit < units; part -= per_expert) rank++;
    }
};

// h of one element.
DEVICE float swiglu_element(float gate, float up) { return (gate / (1.0f + exp_form(-gate))) * up; }

// The weights of the ids in `choice`, which may still be on their way there, and both to global memory.
DEVICE void store_choice(const RouterTopkArgs &topk, const ChoiceShared &choice) {
    __syncthreads();
    block_choice_weights(topk, 0, choice);
    block_store_choice(topk, 0, choice);
}

// q4local rows of whole steps. A warp takes four pairs of rows at a time, a quad.
template <bool FULL, bool EXPERTS> DEVICE void gate_up(const GateUpArgs &a, int block, int blocks, unsigned char *shared) {
    const int lane = lane_id(), groups = a.mm.w[0].k / 32, pieces = (groups + 8 * QUAD_STEPS - 1) / (8 * QUAD_STEPS);
    GateUpUnits own(a, EXPERTS, block, blocks);
    StagedRow in;
    in.open(shared, groups);
    float *const h = (float *)(shared + StagedRow::bytes(groups));  // f32[2, 32]: units in turn
    unsigned char *const tile = (unsigned char *)(h + 64) + warp_id() * QuadPair<FULL>::SCALE_BYTES;
    const A8Row row = {a.mm.xq, a.mm.xd, a.mm.gsum};
    const bool by_warp = EXPERTS && a.topk.E <= WARP_CHOOSE_EXPERTS && a.topk.T <= WARP_CHOOSE_RANKS;
    const ChoiceShared choice = choice_shared((unsigned char *)(h + 64) + warp_count() * QuadPair<FULL>::SCALE_BYTES,
                                              EXPERTS ? a.topk.E : 0, EXPERTS ? a.topk.T : 0);
    int ids = 0;  // lane t: the expert of rank t
    touch_exp_table();
    if (EXPERTS) {
        wait_for_previous();
        if (by_warp) {
            ids = warp_choose(a.topk.logits, a.topk.E, own.count, [&] { in.ask(row, groups); });
        } else {
            in.ask(row, groups);
            block_choose(a.topk.logits, a.topk.E, a.topk.T, choice);
        }
    }
    bool begun = false;
    // Once for each warp (warps are no more than quads), as soon as its first rows are asked for.
    auto begin = [&] {
        if (!EXPERTS) wait_for_previous();
        start_next();
        if (!EXPERTS) in.ask(row, groups);
        copy_wait_all();
        __syncthreads();
        begun = true;
    };
    int turn = 0;
    for (; own.more(); own.advance(blocks), turn ^= 1) {
        if (EXPERTS && own.stores()) {
            if (!begun) begin();
            if (by_warp && (int)threadIdx.x < a.topk.T) choice.ids[threadIdx.x] = ids;  // T: at most a warp
            store_choice(a.topk, choice);
            break;
        }
        const long long expert = !EXPERTS ? 0 : by_warp ? __shfl_sync(FULL_WARP, ids, own.rank) : choice.ids[own.rank];
        const long long start = expert * (a.swiglu.F * groups);  // of the expert's groups
#pragma unroll 1
        for (int quad = warp_id(); quad < 8; quad += warp_count()) {
            float acc[2] = {0.0f, 0.0f};
#pragma unroll 1
            for (int piece = 0; piece < pieces; piece++) {
                QuadPair<FULL> rows;
                rows.ask(a.mm.w, start + (32 * own.part + 4 * quad + lane / 8) * groups, groups, piece, tile);
                if (!begun) {
                    begin();
                } else {
                    copy_wait_all();
                    __syncwarp();
                }
                rows.add(in, piece, tile, acc);
                __syncwarp();  // the scales' memory may be asked for again
            }
            const float value = swiglu_element(group_hsum8(acc[0]), group_hsum8(acc[1]));
            if (lane % 8 == 0) h[32 * turn + 4 * quad + lane / 8] = value;
        }
        __syncthreads();
        if (warp_id() == 0) {
            const float value = h[32 * turn + lane];
            a.swiglu.h[32 * own.unit + lane] = value;
            warp_a8_element(value, a.a8, own.unit);
        }
    }
    if (!begun) begin();  // a block without a unit
}

// Any format and length.
template <bool EXPERTS> DEVICE void gate_up_any(const GateUpArgs &a, int block, int blocks, unsigned char *shared) {
    const int lane = lane_id(), E = EXPERTS ? a.topk.E : 0, T = EXPERTS ? a.topk.T : 0;
    GateUpUnits own(a, EXPERTS, block, blocks);
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
            store_choice(a.topk, choice);
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

// Dynamic shared: StagedRow, f32[2, 32], scales of the warps' quads, ChoiceShared (experts). The name says of what number
// the input's length is a multiple.
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_gate_up_2048)(const GateUpArgs a) {
    DYNAMIC_SHARED(shared);
    gate_up<true, false>(a, blockIdx.x, gridDim.x, shared);
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_gate_up_256)(const GateUpArgs a) {
    DYNAMIC_SHARED(shared);
    gate_up<false, false>(a, blockIdx.x, gridDim.x, shared);
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_moe_gate_up_2048)(const GateUpArgs a) {
    DYNAMIC_SHARED(shared);
    gate_up<true, true>(a, blockIdx.x, gridDim.x, shared);
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_moe_gate_up_256)(const GateUpArgs a) {
    DYNAMIC_SHARED(shared);
    gate_up<false, true>(a, blockIdx.x, gridDim.x, shared);
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

#define DOWN_GROUPS 3  // of the input that a thread holds at a time
#define DOWN_QUADS 4   // times four rows that a warp takes of one expert at a time, two by two

// Shared memory of the down stage behind ChoiceShared; kestrel/stages/moe.py computes the same size.
struct DownShared {
    float *x;              // f32[rows]
    float *p;              // f32[T rounded up to 8]: the experts' weights
    float *y;              // f32[T rounded up to 8, rows]
    unsigned char *codes;  // u8[T, rows, G, 16], q4local
    unsigned char *scale;  // f16[T, rows, G]; each expert's start rounded up to 16 bytes
    int scale_bytes;       // from one expert to the next
};

DEVICE DownShared down_shared(unsigned char *base, int T, int rows, int groups) {
    const int ranks = (T + 7) / 8 * 8;
    DownShared sh;
    sh.x = (float *)base;  // rows are a multiple of 4
    sh.p = sh.x + rows;
    sh.y = sh.p + ranks;
    sh.codes = (unsigned char *)(sh.y + ranks * rows);
    sh.scale = sh.codes + T * rows * groups * 16;
    sh.scale_bytes = (2 * rows * groups + 15) / 16 * 16;
    return sh;
}

// What a warp does at a time: an item is up to DOWN_QUADS quads of rows of one expert, as many as leave work for every warp.
// The items are those of the expert of rank 0, then of rank 1, ...; the warps take turns.
struct DownItems {
    int quads, each, parts;  // of an expert; of an item; items of an expert
    int t, part;             // the warp's current item: part `part` of the expert of rank t

    DEVICE_MEMBER DownItems(int T, int rows) {
        quads = rows / 4;
        const int shift = T * quads >= 4 * warp_count() ? 2 : T * quads >= 2 * warp_count() ? 1 : 0;
        each = 1 << shift;
        parts = (quads + each - 1) >> shift;
        t = (int)((unsigned)warp_id() / (unsigned)parts);
        part = warp_id() - t * parts;
    }

    DEVICE_MEMBER void advance() {
#pragma unroll 1
        for (part += warp_count(); part >= parts; part -= parts) t++;
    }

    DEVICE_MEMBER int quad() const { return part * each; }  // the item's first
    DEVICE_MEMBER int have() const { return quads - quad() < each ? quads - quad() : each; }
};

// Adds an item's quads, from the tile that the warp copied, to acc, f32[DOWN_QUADS]: a slot of eight lanes to a row, each
// lane its own chain. in: all experts' rows. A quad past the last is another one again, and nobody stores it.
DEVICE void down_quads(const DownShared &sh, const DownItems &item, const A8Row &in, int rows, int groups, float *acc) {
    const int l = lane_id() % 8, have = item.have();
    const int row = (4 * item.quad() + lane_id() / 8) * groups;
    const uint4 *const codes = (const uint4 *)sh.codes + item.t * rows * groups + row;
    const unsigned short *const scale = (const unsigned short *)(sh.scale + item.t * sh.scale_bytes) + row;
#pragma unroll 1
    for (int step = 0; step < groups; step += 8 * DOWN_GROUPS) {
        const int first = step + l;
        InputGroups<DOWN_GROUPS> held;
        held.load(in, item.t * groups, first, groups);
        int at[DOWN_GROUPS];  // past a row's end its last group again, added to nothing: other rows may be on their way still
#pragma unroll
        for (int u = 0; u < DOWN_GROUPS; u++) at[u] = first + 8 * u < groups ? first + 8 * u : groups - 1;
#pragma unroll 1
        for (int pair = 0; pair < DOWN_QUADS; pair += 2) {  // a loop, because instructions come from far away, too
            if (pair < have) {
                copy_wait_all();  // here the compiler cannot put it ahead of the loads
                __syncwarp();
                float dot[2][DOWN_GROUPS], ws[2][DOWN_GROUPS];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int start = 4 * (pair + i < have ? pair + i : pair) * groups;
#pragma unroll
                    for (int u = 0; u < DOWN_GROUPS; u++) {
                        dot[i][u] = held.dot(u, codes[start + at[u]]);
                        ws[i][u] = half_to_float(scale[start + at[u]]) * held.d[u];
                    }
                }
#pragma unroll
                for (int u = 0; u < DOWN_GROUPS; u++) {
                    if (first + 8 * u < groups) {
                        acc[0] = fma_f32(dot[0][u], ws[0][u], acc[0]);
                        acc[1] = fma_f32(dot[1][u], ws[1][u], acc[1]);
                    }
                }
            }
            // The other pair comes forward; after the second turn each is where it was.
            const float a0 = acc[0], a1 = acc[1];
            acc[0] = acc[2], acc[1] = acc[3], acc[2] = a0, acc[3] = a1;
        }
    }
}

// hsum8 of four rows of each slot: what two lanes would both compute, they compute for one row each. Lane l of a slot
// returns row 2 * (l / 4) + l % 2.
DEVICE float four_hsum8(const float *acc) {
    const bool upper = lane_id() & 4, odd = lane_id() & 1;
    float a = upper ? acc[2] : acc[0], b = upper ? acc[3] : acc[1];
    a = a + __shfl_xor_sync(FULL_WARP, upper ? acc[0] : acc[2], 4);  // lo[k] = a[k] + a[k+4]
    b = b + __shfl_xor_sync(FULL_WARP, upper ? acc[1] : acc[3], 4);
    const float sum = (odd ? b : a) + __shfl_xor_sync(FULL_WARP, odd ? a : b, 1);  // lo0 + lo1, lo2 + lo3
    return sum + __shfl_xor_sync(FULL_WARP, sum, 2);
}

// A block takes `a.rows` neighbouring rows of every chosen expert: who the experts are follows from the logits, which the
// kernel two before wrote, so their rows are on the way before h is made (STAGED: q4local; other formats are read where
// they lie). A warp copies the rows that it computes; then each row is combined in rank order and added to x.
template <bool STAGED> DEVICE void moe_down(const MoeDownArgs &a, int block, int blocks, unsigned char *shared) {
    const Weight &w = a.mm.w[0];
    const int T = a.mm.T, rows = a.rows, groups = w.k / 32, lane = lane_id();
    const ChoiceShared choice = choice_shared(shared, a.topk.E, T);
    const DownShared sh = down_shared(shared + choice_shared_bytes(a.topk.E, T), T, rows, groups);
    const DownItems begin(T, rows);
    const bool by_warp = STAGED && a.topk.E <= WARP_CHOOSE_EXPERTS && T <= WARP_CHOOSE_RANKS;
    int ids = 0;  // by_warp: lane t has the expert of rank t
    if (by_warp) {
        const int ranks = T * begin.parts > warp_count() ? T : begin.t + 1;  // that the warp's items need
        ids = warp_choose(a.topk.logits, a.topk.E, ranks < T ? ranks : T, [] {});
    } else {
        block_choose(a.topk.logits, a.topk.E, T, choice);
    }
    int n = block * rows;
    do {
        const int count = n >= w.n ? 0 : w.n - n < rows ? w.n - n : rows;
        if (STAGED) {
#pragma unroll 1
            for (DownItems item = begin; item.t < T; item.advance()) {
                const int first = 4 * item.quad(), left = count - first;
                const int here = (left < 4 * item.have() ? left : 4 * item.have()) * groups;  // groups; none if below 0
                const int expert = by_warp ? __shfl_sync(FULL_WARP, ids, item.t) : choice.ids[item.t];
                const long long g = ((long long)expert * w.n + n + first) * groups;
                copy_rows(sh.codes + (item.t * rows + first) * groups * 16, (const unsigned char *)w.codes + g * 16, here,
                          sh.scale + item.t * sh.scale_bytes + 2 * first * groups, w.scale + g, here, lane, 32);
            }
        }
        wait_for_previous();  // a second time it costs nothing
        start_next();
        // Asked for without waiting, and without a register.
        if (T % 4 == 0 && ((unsigned long long)a.combine.weights & 15) == 0) {
#pragma unroll 1
            for (int t = 4 * threadIdx.x; t < T; t += 4 * blockDim.x) copy_async_16(sh.p + t, a.combine.weights + t);
        } else {
#pragma unroll 1
            for (int t = threadIdx.x; t < T; t += blockDim.x) sh.p[t] = load_l2(a.combine.weights + t);
        }
        if (4 * (int)threadIdx.x < count) copy_async_16(sh.x + 4 * threadIdx.x, a.add.x + n + 4 * threadIdx.x);
#pragma unroll 1
        for (DownItems item = begin; item.t < T; item.advance()) {
            float acc[DOWN_QUADS] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (STAGED) {
                const A8Row all = {a.mm.xq, a.mm.xd, a.mm.gsum};
                down_quads(sh, item, all, rows, groups, acc);
            } else {
                const int g = item.t * groups;
                const InputRows<1> one = {{nullptr}, {a.mm.xq + 32ll * g}, {a.mm.xd + g}, {a.mm.gsum + g}};
#pragma unroll
                for (int j = 0; j < DOWN_QUADS; j++) {
                    const int row = 4 * (item.quad() + j) + lane / 8;
                    if (j < item.have() && row < count)
                        weight_row<1, false>(w, (long long)choice.ids[item.t] * w.n + n + row, one, lane % 8, acc + j);
                }
            }
            const float y = four_hsum8(acc);
            const int j = ((lane >> 1) & 2) | (lane & 1);
            if ((lane & 2) == 0 && j < item.have()) sh.y[item.t * rows + 4 * (item.quad() + j) + lane / 8] = y;
        }
        copy_wait_all();
        __syncthreads();
        if ((int)threadIdx.x < count) {  // rows are no more than threads
            const float *y = sh.y + threadIdx.x;
            float acc = 0.0f;
#pragma unroll 1
            for (int first = 0; first < T; first += 8) {  // rank order
#pragma unroll
                for (int j = 0; j < 8; j++, y += rows) {
                    const float p = sh.p[first + j], term = *y;
                    if (first + j < T) acc = fma_f32(p, term, acc);
                }
            }
            a.combine.out[n + threadIdx.x] = acc;
            a.add.x[n + threadIdx.x] = sh.x[threadIdx.x] + acc;
        }
        n += blocks * rows;
        if (n < w.n) __syncthreads();
    } while (n < w.n);
}

// Dynamic shared: ChoiceShared, DownShared. 80 registers: beside a block of the stage before there is room for this one.
KERNEL LAUNCH_BOUNDS(256, 3) void FORM(k_moe_down)(const MoeDownArgs a) {
    DYNAMIC_SHARED(shared);
    moe_down<true>(a, blockIdx.x, gridDim.x, shared);
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_moe_down_any)(const MoeDownArgs a) {
    DYNAMIC_SHARED(shared);
    moe_down<false>(a, blockIdx.x, gridDim.x, shared);
}
