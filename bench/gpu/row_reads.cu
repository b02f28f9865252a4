// A row that one launch writes and every block of the next one reads, as stages of a decode step do with x, h and a8: how long
// that takes, by how far the row's lines of 128 bytes lie apart.
#include "port.cuh"

// Unit i of 16 bytes.
DEVICE uint4 *row_unit(unsigned char *row, int apart, int i) { return (uint4 *)(row + (long long)(i / 8) * apart) + i % 8; }

// Grid: any; each block writes its share.
extern "C" __global__ void k_row_write(unsigned char *row, int apart, int units, unsigned value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < units; i += gridDim.x * blockDim.x)
        *row_unit(row, apart, i) = make_uint4(value, value + 1, value + 2, value + 3);
}

#define ROW_READS 4  // units of a thread on their way together

// cycles: u32[grid], from a block's first load to its last one's arrival. Up to 256 * ROW_READS units.
extern "C" __global__ void __launch_bounds__(256) k_row_read(unsigned char *row, int apart, int units, unsigned *cycles) {
    const int first = ROW_READS * threadIdx.x;
    uint4 v[ROW_READS] = {};
    __syncthreads();
    const unsigned begin = clock();
#pragma unroll
    for (int i = 0; i < ROW_READS; i++)
        if (first + i < units) v[i] = load_l2(row_unit(row, apart, first + i));
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < ROW_READS; i++) sum += v[i].x + v[i].y + v[i].z + v[i].w;
    const int any = __any_sync(FULL_WARP, sum == 0x12345u);
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock() - begin + (any ? 1u : 0u);
}
