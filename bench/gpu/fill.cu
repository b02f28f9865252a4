// Seeded random weights, made on the device.

static __device__ __forceinline__ unsigned long long mix(unsigned long long z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Uniform bits; n counts words of 8 bytes.
extern "C" __global__ void k_fill_bits(unsigned long long *out, long long n, unsigned long long seed) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
        out[i] = mix(seed * 0x9e3779b97f4a7c15ull + (unsigned long long)(i + 1) * 0xd1342543de82ef95ull);
}

// f16 scales of either sign, size * (0.75 .. 1.25).
extern "C" __global__ void k_fill_scales(unsigned short *out, long long n, unsigned long long seed, float size) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {
        const unsigned r = (unsigned)(mix(seed * 0x9e3779b97f4a7c15ull + (unsigned long long)(i + 1)) >> 32);
        const float value = size * (0.75f + 0.5f * (float)(r >> 8) * 5.9604645e-8f) * (r & 1u ? -1.0f : 1.0f);
        unsigned short half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
        out[i] = half;
    }
}

// f32, size * (0.75 .. 1.25).
extern "C" __global__ void k_fill_f32(float *out, long long n, unsigned long long seed, float size) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {
        const unsigned r = (unsigned)(mix(seed * 0x9e3779b97f4a7c15ull + (unsigned long long)(i + 1)) >> 32);
        out[i] = size * (0.75f + 0.5f * (float)(r >> 8) * 5.9604645e-8f);
    }
}
