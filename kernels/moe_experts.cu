// The FFN of chosen experts of a decode step (M = 1), q4local: two launches behind the router's logits. k_moe_gate_up makes
// the choice, gate, up and SwiGLU; k_moe_down makes a8, down, the combination in rank order and the residual. Both stream
// weights by bulk copies into rings of shared memory, which take no registers, and the
// second launch asks for its weights while the first one still reads: the experts follow from the logits, which the kernel
// two before it wrote. Other formats and lengths: moe_stages.cu. Each kernel exists in both forms: k_x and k_x_fast.
#include "expert_rows.cuh"
#include "router.cuh"

// ---- choice, gate, up, SwiGLU ----

// A quad is four rows of gate and the same four of up of one chosen expert, which make four elements of h. The quads of all
// chosen experts, rank after rank, are dealt to the blocks in runs of equal length, because what the fullest block has to
// read is what counts; the warps of a block take those of its run in turn. Groups of h may then lie in two blocks, so h gets
// its a8 from whoever reads it. A quad comes in two halves, gate, then up, and a warp asks for a half when the one before it
// has come: what is asked for further ahead fills the queues of memory, and everything that anybody loads waits in them.
#define EXPERT_SPREAD 32  // of h: all blocks of k_moe_down read it at a time; as in kestrel/stages/moe.py

#define RING_HALVES 2  // one is computed while the other comes

// The quads of a warp, and the ring that their halves come to: u8[4][G][16] codes, then f16[4][G] scales of each.
struct QuadRing {
    const GateUpArgs &a;
    const int *ids;             // of the chosen experts, by rank
    unsigned long long *gates;  // u64[RING_HALVES]
    unsigned char *halves;      // u8[RING_HALVES][72 * G]
    int groups, per_expert;
    int first, apart;  // the warp's first quad, and from one to its next
    // The next half to be asked for: where its weights would be of expert 0, groups from one expert to the next, the rank of its
    // own, its place in the ring.
    const unsigned char *codes;
    const unsigned short *scale;
    int expert, rank, slot;

    DEVICE_MEMBER int bytes() const { return 72 * groups; }  // kestrel/stages/moe.py: the same
    DEVICE_MEMBER int quad(int half) const { return first + half / 2 * apart; }

    // All but what depends on the choice, ahead of the moment that counts: the half's place in the ring is free.
    DEVICE_MEMBER void prepare(int half) {
        const Weight &w = a.mm.w[half % 2];
        rank = (int)((unsigned)quad(half) / (unsigned)per_expert);
        const int group = 4 * (quad(half) - rank * per_expert) * groups;
        codes = (const unsigned char *)w.codes + 16 * (long long)group;
        scale = w.scale + group;
        expert = w.n * groups;
        slot = half % RING_HALVES;
        settle(codes);
        settle(scale);
        settle(expert);
        bulk_expect(gates + slot, bytes());
    }
    DEVICE_MEMBER void ask() const {
        const long long g = (long long)ids[rank] * expert;
        unsigned char *const to = halves + slot * bytes();
        bulk_copy(to, codes + 16 * g, 64 * groups, gates + slot);
        bulk_copy(to + 64 * groups, scale + g, 8 * groups, gates + slot);
    }
};

#define HALF_PAIRS 2  // of steps of eight groups, of which a lane has the dots on their way together

// The sums of a half: row lane / 8 to every lane. half: as in QuadRing; G is a multiple of 8. Sixteen lanes have two rows, so
// that what they read of the input serves both; eight of them take the even steps, eight the odd ones, each one of the eight sums
// of a row. The terms of the row that is not a lane's own go to the lane whose it is, which adds them in order.
DEVICE float half_sum(const unsigned char *half, const StagedRow &in, int groups) {
    const int lane = lane_id(), l = lane % 8, odd = lane / 8 % 2, rows = 2 * (lane / 16) * groups;
    const uint4 *const codes = (const uint4 *)half + rows;
    const unsigned short *const scale = (const unsigned short *)(half + 64 * groups) + rows;
    float acc = 0.0f;
#pragma unroll 1
    for (int first = 0; first < groups; first += 16 * HALF_PAIRS) {
        float dot[2 * HALF_PAIRS], ws[2 * HALF_PAIRS];
#pragma unroll
        for (int u = 0; u < HALF_PAIRS; u++) {
            const int next = first + 16 * u + 8 * odd + l, g = next < groups ? next : l;  // past the end any, added to nothing
            const uint4 lo = in.lo[g], hi = in.hi[g];
            const int bias = q4_bias(in.gsum[g]);
            const float d = in.d[g];
            const float dot0 = q4_dot(codes[g], lo, hi, bias), dot1 = q4_dot(codes[g + groups], lo, hi, bias);
            const float ws0 = half_to_float(scale[g]) * d, ws1 = half_to_float(scale[g + groups]) * d;
            const float other_dot = __shfl_xor_sync(FULL_WARP, odd ? dot0 : dot1, 8);
            const float other_ws = __shfl_xor_sync(FULL_WARP, odd ? ws0 : ws1, 8);
            dot[2 * u] = odd ? other_dot : dot0, dot[2 * u + 1] = odd ? dot1 : other_dot;
            ws[2 * u] = odd ? other_ws : ws0, ws[2 * u + 1] = odd ? ws1 : other_ws;
        }
#pragma unroll
        for (int i = 0; i < 2 * HALF_PAIRS; i++)
            if (first + 8 * i < groups) acc = fma_f32(dot[i], ws[i], acc);
    }
    return group_hsum8(acc);
}

// Dynamic shared: StagedRow, u64[warps, RING_HALVES] gates, ChoiceShared, u8[warps, RING_HALVES] halves.
DEVICE void expert_gate_up(const GateUpArgs &a, int block, int blocks, unsigned char *shared) {
    const int warps = warp_count(), warp = __shfl_sync(FULL_WARP, warp_id(), 0), lane = lane_id(), size = RING_HALVES;
    const int T = a.topk.T, per_expert = a.swiglu.F / 4, quads = T * per_expert, groups = a.mm.w[0].k / 32;
    StagedRow in;
    in.open(shared, groups);
    unsigned long long *const gates = (unsigned long long *)(shared + StagedRow::bytes(groups));
    unsigned char *const behind = (unsigned char *)(gates + warps * size);
    const ChoiceShared choice = choice_shared(behind, a.topk.E, T);
    const bool by_warp = warp_can_choose(a.topk.E, T), chooses = by_warp && warp == warps - 1;
    // The run of the block, and this warp's halves of it. The first blocks have one quad more: they know their experts first, ask
    // first, and are served first.
    const int each = (int)((unsigned)quads / (unsigned)blocks), more = quads - each * blocks;
    const int begin = each * block + (block < more ? block : more), end = begin + each + (block < more);
    const int mine = begin + warp < end ? 2 * ((end - begin - 1 - warp) / warps + 1) : 0;
    QuadRing ring = {a, choice.ids, gates + warp * size, behind + choice_shared_bytes(a.topk.E, T), groups, per_expert,
                     begin + warp, warps, nullptr, nullptr, 0, 0, 0};
    ring.halves += warp * size * ring.bytes();
    for (int i = 0; i < size; i++) bulk_open(ring.gates + i);
    if (mine > 0) ring.prepare(0);
    touch_exp_table();
    const A8Row row = {a.mm.xq, a.mm.xd, a.mm.gsum};
    const int ranks = block == 0 ? T : end > begin ? (int)((unsigned)(end - 1) / (unsigned)per_expert) + 1 : 0;  // needed here
    wait_for_previous();
    start_next();  // so that k_moe_down has read the logits before memory is busy
    // What is read here is asked for ahead of the weights: it would come behind them.
    float4 logits = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (chooses) {
        logits = lane_logits(a.topk.logits, a.topk.E);
        warp_choose(logits, a.topk.E, ranks, choice.ids);
    } else {
        in.copy(row, groups, by_warp ? 32 * (warps - 1) : blockDim.x);
    }
    if (!by_warp) block_choose(a.topk.logits, a.topk.E, T, choice);
    if (warps == 1 && by_warp) in.copy(row, groups, blockDim.x);
    __syncthreads();
    if (mine > 0) ring.ask();
    if (block == 0 && !by_warp) {  // no run is shorter than its
        block_choice_weights(a.topk, 0, choice);
        block_store_choice(a.topk, 0, choice);
    } else if (block == 0 && chooses) {  // what it has asked for is long in coming
        warp_store_choice(a.topk, logits, choice.ids, choice.p_all);
    }
    float silu = 0.0f;
    int slot = 0;
    unsigned round = 0;  // of the ring
#pragma unroll 1
    for (int half = 0; half < mine; half++) {
        if (half + 1 < mine) ring.prepare(half + 1);
        bulk_wait(ring.gates + slot, round);
        if (half + 1 < mine) ring.ask();
        const float sum = half_sum(ring.halves + slot * ring.bytes(), in, groups);
        __syncwarp();  // before its place is asked for again
        if (half % 2 == 0)
            silu = silu_form(sum);  // while the other half comes
        else if (lane % 8 == 0)
            a.swiglu.h[KESTREL_SPREAD_AT(4 * ring.quad(half) + lane / 8, EXPERT_SPREAD)] = silu * sum;
        if (++slot == size) slot = 0, round++;
    }
}

// At most 512 threads. Bounds of 576 leave them 112 registers, so that beside twelve warps there is room for k_moe_down.
KERNEL LAUNCH_BOUNDS(576, 1) void FORM(k_moe_gate_up)(const GateUpArgs a) {
    DYNAMIC_SHARED(shared);
    expert_gate_up(a, blockIdx.x, gridDim.x, shared);
}

// ---- down, combination, residual ----

#define DOWN_QUADS 4  // times four rows that a warp takes of one expert at a time

// Shared memory of the down stage; kestrel/stages/moe.py computes the same size.
struct DownShared {
    unsigned long long *gates;  // u64[1 + S rounded up to 2]: of the sums, of an expert's rows
    float *p;                   // f32[T rounded up to 8]: the experts' weights
    float *y;                   // f32[T rounded up to 8, rows]: by all blocks of the cluster
    float *d;                   // f32[S * G rounded up to 4]: the experts' inputs
    int *gsum;                  // i32[S * G rounded up to 4]
    uint4 *q;                   // i8[S, G, 32]
    unsigned char *codes;       // u8[S, C * rows, G, 16]
    unsigned short *scale;      // f16[S, C * rows, G]

    // C blocks share T experts, S = T / C each, and have `rows` rows each to combine.
    DEVICE_MEMBER DownShared(unsigned char *base, int T, int C, int rows, int groups) {
        const int ranks = (T + 7) / 8 * 8, S = T / C, all = (S * groups + 3) / 4 * 4;
        gates = (unsigned long long *)base;
        p = (float *)(gates + (S + 2) / 2 * 2);
        y = p + ranks;
        d = y + ranks * rows;
        gsum = (int *)(d + all);
        q = (uint4 *)(gsum + all);
        codes = (unsigned char *)(q + 2 * S * groups);
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
        for (int quad = 0; quad < DOWN_QUADS; quad++) {
            const int start = row + 4 * (quad < last ? quad : last) * groups;
            float dot[DOWN_GROUPS], ws[DOWN_GROUPS], sum = acc[0];
#pragma unroll
            for (int u = 0; u < DOWN_GROUPS; u++) {
                dot[u] = q4_dot(((const uint4 *)sh.codes)[start + at[u]], lo[u], hi[u], bias[u]);
                ws[u] = half_to_float(sh.scale[start + at[u]]) * d[u];
            }
#pragma unroll
            for (int u = 0; u < DOWN_GROUPS; u++)
                if (first + 8 * u < groups) sum = fma_f32(dot[u], ws[u], sum);
            // The next one comes forward; after the last turn each is where it was.
            acc[0] = acc[1], acc[1] = acc[2], acc[2] = acc[3], acc[3] = sum;
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

#define DOWN_ASKED 2  // experts' rows that are on their way at a time: more would hold up what all others load
#define DOWN_LOADS 3  // of 16 bytes of h that a thread has on their way

// a8 of the experts' inputs, `all` groups of h, f32[all, 32 + spread], by the block: eight lanes to a group, four elements to
// each. What is past the last is the last again, and nobody stores it.
DEVICE void down_inputs(const DownShared &sh, const float *h, int spread, int all) {
    const int warp = __shfl_sync(FULL_WARP, warp_id(), 0);  // the compiler sees that a warp stays together
#pragma unroll 1
    for (int first = 32 * warp; first < 8 * all; first += DOWN_LOADS * blockDim.x) {
        int at[DOWN_LOADS];
        float4 x[DOWN_LOADS];
        unsigned codes[DOWN_LOADS];
        float d[DOWN_LOADS];
        int sum[DOWN_LOADS];
#pragma unroll
        for (int i = 0; i < DOWN_LOADS; i++) {
            at[i] = first + i * (int)blockDim.x + lane_id();
            const int real = at[i] < 8 * all ? at[i] : 8 * all - 1;
            x[i] = load_l2((const float4 *)h + real + real / 8 * (spread / 4));
        }
#pragma unroll
        for (int i = 0; i < DOWN_LOADS; i++) {
            const float v[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
            codes[i] = a8_group(v, &d[i], &sum[i]);
        }
#pragma unroll
        for (int i = 0; i < DOWN_LOADS; i++) {
            if (at[i] >= 8 * all) continue;
            ((unsigned *)sh.q)[at[i]] = codes[i];
            if (at[i] % 8 == 0) sh.d[at[i] / 8] = d[i], sh.gsum[at[i] / 8] = sum[i];
        }
    }
}

// A cluster of C blocks takes C * `a.rows` neighbouring rows of every chosen expert: each block those of S = T / C experts,
// whose inputs alone it has to read. Sums go to the block that has the row among its own, `a.rows` of them; there each row is
// combined in rank order and added to x. A block of the last cluster may have none of its own; it does its share for the others.
// Dynamic shared: DownShared, ChoiceShared.
DEVICE void expert_down(const MoeDownArgs &a, int block, unsigned char *shared) {
    const Weight &w = a.mm.w[0];
    const int T = a.mm.T, C = cluster_size(), S = T / C, rows = a.rows, together = C * rows, groups = w.k / 32, lane = lane_id();
    const int rank = cluster_rank(), first = S * rank, n0 = (block - rank) * rows, n = n0 + rank * rows;
    const int asked = w.n - n0 < together ? w.n - n0 : together, own = w.n - n < rows ? w.n - n : rows;
    const DownShared sh(shared, T, C, rows, groups);
    const ChoiceShared choice = choice_shared((unsigned char *)(sh.scale + T * rows * groups), a.topk.E, T);
    const DownItems begin(S, together);
    unsigned long long *const arrived = sh.gates, *const gates = sh.gates + 1;
    if (warp_id() == warp_count() - 1) {
        for (int t = 0; t < S; t++) bulk_open(gates + t);
        cluster_open(arrived);
        if (own > 0) cluster_expect(arrived, 4 * T * own);
    }
    // The others learn that this block is there. cluster_begin would do; what this one waits for besides lets the weights of gate
    // and up go first, at most depths (docs/performance.md).
    cluster_arrive();
    const bool by_warp = warp_can_choose(a.topk.E, T);
    if (!by_warp)
        block_choose(a.topk.logits, a.topk.E, T, choice);
    else if (warp_id() == 0)
        warp_choose(lane_logits(a.topk.logits, a.topk.E), a.topk.E, first + S, choice.ids);
    __syncthreads();
    // A warp to an expert, because a warp takes its time to ask; DOWN_ASKED on their way at a time.
#pragma unroll 1
    for (int t = __shfl_sync(FULL_WARP, warp_id(), 0); t < S && asked > 0; t += warp_count()) {
        if (t >= DOWN_ASKED) bulk_wait(gates + t - DOWN_ASKED, 0);
        const int to = t * together * groups;
        const long long from = ((long long)choice.ids[first + t] * w.n + n0) * groups;
        bulk_expect(gates + t, 18 * asked * groups);
        bulk_copy(sh.codes + 16 * to, (const unsigned char *)w.codes + 16 * from, 16 * asked * groups, gates + t);
        bulk_copy(sh.scale + to, w.scale + from, 2 * asked * groups, gates + t);
    }
    const int at = (int)threadIdx.x < own ? KESTREL_SPREAD_AT(n + (int)threadIdx.x, a.add.spread) : 0;
    const float *x_at = a.add.x + at;
    settle(x_at);  // ahead of the wait
    start_next();
    wait_for_previous(x_at);
    const float x = load_l2(x_at), p = load_l2(a.combine.weights + ((int)threadIdx.x < T ? (int)threadIdx.x : 0));
    down_inputs(sh, a.mm.x + KESTREL_SPREAD_AT(first * w.k, a.spread), a.spread, S * groups);
    if ((int)threadIdx.x < T) sh.p[threadIdx.x] = p;
#pragma unroll 1
    for (int t = threadIdx.x + blockDim.x; t < T; t += blockDim.x) sh.p[t] = load_l2(a.combine.weights + t);
    if (!BULK_GATES) copy_wait_all();
    __syncthreads();
    cluster_wait();
    if (asked <= 0) return;  // a cluster too many
#pragma unroll 1
    for (DownItems item = begin; item.t < S; item.advance()) {
        float acc[DOWN_QUADS];
        bulk_wait(gates + item.t, 0);
        down_quads(sh, item, together, groups, acc);
        const float y = four_hsum8(acc);
        const int j = (lane >> 1 & 2) | (lane & 1), row = 4 * (item.quad() + j) + lane / 8;
        const int to = (int)((unsigned)row / (unsigned)rows);
        if ((lane & 2) == 0 && j < item.have() && row < asked)
            cluster_send(sh.y + (first + item.t) * rows + row - to * rows, to, y, arrived);
    }
    if (own <= 0) return;
    cluster_receive(arrived, 0);
    if ((int)threadIdx.x < own) {  // rows are no more than threads
        const float *y = sh.y + threadIdx.x;
        float acc = 0.0f;
#pragma unroll 1
        for (int from = 0; from < T; from += 8) {  // rank order
#pragma unroll
            for (int j = 0; j < 8; j++, y += rows) {
                const float p = sh.p[from + j], term = *y;
                if (from + j < T) acc = fma_f32(p, term, acc);
            }
        }
        a.combine.out[n + threadIdx.x] = acc;
        a.add.out[at] = x + acc;
    }
}

// Grid: a block for each `a.rows` rows, rounded up to whole clusters, whose size divides the number of experts chosen.
KERNEL LAUNCH_BOUNDS(256, 3) void FORM(k_moe_down)(const MoeDownArgs a) {
    DYNAMIC_SHARED(shared);
    expert_down(a, blockIdx.x, shared);
}
