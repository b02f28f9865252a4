// One weight row by a whole warp, in the contract's order (section 3), for a single input row. The 8-lane order makes
// only the fma chain of each lane serial; dots and scales of its terms are free. So the warp's four slots of eight
// threads split the row's steps (a step is eight groups) into neighbouring runs, each slot computes the terms of its
// run, then the eight running sums are handed from slot to slot, each adding its terms. Four times the threads of
// matvec.cuh for the same bytes: shorter loads per thread and a shorter tail. bf16 has no terms apart from its chain:
// there each slot takes a row of its own.
#pragma once

#include "matvec.cuh"
#include "stage_args.h"

// One a8 row, 16-byte aligned.
struct A8Row {
    const signed char *q;  // i8[K]
    const float *d;        // f32[G]
    const int *gsum;       // i32[G]

    // The units of 16 bytes of `groups` groups: 2 * groups of codes, groups / 4 of scales, groups / 4 of sums.
    DEVICE_MEMBER const void *unit(int i, int groups) const {
        const int j = 4 * (i - 2 * groups), words = groups / 4 * 4;
        return j < 0 ? (const void *)(q + 16 * i) : j < words ? (const void *)(d + j) : gsum + (j - words);
    }
};

// The 8x8 transpose of halfwords over the eight threads of a slot: of thread j's eight elements `mine`, thread l gets
// element l as float in out[j]. All lanes call it.
DEVICE void transpose_bf16(uint4 mine, float *out) {
    const int lane = lane_id();
    // Words 0, 1 are for threads 0..3, words 2, 3 for threads 4..7.
    const bool upper = lane & 4, second = lane & 2, odd = lane & 1;
    const unsigned give0 = __shfl_xor_sync(FULL_WARP, upper ? mine.x : mine.z, 4);
    const unsigned give1 = __shfl_xor_sync(FULL_WARP, upper ? mine.y : mine.w, 4);
    const unsigned keep0 = upper ? mine.z : mine.x, keep1 = upper ? mine.w : mine.y;
    // From thread lane % 4, and from the one four further: word 0 for the first pair of threads, word 1 for the second.
    const unsigned low0 = upper ? give0 : keep0, low1 = upper ? give1 : keep1;
    const unsigned high0 = upper ? keep0 : give0, high1 = upper ? keep1 : give1;
    const unsigned from_low = __shfl_xor_sync(FULL_WARP, second ? low0 : low1, 2);
    const unsigned from_high = __shfl_xor_sync(FULL_WARP, second ? high0 : high1, 2);
    const unsigned own_low = second ? low1 : low0, own_high = second ? high1 : high0;
    // Words of threads p, p + 2, p + 4, p + 6, where p is this thread's parity; halves for the even and the odd thread.
    const unsigned w0 = second ? from_low : own_low, w2 = second ? own_low : from_low;
    const unsigned w4 = second ? from_high : own_high, w6 = second ? own_high : from_high;
    const unsigned other = odd ? 0x5410u : 0x7632u, own = odd ? 0x7632u : 0x5410u;  // byte_perm: low or high halves
    const unsigned got02 = __shfl_xor_sync(FULL_WARP, __byte_perm(w0, w2, other), 1);
    const unsigned got46 = __shfl_xor_sync(FULL_WARP, __byte_perm(w4, w6, other), 1);
    const unsigned own02 = __byte_perm(w0, w2, own), own46 = __byte_perm(w4, w6, own);
    const unsigned even02 = odd ? got02 : own02, odd02 = odd ? own02 : got02;
    const unsigned even46 = odd ? got46 : own46, odd46 = odd ? own46 : got46;
    out[0] = f32_from_bits(even02 << 16), out[2] = f32_from_bits(even02 & 0xffff0000u);
    out[4] = f32_from_bits(even46 << 16), out[6] = f32_from_bits(even46 & 0xffff0000u);
    out[1] = f32_from_bits(odd02 << 16), out[3] = f32_from_bits(odd02 & 0xffff0000u);
    out[5] = f32_from_bits(odd46 << 16), out[7] = f32_from_bits(odd46 & 0xffff0000u);
}

// `units` units of 16 bytes of another kernel's output to shared memory, unit i from from(i) to to(i), by the first `threads`
// threads, which alone call it; there behind a barrier. By way of registers, two units of a thread on their way at a time:
// in a decode step that is much faster than copy_async_16 (docs/performance.md).
template <class From, class To> DEVICE void copy_units(int units, int threads, const From &from, const To &to) {
#pragma unroll 1
    for (int i = threadIdx.x; i < units; i += 2 * threads) {
        const int j = i + threads < units ? i + threads : i;
        const uint4 one = load_l2((const uint4 *)from(i)), two = load_l2((const uint4 *)from(j));
        *(uint4 *)to(i) = one;
        *(uint4 *)to(j) = two;
    }
}

// Words of another kernel's output to shared memory by the whole block; both ends 16-byte aligned. There behind a barrier.
DEVICE void block_copy(void *shared, const void *global, int words) {
    copy_units(
        words / 4, blockDim.x, [&](int i) { return (const uint4 *)global + i; }, [&](int i) { return (uint4 *)shared + i; });
#pragma unroll 1
    for (int i = words / 4 * 4 + threadIdx.x; i < words; i += blockDim.x)
        ((unsigned *)shared)[i] = load_l2((const unsigned *)global + i);
}

// Up to R neighbouring rows of one matrix, piece by piece: a piece is what a warp has in flight, R * U loads of 16 bytes
// a thread. load() asks for a piece; use() adds it to the running sums and asks for the next one as soon as its
// registers are free; sums() ends the rows. Or begin(), which may stand far ahead, then finish(). A q4local piece is U
// steps of each slot, a q8local one U / 2; bf16 takes the same number of loads from its rows, k a multiple of 32. FORMAT:
// the only one that occurs, or ANY_FORMAT.
#define ANY_FORMAT -1
template <int U, int R, int FORMAT = ANY_FORMAT> struct WarpRows {
    static_assert(U >= 2 && R <= 8, "q8local halves U; lanes 0..7 hold the results");
    static const int ROWS = R;
    static const int TURNS = (R + 3) / 4;     // bf16: rows of a slot
    static const int SUMS = 4 * TURNS;        // running sums of a thread: one to a row, or of bf16 four to a row of its slot
    static const int BLOCKS = R * U / TURNS;  // bf16: blocks of 64 elements of a row in a piece
    static const int HALF = U / 2;            // q8local: steps of a slot in a piece
    static const bool EARLY = R * U <= 10;    // registers suffice to ask for the next piece ahead of this one's chain

    // The piece in flight; of quantised rows this lane's first group (the next are 8 apart) and how many it has, of bf16
    // its first element of lane % 8.
    uint4 raw[R * U];
    unsigned short scale[R * U];
    int first, count;

    DEVICE_MEMBER static int format(const Weight &w) { return FORMAT == ANY_FORMAT ? w.wtype : FORMAT; }
    DEVICE_MEMBER static int row() { return lane_id(); }  // whose sum this lane gets

    DEVICE_MEMBER static int pieces(const Weight &w) {
        if (format(w) == KESTREL_BF16) return (w.k + 64 * BLOCKS - 1) / (64 * BLOCKS);
        const int steps = (w.k / 32 + 7) / 8;
        return format(w) == KESTREL_Q4LOCAL ? (steps + 4 * U - 1) / (4 * U) : (steps + 4 * HALF - 1) / (4 * HALF);
    }

    // Rows n .. n + rows - 1.
    DEVICE_MEMBER void load(const Weight &w, long long n, int rows, int piece) {
        if (format(w) == KESTREL_BF16) {
            const int slot = lane_id() / 8, begin = 64 * BLOCKS * piece + 8 * (lane_id() % 8);
            first = 64 * BLOCKS * piece + lane_id() % 8;
#pragma unroll
            for (int t = 0; t < TURNS; t++) {
                const unsigned short *const row = (const unsigned short *)w.codes + (n + slot + 4 * t) * w.k + begin;
#pragma unroll
                for (int b = 0; b < BLOCKS; b++) {
                    if (slot + 4 * t < rows && begin + 64 * b < w.k)
                        raw[t * BLOCKS + b] = load_once(row + 64 * b);
                    else
                        raw[t * BLOCKS + b] = make_uint4(0, 0, 0, 0);
                }
            }
            return;
        }
        const int groups = w.k / 32, most = format(w) == KESTREL_Q4LOCAL ? U : HALF;
        const int steps = (groups + 7) / 8 - 4 * most * piece;  // left
        const int each = steps >= 4 * most ? most : (steps + 3) / 4;
        first = 8 * (4 * most * piece + lane_id() / 8 * each) + lane_id() % 8;
        const int have = (groups - first + 7) / 8;
        count = have < 0 ? 0 : have < each ? have : each;
        const unsigned short *const s = w.scale + n * groups + first;
        if (format(w) == KESTREL_Q4LOCAL) {
            const unsigned char *const c = (const unsigned char *)w.codes + (n * groups + first) * 16;
#pragma unroll
            for (int r = 0; r < R; r++) {
#pragma unroll
                for (int u = 0; u < U; u++) {
                    if (u < count && r < rows) {
                        raw[r * U + u] = load_once(c + ((long long)r * groups + 8 * u) * 16);
                        scale[r * U + u] = load_streaming_u16(s + (long long)r * groups + 8 * u);
                    }
                }
            }
        } else {
            const unsigned char *const c = (const unsigned char *)w.codes + (n * groups + first) * 32;
#pragma unroll
            for (int r = 0; r < R; r++) {
#pragma unroll
                for (int u = 0; u < HALF; u++) {
                    if (u < count && r < rows) {
                        const unsigned char *const at = c + ((long long)r * groups + 8 * u) * 32;
                        raw[r * U + 2 * u] = load_once(at);
                        raw[r * U + 2 * u + 1] = load_once(at + 16);
                        scale[r * U + u] = load_streaming_u16(s + (long long)r * groups + 8 * u);
                    }
                }
            }
        }
    }

    // A group of the a8 row.
    struct Input {
        int g;
        uint4 lo, hi;
        float d;
    };

    DEVICE_MEMBER static Input input(const A8Row &in, int g) {
        const uint4 *const q = (const uint4 *)(in.q + 32ll * g);
        const bool swap = lane_id() & 4;  // half of the lanes read the halves in turn: no two meet in a bank
        const uint4 one = q[swap ? 1 : 0], two = q[swap ? 0 : 1];
        Input x8;
        x8.g = g;
        x8.lo = swap ? two : one;
        x8.hi = swap ? one : two;
        x8.d = in.d[g];
        return x8;
    }

    // acc: f32[SUMS], +0 before the first piece. in: the a8 row; x: f32[K] for bf16. All lanes call it; `refill` asks for
    // the next piece.
    template <class Refill>
    DEVICE_MEMBER void use(const Weight &w, const A8Row &in, const float *x, float *acc, const Refill &refill) {
        const int lane = lane_id(), slot = lane / 8;
        if (format(w) == KESTREL_BF16) {  // acc[4 * t + i] of thread l of a slot: lane l + 8 * i of row slot + 4 * t
#pragma unroll
            for (int t = 0; t < TURNS; t++) {
#pragma unroll
                for (int b = 0; b < BLOCKS; b++) {
                    float terms[8];
                    transpose_bf16(raw[t * BLOCKS + b], terms);
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const int k = first + 64 * b + 8 * j;
                        float &sum = acc[4 * t + j % 4];
                        if (k < w.k) sum = fma_f32(terms[j], x[k], sum);
                    }
                }
            }
            refill();
            return;
        }
        // acc[r] of lane l: lane l of row r, in slot 0 before and after. Rows and groups that are not there are computed
        // from whatever lies in the registers, and dropped: without branches all dots run side by side.
        const int have = count;
        float dot[R][U], ws[R][U];
        if (format(w) == KESTREL_Q4LOCAL) {
#pragma unroll
            for (int u = 0; u < U; u++) {
                const Input x8 = input(in, u < have ? first + 8 * u : 0);
                const int gsum = in.gsum[x8.g];
#pragma unroll
                for (int r = 0; r < R; r++) {
                    dot[r][u] = (float)dot_q4(raw[r * U + u], x8.lo, x8.hi, gsum);
                    ws[r][u] = half_to_float(scale[r * U + u]) * x8.d;
                }
            }
        } else {
#pragma unroll
            for (int u = 0; u < HALF; u++) {
                const Input x8 = input(in, u < have ? first + 8 * u : 0);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const int i = r * U + 2 * u;
                    dot[r][u] = (float)dot_s8(raw[i + 1], x8.hi, dot_s8(raw[i], x8.lo, 0));
                    ws[r][u] = half_to_float(scale[r * U + u]) * x8.d;
                }
            }
#pragma unroll
            for (int u = HALF; u < U; u++) {
#pragma unroll
                for (int r = 0; r < R; r++) dot[r][u] = ws[r][u] = 0.0f;  // never added
            }
        }
        if (EARLY) refill();
#pragma unroll
        for (int turn = 0; turn < 4; turn++) {
            const int mine = slot == turn ? have : 0;
#pragma unroll
            for (int r = 0; r < R; r++) {
#pragma unroll
                for (int u = 0; u < U; u++)
                    if (u < mine) acc[r] = fma_f32(dot[r][u], ws[r][u], acc[r]);
                acc[r] = __shfl_sync(FULL_WARP, acc[r], (lane + 24) & 31);  // from the slot before; slot 3 hands to slot 0
            }
        }
        if (!EARLY) refill();
    }

    // y: f32[R] of the rows, valid in lanes 0..7; acc goes back to +0.
    DEVICE_MEMBER void sums(const Weight &w, float *acc, float *y) {
        float sum[R];
        if (format(w) == KESTREL_BF16) {
#pragma unroll
            for (int t = 0; t < TURNS; t++) acc[t] = fold_lanes(acc[4 * t], acc[4 * t + 1], acc[4 * t + 2], acc[4 * t + 3]);
        }
#pragma unroll
        for (int r = 0; r < R; r++) sum[r] = group_hsum8(acc[r]);
#pragma unroll
        for (int i = 0; i < SUMS; i++) acc[i] = 0.0f;
#pragma unroll
        for (int r = 0; r < R; r++)
            y[r] = format(w) == KESTREL_BF16 ? __shfl_sync(FULL_WARP, sum[r / 4], 8 * (r % 4)) : sum[r];
    }

    // This lane's row of the same.
    DEVICE_MEMBER float sums(const Weight &w, float *acc) {
        float y[R], mine = 0.0f;
        sums(w, acc, y);
#pragma unroll
        for (int r = 0; r < R; r++)
            if (lane_id() == r) mine = y[r];
        return mine;
    }

    // For rows and groups that are never loaded: use() computes with them.
    DEVICE_MEMBER void clear() {
#pragma unroll
        for (int i = 0; i < R * U; i++) {
            raw[i] = make_uint4(0, 0, 0, 0);
            scale[i] = 0;
        }
    }

    DEVICE_MEMBER void begin(const Weight &w, long long n, int rows) {
        clear();
        load(w, n, rows, 0);
    }

    DEVICE_MEMBER void finish(const Weight &w, long long n, int rows, const A8Row &in, const float *x, float *y) {
        float acc[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; i++) acc[i] = 0.0f;
        const int all = pieces(w);
        for (int piece = 0; piece < all; piece++) {
            use(w, in, x, acc, [&] {
                if (piece + 1 < all) load(w, n, rows, piece + 1);
            });
        }
        sums(w, acc, y);
    }
};

// Which matrix and which of its rows a warp's unit of R rows is: units do not cross matrices.
struct RowUnit {
    Weight w;
    int n, rows;  // first row within w, and how many (at most R; 0: past the end)
    int out;      // first row in the concatenated output
};

DEVICE RowUnit row_unit(const MatmulArgs &a, int unit, int R) {
    RowUnit at;
    at.w = a.w[0];
    at.out = 0;
#pragma unroll
    for (int i = 1; i < 3; i++) {
        int n = at.w.n;
        settle(n);  // a loop's later units are not prepared ahead of its first
        const int units = (n + R - 1) / R;
        if (i < a.n_w && unit >= units) {
            unit -= units;
            at.out += at.w.n;
            at.w = a.w[i];
        }
    }
    at.n = unit * R;
    at.rows = at.w.n - at.n < R ? at.w.n - at.n : R;
    if (at.rows < 0) at.rows = 0;
    at.out += at.n;
    return at;
}

DEVICE int row_units(const MatmulArgs &a, int R) {
    int units = 0;
#pragma unroll
    for (int i = 0; i < 3; i++)
        if (i < a.n_w) units += (a.w[i].n + R - 1) / R;
    return units;
}

DEVICE bool reads_bf16(const MatmulArgs &a) {
    bool any = false;
    for (int i = 0; i < a.n_w; i++) any = any || a.w[i].wtype == KESTREL_BF16;
    return any;
}

// The units of one warp, Rows::ROWS rows each: begin() asks for the first piece of its first unit, and may stand ahead of
// anything the rows are multiplied with; finish() walks on, a grid's warps apart, with the next piece in flight, across
// units too. out.open(at, row) is called ahead of a unit, of the first by begin's caller, out.close(at, row, mine) behind
// it: a lane with 0 <= row < at.rows holds that row.
template <class Rows> struct WarpUnits {
    Rows rows;
    RowUnit at;  // whose piece is in flight, or next to be
    int unit, units, stride, piece, pieces;

    DEVICE_MEMBER void begin(const MatmulArgs &mm, int block, int blocks) {
        units = row_units(mm, Rows::ROWS);
        // Every block has its share of a last turn that is not full. From one lane: the compiler sees that a warp stays
        // together.
        unit = __shfl_sync(FULL_WARP, warp_id(), 0) * blocks + block;
        stride = blocks * warp_count();
        at = row_unit(mm, unit, Rows::ROWS);
        piece = 0;
        pieces = rows.pieces(at.w);
        rows.clear();
        if (unit < units) rows.load(at.w, at.n, at.rows, 0);
    }

    DEVICE_MEMBER bool any() const { return unit < units; }

    template <class Out> DEVICE_MEMBER void finish(const MatmulArgs &mm, const A8Row &in, const float *x, Out &out) {
        float acc[Rows::SUMS];
#pragma unroll
        for (int i = 0; i < Rows::SUMS; i++) acc[i] = 0.0f;
        while (any()) {
            const RowUnit now = at;
            bool last = false;
            rows.use(now.w, in, x, acc, [&] {
                last = ++piece == pieces;
                if (last) {
                    piece = 0;
                    unit += stride;
                    if (any()) {
                        at = row_unit(mm, unit, Rows::ROWS);
                        pieces = rows.pieces(at.w);
                    }
                }
                if (any()) rows.load(at.w, at.n, at.rows, piece);
            });
            if (last) {
                const float mine = rows.sums(now.w, acc);
                out.close(now, Rows::row(), mine);
                if (any()) out.open(at, Rows::row());
            }
        }
    }
};
