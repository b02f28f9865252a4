// q4local rows of the stages around one matrix, by warps, in the contract's order (section 3) and as in warp_rows.cuh: the
// four slots of a warp split a row's steps, and the running sums go from slot to slot. What is different is for the sake of
// time: codes travel to shared memory as bulk copies, the input row lies there as the dots read it, and nothing is
// computed that only another format needs.
#pragma once

#include "block_norm.cuh"
#include "warp_rows.cuh"

// An a8 row in shared memory. The halves of its groups lie apart, so that neighbouring lanes read neighbouring words.
struct SplitRow {
    unsigned char *lo, *hi;  // i8[G][16]: elements 0..15 and 16..31 of each group
    float *d;                // f32[G]

    // Memory behind it is returned; kestrel/launch.py computes the same size.
    DEVICE_MEMBER unsigned char *open(unsigned char *base, int k) {
        lo = base;
        hi = lo + k / 2;
        d = (float *)(hi + k / 2);
        return (unsigned char *)(d + (k / 32 + 3) / 4 * 4);
    }
    // Eight codes, or sixteen.
    DEVICE_MEMBER uint2 *eight(int b) const { return (uint2 *)((b & 2 ? hi : lo) + b / 4 * 16) + b % 2; }
    DEVICE_MEMBER uint4 *sixteen(int i) const { return (uint4 *)(i & 1 ? hi : lo) + i / 2; }
};

// What a dot is too large by, as float: 1.0625 * 1.5 * 2^23, where it starts, and 8 times the sum of its input's codes.
#define Q4_BIAS_BITS 0x4b4c0000u

// The row as a norm leaves it: sums of eight codes, which no lane had to wait for.
struct NormedRow : SplitRow {
    uint2 *sums;  // u16[G][4]: each plus 1024

    DEVICE_MEMBER unsigned char *open(unsigned char *base, int k) {
        sums = (uint2 *)SplitRow::open(base, k);
        return (unsigned char *)(sums + (k / 32 + 1) / 2 * 2);
    }
    DEVICE_MEMBER void put(int b, const A8Eight &eight) const {
        *SplitRow::eight(b) = eight.codes;
        ((unsigned short *)sums)[b] = (unsigned short)(eight.sum + 1024);
        if (b % 4 == 0) d[b / 4] = eight.d;
    }
    DEVICE_MEMBER int gsum(int g) const {
        const unsigned two = sums[g].x + sums[g].y;
        return (int)((two & 0xffffu) + (two >> 16)) - 4096;
    }
    DEVICE_MEMBER float bias(int g) const { return f32_from_bits(Q4_BIAS_BITS + (unsigned)(8 * gsum(g))); }
};

// The row as another kernel left it in global memory, k a multiple of 256.
struct CopiedRow : SplitRow {
    int *gsums;  // i32[G]
    // Where this thread copies from and to next: codes, and what its groups have besides.
    const signed char *from;
    uint4 *to;

    DEVICE_MEMBER void open(const MatmulArgs &mm, unsigned char *base, int k) {
        gsums = (int *)SplitRow::open(base, k);
        from = mm.xq + 16 * threadIdx.x;
        to = sixteen(threadIdx.x);
        settle(from);
        settle(to);
    }
    // By the whole block; there after copy_wait_all and a barrier.
    DEVICE_MEMBER void copy(const MatmulArgs &mm, int k) {
#pragma unroll 1
        for (int i = threadIdx.x; i < k / 16; i += blockDim.x) {
            copy_async_16(to, from);
            from += 16 * blockDim.x;
            to += blockDim.x / 2;
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < k / 128; i += blockDim.x) {
            copy_async_16(d + 4 * i, mm.xd + 4 * i);
            copy_async_16(gsums + 4 * i, mm.gsum + 4 * i);
        }
    }
    DEVICE_MEMBER float bias(int g) const { return f32_from_bits(Q4_BIAS_BITS + (unsigned)(8 * gsums[g])); }
};

// Sums of eight lanes for R values at a time, by the contract's tree: lane l % 8 gets the sum of value l % 8. At each step
// two lanes hold the same two values of which each goes on with one.
template <int R> DEVICE float hsum8_of_each(const float *values) {
    static_assert(R >= 1 && R <= 8, "a lane to a value");
    const bool bit0 = lane_id() & 1, bit1 = lane_id() & 2, bit2 = lane_id() & 4;
    float v[8];
#pragma unroll
    for (int r = 0; r < 8; r++) v[r] = values[r < R ? r : 0];
#pragma unroll
    for (int r = 0; r < 4; r++) {  // lo[k] = a[k] + a[k+4]
        if (r < R) {
            const float give = r + 4 < R && !bit2 ? v[r + 4] : v[r], keep = r + 4 < R && bit2 ? v[r + 4] : v[r];
            v[r] = keep + __shfl_xor_sync(FULL_WARP, give, 4);
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r += 2) {  // lo0 + lo1, lo2 + lo3
        if (r < R) {
            const float give = r + 1 < R && !bit0 ? v[r + 1] : v[r], keep = r + 1 < R && bit0 ? v[r + 1] : v[r];
            v[r] = keep + __shfl_xor_sync(FULL_WARP, give, 1);
        }
    }
    const float give = R > 2 && !bit1 ? v[2] : v[0], keep = R > 2 && bit1 ? v[2] : v[0];
    return keep + __shfl_xor_sync(FULL_WARP, give, 2);
}

// Up to R neighbouring rows of one matrix, in pieces of U steps to a slot; rows of whole steps, k a multiple of 256. load()
// asks for a piece, which travels to shared memory; take() waits for it and brings it into registers; use() adds it to the
// running sums, and asks for the next one in the meantime.
template <int U, int R> struct Q4Rows {
    static const int ROWS = R, GROUPS = 32 * U;  // groups of a row in a piece, at most

    unsigned char *codes;      // u8[R][pitch][16], then the scales, f16[R][pitch]
    unsigned long long *gate;  // of the copies
    int groups, pitch;         // of a row, of a row of a piece
    unsigned taken;            // pieces
    uint4 raw[R * U];
    unsigned short scale[R * U];
    int here, first, count;  // groups of the piece; this lane's first one in the row, and how many: they are 8 apart

    // Memory behind what the block's warps need is returned; kestrel/launch.py computes the same size.
    DEVICE_MEMBER unsigned char *open(unsigned char *base, int k) {
        const int gates = (8 * warp_count() + 15) / 16 * 16;
        groups = k / 32;
        pitch = groups < GROUPS ? groups : GROUPS;
        gate = (unsigned long long *)base + warp_id();
        codes = base + gates + warp_id() * R * pitch * 18;
        taken = 0;
        bulk_open(gate);
        return base + gates + warp_count() * R * pitch * 18;
    }
    DEVICE_MEMBER int pieces(const Weight &) const { return (groups + GROUPS - 1) / GROUPS; }
    DEVICE_MEMBER static int row() { return lane_id() - 24; }  // whose sum this lane gets
    DEVICE_MEMBER void clear() {}

    DEVICE_MEMBER void load(const Weight &w, long long n, int rows, int piece) {
        const int begin = GROUPS * piece;
        int apart = pitch;
        settle(apart);
        here = groups - begin < GROUPS ? groups - begin : GROUPS;
        long long at = n * groups + begin;
        // Rows of one piece lie side by side there, too.
        const int runs = here == groups ? 1 : rows, run = here == groups ? rows * here : here;
        bulk_expect(gate, runs * run * 18);
#pragma unroll 1
        for (int i = 0; i < runs * apart; i += apart, at += groups) {
            bulk_copy(codes + 16 * i, (const unsigned char *)w.codes + 16 * at, 16 * run, gate);
            bulk_copy(codes + 16 * R * apart + 2 * i, w.scale + at, 2 * run, gate);
        }
        first = begin;
    }

    // Rows that are not there are whatever lies in their place.
    DEVICE_MEMBER void take() {
        const int each = (here + 31) / 32, slot = lane_id() / 8, left = here / 8 - each * slot;
        const int mine = 8 * each * slot + lane_id() % 8;
        count = left < 0 ? 0 : left < each ? left : each;
        first += mine;
        bulk_wait(gate, taken++);
        int apart = pitch;
        settle(apart);
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int at = mine + 8 * u < here ? mine + 8 * u : here - 1;
            const unsigned char *const from = codes + 16 * at, *const scale_from = codes + 16 * R * apart + 2 * at;
#pragma unroll
            for (int r = 0; r < R; r++) {
                raw[r * U + u] = *(const uint4 *)(from + 16 * r * apart);
                scale[r * U + u] = *(const unsigned short *)(scale_from + 2 * r * apart);
            }
        }
        __syncwarp();
    }

    // (f32)dot of a group: high nibbles stay where they are, 16 times too large. The integers grow in the low bits of
    // floats, where nothing rounds.
    DEVICE_MEMBER static float dot(uint4 c, const uint4 lo, const uint4 hi, float bias) {
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

    // acc: f32[R], lane l of row r in acc[r] of slot 3 afterwards. `refill` asks for the next piece and returns whether the
    // row goes on in it.
    template <class Row, class Refill>
    DEVICE_MEMBER void use(const Weight &, const Row &in, const float *, float *acc, const Refill &refill) {
        const int have = count, group = first;
        float terms[R][U], ws[R][U];
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int g = group + 8 * u < groups ? group + 8 * u : groups - 1;
            const uint4 lo = ((const uint4 *)in.lo)[g], hi = ((const uint4 *)in.hi)[g];
            const float d = in.d[g], bias = in.bias(g);
#pragma unroll
            for (int r = 0; r < R; r++) {
                terms[r][u] = dot(raw[r * U + u], lo, hi, bias);
                ws[r][u] = half_to_float(scale[r * U + u]) * d;
            }
        }
        const bool more = refill();
        // Turn t matters in slot t alone, which got its sums from slot t - 1; the others add to sums that nobody reads.
#pragma unroll
        for (int turn = 0; turn < 4; turn++) {
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (turn > 0) acc[r] = from_slot_before(acc[r]);
#pragma unroll
                for (int u = 0; u < U; u++)
                    if (u < have) acc[r] = fma_f32(terms[r][u], ws[r][u], acc[r]);
            }
        }
        if (more) {
#pragma unroll
            for (int r = 0; r < R; r++) acc[r] = from_slot_before(acc[r]);
        }
    }

    DEVICE_MEMBER static float from_slot_before(float v) { return __shfl_sync(FULL_WARP, v, (lane_id() + 24) & 31); }

    // This lane's row; acc goes back to +0.
    DEVICE_MEMBER float sums(const Weight &, float *acc) {
        const float mine = hsum8_of_each<R>(acc);
#pragma unroll
        for (int r = 0; r < R; r++) acc[r] = 0.0f;
        return mine;
    }
};

// rms_norm and a8 of one row into `in`, and `part` of both to global memory, but for what store_groups stores; `meanwhile`
// runs ahead of the barrier at the end. Waits as norm_scale does.
template <int C, class Meanwhile>
DEVICE void norm_a8_row(const RmsNormArgs &norm, const QuantizeA8Args &a8, float *terms, const NormedRow &in, NormPart part,
                        const Meanwhile &meanwhile) {
    const int blocks = norm.d / 8;
    norm_a8_eights<C>(norm, a8, 0, terms, part, [&](int b, const float *, const A8Eight &eight) {
        if (b < blocks) in.put(b, eight);
    });
    meanwhile();
    __syncthreads();
}

// Scales and sums of `part`.
DEVICE void store_groups(const QuantizeA8Args &a8, const NormedRow &in, NormPart part) {
    const int end = part.end / 4 < a8.K / 32 ? part.end / 4 : a8.K / 32;
#pragma unroll 1
    for (int g = part.first / 4 + threadIdx.x; g < end; g += blockDim.x) {
        a8.d[g] = in.d[g];
        a8.gsum[g] = in.gsum(g);
    }
}
