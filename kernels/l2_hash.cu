// FNV-1a 64 of rows of bytes in parallel, with the serial value; contract section 12.
//
// h' = (h ^ b) * P mod 2^64 looks serial, but its low byte is a T-function: bit j of the product depends on bits <= j
// only, and because P is odd, bit j of the state is (bit j before) xor (bit j of b) xor (a function of lower bits).
// So the low byte at the start of every segment follows from eight prefix XORs, one per bit. With the low bytes s
// known, h ^ b = h + d for the small number d = (s ^ b) - s, and the rest is the linear recurrence h' = (h + d) * P,
// whose segments combine as (left, right) -> left * P^length(right) + right.
//
// A thread holds eight words, 32 bytes, and walks their halves side by side, in the 16-bit halves of a register:
// (s ^ b) * 0xb3 fits 16 bits. A block takes such a tile at a time. Zeros stand ahead of a row, so that its tiles are whole:
// a zero byte multiplies the low byte, which the first start makes up for, and has d = 0.
#include "port.cuh"

#define FNV_OFFSET 1469598103934665603ull
#define FNV_PRIME 1099511628211ull
#define LOW_PRIME 0xb3u        // FNV_PRIME mod 256
#define LOW_BYTES 0x00ff00ffu  // of the two halves
#define THREAD_WORDS 8
#define WARP_WORDS (32 * THREAD_WORDS)

#if !KESTREL_FAST

// The tiles of a row, for this block.
struct RowTiles {
    int warps;  // that work, the first of the block
    int words;  // of a tile
    int count;
    int pad;    // words of zeros ahead of the row

    DEVICE_MEMBER explicit RowTiles(int total) {
        const int needed = (total + WARP_WORDS - 1) / WARP_WORDS;
        warps = needed < warp_count() ? needed : warp_count();
        words = WARP_WORDS * warps;
        count = needed <= warp_count() ? (needed > 0 ? 1 : 0) : (needed + warps - 1) / warps;
        pad = count * words - total;
    }

    DEVICE_MEMBER bool working() const { return warp_id() < warps; }
};

// The words of a row behind its zeros.
struct RowWords {
    const unsigned char *p;  // u8[bytes]
    int pad;
    bool aligned, by_four, is_f32;

    DEVICE_MEMBER RowWords(const unsigned char *row, int total, int zeros, bool floats) {
        p = row;
        pad = zeros;
        is_f32 = floats;
        aligned = ((unsigned long long)p & 3u) == 0;
        by_four = ((unsigned long long)p & 15u) == 0 && total % 4 == 0;
    }

    DEVICE_MEMBER unsigned seen(unsigned word) const {
        return is_f32 && (word & 0x7fffffffu) > KESTREL_INF_BITS ? KESTREL_NAN_BITS : word;
    }

    // The eight words from `first` on, zeros counted; a multiple of eight.
    DEVICE_MEMBER void load(int first, unsigned *w) const {
        const int i = first - pad;
        if (by_four) {
#pragma unroll
            for (int j = 0; j < THREAD_WORDS; j += 4) {
                uint4 four = make_uint4(0, 0, 0, 0);
                if (i + j >= 0) four = *(const uint4 *)(p + 4ll * (i + j));
                w[j] = seen(four.x), w[j + 1] = seen(four.y), w[j + 2] = seen(four.z), w[j + 3] = seen(four.w);
            }
            return;
        }
#pragma unroll
        for (int j = 0; j < THREAD_WORDS; j++) {
            w[j] = 0;
            if (i + j < 0) continue;
            const unsigned char *const b = p + 4ll * (i + j);
            w[j] = seen(aligned ? *(const unsigned *)b
                                : (unsigned)b[0] | (unsigned)b[1] << 8 | (unsigned)b[2] << 16 | (unsigned)b[3] << 24);
        }
    }
};

DEVICE unsigned long long power_of(unsigned long long base, int n) {
    unsigned long long power = 1;
    for (; n > 0; n >>= 1, base *= base)
        if (n & 1) power *= base;
    return power;
}

// P^(2^log2): a constant where log2 is one.
DEVICE unsigned long long prime_squared(int log2) {
    unsigned long long power = FNV_PRIME;
#pragma unroll
    for (int i = 0; i < log2; i++) power *= power;
    return power;
}

// The low byte ahead of `pad` words of zeros that turn it into the offset's. LOW_PRIME^64 is 1.
DEVICE unsigned padded_start(int pad) {
    return (unsigned)FNV_OFFSET * (unsigned)power_of(LOW_PRIME, (int)((unsigned)(-4 * pad) & 63u)) & 0xffu;
}

// Byte k of both halves.
DEVICE unsigned byte_pair(unsigned a, unsigned b, int k) {
    return __byte_perm(a, b, (unsigned)k * 0x1111u + 0x4400u) & LOW_BYTES;
}

// The low bytes before both halves of each thread, those of the first in the low half of the result, up to bit `bits`.
// `start` is the one before the tile and becomes the one behind it; in warps that do not work, neither. The whole block calls
// it.
DEVICE unsigned tile_starts(const unsigned *w, int bits, const RowTiles &tiles, unsigned &start) {
    __shared__ unsigned flips[2][32];  // whether a warp's bytes flip the bit, by turns
    const int lane = lane_id(), warp = warp_id();
    unsigned mine = 0, end = 0;
#pragma unroll 1
    for (int bit = 0; bit < bits; bit++) {
        unsigned a = 0, b = 0, here = 0;  // whether the halves flip the bit, and whether a lane's together do
        if (tiles.working()) {
            if (bit < 2) {  // of y and of 3 y: no carries, so bit 1 takes its own flips and bit 0 of every other byte
                const unsigned counted = bit == 0 ? 0x01010101u : 0x03020302u;
                a = (unsigned)__popc((w[0] ^ w[1] ^ w[2] ^ w[3]) & counted) & 1u;
                b = (unsigned)__popc((w[4] ^ w[5] ^ w[6] ^ w[7]) & counted) & 1u;
            } else {
                unsigned s = mine;
#pragma unroll
                for (int i = 0; i < 16; i++) s = ((s & LOW_BYTES) ^ byte_pair(w[i / 4], w[4 + i / 4], i % 4)) * LOW_PRIME;
                a = s >> bit & 1u;
                b = s >> (16 + bit) & 1u;
            }
            here = __ballot_sync(FULL_WARP, a != b);
            if (lane == 0) flips[bit & 1][warp] = (unsigned)__popc(here) & 1u;
        }
        __syncthreads();
        if (!tiles.working()) continue;
        const unsigned warps = __ballot_sync(FULL_WARP, lane < tiles.warps && flips[bit & 1][lane] != 0u);
        const unsigned first = start >> bit & 1u;
        const int others = __popc(warps & ((1u << warp) - 1u)) + __popc(here & ((1u << lane) - 1u));
        const unsigned before = (first ^ (unsigned)others) & 1u;
        mine |= before << bit | (before ^ a) << (16 + bit);
        end |= ((first ^ (unsigned)__popc(warps)) & 1u) << bit;
    }
    start = end;
    return mine;
}

// What the tile's bytes, and the offset where the row begins, make of h at the tile's end, in thread 0. `begins`: the
// thread's word with which the row begins, if it is one of them. The whole block calls it.
DEVICE unsigned long long tile_sum(const unsigned *w, unsigned starts, int begins, const RowTiles &tiles) {
    __shared__ unsigned long long of_warp[32];
    unsigned long long h = 0;
    if (tiles.working()) {
        unsigned long long a = 0, b = 0;  // of the halves, before the multiplication that is still to come
        unsigned s = starts & LOW_BYTES;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const unsigned y = s ^ byte_pair(w[i / 4], w[4 + i / 4], i % 4);
            const unsigned d = y + 0x01000100u - s;  // 256 more in each half: none is negative
            a = a * FNV_PRIME + (d & 0xffffu);
            b = b * FNV_PRIME + (d >> 16);
            if (i % 4 == 0) {
                a += begins == i / 4 ? FNV_OFFSET : 0ull;
                b += begins == 4 + i / 4 ? FNV_OFFSET : 0ull;
            }
            s = y * LOW_PRIME & LOW_BYTES;
        }
        unsigned long long excess = 0;
#pragma unroll
        for (int i = 0; i < 4 * THREAD_WORDS; i++) excess = (excess + 256u) * FNV_PRIME;
        h = (a * prime_squared(4) + b) * FNV_PRIME - excess;
#pragma unroll
        for (int log2 = 0; log2 < 5; log2++)  // right in lane 0; lanes past the end are not read
            h = h * prime_squared(5 + log2) + __shfl_down_sync(FULL_WARP, h, 1 << log2);
        if (lane_id() == 0) of_warp[warp_id()] = h;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        h = of_warp[0];
        for (int i = 1; i < tiles.warps; i++) h = h * prime_squared(10) + of_warp[i];
    }
    return h;
}

DEVICE unsigned long long tile_power(const RowTiles &tiles) { return power_of(prime_squared(10), tiles.warps); }

// Returns the hash in thread 0. The whole block calls it; blockDim.x is a multiple of 32.
DEVICE unsigned long long hash_row(const unsigned char *p, int bytes, bool is_f32) {
    const int total = bytes / 4;
    const RowTiles tiles(total);
    const RowWords row(p, total, tiles.pad, is_f32);
    unsigned start = padded_start(tiles.pad);
    unsigned long long h = total == 0 ? FNV_OFFSET : 0ull;
#pragma unroll 1
    for (int tile = 0; tile < tiles.count; tile++) {
        const int first = tile * tiles.words + THREAD_WORDS * threadIdx.x;
        unsigned w[THREAD_WORDS] = {};
        if (tiles.working()) row.load(first, w);
        const unsigned starts = tile_starts(w, 8, tiles, start);
        if (tile > 0) h *= tile_power(tiles);
        h += tile_sum(w, starts, tiles.pad - first, tiles);
    }
    for (int i = 4 * total; i < bytes; i++) h = (h ^ p[i]) * FNV_PRIME;
    return h;
}

DEVICE const unsigned char *row_of(const L2HashArgs &a, int m) {
    const long long row = a.row0 != nullptr ? (long long)a.row0[m] + a.row1[m] : m;
    return (const unsigned char *)a.x + row * a.stride;
}

// A block per row, grid-stride in x.
DEVICE void hash_rows(const L2HashArgs &a) {
#pragma unroll 1
    for (int m = blockIdx.x; m < a.M; m += gridDim.x) {
        const unsigned long long h = hash_row(row_of(a, m), a.bytes, a.is_f32 != 0);
        if (threadIdx.x == 0) a.out[m] = h;
    }
}

KERNEL LAUNCH_BOUNDS(256) void k_l2_hash(const L2HashArgs a) { hash_rows(a); }

// Several taps in one launch: tap blockIdx.y. The layout is repeated in kestrel/launch.py.
struct L2HashManyArgs {
    const L2HashArgs *table;  // [gridDim.y]
};

KERNEL LAUNCH_BOUNDS(256) void k_l2_hash_many(const L2HashManyArgs a) {
    wait_for_previous();
    start_next();
    hash_rows(a.table[blockIdx.y]);
}

// ---- one long row by many blocks ----

#define LONG_TILES 256  // of a long row, at most; kestrel/launch.py knows it, too

// Which low nibble, then which high one, comes behind a tile for each one before it; read by words. Launches of long rows
// never overlap.
alignas(4) static __device__ unsigned char long_nibbles[2][LONG_TILES][16];

// The nibble before tile `tile` if `nibble` is the one before the row: the tiles' tables one after the other. Each warp
// follows all 16 through a part of them at first. The whole block calls it.
DEVICE unsigned nibble_before(int which, int tile, unsigned nibble) {
    __shared__ unsigned tables[4 * LONG_TILES];
    __shared__ unsigned char parts[32][16];
    const int lane = lane_id(), each = (tile + warp_count() - 1) / warp_count();
    for (int i = threadIdx.x; i < 4 * tile; i += blockDim.x)
        tables[i] = load_l2((const unsigned *)long_nibbles[which] + i);
    __syncthreads();
    if (lane < 16) {
        unsigned at = lane;
        const int begin = each * warp_id(), end = begin + each < tile ? begin + each : tile;
        for (int i = begin; i < end; i++) at = ((const unsigned char *)tables)[16 * i + at];
        parts[warp_id()][lane] = (unsigned char)at;
    }
    __syncthreads();
    for (int i = 0; i < warp_count(); i++) nibble = parts[i][nibble];
    return nibble;
}

struct L2HashLongArgs {
    L2HashArgs tap;  // of one row, in whole words, of more than one tile and at most LONG_TILES
    int phase;       // 0 | 1 | 2
    int reserved;
};

// Phase 0 tries every low nibble before every tile, phase 1, with the low ones known, every high nibble, phase 2 adds up
// what the tiles make of the hash. Grid: tiles, and in phases 0 and 1 guesses, both strided. A guess with its top bit flipped
// has the result with its top bit flipped.
KERNEL LAUNCH_BOUNDS(256) void k_l2_hash_long(const L2HashLongArgs a) {
    wait_for_previous();
    start_next();
    const int total = a.tap.bytes / 4;
    const RowTiles tiles(total);
    const RowWords row(row_of(a.tap, 0), total, tiles.pad, a.tap.is_f32 != 0);
    const unsigned row_start = padded_start(tiles.pad);
    if (a.phase == 0 && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) a.tap.out[0] = 0;
    if (a.phase == 2 && blockIdx.y > 0) return;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        const int first = tile * tiles.words + THREAD_WORDS * threadIdx.x;
        unsigned w[THREAD_WORDS];
        row.load(first, w);
        unsigned known = 0;
        if (a.phase > 0) known = nibble_before(0, tile, row_start & 15u);
        if (a.phase < 2) {
#pragma unroll 1
            for (unsigned guess = blockIdx.y; guess < 8; guess += gridDim.y) {
                unsigned start = guess << (4 * a.phase) | known;
                tile_starts(w, 4 + 4 * a.phase, tiles, start);
                const unsigned end = start >> (4 * a.phase);
                if (threadIdx.x < 2)
                    long_nibbles[a.phase][tile][guess + 8 * threadIdx.x] = (unsigned char)(end ^ 8 * threadIdx.x);
            }
        } else {
            unsigned start = nibble_before(1, tile, row_start >> 4) << 4 | known;
            const unsigned starts = tile_starts(w, 8, tiles, start);
            const unsigned long long sum = tile_sum(w, starts, tiles.pad - first, tiles);
            if (threadIdx.x == 0) atomicAdd(a.tap.out, sum * power_of(tile_power(tiles), tiles.count - 1 - tile));
        }
    }
}

#endif
