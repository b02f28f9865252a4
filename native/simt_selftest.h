// What the kernels that test the CUDA shim share.
#pragma once

#include "simt_kernels.h"

#include "../kernels/port.cuh"

struct SelftestArgs {
    int *out;
    int *in;
    int n;
    int reserved;
};

static inline int linear_thread() { return (int)((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x); }
static inline int linear_block() { return (int)((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x); }
static inline int block_size() { return (int)(blockDim.x * blockDim.y * blockDim.z); }
