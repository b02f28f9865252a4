// q4local rows of the stages around one matrix as a stream: every warp has a ring of shared memory in which bulk copies
// keep pieces of its rows on their way, across rows and matrices, from before the stage's input is there. A warp takes
// ROWS rows side by side, eight lanes to a row, each lane one of the eight sums of contract section 3 from its first group
// to its last. With fewer rows than the warp has slots of eight lanes, the slots of a row compute its steps (a step is
// eight groups) in turn, and hand the terms to the first of them, which adds.
#pragma once

#include "block_norm.cuh"
#include "warp_rows.cuh"

// What a dot is too large by, as float: 1.0625 * 1.5 * 2^23, where it starts, and 8 times the sum of its input's codes.
#define Q4_BIAS_BITS 0x4b4c0000u

// An a8 row in shared memory, of whole steps. The halves of its groups lie apart, so that neighbouring lanes read
// neighbouring words.
struct SplitRow {
    unsigned char *lo, *hi;  // i8[G][16]: elements 0..15 and 16..31 of each group
    float2 *scale;           // f32[G + 104][2]: scale, and what a dot is too large by; room behind them that is read for nothing

    // Memory behind it is returned; kestrel/launch.py computes the same size.
    DEVICE_MEMBER unsigned char *open(unsigned char *base, int k) {
        lo = base;
        hi = lo + k / 2;
        scale = (float2 *)(hi + k / 2);
        return (unsigned char *)(scale + k / 32 + 104);
    }
    DEVICE_MEMBER void put_scale(int g, float d, int gsum) const {
        scale[g] = make_float2(d, f32_from_bits(Q4_BIAS_BITS + (unsigned)(8 * gsum)));
    }
    DEVICE_MEMBER int gsum(int g) const { return (int)(f32_bits(scale[g].y) - Q4_BIAS_BITS) / 8; }

    // Eight codes of a norm, block b of eight; all lanes of a warp call it, for neighbouring blocks.
    DEVICE_MEMBER void put(int b, const A8Eight &eight, bool there) const {
        const int sum = group_sum_s32(eight.sum, 4);
        if (!there) return;
        ((uint2 *)((b & 2 ? hi : lo) + b / 4 * 16))[b % 2] = eight.codes;
        if (b % 4 == 0) put_scale(b / 4, eight.d, sum);
    }
    // The row that another kernel left in global memory, by the whole block; there behind a barrier. Scales are on their way
    // together with the codes, as far as there are threads.
    DEVICE_MEMBER void copy(const MatmulArgs &mm, int k) const {
        const int first = threadIdx.x, groups = k / 32;
        const bool scales = first < groups;
        const float d = load_l2(mm.xd + (scales ? first : 0));
        const int gsum = load_l2(mm.gsum + (scales ? first : 0));
        copy_units(
            2 * groups, blockDim.x, [&](int i) { return (const uint4 *)mm.xq + i; },
            [&](int i) { return (uint4 *)(i & 1 ? hi : lo) + i / 2; });
        if (scales) put_scale(first, d, gsum);
#pragma unroll 1
        for (int g = first + blockDim.x; g < groups; g += blockDim.x) put_scale(g, load_l2(mm.xd + g), load_l2(mm.gsum + g));
    }
};

// (f32)dot of a group: high nibbles stay where they are, 16 times too large. The integers grow in the low bits of floats,
// where nothing rounds.
DEVICE float q4_stream_dot(uint4 c, uint4 lo, uint4 hi, float bias) {
    const unsigned low = 0x0f0f0f0fu, high = 0xf0f0f0f0u;
    int sixteen = 0x4b400000, one = 0x4b400000;
    sixteen = dot_u8_s8(c.x & high, hi.x, sixteen);
    one = dot_u8_s8(c.x & low, lo.x, one);
    sixteen = dot_u8_s8(c.y & high, hi.y, sixteen);
    one = dot_u8_s8(c.y & low, lo.y, one);
    sixteen = dot_u8_s8(c.z & high, hi.z, sixteen);
    one = dot_u8_s8(c.z & low, lo.z, one);
    sixteen = dot_u8_s8(c.w & high, hi.w, sixteen);
    one = dot_u8_s8(c.w & low, lo.w, one);
    return fma_f32(f32_from_bits((unsigned)sixteen), 0.0625f, f32_from_bits((unsigned)one)) - bias;
}

DEVICE float q8_stream_dot(uint4 c0, uint4 c1, uint4 x0, uint4 x1) {
    return f32_from_bits((unsigned)dot_s8(c1, x1, dot_s8(c0, x0, 0x4b400000))) - 12582912.0f;  // 1.5 * 2^23
}

// What the warps of a block take in turn, for stages whose units are rows of the matrices one after the other.
struct MatrixUnits {
    const MatmulArgs &mm;

    template <int ROWS> DEVICE_MEMBER RowUnit at(int unit) const { return row_unit(mm, unit, ROWS); }
};

// One warp's units of ROWS neighbouring rows: `unit`, `unit` + stride, ... below `units`; `place` says which rows they are.
// open(), begin(), which may stand ahead of everything, then next() for each unit, when the input is there.
// CODES: bytes of a group's codes, 16 in q4local and 32 in q8local.
template <int ROWS, int CODES = 16> struct Q4Stream {
    static_assert(ROWS == 4 || (ROWS == 2 && CODES == 16), "one slot of eight lanes to a row, or two");
    static const int APART = CODES == 32 ? 64 : 128 / ROWS;  // rows in shared memory, modulo 128: no two lanes meet in a bank
    static const int SLOTS = 4 / ROWS;  // of eight lanes, for a row
    static const int U = ROWS == 2 ? 4 : 2;  // steps of a slot at a time

    unsigned char *ring;        // u8[pieces][ROWS][pitch]: of each row the codes, then the scales
    unsigned long long *gates;  // of the copies: u64[pieces]
    int groups, pieces;         // of a row; of the ring
    int most, pitch;            // groups of a row in a piece; bytes from row to row
    int unit, units, stride;    // this warp's first one, all, and from one of this warp to its next
    int ask_unit, ask_group, ask_slot;  // what is asked for next: unit, first group, place in the ring
    int ask_rows;                       // of that unit, which begin there:
    const unsigned char *ask_codes;
    const unsigned short *ask_scale;
    int take_slot;  // where the next piece arrives, and how often the ring has gone round
    unsigned turn;

    // Memory behind what all streams need is returned; kestrel/launch.py computes the same size. `warp`: of the block; from
    // `plan.streams` on they have no units.
    DEVICE_MEMBER unsigned char *open(unsigned char *base, int k, const StreamArgs &plan, int warp) {
        groups = k / 32;
        pieces = plan.pieces;
        most = 8 * plan.steps;
        pitch = ((CODES + 2) * most + 128 - APART - 1) / 128 * 128 + APART;
        gates = (unsigned long long *)base + warp * pieces;
        base += (8 * plan.streams * pieces + 15) / 16 * 16;
        ring = base + warp * pieces * ROWS * pitch;
        return base + plan.streams * pieces * ROWS * pitch;
    }

    // Fills the ring.
    template <class Units> DEVICE_MEMBER void begin(const Units &place, int first, int count, int apart) {
        unit = ask_unit = first;
        units = count;
        stride = apart;
        ask_group = ask_slot = ask_rows = take_slot = 0;
        ask_codes = nullptr;
        ask_scale = nullptr;
        turn = 0;
        if (!any()) return;
#pragma unroll 1
        for (int i = 0; i < pieces; i++) {
            bulk_open(gates + i);
            ask(place);
        }
    }

    DEVICE_MEMBER bool any() const { return unit < units; }
    // A lane's place: row, group of a step, slot of its row.
    DEVICE_MEMBER static int row() { return lane_id() % ROWS; }
    DEVICE_MEMBER static int group() { return lane_id() / ROWS % 8; }
    DEVICE_MEMBER static int slot() { return lane_id() / (8 * ROWS); }

    template <class Units> DEVICE_MEMBER void ask(const Units &place) {
        if (ask_unit >= units) return;
        if (ask_group == 0) {
            const RowUnit at = place.template at<ROWS>(ask_unit);
            ask_rows = at.rows;
            ask_codes = (const unsigned char *)at.w.codes + (long long)at.n * groups * CODES;
            ask_scale = at.w.scale + (long long)at.n * groups;
        }
        const int here = groups - ask_group < most ? groups - ask_group : most;
        unsigned long long *const gate = gates + ask_slot;
        unsigned char *to = ring + ask_slot * ROWS * pitch;
        bulk_expect(gate, ask_rows * here * (CODES + 2));
        const unsigned char *codes = ask_codes + CODES * ask_group;
        const unsigned short *scale = ask_scale + ask_group;
        // One lane asks for all: lanes that ask each for themselves take turns all the same, and longer ones.
#pragma unroll 1
        for (int r = 0; r < ask_rows; r++, to += pitch, codes += CODES * groups, scale += groups) {
            bulk_copy(to, codes, CODES * here, gate);
            bulk_copy(to + CODES * most, scale, 2 * here, gate);
        }
        ask_slot = ask_slot + 1 == pieces ? 0 : ask_slot + 1;
        ask_group += here;
        if (ask_group == groups) {
            ask_group = 0;
            ask_unit += stride;
        }
    }

    // Adds `steps` steps of a piece to this lane's sum, of which the first slot's counts. What lies behind the steps is read
    // and not used.
    DEVICE_MEMBER float add(const unsigned char *piece, const SplitRow &in, int first, int steps, float acc) const {
        const int step = slot(), g = first + 8 * step + group();
        // Of q8local rows the upper two read the halves of a group the other way round.
        const bool swap = CODES == 32 && row() >= 2;
        const unsigned char *codes = piece + row() * pitch + CODES * (8 * step + group());
        const unsigned char *scales = piece + row() * pitch + CODES * most + 2 * (8 * step + group());
        const uint4 *lo = (const uint4 *)(swap ? in.hi : in.lo) + g, *hi = (const uint4 *)(swap ? in.lo : in.hi) + g;
        const float2 *scale = in.scale + g;
#pragma unroll 1
        for (int j = 0; j < steps; j += U * SLOTS) {
            float dot[U], ws[U];
#pragma unroll
            for (int u = 0; u < U; u++) {
                const float2 by = scale[8 * SLOTS * u];
                const unsigned char *const at = codes + 8 * CODES * SLOTS * u;
                const uint4 x0 = lo[8 * SLOTS * u], x1 = hi[8 * SLOTS * u];
                if (CODES == 16)
                    dot[u] = q4_stream_dot(*(const uint4 *)at, x0, x1, by.y);
                else
                    dot[u] = q8_stream_dot(((const uint4 *)at)[swap ? 1 : 0], ((const uint4 *)at)[swap ? 0 : 1], x0, x1);
                ws[u] = half_to_float(*(const unsigned short *)(scales + 16 * SLOTS * u)) * by.x;
            }
#pragma unroll
            for (int u = 0; u < U; u++) {
#pragma unroll
                for (int s = 0; s < SLOTS; s++) {
                    const float d = s == 0 ? dot[u] : __shfl_xor_sync(FULL_WARP, dot[u], 8 * ROWS);
                    const float w = s == 0 ? ws[u] : __shfl_xor_sync(FULL_WARP, ws[u], 8 * ROWS);
                    if (j + SLOTS * u + s < steps) acc = fma_f32(d, w, acc);
                }
            }
            codes += 8 * CODES * U * SLOTS, scales += 16 * U * SLOTS;
            lo += 8 * U * SLOTS, hi += 8 * U * SLOTS, scale += 8 * U * SLOTS;
        }
        return acc;
    }

    // hsum8 of a row; every lane of its first slot gets it.
    DEVICE_MEMBER static float sum(float a) {
        a = a + __shfl_xor_sync(FULL_WARP, a, 4 * ROWS);  // lo[k] = a[k] + a[k+4]
        a = a + __shfl_xor_sync(FULL_WARP, a, ROWS);      // lo0 + lo1, lo2 + lo3
        return a + __shfl_xor_sync(FULL_WARP, a, 2 * ROWS);
    }

    // The next unit's sums: a lane below ROWS gets that row's.
    template <class Units> DEVICE_MEMBER float next(const Units &place, const SplitRow &in) {
        float acc = 0.0f;
#pragma unroll 1
        for (int first = 0; first < groups; first += most) {
            bulk_wait(gates + take_slot, turn);
            const int here = groups - first < most ? groups - first : most;
            acc = add(ring + take_slot * ROWS * pitch, in, first, here / 8, acc);
            __syncwarp();
            ask(place);
            if (++take_slot == pieces) take_slot = 0, turn++;
        }
        unit += stride;
        return sum(acc);
    }
};

// The matrices of a stage: units of ROWS rows are dealt to the blocks, then to the streams of each.
template <int ROWS, int CODES = 16> struct MatrixStream {
    Q4Stream<ROWS, CODES> stream;
    MatrixUnits place;

    DEVICE_MEMBER MatrixStream(const MatmulArgs &mm) : place{mm} {}

    DEVICE_MEMBER unsigned char *begin(unsigned char *base, const StreamArgs &plan, int block, int blocks) {
        // From one lane: the compiler sees that a warp stays together.
        const int warp = __shfl_sync(FULL_WARP, warp_id(), 0), units = row_units(place.mm, ROWS);
        base = stream.open(base, place.mm.w[0].k, plan, warp);
        stream.begin(place, warp < plan.streams ? warp * blocks + block : units, units, plan.streams * blocks);
        return base;
    }

    // This lane's row of a unit, or none.
    DEVICE_MEMBER static int row() { return lane_id() < ROWS ? lane_id() : ROWS; }

    // Ahead of finish(): what `out` needs of the first unit.
    template <class Out> DEVICE_MEMBER void open(Out &out) const {
        if (stream.any()) out.open(place.template at<ROWS>(stream.unit), row());
    }

    // out.open(at, row) is called ahead of every unit but the first, out.close(at, row, sum) behind each: a lane with
    // row < at.rows holds that row.
    template <class Out> DEVICE_MEMBER void finish(const SplitRow &in, Out &out) {
#pragma unroll 1
        while (stream.any()) {
            const int unit = stream.unit;
            const float mine = stream.next(place, in);
            out.close(place.template at<ROWS>(unit), row(), mine);
            open(out);
        }
    }
};

// rms_norm and a8 of one row, whole steps, into `in`, and `part` of both to global memory, but for what store_groups stores.
// Waits as norm_scale does; ends with a barrier.
template <int C>
DEVICE void norm_a8_row(const RmsNormArgs &norm, const QuantizeA8Args &a8, float *terms, const SplitRow &in, NormPart part) {
    const int blocks = norm.d / 8;
    norm_a8_eights<C>(norm, a8, 0, terms, part,
                      [&](int b, const float *, const A8Eight &eight) { in.put(b, eight, b < blocks); });
    __syncthreads();
}

// Scales and sums of `part`.
DEVICE void store_groups(const QuantizeA8Args &a8, const SplitRow &in, NormPart part) {
    const int end = part.end / 4 < a8.K / 32 ? part.end / 4 : a8.K / 32;
#pragma unroll 1
    for (int g = part.first / 4 + threadIdx.x; g < end; g += blockDim.x) {
        a8.d[g] = in.scale[g].x;
        a8.gsum[g] = in.gsum(g);
    }
}
