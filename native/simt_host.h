// The CUDA execution model on one CPU thread, for tests: the kernels under kernels/ compile against this header with
// g++. Each CUDA thread is a fiber that runs until it meets a barrier or a warp operation. Clusters of blocks run one after
// another; the blocks of a cluster take turns, each until it waits for the others, or until the seed says. It checks what a
// GPU leaves undefined: divergent barriers, lanes missing from a mask, shared memory read before it is written (poisoned with
// 0xff before each block), shared memory of a block that may not have begun or may have left. A seed shuffles the order of
// blocks and fibers, so that a result that depends on the order moves. Bulk copies arrive when the seed says: their destination
// is poison until then, and each turn of their gates must be opened, expected, asked for and waited for as on sm_90. The same of
// sends between blocks. It shows no
// races within one instruction, no missing fences between a thread's own accesses and bulk copies, no order of memory between
// blocks, and no performance.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

// ---- types ----
struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace simt {

struct Launch {
    uint3 grid, block;
    size_t shared_bytes;  // dynamic shared memory
    uint64_t seed;        // 0: blocks and fibers in index order
    bool gates;           // as from sm_90 on; without, bulk copies are plain ones
    unsigned cluster;     // blocks along x that are alive at once; 1 without gates
};

// Runs `kernel(args)` on every thread of the launch; throws std::runtime_error on undefined behaviour it sees.
void run(const Launch &launch, void (*kernel)(const void *args), const void *args);

extern uint3 grid_dim, block_dim, block_index;
extern const uint3 *thread_index;  // of the running fiber
extern bool bulk_gates;            // of the running launch
unsigned char *dynamic_shared();

// Counts since the process started, for tests of the shim and for a feel of the cost.
struct Counters {
    uint64_t launches, blocks, switches, barriers;
};
extern Counters counters;

// Where the source calls; equal strings of one site have equal addresses.
struct Site {
    const char *file;
    int line;
    bool operator==(const Site &o) const { return file == o.file && line == o.line; }
};

// As a default argument: where the function is called.
constexpr Site caller(const char *file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

enum class Collective : uint8_t { sync, shuffle_index, shuffle_up, shuffle_down, shuffle_xor, ballot, reduce_max, reduce_add,
                                mma_s8, mma_u8_s8, load_halves };

void block_barrier(Site site);
// All lanes of `mask` meet; returns this lane's result. `arg` is the lane, delta or mask of a shuffle.
uint64_t warp_collective(Site site, Collective kind, unsigned mask, uint64_t value, int arg, int width);

// One warp's D += A B over int8 (16x8x32), registers as PTX's mma.m16n8k32 lays them out. kind: mma_s8 or mma_u8_s8.
struct MmaOperands {
    int *d;             // i32[4]
    const unsigned *a;  // 4 x s8[4] or u8[4]
    const unsigned *b;  // 2 x s8[4]
};
void mma(Site site, Collective kind, int *d, const unsigned *a, const unsigned *b);

struct HalvesOperands {
    unsigned *words;           // u32[4]
    const unsigned char *row;  // u8[16], in shared memory
};
void load_halves(Site site, unsigned *words, const void *row);

// With seed 0 as late as a GPU may copy: a missing wait leaves the poison of shared memory in place. Otherwise some come at
// once: what asks for them too early overwrites what is still read.
void copy_async(void *to, const void *from, size_t bytes);
void copy_wait_all();
void copy_close();
void copy_wait_closed();

// Bulk copies and their gates: see kernels/port.cuh. The running thread opens, expects and asks, whichever lane it is; any
// thread may wait. What is asked for is what the source holds then; with seed 0 it arrives when all threads of the block
// wait for something and one of them for its gate, otherwise at any time up to then.
void gate_open(Site site, unsigned long long *gate);
void gate_expect(Site site, unsigned long long *gate, int bytes);
void bulk_copy(Site site, void *to, const void *from, int bytes, unsigned long long *gate);
void gate_wait(Site site, unsigned long long *gate, unsigned turn);

// Clusters: see kernels/port.cuh. All threads of a block arrive, and wait, at one place; blocks may differ. cluster_address is
// that of what lies at `shared` in the shared memory of block `rank`.
int cluster_rank();
int cluster_size();
void cluster_arrive(Site site);
void cluster_wait(Site site);
unsigned char *cluster_address(Site site, const void *shared, int rank, size_t bytes);

// Sends between the blocks of a cluster and their gates: see kernels/port.cuh. A send's destination is poison until it arrives,
// as late or early as a bulk copy. Gates of a launch without clusters are not used: nobody calls these.
void cluster_open(Site site, unsigned long long *gate);
void cluster_begin(Site site);
void cluster_expect(Site site, unsigned long long *gate, int bytes);
void cluster_send(Site site, void *to, int rank, const void *from, size_t bytes, const unsigned long long *gate);
void cluster_receive(Site site, unsigned long long *gate, unsigned turn);

template <class T>
inline uint64_t to_word(T v) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t w = 0;
    std::memcpy(&w, &v, sizeof v);
    return w;
}

template <class T>
inline T shuffle(Site site, Collective kind, unsigned mask, T v, int arg, int width = 32) {
    const uint64_t w = warp_collective(site, kind, mask, to_word(v), arg, width);
    T out;
    std::memcpy(&out, &w, sizeof out);
    return out;
}

}  // namespace simt

// ---- CUDA's spellings ----
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__ __restrict
// One block runs at a time, so shared memory is static; its section is poisoned before each block, and copied when blocks of a
// cluster take turns. Not in a template: g++ ignores the section of a template's static variable
// (tests/kernels/test_sources.py looks for that).
#define __shared__ static __attribute__((section("simt_shared")))
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (*simt::thread_index)
#define blockIdx (simt::block_index)
#define blockDim (simt::block_dim)
#define gridDim (simt::grid_dim)

#define SIMT_SITE (simt::Site{__FILE__, __LINE__})
#define __syncthreads() simt::block_barrier(SIMT_SITE)
#define __syncwarp(...) \
    ((void)simt::warp_collective(SIMT_SITE, simt::Collective::sync, simt::mask_or_full(__VA_ARGS__), 0, 0, 32))
#define __shfl_sync(mask, v, ...) simt::shuffle(SIMT_SITE, simt::Collective::shuffle_index, mask, v, __VA_ARGS__)
#define __shfl_up_sync(mask, v, ...) simt::shuffle(SIMT_SITE, simt::Collective::shuffle_up, mask, v, __VA_ARGS__)
#define __shfl_down_sync(mask, v, ...) simt::shuffle(SIMT_SITE, simt::Collective::shuffle_down, mask, v, __VA_ARGS__)
#define __shfl_xor_sync(mask, v, ...) simt::shuffle(SIMT_SITE, simt::Collective::shuffle_xor, mask, v, __VA_ARGS__)
#define __ballot_sync(mask, predicate) \
    ((unsigned)simt::warp_collective(SIMT_SITE, simt::Collective::ballot, mask, (predicate) ? 1 : 0, 0, 32))
#define __any_sync(mask, predicate) (__ballot_sync(mask, predicate) != 0u)
#define __all_sync(mask, predicate) (__ballot_sync(mask, !(predicate)) == 0u)
#define __reduce_add_sync(mask, v) \
    ((int)simt::warp_collective(SIMT_SITE, simt::Collective::reduce_add, mask, (unsigned)(v), 0, 32))
#define __reduce_max_sync(mask, v) \
    ((unsigned)simt::warp_collective(SIMT_SITE, simt::Collective::reduce_max, mask, (unsigned)(v), 0, 32))

namespace simt {
inline unsigned mask_or_full(unsigned mask = 0xffffffffu) { return mask; }
}  // namespace simt

// A fiber is never interrupted between barriers, so these are plain. There are none for floats, on purpose.
static inline void __threadfence() {}
template <class T, class U>
static inline T atomicAdd(T *p, U v) {
    static_assert(T(1) / T(2) == T(0), "no float atomics: their order is not fixed");
    const T old = *p;
    *p = old + (T)v;
    return old;
}
template <class T, class U>
static inline T atomicMax(T *p, U v) {
    static_assert(T(1) / T(2) == T(0), "integers only");
    const T old = *p;
    if ((T)v > old) *p = (T)v;
    return old;
}
static inline unsigned atomicInc(unsigned *p, unsigned limit) {
    const unsigned old = *p;
    *p = old >= limit ? 0u : old + 1u;
    return old;
}
template <class T>
static inline T atomicExch(T *p, T v) {
    const T old = *p;
    *p = v;
    return old;
}
template <class T>
static inline T atomicCAS(T *p, T expected, T v) {
    const T old = *p;
    if (old == expected) *p = v;
    return old;
}

static inline int __dp4a(int a, int b, int c) {
    unsigned sum = (unsigned)c;
    for (int i = 0; i < 32; i += 8) sum += (unsigned)((int)(signed char)(a >> i) * (int)(signed char)(b >> i));
    return (int)sum;
}
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz((unsigned)v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline unsigned __float_as_uint(float x) {
    unsigned u;
    std::memcpy(&u, &x, 4);
    return u;
}
static inline float __uint_as_float(unsigned u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(bytes >> (8 * (selector >> (4 * i) & 7u)) & 0xffu) << (8 * i);
    return out;
}
