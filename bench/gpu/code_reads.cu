// Instructions that a multiprocessor has not executed for a while: 32 kernels of the same length of straight code, of which a
// chain of launches goes through some in turn, as a decode step goes through its stages.
#include "port.cuh"

#define CODE_FMAS 512  // of 16 bytes each: 8 KB

// cycles: u32[2, grid], of a first and a second pass through the code by the block's first warp. Up to four warps, one to a
// quarter of the multiprocessor: more would take turns, and the first one's time would say little.
DEVICE void read_code(unsigned *cycles, float seed) {
    float a = seed, b = seed + 1.0f, c = seed + 2.0f, d = seed + 3.0f;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        __syncthreads();
        const unsigned begin = clock();
#pragma unroll
        for (int i = 0; i < CODE_FMAS / 4; i++) {
            asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(a) : "f"(seed));
            asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(b) : "f"(seed));
            asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(c) : "f"(seed));
            asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(d) : "f"(seed));
        }
        __syncthreads();
        if (threadIdx.x == 0) cycles[pass * gridDim.x + blockIdx.x] = clock() - begin + (a + b + c + d == 0.25f ? 1u : 0u);
    }
}

#define CODE(NAME) \
    extern "C" __global__ void NAME(unsigned *cycles, float seed) { read_code(cycles, seed); }
#define CODE_FOUR(NAME) CODE(NAME##0) CODE(NAME##1) CODE(NAME##2) CODE(NAME##3)
CODE_FOUR(k_code_0) CODE_FOUR(k_code_1) CODE_FOUR(k_code_2) CODE_FOUR(k_code_3)
CODE_FOUR(k_code_4) CODE_FOUR(k_code_5) CODE_FOUR(k_code_6) CODE_FOUR(k_code_7)
