// The FFN of chosen experts of a decode step (M = 1), q4local: two launches behind the router's logits. k_moe_gate_up makes
// the choice, gate, up, SwiGLU and a8; k_moe_down makes down, the combination in rank order and the residual. Both stream
// weights by bulk copies into rings of shared memory, which take neither registers nor the path of other loads, and the
// second launch asks for its weights while the first one still reads: the experts follow from the logits, which the kernel
// two before it wrote. Other formats and lengths: moe_stages.cu. Each kernel exists in both forms: k_x and k_x_fast.
#include "expert_rows.cuh"
#include "router.cuh"

// ---- choice, gate, up, SwiGLU, a8 ----

// A unit is one group of 32 elements of h of one chosen expert: 32 rows of gate and 32 of up. They travel in four parts of
// eight rows of each, with a gate to a part, and are computed in eight quads of four rows of each. Blocks take units in
// turn and have `slots` of them in flight; in a block warp w takes quads w, w + warps, ..., and one more warp makes h of a
// unit, and asks for later ones, while the others go on. warps: a power of two, at most 8.
#define UNIT_QUADS 8
#define UNIT_PARTS 4

// Where the rows of a part lie in shared memory: u8[2][8][G][16] codes of gate and up, then f16[2][8][G].
struct PartShape {
    int groups;  // of a row

    DEVICE_MEMBER int bytes() const { return 288 * groups; }  // kestrel/stages/moe.py: the same

    // This lane's sums of its slot's gate and up row in a quad (0 or 1) of the part.
    DEVICE_MEMBER void sums(const unsigned char *part, int quad, const StagedRow &in, float *acc) const {
        const int row = (4 * quad + lane_id() / 8) * groups;
        const uint4 *const codes = (const uint4 *)part + row;
        const unsigned short *const scale = (const unsigned short *)(part + 256 * groups) + row;
        acc[0] = acc[1] = 0.0f;
#pragma unroll 4
        for (int g = lane_id() % 8; g < groups; g += 8) {
            const int bias = q4_bias(in.gsum[g]);
            const uint4 lo = in.lo[g], hi = in.hi[g];
            const float d = in.d[g];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float ws = half_to_float(scale[8 * i * groups + g]) * d;
                acc[i] = fma_f32(q4_dot(codes[8 * i * groups + g], lo, hi, bias), ws, acc[i]);
            }
        }
    }
};

// Dynamic shared: StagedRow, f32[2, 2, 32] sums of a unit's gate and up rows (units in turn), u64[a.slots, UNIT_PARTS] gates,
// ChoiceShared, u8[a.slots, UNIT_PARTS] parts.
DEVICE void expert_gate_up(const GateUpArgs &a, int block, int blocks, unsigned char *shared) {
    const int warps = warp_count() - 1, warp = __shfl_sync(FULL_WARP, warp_id(), 0), lane = lane_id(), slots = a.slots;
    const PartShape shape = {a.mm.w[0].k / 32};
    StagedRow in;
    in.open(shared, shape.groups);
    float *const sums = (float *)(shared + StagedRow::bytes(shape.groups));
    unsigned long long *const gates = (unsigned long long *)(sums + 128);
    const ChoiceShared choice = choice_shared((unsigned char *)(gates + slots * UNIT_PARTS), a.topk.E, a.topk.T);
    unsigned char *const ring = (unsigned char *)(gates + slots * UNIT_PARTS) + choice_shared_bytes(a.topk.E, a.topk.T);
    const int per_expert = a.swiglu.F / 32, units = a.mm.T * per_expert;
    const int mine = block < units ? (units - 1 - block) / blocks + 1 : 0;  // units of this block
    const bool chooses = warp == warps, by_warp = warp_can_choose(a.topk.E, a.topk.T);
    if (chooses) {
        for (int i = 0; i < slots * UNIT_PARTS; i++) bulk_open(gates + i);
    }
    touch_exp_table();
    wait_for_previous();
    if (by_warp && chooses) {
        warp_choose(a.topk.logits, a.topk.E, a.topk.T, choice.ids);
    } else {
        in.copy({a.mm.xq, a.mm.xd, a.mm.gsum}, shape.groups, by_warp ? 32 * warps : blockDim.x);
    }
    if (!by_warp) block_choose(a.topk.logits, a.topk.E, a.topk.T, choice);
    // Asks for a part of unit u of the block.
    auto ask = [&](int u, int slot, int part) {
        const int unit = block + u * blocks, rank = (int)((unsigned)unit / (unsigned)per_expert);
        const int row = 32 * (unit - rank * per_expert) + 8 * part;
        const long long g = ((long long)choice.ids[rank] * a.swiglu.F + row) * shape.groups;
        unsigned char *to = ring + (slot * UNIT_PARTS + part) * shape.bytes();
        unsigned long long *const gate = gates + slot * UNIT_PARTS + part;
        bulk_expect(gate, shape.bytes());
#pragma unroll
        for (int i = 0; i < 2; i++, to += 128 * shape.groups)
            bulk_copy(to, (const unsigned char *)a.mm.w[i].codes + 16 * g, 128 * shape.groups, gate);
#pragma unroll
        for (int i = 0; i < 2; i++, to += 16 * shape.groups) bulk_copy(to, a.mm.w[i].scale + g, 16 * shape.groups, gate);
    };
    __syncthreads();
    // The first units: a warp to a part, because a warp takes its time to ask.
#pragma unroll 1
    for (int part = warp; part < UNIT_PARTS * slots; part += warps + 1) {
        if (part / UNIT_PARTS < mine) ask(part / UNIT_PARTS, part / UNIT_PARTS, part % UNIT_PARTS);
    }
    start_next();  // not earlier: the next launch's weights are not wanted before these
    if (!BULK_GATES) {
        copy_wait_all();
        __syncthreads();
    }
    if (block == units % blocks) {  // a block with as few units as any
        block_choice_weights(a.topk, 0, choice);
        block_store_choice(a.topk, 0, choice);
    }
    int slot = 0;
    unsigned round = 0;  // of the ring
#pragma unroll 1
    for (int u = 0; u < mine; u++) {
        float *const to = sums + (u & 1) * 64;
#pragma unroll 1
        for (int quad = warp; quad < UNIT_QUADS && warp < warps; quad += warps) {
            const int part = slot * UNIT_PARTS + quad / 2;
            float acc[2];
            bulk_wait(gates + part, round);
            shape.sums(ring + part * shape.bytes(), quad % 2, in, acc);
            const float gate = group_hsum8(acc[0]), up = group_hsum8(acc[1]);
            if (lane % 8 == 0) {
                float *const row = to + 4 * quad + lane / 8;
                row[0] = gate, row[32] = up;
            }
        }
        __syncthreads();
        if (warp == warps) {
            for (int part = 0; part < UNIT_PARTS && u + slots < mine; part++) ask(u + slots, slot, part);
            const float value = swiglu_element(to[lane], to[32 + lane]);
            const int g = block + u * blocks;
            a.swiglu.h[32 * g + lane] = value;
            warp_a8_element(value, a.a8, g);
        }
        if (!BULK_GATES) {
            copy_wait_all();
            __syncthreads();
        }
        if (++slot == slots) slot = 0, round++;
    }
}

KERNEL LAUNCH_BOUNDS(288, 1) void FORM(k_moe_gate_up)(const GateUpArgs a) {
    DYNAMIC_SHARED(shared);
    expert_gate_up(a, blockIdx.x, gridDim.x, shared);
}

// ---- down, combination, residual ----

#define DOWN_QUADS 4  // times four rows that a warp takes of one expert at a time

// Shared memory of the down stage; kestrel/stages/moe.py computes the same size.
struct DownShared {
    unsigned long long *gates;  // u64[T rounded up to 2]: of an expert's rows
    float *p;                   // f32[T rounded up to 8]: the experts' weights
    float *y;                   // f32[T rounded up to 8, rows]
    float *d;                   // f32[T * G rounded up to 4]: the experts' inputs
    int *gsum;                  // i32[T * G rounded up to 4]
    uint4 *q;                   // i8[T, G, 32]
    unsigned char *codes;       // u8[T, rows, G, 16]
    unsigned short *scale;      // f16[T, rows, G]

    DEVICE_MEMBER DownShared(unsigned char *base, int T, int rows, int groups) {
        const int ranks = (T + 7) / 8 * 8, all = (T * groups + 3) / 4 * 4;
        gates = (unsigned long long *)base;
        p = (float *)(gates + (T + 1) / 2 * 2);
        y = p + ranks;
        d = y + ranks * rows;
        gsum = (int *)(d + all);
        q = (uint4 *)(gsum + all);
        codes = (unsigned char *)(q + 2 * T * groups);
        scale = (unsigned short *)(codes + T * rows * groups * 16);
    }
};

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

#define DOWN_GROUPS 3  // of the input that a thread holds at a time

// An item's sums: acc, f32[DOWN_QUADS], a slot of eight lanes to a row, each lane its own chain. A quad past the last is
// the last one again, and nobody stores it.
DEVICE void down_quads(const DownShared &sh, const DownItems &item, int rows, int groups, float *acc) {
    const int l = lane_id() % 8, last = item.have() - 1;
    const int row = (item.t * rows + 4 * item.quad() + lane_id() / 8) * groups;
#pragma unroll
    for (int j = 0; j < DOWN_QUADS; j++) acc[j] = 0.0f;
#pragma unroll 1
    for (int first = l; first < groups + l; first += 8 * DOWN_GROUPS) {
        uint4 lo[DOWN_GROUPS], hi[DOWN_GROUPS];
        float d[DOWN_GROUPS];
        int at[DOWN_GROUPS], bias[DOWN_GROUPS];  // past a row's end its last group again, added to nothing
#pragma unroll
        for (int u = 0; u < DOWN_GROUPS; u++) {
            at[u] = first + 8 * u < groups ? first + 8 * u : groups - 1;
            const int g = item.t * groups + at[u];
            lo[u] = sh.q[2 * g], hi[u] = sh.q[2 * g + 1];
            bias[u] = q4_bias(sh.gsum[g]);
            d[u] = sh.d[g];
        }
#pragma unroll 1
        for (int pair = 0; pair < DOWN_QUADS; pair += 2) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int start = row + 4 * (pair + i < last ? pair + i : last) * groups;
                float dot[DOWN_GROUPS], ws[DOWN_GROUPS];
#pragma unroll
                for (int u = 0; u < DOWN_GROUPS; u++) {
                    dot[u] = q4_dot(((const uint4 *)sh.codes)[start + at[u]], lo[u], hi[u], bias[u]);
                    ws[u] = half_to_float(sh.scale[start + at[u]]) * d[u];
                }
#pragma unroll
                for (int u = 0; u < DOWN_GROUPS; u++)
                    if (first + 8 * u < groups) acc[i] = fma_f32(dot[u], ws[u], acc[i]);
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

// A block takes `a.rows` neighbouring rows of every chosen expert. Then each row is combined in rank order and added to x.
// Dynamic shared: DownShared, ChoiceShared.
DEVICE void expert_down(const MoeDownArgs &a, int block, unsigned char *shared) {
    const Weight &w = a.mm.w[0];
    const int T = a.mm.T, rows = a.rows, groups = w.k / 32, n = block * rows, lane = lane_id();
    const int count = w.n - n < rows ? w.n - n : rows;
    const DownShared sh(shared, T, rows, groups);
    const ChoiceShared choice = choice_shared((unsigned char *)(sh.scale + T * rows * groups), a.topk.E, T);
    const DownItems begin(T, rows);
    const bool by_warp = warp_can_choose(a.topk.E, T);
    if (!by_warp)
        block_choose(a.topk.logits, a.topk.E, T, choice);
    else if (warp_id() == 0)
        warp_choose(a.topk.logits, a.topk.E, T, choice.ids);
    if (warp_id() == warp_count() - 1) {
        for (int t = 0; t < T; t++) bulk_open(sh.gates + t);
    }
    __syncthreads();
    // A warp to an expert, because a warp takes its time to ask.
#pragma unroll 1
    for (int t = __shfl_sync(FULL_WARP, warp_id(), 0); t < T && count > 0; t += warp_count()) {
        const int to = t * rows * groups;
        const long long from = ((long long)choice.ids[t] * w.n + n) * groups;
        bulk_expect(sh.gates + t, 18 * count * groups);
        bulk_copy(sh.codes + 16 * to, (const unsigned char *)w.codes + 16 * from, 16 * count * groups, sh.gates + t);
        bulk_copy(sh.scale + to, w.scale + from, 2 * count * groups, sh.gates + t);
    }
    const float *x_at = a.add.x + ((int)threadIdx.x < count ? n + (int)threadIdx.x : 0);
    settle(x_at);  // ahead of the wait
    wait_for_previous(x_at);
    start_next();
    const float x = load_l2(x_at);
    const A8Row in = {a.mm.xq, a.mm.xd, a.mm.gsum};
    const int all = T * groups, codes = 2 * all, scales = codes + all / 4;
    copy_units(
        scales + all / 4, blockDim.x, [&](int i) { return in.unit(i, all); },
        [&](int i) {
            return i < codes ? sh.q + i : i < scales ? (uint4 *)sh.d + (i - codes) : (uint4 *)sh.gsum + (i - scales);
        });
#pragma unroll 1
    for (int g = all / 4 * 4 + threadIdx.x; g < all; g += blockDim.x) {
        sh.d[g] = load_l2(in.d + g);
        sh.gsum[g] = load_l2(in.gsum + g);
    }
#pragma unroll 1
    for (int t = threadIdx.x; t < T; t += blockDim.x) sh.p[t] = load_l2(a.combine.weights + t);
    if (!BULK_GATES) copy_wait_all();
    __syncthreads();
    if (count <= 0) return;  // a block too many
#pragma unroll 1
    for (DownItems item = begin; item.t < T; item.advance()) {
        float acc[DOWN_QUADS];
        bulk_wait(sh.gates + item.t, 0);
        down_quads(sh, item, rows, groups, acc);
        const float y = four_hsum8(acc);
        const int j = (lane >> 1 & 2) | (lane & 1);
        if ((lane & 2) == 0 && j < item.have()) sh.y[item.t * rows + 4 * (item.quad() + j) + lane / 8] = y;
    }
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
        a.add.out[n + threadIdx.x] = x + acc;
    }
}

// Grid: a block for each `a.rows` rows.
KERNEL LAUNCH_BOUNDS(256, 3) void FORM(k_moe_down)(const MoeDownArgs a) {
    DYNAMIC_SHARED(shared);
    expert_down(a, blockIdx.x, shared);
}
