// Loads of 16 bytes from shared memory by all lanes of some warps, by how many lanes read the same 16 bytes and where those
// lanes lie: what a dot costs that takes its weights and its input from there.
#include "port.cuh"

#define READS 64  // of a warp
#define ROOM 16   // different places of a warp's load, of 512 bytes each

// Which 16 bytes of 512 a lane reads.
DEVICE int shared_unit(int pattern) {
    switch (pattern) {
    case 0: return lane_id();      // each its own
    case 1: return lane_id() / 2;  // neighbours share: two, four, eight lanes
    case 2: return lane_id() / 4;
    case 3: return lane_id() / 8;
    case 4: return lane_id() % 16;  // lanes that lie apart share: two, four, eight
    case 5: return lane_id() % 8;
    case 6: return lane_id() % 4;
    default: return 0;  // all share
    }
}

// cycles: u32[warps], from a barrier to the last load's arrival.
extern "C" __global__ void k_shared_reads(int pattern, unsigned *cycles) {
    __shared__ uint4 memory[32 * ROOM];
    for (int i = threadIdx.x; i < 32 * ROOM; i += blockDim.x) memory[i] = make_uint4(i, i + 1, i + 2, i + 3);
    const uint4 *const mine = memory + shared_unit(pattern);
    unsigned sum = 0, begin = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {  // the second one counts: it has its instructions
        __syncthreads();
        begin = clock();
#pragma unroll 8
        for (int i = 0; i < READS; i++) {
            const uint4 v = mine[32 * (i % ROOM)];
            sum += v.x ^ v.y ^ v.z ^ v.w;
        }
    }
    const int any = __any_sync(FULL_WARP, sum == 0x12345u);
    if (lane_id() == 0) cycles[warp_id()] = clock() - begin + (any ? 1u : 0u);
}
