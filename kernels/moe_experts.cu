// The FFN of chosen experts of a decode step (M = 1), q4local: two launches behind the router's logits. k_moe_gate_up makes
// the choice, gate, up, SwiGLU and a8; k_moe_down makes down, the combination in rank order and the residual. Both stream
// weights by bulk copies into rings of shared memory, which take neither registers nor the path of other loads, and the
// second launch asks for its weights while the first one still reads: the experts follow from the logits, which the kernel
// two before it wrote. Loops are small, because instructions that run once a launch come from far away. Other formats and
// lengths: moe_stages.cu. Each kernel exists in both forms: k_x and k_x_fast.
#include "expert_rows.cuh"
#include "router.cuh"

// ---- choice, gate, up, SwiGLU, a8 ----

// A unit is one group of 32 elements of h of one chosen expert: 32 rows of gate and 32 of up, in eight quads of four rows of
// each. Blocks take units in turn; in a block warp w takes quads w, w + warps, ..., and one more warp makes h of a unit
// while the others go on. warps: a power of two, at most 8.
#define UNIT_QUADS 8

// Where the rows of a quad lie in shared memory: u8[2][4][G][16] codes of gate and up, then f16[2][4][scale_pitch / 2].
struct QuadShape {
    int groups, scale_pitch;  // of a row; bytes from row to row: no two slots meet in a bank

    DEVICE_MEMBER explicit QuadShape(int groups) : groups(groups), scale_pitch(2 * groups + 16) {}
    DEVICE_MEMBER int code_bytes() const { return 128 * groups; }
    DEVICE_MEMBER int bytes() const { return code_bytes() + 8 * scale_pitch; }  // kestrel/stages/moe.py: the same

    // Asks for the rows whose groups begin at g of both matrices: a lane to a piece.
    DEVICE_MEMBER void ask(const Weight *w, long long g, unsigned char *to, unsigned long long *gate) const {
        const int lane = lane_id();
        bulk_expect(gate, 8 * 18 * groups);
        if (lane < 2)
            bulk_copy_lane(to + lane * 64 * groups, (const unsigned char *)w[lane].codes + 16 * g, 64 * groups, gate);
        else if (lane < 10)
            bulk_copy_lane(to + code_bytes() + (lane - 2) * scale_pitch,
                           w[lane < 6 ? 0 : 1].scale + g + (lane - 2) % 4 * groups, 2 * groups, gate);
    }

    // This lane's sums of its slot's gate and up row, of whole steps.
    DEVICE_MEMBER void sums(const unsigned char *rows, const StagedRow &in, float *acc) const {
        const int slot = lane_id() / 8, l = lane_id() % 8;
        const uint4 *const codes = (const uint4 *)rows + slot * groups;
        const unsigned char *const scale = rows + code_bytes() + slot * scale_pitch;
        acc[0] = acc[1] = 0.0f;
#pragma unroll 2
        for (int g = l; g < groups; g += 8) {
            const int bias = q4_bias(in.gsum[g]);
            const uint4 lo = in.lo[g], hi = in.hi[g];
            const float d = in.d[g];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float ws = half_to_float(*(const unsigned short *)(scale + 4 * i * scale_pitch + 2 * g)) * d;
                acc[i] = fma_f32(q4_dot(codes[4 * i * groups + g], lo, hi, bias), ws, acc[i]);
            }
        }
    }
};

// Dynamic shared: StagedRow, f32[2, 2, 32] sums of a unit's gate and up rows (units in turn), u64[warps, a.slots] gates,
// ChoiceShared, u8[warps, a.slots] quads.
DEVICE void expert_gate_up(const GateUpArgs &a, int block, int blocks, unsigned char *shared) {
    const int warps = warp_count() - 1, warp = __shfl_sync(FULL_WARP, warp_id(), 0), slots = a.slots;
    const QuadShape quad(a.mm.w[0].k / 32);
    StagedRow in;
    in.open(shared, quad.groups);
    float *const sums = (float *)(shared + StagedRow::bytes(quad.groups));
    unsigned long long *const gates = (unsigned long long *)(sums + 128) + warp * slots;
    unsigned char *const rest = (unsigned char *)(sums + 128) + (8 * warps * slots + 15) / 16 * 16;
    const ChoiceShared choice = choice_shared(rest, a.topk.E, a.topk.T);
    unsigned char *const ring = rest + choice_shared_bytes(a.topk.E, a.topk.T) + warp * slots * quad.bytes();
    const int per_expert = a.swiglu.F / 32, units = a.mm.T * per_expert, each = UNIT_QUADS / warps;
    const int mine = block < units ? (units - 1 - block) / blocks + 1 : 0;  // units of this block
    const int items = warp < warps ? mine * each : 0;                        // quads of this warp
    for (int s = 0; s < slots && warp < warps; s++) bulk_open(gates + s);
    touch_exp_table();
    wait_for_previous();
    start_next();
    in.ask({a.mm.xq, a.mm.xd, a.mm.gsum}, quad.groups);
    block_choose(a.topk.logits, a.topk.E, a.topk.T, choice);
    // Item i is quad warp + i % each * warps of the block's unit i / each.
    int unit = block, turn = 0;  // of the item to be asked for
    auto ask = [&](int slot) {
        const int rank = (int)((unsigned)unit / (unsigned)per_expert), part = unit - rank * per_expert;
        const long long row = (long long)choice.ids[rank] * a.swiglu.F + 32 * part + 4 * (warp + turn * warps);
        quad.ask(a.mm.w, row * quad.groups, ring + slot * quad.bytes(), gates + slot);
        if (++turn == each) turn = 0, unit += blocks;
    };
#pragma unroll 1
    for (int i = 0; i < slots && i < items; i++) ask(i);
    copy_wait_all();
    __syncthreads();
    if (block == units % blocks) {  // a block with as few units as any
        block_choice_weights(a.topk, 0, choice);
        block_store_choice(a.topk, 0, choice);
    }
    int slot = 0, item = 0;
    unsigned round = 0;  // of the ring
#pragma unroll 1
    for (int u = 0; u < mine; u++) {
        float *const to = sums + (u & 1) * 64;
        if (warp < warps) {
#pragma unroll 1
            for (int t = 0; t < each; t++, item++) {
                float acc[2];
                bulk_wait(gates + slot, round);
                quad.sums(ring + slot * quad.bytes(), in, acc);
                __syncwarp();  // the slot may be filled again
                if (item + slots < items) ask(slot);
                if (++slot == slots) slot = 0, round++;
                const float gate = group_hsum8(acc[0]), up = group_hsum8(acc[1]);
                if (lane_id() % 8 == 0) {
                    float *const row = to + 4 * (warp + t * warps) + lane_id() / 8;
                    row[0] = gate, row[32] = up;
                }
            }
        }
        __syncthreads();
        if (warp == warps) {
            const float gate = to[lane_id()], value = (gate / (1.0f + exp_form(-gate))) * to[32 + lane_id()];
            const int g = block + u * blocks;
            a.swiglu.h[32 * g + lane_id()] = value;
            warp_a8_element(value, a.a8, g);
        }
    }
}

KERNEL LAUNCH_BOUNDS(288, 2) void FORM(k_moe_gate_up)(const GateUpArgs a) {
    DYNAMIC_SHARED(shared);
    expert_gate_up(a, blockIdx.x, gridDim.x, shared);
}

// ---- down, combination, residual ----

#define DOWN_QUADS 4  // times four rows that a warp takes of one expert at a time

// Shared memory of the down stage; kestrel/stages/moe.py computes the same size.
struct DownShared {
    unsigned long long *gates;  // u64[warps rounded up to 2]
    float *p;                   // f32[T rounded up to 8]: the experts' weights
    float *y;                   // f32[T rounded up to 8, rows]
    float *d;                   // f32[T * G rounded up to 4]: the experts' inputs
    int *gsum;                  // i32[T * G rounded up to 4]
    uint4 *q;                   // i8[T, G, 32]
    unsigned char *codes;       // u8[T, rows, G, 16]
    unsigned short *scale;      // f16[T, rows, G]

    DEVICE_MEMBER DownShared(unsigned char *base, int warps, int T, int rows, int groups) {
        const int ranks = (T + 7) / 8 * 8, all = (T * groups + 3) / 4 * 4;
        gates = (unsigned long long *)base;
        p = (float *)(gates + (warps + 1) / 2 * 2);
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

// An item's sums: acc, f32[DOWN_QUADS], a slot of eight lanes to a row, each lane its own chain. A quad past the last is
// the last one again, and nobody stores it.
DEVICE void down_quads(const DownShared &sh, const DownItems &item, int rows, int groups, float *acc) {
    const int l = lane_id() % 8, last = item.have() - 1;
    const int row = (item.t * rows + 4 * item.quad() + lane_id() / 8) * groups;
#pragma unroll
    for (int j = 0; j < DOWN_QUADS; j++) acc[j] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < groups; first += 8) {
        const bool inside = first + l < groups;
        const int at = inside ? first + l : groups - 1, g = item.t * groups + at;
        const uint4 lo = sh.q[2 * g], hi = sh.q[2 * g + 1];
        const int bias = q4_bias(sh.gsum[g]);
        const float d = sh.d[g];
#pragma unroll
        for (int j = 0; j < DOWN_QUADS; j++) {
            const int from = row + 4 * (j < last ? j : last) * groups + at;
            const float dot = q4_dot(((const uint4 *)sh.codes)[from], lo, hi, bias), ws = half_to_float(sh.scale[from]) * d;
            if (inside) acc[j] = fma_f32(dot, ws, acc[j]);
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

// Words of another kernel's output to shared memory by the whole block, 16 bytes at a time where there are 16.
DEVICE void copy_words(void *shared, const void *global, int words) {
#pragma unroll 1
    for (int i = threadIdx.x; i < words / 4; i += blockDim.x) copy_async_16((uint4 *)shared + i, (const uint4 *)global + i);
#pragma unroll 1
    for (int i = words / 4 * 4 + (int)threadIdx.x; i < words; i += blockDim.x)
        ((unsigned *)shared)[i] = load_l2((const unsigned *)global + i);
}

// A block takes `a.rows` neighbouring rows of every chosen expert; a warp copies the rows that it computes. Then each row
// is combined in rank order and added to x. Dynamic shared: DownShared, ChoiceShared.
DEVICE void expert_down(const MoeDownArgs &a, int block, unsigned char *shared) {
    const Weight &w = a.mm.w[0];
    const int T = a.mm.T, rows = a.rows, groups = w.k / 32, n = block * rows;
    const int count = w.n - n < rows ? w.n - n : rows;
    const DownShared sh(shared, warp_count(), T, rows, groups);
    const ChoiceShared choice = choice_shared((unsigned char *)(sh.scale + T * rows * groups), a.topk.E, T);
    const DownItems begin(T, rows);
    unsigned long long *const gate = sh.gates + warp_id();
    bulk_open(gate);
    block_choose(a.topk.logits, a.topk.E, T, choice);
    // A lane to a piece: codes or scales of an item.
    int bytes = 0;
#pragma unroll 1
    for (DownItems item = begin; item.t < T; item.advance()) {
        const int left = count - 4 * item.quad(), have = left < 4 * item.have() ? left : 4 * item.have();
        if (have > 0) bytes += 18 * have * groups;
    }
    bulk_expect(gate, bytes);
    if (lane_id() < 2) {
#pragma unroll 1
        for (DownItems item = begin; item.t < T; item.advance()) {
            const int first = 4 * item.quad(), left = count - first, have = left < 4 * item.have() ? left : 4 * item.have();
            const long long from = ((long long)choice.ids[item.t] * w.n + n + first) * groups;
            const int to = (item.t * rows + first) * groups;
            if (have <= 0) continue;
            if (lane_id() == 0)
                bulk_copy_lane(sh.codes + 16 * to, (const unsigned char *)w.codes + 16 * from, 16 * have * groups, gate);
            else
                bulk_copy_lane(sh.scale + to, w.scale + from, 2 * have * groups, gate);
        }
    }
    wait_for_previous();
    start_next();
    copy_words(sh.q, a.mm.xq, 8 * T * groups);
    copy_words(sh.d, a.mm.xd, T * groups);
    copy_words(sh.gsum, a.mm.gsum, T * groups);
#pragma unroll 1
    for (int t = threadIdx.x; t < T; t += blockDim.x) sh.p[t] = load_l2(a.combine.weights + t);
    float x = 0.0f;
    if ((int)threadIdx.x < count) x = load_l2(a.add.x + n + threadIdx.x);
    copy_wait_all();
    bulk_wait(gate, 0);
    __syncthreads();
#pragma unroll 1
    for (DownItems item = begin; item.t < T; item.advance()) {
        float acc[DOWN_QUADS];
        down_quads(sh, item, rows, groups, acc);
        const float y = four_hsum8(acc);
        const int j = (lane_id() >> 1 & 2) | (lane_id() & 1);
        if ((lane_id() & 2) == 0 && j < item.have()) sh.y[item.t * rows + 4 * (item.quad() + j) + lane_id() / 8] = y;
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
        a.add.x[n + threadIdx.x] = x + acc;
    }
}

// Grid: a block for each `a.rows` rows.
KERNEL LAUNCH_BOUNDS(256, 3) void FORM(k_moe_down)(const MoeDownArgs a) {
    DYNAMIC_SHARED(shared);
    expert_down(a, blockIdx.x, shared);
}
