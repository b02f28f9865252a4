// FNV-1a 64 of rows of bytes in parallel, with the serial value; contract section 12.
//
// h' = (h ^ b) * P mod 2^64 looks serial, but its low byte is a T-function: bit j of the product depends on bits <= j
// only, and because P is odd, bit j of the state is (bit j before) xor (bit j of b) xor (a function of lower bits).
// So the low byte at the start of every segment follows from eight prefix XORs, one per bit. With the low bytes s
// known, h ^ b = h + d for the small number d = (s ^ b) - s, and the rest is the linear recurrence h' = (h + d) * P,
// whose segments combine as (left, right) -> left * P^length(right) + right.
//
// Each thread walks two half segments at once, in the 16-bit halves of a register: (s ^ b) * 0xb3 fits 16 bits.
#include "port.cuh"

#define FNV_OFFSET 1469598103934665603ull
#define FNV_PRIME 1099511628211ull
#define HASH_CACHED_WORDS 4  // of each half segment, kept in registers when that is enough

#if !KESTREL_FAST

// The words of one row, counted from `pad` words before its start, so that every segment but the first is whole.
struct HashWords {
    const unsigned char *p;  // u8[bytes]
    long long pad;
    bool aligned, is_f32;

    DEVICE_MEMBER unsigned operator()(long long virtual_index) const {
        const long long i = virtual_index - pad;
        if (i < 0) return 0u;
        unsigned w;
        if (aligned) {
            w = ((const unsigned *)p)[i];
        } else {
            const unsigned char *const b = p + 4 * i;
            w = (unsigned)b[0] | (unsigned)b[1] << 8 | (unsigned)b[2] << 16 | (unsigned)b[3] << 24;
        }
        return is_f32 && (w & 0x7fffffffu) > KESTREL_INF_BITS ? KESTREL_NAN_BITS : w;
    }
};

// Four bytes of each of two automata: a in the low half of the state, b in the high.
DEVICE unsigned low_bytes_step(unsigned s, unsigned a, unsigned b) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const unsigned pair = __byte_perm(a, b, (unsigned)k * 0x1111u + 0x4400u);  // a.k, _, b.k, _
        s = ((s ^ pair) & 0x00ff00ffu) * 0xb3u;
    }
    return s;
}

// A half stands still before the row's first word.
DEVICE unsigned keep_before_start(unsigned stepped, unsigned s, bool a_in, bool b_in) {
    const unsigned mask = (a_in ? 0x0000ffffu : 0u) | (b_in ? 0xffff0000u : 0u);
    return (stepped & mask) | (s & ~mask);
}

// One word of the linear recurrence; s is the low byte before it.
DEVICE void linear_step(unsigned long long &h, unsigned &s, unsigned word) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const unsigned y = s ^ (word >> (8 * k) & 0xffu);
        h = (h + (unsigned long long)((long long)(int)y - (int)s)) * FNV_PRIME;
        s = y * 0xb3u & 0xffu;
    }
}

// Returns the hash in thread 0. All threads of the block call it; blockDim.x is a multiple of 32.
DEVICE unsigned long long hash_row(const unsigned char *p, int bytes, bool is_f32) {
    __shared__ unsigned parity[2][32];            // of each warp's contributions, by turns
    __shared__ unsigned long long partial[32];
    const int lane = lane_id(), warp = warp_id(), warps = warp_count();
    const int total = bytes / 4;
    const int half = (total + 2 * (int)blockDim.x - 1) / (2 * (int)blockDim.x);  // words of a half segment
    const HashWords words = {p, 2ll * blockDim.x * half - total, ((unsigned long long)p & 3u) == 0, is_f32};
    const long long first_a = 2ll * threadIdx.x * half, first_b = first_a + half;

    const bool cached = half <= HASH_CACHED_WORDS;
    unsigned wa[HASH_CACHED_WORDS], wb[HASH_CACHED_WORDS];
#pragma unroll
    for (int i = 0; i < HASH_CACHED_WORDS; i++) {
        wa[i] = i < half ? words(first_a + i) : 0u;
        wb[i] = i < half ? words(first_b + i) : 0u;
    }

    unsigned start = 0;  // low bytes at the start of the halves, known up to the bit of the pass
    for (int bit = 0; bit < 8; bit++) {
        unsigned s = start;
        if (cached) {
#pragma unroll
            for (int i = 0; i < HASH_CACHED_WORDS; i++)
                if (i < half)
                    s = keep_before_start(low_bytes_step(s, wa[i], wb[i]), s, first_a + i >= words.pad,
                                          first_b + i >= words.pad);
        } else {
            for (int i = 0; i < half; i++)
                s = keep_before_start(low_bytes_step(s, words(first_a + i), words(first_b + i)), s,
                                      first_a + i >= words.pad, first_b + i >= words.pad);
        }
        const unsigned a_moves = s >> bit & 1u, b_moves = s >> (16 + bit) & 1u;
        const unsigned ballot = __ballot_sync(FULL_WARP, a_moves ^ b_moves);
        if (lane == 0) parity[bit & 1][warp] = (unsigned)__popc(ballot) & 1u;
        __syncthreads();
        unsigned before = (unsigned)(FNV_OFFSET >> bit) & 1u;
        for (int w = 0; w < warp; w++) before ^= parity[bit & 1][w];
        before ^= (unsigned)__popc(ballot & ((1u << lane) - 1u)) & 1u;
        start |= before << bit | (before ^ a_moves) << (16 + bit);
    }

    unsigned long long ha = 0, hb = 0;
    unsigned sa = start & 0xffu, sb = start >> 16 & 0xffu;
    for (int i = 0; i < half; i++) {
        if (first_a + i >= words.pad) {
            if (first_a + i == words.pad) ha = FNV_OFFSET;
            linear_step(ha, sa, words(first_a + i));
        }
        if (first_b + i >= words.pad) {
            if (first_b + i == words.pad) hb = FNV_OFFSET;
            linear_step(hb, sb, words(first_b + i));
        }
    }

    // P^(4 * half), then its squares: the lengths that meet at each level of the tree.
    unsigned long long power = 1, square = FNV_PRIME;
    for (int n = 4 * half; n > 0; n >>= 1) {
        if (n & 1) power *= square;
        square *= square;
    }
    unsigned long long h = ha * power + hb;
    power *= power;
    for (int step = 1; step < 32; step <<= 1) {
        const unsigned long long right = __shfl_down_sync(FULL_WARP, h, step);
        h = h * power + right;  // right in lane 0; lanes past the end are not read
        power *= power;
    }
    if (lane == 0) partial[warp] = h;
    __syncthreads();
    if (threadIdx.x == 0) {
        h = partial[0];
        for (int w = 1; w < warps; w++) h = h * power + partial[w];
        if (total == 0) h = FNV_OFFSET;
        for (int i = 4 * total; i < bytes; i++) h = (h ^ p[i]) * FNV_PRIME;
    }
    __syncthreads();
    return h;
}

DEVICE void hash_rows(const L2HashArgs &a) {
    for (int m = blockIdx.x; m < a.M; m += gridDim.x) {
        const long long row = a.row0 != nullptr ? (long long)a.row0[m] + a.row1[m] : m;
        const unsigned long long h = hash_row((const unsigned char *)a.x + row * a.stride, a.bytes, a.is_f32 != 0);
        if (threadIdx.x == 0) a.out[m] = h;
    }
}

// A block per row, grid-stride.
KERNEL LAUNCH_BOUNDS(1024) void k_l2_hash(const L2HashArgs a) { hash_rows(a); }

// Several taps in one launch: tap blockIdx.y. The layout is repeated in kestrel/launch.py.
struct L2HashManyArgs {
    L2HashArgs tap[32];
    int count;
    int reserved;
};

KERNEL LAUNCH_BOUNDS(1024) void k_l2_hash_many(const L2HashManyArgs a) { hash_rows(a.tap[blockIdx.y]); }

#endif
