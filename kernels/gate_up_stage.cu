// The first half of a dense FFN of q4local weights in a decode step (M = 1): norm, a8, gate, up, SwiGLU, a8 in one launch;
// stages.cu says what a stage is. A unit is one group of 32 elements of h and its a8: eight quads of gate rows, then eight
// of up rows, which a block's streams share. The block's last warp makes h of a unit while the others go on.
#include "expert_rows.cuh"
#include "q4_stream.cuh"

#define GATE_UP_QUADS 16  // of a unit

// The quads of a block, from unit to unit.
struct GateUpQuads {
    const MatmulArgs &mm;
    int block, blocks;

    template <int ROWS> DEVICE_MEMBER RowUnit at(int quad) const {
        static_assert(ROWS == 4, "quads");
        const int unit = block + quad / GATE_UP_QUADS * blocks, part = quad % GATE_UP_QUADS;
        RowUnit found;
        found.w = part < GATE_UP_QUADS / 2 ? mm.w[0] : mm.w[1];
        found.n = 32 * unit + 4 * part % 32;
        found.rows = 4;
        found.out = 0;
        return found;
    }
};

DEVICE void norm_gate_up(const NormGateUpArgs &a, int block, int blocks, unsigned char *shared) {
    const int warp = __shfl_sync(FULL_WARP, warp_id(), 0), lane = lane_id();
    const int all = a.swiglu.F / 32, units = block < all ? (all - 1 - block) / blocks + 1 : 0;  // of all blocks, of this one
    const int quads = GATE_UP_QUADS * units;
    const GateUpQuads place = {a.mm, block, blocks};
    float *const sums = (float *)shared;  // f32[2][64]: gate and up rows of a unit; units in turn
    Q4Stream<4> stream;
    SplitRow in;
    float *const terms = (float *)in.open(stream.open(shared + 512, a.norm.d, a.stream, warp), a.norm.d);
    stream.begin(place, warp < a.stream.streams ? warp : quads, quads, a.stream.streams);
    touch_exp_table();
    norm_a8_row<1>(a.norm, a.a8, terms, in, norm_part(a.norm.d, block, blocks));
#pragma unroll 1
    for (int u = 0; u < units; u++) {
        float *const to = sums + (u & 1) * 64;
#pragma unroll 1
        while (stream.unit < GATE_UP_QUADS * (u + 1)) {
            const int row = 4 * (stream.unit % GATE_UP_QUADS) + lane;
            const float sum = stream.next(place, in);
            if (lane < 4) to[row] = sum;
        }
        __syncthreads();
        if (warp == warp_count() - 1) {
            const float value = swiglu_element(to[lane], to[32 + lane]);
            const int g = block + u * blocks;
            a.swiglu.h[32 * g + lane] = value;
            warp_a8_element(value, a.h_a8, g);
        }
    }
    store_groups(a.a8, in, norm_part(a.norm.d, block, blocks));
}

// Dynamic shared: f32[2, 64], Q4Stream, SplitRow, f32[norm_terms(d)]. Streams are fewer than warps.
KERNEL LAUNCH_BOUNDS(512, 2) void FORM(k_norm_gate_up)(const NormGateUpArgs a) {
    DYNAMIC_SHARED(shared);
    norm_gate_up(a, blockIdx.x, gridDim.x, shared);
}
