// The only file that knows who compiles the kernels: NVRTC for a GPU, or g++ against the CUDA shim of the tests
// (native/simt_host.h), where threads are fibers. What CUDA spells as plain C++ (threadIdx, __syncthreads, __shfl_*,
// __dp4a, __shared__, atomics) keeps its CUDA spelling in the kernels; this file adds what needs PTX or a macro.
#pragma once

#include "contract.cuh"
#include "op_args.h"

#define ROOT_FROM 8.271806e-25f  // 2^-80

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)

#define KERNEL extern "C" __global__
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
// Bytes given at launch, 16-byte aligned.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define LAUNCH_BOUNDS(...) __launch_bounds__(__VA_ARGS__)

// How L2 treats what is read once in a step: it leaves first, and activations and the KV cache stay.
DEVICE unsigned long long leaves_first() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// 16 bytes of weights, which need not displace the activations in L1: load_once of those that nobody reads a second time.
DEVICE uint4 load_streaming(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
DEVICE uint4 load_once(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(leaves_first()));
    return v;
}
// Read-only for the whole kernel.
DEVICE unsigned short load_streaming_u16(const unsigned short *p) { return __ldg(p); }
DEVICE float load_weight(const float *p) { return __ldg(p); }
DEVICE float2 load_weight(const float2 *p) { return __ldg(p); }
DEVICE float4 load_weight(const float4 *p) { return __ldg(p); }
// One instruction; exact, and equal to f16_to_f32 for every number (NaN payloads are the hardware's).
DEVICE float half_to_float(unsigned short h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
// count - ((a, a_low) < (b, b_low)), pairs compared as one number, by the borrow of their difference: three instructions.
DEVICE unsigned minus_less(unsigned count, unsigned a, unsigned a_low, unsigned b, unsigned b_low) {
    asm("{\n\t.reg .u32 t;\n\tsub.cc.u32 t, %2, %4;\n\tsubc.cc.u32 t, %1, %3;\n\tsubc.u32 %0, %0, 0;\n\t}"
        : "+r"(count)
        : "r"(a), "r"(a_low), "r"(b), "r"(b_low));
    return count;
}
// What another block of this launch, or the launch before, wrote: past L1, which is not coherent. Volatile, so that the
// compiler leaves it behind wait_for_previous.
#define LOAD_L2(TYPE, PTX, CONSTRAINT)                                                   \
    DEVICE TYPE load_l2(const TYPE *p) {                                                 \
        TYPE v;                                                                          \
        asm volatile("ld.global.cg." PTX " %0, [%1];" : "=" CONSTRAINT(v) : "l"(p));     \
        return v;                                                                        \
    }
LOAD_L2(float, "f32", "f")
LOAD_L2(int, "s32", "r")
LOAD_L2(unsigned, "u32", "r")
#undef LOAD_L2
DEVICE float2 load_l2(const float2 *p) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
    return v;
}
DEVICE uint4 load_l2(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE float4 load_l2(const float4 *p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}
// The same where there is something to load; elsewhere anything, for which no register need be written.
#define LOAD_L2_WHERE(TYPE, PTX, CONSTRAINT)                                                                           \
    DEVICE TYPE load_l2_where(bool there, const TYPE *p) {                                                             \
        TYPE v;                                                                                                        \
        asm volatile("{\n\t.reg .pred %%there;\n\tsetp.ne.s32 %%there, %5, 0;\n\t@%%there ld.global.cg.v4." PTX             \
                     " {%0, %1, %2, %3}, [%4];\n\t}"                                                                   \
                     : "=" CONSTRAINT(v.x), "=" CONSTRAINT(v.y), "=" CONSTRAINT(v.z), "=" CONSTRAINT(v.w)              \
                     : "l"(p), "r"((int)there));                                                                       \
        return v;                                                                                                      \
    }
LOAD_L2_WHERE(uint4, "u32", "r")
LOAD_L2_WHERE(float4, "f32", "f")
#undef LOAD_L2_WHERE

// atomicInc that releases what this thread has written or seen behind a barrier, and acquires what others have so released:
// one fence, where a fence on each side of it would make two.
DEVICE unsigned arrive(unsigned *counter, unsigned last) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

// 1 / a, rounded as a division rounds, of a from 2^-100 to 2^64: what the compiler makes of 1.0f / a but for its branch to other
// a, which keeps what lies around it from being interleaved. Compared with the division for all of them (bench/gpu/unary.py). The
// lint takes an approximation only in these very instructions (kestrel/cuda/ptx_lint.py).
DEVICE float reciprocal(float a) {
#if KESTREL_FAST
    return 1.0f / a;
#else
    float inverse;
    asm("{\n\t.reg .f32 near, rest;\n\t"
        "rcp.approx.ftz.f32 near, %1;\n\t"
        "fma.rn.f32 rest, %1, near, 0fBF800000;\n\t"
        "neg.f32 rest, rest;\n\t"
        "fma.rn.f32 %0, near, rest, near;\n\t}"
        : "=f"(inverse)
        : "f"(a));
    return inverse;
#endif
}

// The root of x, rounded as sqrt rounds, of finite x from ROOT_FROM on: likewise.
DEVICE float root(float x) {
#if KESTREL_FAST
    return sqrtf(x);
#else
    float y;
    asm("{\n\t.reg .f32 near, half, guess, rest;\n\t"
        "rsqrt.approx.ftz.f32 near, %1;\n\t"
        "mul.rn.f32 guess, %1, near;\n\t"
        "mul.rn.f32 half, near, 0f3F000000;\n\t"
        "neg.f32 rest, guess;\n\t"
        "fma.rn.f32 rest, rest, guess, %1;\n\t"
        "fma.rn.f32 %0, rest, half, guess;\n\t}"
        : "=f"(y)
        : "f"(x));
    return y;
#endif
}

// The larger one; NaN if one is NaN.
DEVICE float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// A value as it is, of which the compiler knows nothing more: what is made of it is not computed further ahead, and the
// value itself not later than here.
DEVICE void settle(int &v) { asm volatile("" : "+r"(v)); }
DEVICE void settle(float &v) { asm volatile("" : "+f"(v)); }
template <class T> DEVICE void settle(T *&p) { asm volatile("" : "+l"(p)); }
// The same of a place in shared memory, which stays known to be there.
template <class T> DEVICE void settle_shared(T *&p) {
    unsigned at = (unsigned)__cvta_generic_to_shared(p);
    asm volatile("" : "+r"(at));
    p = (T *)__cvta_shared_to_generic(at);
}

// D += A B over int8, exact: A 16x32 by rows, B 32x8 by columns. Lane 4g+c holds of A the words (row g, column word c),
// (g+8, c), (g, c+4), (g+8, c+4), of B the words (c, column g), (c+4, g), of D rows g and g+8, columns 2c and 2c+1.
DEVICE void mma_s8(int *d, const unsigned *a, const unsigned *b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same with A unsigned.
DEVICE void mma_u8_s8(int *d, const unsigned *a, const unsigned *b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four matrices of 8 rows of 16 bytes of shared memory, by a warp: lane 8q+r names row r of matrix q. Lane 4g+c gets of each
// one word: halves g of rows 2c and 2c+1.
DEVICE void load_halves(unsigned *words, const void *row) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at)
                 : "memory");
}

// c + sum of four products, bytes of a unsigned, of b signed.
DEVICE int dot_u8_s8(unsigned a, unsigned b, int c) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Copies 16 bytes from global to shared memory; visible after a wait and a barrier. copy_close ends a set of a thread's copies,
// of none, too; copy_wait_closed waits for all sets but the last.
DEVICE void copy_async_16(void *shared, const void *global) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
DEVICE void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE void copy_close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void copy_wait_closed() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
// Bulk copies of weights, by a warp: one lane asks, and a unit of its own moves the bytes to shared memory. That takes no
// registers. But loads asked for behind them come behind them. All lanes call all four. A gate is u64[1] of shared memory,
// opened once; bulk_expect says how many bytes the bulk_copy calls behind it will bring (multiples of 16, both ends aligned
// to 16), and bulk_wait returns when all lanes see them; `turn` counts the calls from 0. A lane that has read what arrived
// calls __syncwarp before the next copy to the same place. Asking takes a lane its time: several warps may share it.
#if __CUDA_ARCH__ >= 900
DEVICE void bulk_open(unsigned long long *gate) {
    if (threadIdx.x % 32 == 0) {
        const unsigned at = (unsigned)__cvta_generic_to_shared(gate);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.proxy.async.shared::cta;" ::"r"(at) : "memory");
    }
    __syncwarp();
}
DEVICE void bulk_expect(unsigned long long *gate, int bytes) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(gate);
    if (threadIdx.x % 32 == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
DEVICE void bulk_copy(void *shared, const void *global, int bytes, unsigned long long *gate) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared), at = (unsigned)__cvta_generic_to_shared(gate);
    if (threadIdx.x % 32 == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                     "l"(global), "r"(bytes), "r"(at), "l"(leaves_first())
                     : "memory");
}
DEVICE void bulk_wait(unsigned long long *gate, unsigned turn) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(gate);
    unsigned done;
    do {
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(at), "r"(turn % 2)
                     : "memory");
    } while (!done);
}
#endif
// Asks for the line that holds p.
DEVICE void prefetch_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// The same into L1 of this multiprocessor.
DEVICE void touch_l1(const void *p) { asm volatile("prefetch.L1 [%0];" ::"l"(p)); }

// Programmatic dependent launch: a kernel launched this way may begin while the one before it runs. Every such kernel calls
// wait_for_previous, which returns when the kernel before it has ended, and so all before that one, and its writes can be
// seen; and start_next, which lets the next kernel begin. At least one thread of every launch waits, or its end would not mean
// that of the others. Nobody writes ahead of the wait. Behind a kernel that waits first, a kernel that has begun knows that
// all up to the one two before it have ended, and may read what they wrote, past L1 (load_l2), ahead of its own wait: so
// k_moe_down reads the router's logits. Most kernels start the next one first, because its launch takes a microsecond
// (kestrel/launch.py: STARTS_NEXT_FIRST). Behind those any number of kernels may still run: what follows them reads, ahead of
// its wait, weights, and what was written before the step, whose first launch waits for everything: position and cache.
#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The same, when address `ready` is there, which is not null: so that it is computed ahead of the wait.
DEVICE void wait_for_previous(const void *ready) {
    asm volatile("{\n\t.reg .pred %%there;\n\tsetp.ne.u64 %%there, %0, 0;\n\t@%%there griddepcontrol.wait;\n\t}" ::"l"(ready)
                 : "memory");
}
DEVICE void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_previous(const void *) {}
DEVICE void wait_for_previous() {}
DEVICE void start_next() {}
#endif

// Thread block clusters (Hopper and newer): `Launch.cluster` blocks along x run at the same time and reach each other's
// shared memory. cluster_rank is this block's number among the cluster_size blocks. All threads of all blocks call the
// barriers, each cluster_arrive followed by its cluster_wait; what is written ahead of the former, here or in another block,
// is seen behind the latter. cluster_store(p, rank, v) writes a word of 4 bytes, or four, to where p lies, in block `rank`.
// Ahead of its first store to another block a block must have passed a barrier, for the other may not have begun; and behind
// its last one all must pass another, for a block may not leave while others may still write to its shared memory. Without
// clusters, as below sm_90, each block is one of its own.
//
// cluster_arrive waits for everything that the block has under way, loads too, which is long while memory is busy. Stores that
// are counted where they arrive need no barrier behind them. A gate is u64[1] of shared memory, at the same place in all blocks,
// opened once by cluster_open, by a warp. cluster_begin is a cluster_arrive that publishes nothing but that this block is there
// and which gates it has opened; its cluster_wait comes ahead of the first send. cluster_send(p, rank, v, gate) stores a word of
// 4 bytes, or four, to where p lies in block `rank`, and counts them at that block's gate; every thread that calls it sends.
// cluster_expect, by one warp, says how many bytes will arrive in all, what the block sends to itself included: once a turn,
// before or after they begin to arrive, but not before all threads of the block have received the turn before. cluster_receive,
// by all threads of the block, returns when the turn's bytes are there to be read, and tells of nothing else; `turn` counts its
// calls from 0. No send to a gate, or to a place, may be made while the turn before it lacks bytes from whichever block, or is
// still being read: two gates, each with places of its own, by turns, do where each block hears from all in each turn, and sends
// in a turn when all its threads have read the one before. A block may leave when it has received all that is sent to it; nobody
// waits for its own sends. Without clusters cluster_send is a plain store (the GPU has no other there), cluster_receive a barrier
// of the block, and gates are not used.
#if __CUDA_ARCH__ >= 900
DEVICE int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE int cluster_size() {
    int size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE unsigned cluster_address(const void *shared, int rank) {
    const unsigned here = (unsigned)__cvta_generic_to_shared(shared);
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    return there;
}
template <class T> DEVICE void cluster_store(T *shared, int rank, T v) {
    static_assert(sizeof(T) == 4, "words of 4 bytes");
    const unsigned to = cluster_address(shared, rank);
    unsigned w;
    memcpy(&w, &v, sizeof v);
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(w) : "memory");
}
DEVICE void cluster_store(float4 *shared, int rank, float4 v) {
    const unsigned to = cluster_address(shared, rank);
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}
DEVICE void cluster_open(unsigned long long *gate) {
    if (threadIdx.x % 32 == 0) {
        const unsigned at = (unsigned)__cvta_generic_to_shared(gate);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(at) : "memory");
    }
    __syncwarp();
}
DEVICE void cluster_begin() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_expect(unsigned long long *gate, int bytes) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(gate);
    if (cluster_size() > 1 && threadIdx.x % 32 == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
template <class T> DEVICE void cluster_send(T *shared, int rank, T v, unsigned long long *gate) {
    static_assert(sizeof(T) == 4, "words of 4 bytes");
    if (cluster_size() == 1) {
        *shared = v;
        return;
    }
    const unsigned to = cluster_address(shared, rank), at = cluster_address(gate, rank);
    unsigned w;
    memcpy(&w, &v, sizeof v);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(w), "r"(at)
                 : "memory");
}
DEVICE void cluster_send(float4 *shared, int rank, float4 v, unsigned long long *gate) {
    if (cluster_size() == 1) {
        *shared = v;
        return;
    }
    const unsigned to = cluster_address(shared, rank), at = cluster_address(gate, rank);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(at)
                 : "memory");
}
DEVICE void cluster_receive(unsigned long long *gate, unsigned turn) {
    if (cluster_size() == 1) {
        __syncthreads();
        return;
    }
    const unsigned at = (unsigned)__cvta_generic_to_shared(gate);
    unsigned done;
    do {
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(at), "r"(turn % 2)
                     : "memory");
    } while (!done);
}
#else
DEVICE int cluster_rank() { return 0; }
DEVICE int cluster_size() { return 1; }
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() { __syncthreads(); }
template <class T> DEVICE void cluster_store(T *shared, int, T v) { *shared = v; }
DEVICE void cluster_open(unsigned long long *) {}
DEVICE void cluster_begin() {}
DEVICE void cluster_expect(unsigned long long *, int) {}
template <class T> DEVICE void cluster_send(T *shared, int, T v, unsigned long long *) { *shared = v; }
DEVICE void cluster_receive(unsigned long long *, unsigned) { __syncthreads(); }
#endif
DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

#else

#include "../native/simt_host.h"

#define KERNEL extern "C"
#define DEVICE static inline
// Never out of line: exact and fast kernels are two texts of the same names, of which the linker would keep one.
#define DEVICE_MEMBER inline __attribute__((always_inline))
#define LAUNCH_BOUNDS(...)
#define DYNAMIC_SHARED(name) unsigned char *const name = simt::dynamic_shared()

DEVICE uint4 load_streaming(const void *p) { return *static_cast<const uint4 *>(p); }
DEVICE uint4 load_once(const void *p) { return *static_cast<const uint4 *>(p); }
DEVICE unsigned short load_streaming_u16(const unsigned short *p) { return *p; }
DEVICE float load_weight(const float *p) { return *p; }
DEVICE float2 load_weight(const float2 *p) { return *p; }
DEVICE float4 load_weight(const float4 *p) { return *p; }
DEVICE float half_to_float(unsigned short h) { return f16_to_f32(h); }
DEVICE unsigned minus_less(unsigned count, unsigned a, unsigned a_low, unsigned b, unsigned b_low) {
    return count - (a < b || (a == b && a_low < b_low) ? 1u : 0u);
}
DEVICE float load_l2(const float *p) { return *p; }
DEVICE float2 load_l2(const float2 *p) { return *p; }
DEVICE float4 load_l2(const float4 *p) { return *p; }
DEVICE uint4 load_l2(const uint4 *p) { return *p; }
DEVICE uint4 load_l2_where(bool there, const uint4 *p) { return there ? *p : make_uint4(~0u, ~0u, ~0u, ~0u); }
DEVICE float4 load_l2_where(bool there, const float4 *p) { return there ? *p : make_float4(NAN, NAN, NAN, NAN); }
DEVICE int load_l2(const int *p) { return *p; }
DEVICE unsigned load_l2(const unsigned *p) { return *p; }
DEVICE unsigned arrive(unsigned *counter, unsigned last) { return atomicInc(counter, last); }
DEVICE float reciprocal(float a) { return 1.0f / a; }
DEVICE float root(float x) { return sqrt_f32(x); }
DEVICE float max_or_nan(float a, float b) { return a != a || a > b ? a : b; }
DEVICE void settle(int &) {}
DEVICE void settle(float &) {}
template <class T> DEVICE void settle(T *&) {}
template <class T> DEVICE void settle_shared(T *&) {}
DEVICE int dot_u8_s8(unsigned a, unsigned b, int c) {
    for (int i = 0; i < 32; i += 8) c += (int)(a >> i & 0xffu) * (int)(signed char)(b >> i);
    return c;
}
DEVICE void mma_s8(int *d, const unsigned *a, const unsigned *b) { simt::mma(SIMT_SITE, simt::Collective::mma_s8, d, a, b); }
DEVICE void mma_u8_s8(int *d, const unsigned *a, const unsigned *b) {
    simt::mma(SIMT_SITE, simt::Collective::mma_u8_s8, d, a, b);
}
DEVICE void load_halves(unsigned *words, const void *row) { simt::load_halves(SIMT_SITE, words, row); }
DEVICE void copy_async_16(void *shared, const void *global) { simt::copy_async(shared, global, 16); }
DEVICE void copy_wait_all() { simt::copy_wait_all(); }
DEVICE void copy_close() { simt::copy_close(); }
DEVICE void copy_wait_closed() { simt::copy_wait_closed(); }
DEVICE void prefetch_l2(const void *) {}
DEVICE void touch_l1(const void *) {}
DEVICE void wait_for_previous() {}
DEVICE void wait_for_previous(const void *) {}
DEVICE void start_next() {}
DEVICE int cluster_rank() { return simt::cluster_rank(); }
DEVICE int cluster_size() { return simt::cluster_size(); }
DEVICE void cluster_arrive(simt::Site site = simt::caller()) { simt::cluster_arrive(site); }
DEVICE void cluster_wait(simt::Site site = simt::caller()) { simt::cluster_wait(site); }
DEVICE void cluster_sync(simt::Site site = simt::caller()) {
    simt::cluster_arrive(site);
    simt::cluster_wait(site);
}
template <class T> DEVICE void cluster_store(T *shared, int rank, T v, simt::Site site = simt::caller()) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 16, "words of 4 bytes, one or four");
    std::memcpy(simt::cluster_address(site, shared, rank, sizeof v), &v, sizeof v);
}
DEVICE void cluster_open(unsigned long long *gate, simt::Site site = simt::caller()) {
    if (cluster_size() == 1) return;
    if (threadIdx.x % 32 == 0) simt::cluster_open(site, gate);
    simt::warp_collective(site, simt::Collective::sync, 0xffffffffu, 0, 0, 32);
}
DEVICE void cluster_begin(simt::Site site = simt::caller()) { simt::cluster_begin(site); }
DEVICE void cluster_expect(unsigned long long *gate, int bytes, simt::Site site = simt::caller()) {
    if (cluster_size() > 1 && threadIdx.x % 32 == 0) simt::cluster_expect(site, gate, bytes);
}
template <class T>
DEVICE void cluster_send(T *shared, int rank, T v, unsigned long long *gate, simt::Site site = simt::caller()) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 16, "words of 4 bytes, one or four");
    if (cluster_size() == 1)
        std::memcpy(simt::cluster_address(site, shared, rank, sizeof v), &v, sizeof v);
    else
        simt::cluster_send(site, shared, rank, &v, sizeof v, gate);
}
DEVICE void cluster_receive(unsigned long long *gate, unsigned turn, simt::Site site = simt::caller()) {
    if (cluster_size() == 1)
        simt::block_barrier(site);
    else
        simt::cluster_receive(site, gate, turn);
}

#endif

#define FULL_WARP 0xffffffffu

#if !(__CUDA_ARCH__ >= 900)
// Bulk copies of a warp where there are no gates.
DEVICE void plain_bulk_copy(void *shared, const void *global, int bytes) {
    for (int i = 16 * (threadIdx.x % 32); i < bytes; i += 512) copy_async_16((char *)shared + i, (const char *)global + i);
}
DEVICE void plain_bulk_wait() {
    copy_wait_all();
    __syncwarp();
}
#endif

// BULK_GATES: whether a gate makes a copy visible to warps that did not ask for it. Where it does not, that takes a
// copy_wait_all of the warp that asked and a barrier of the block.
#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define BULK_GATES (__CUDA_ARCH__ >= 900)
#if !BULK_GATES
DEVICE void bulk_open(unsigned long long *) {}
DEVICE void bulk_expect(unsigned long long *, int) {}
DEVICE void bulk_copy(void *shared, const void *global, int bytes, unsigned long long *) {
    plain_bulk_copy(shared, global, bytes);
}
DEVICE void bulk_wait(unsigned long long *, unsigned) { plain_bulk_wait(); }
#endif
#else
#define BULK_GATES simt::bulk_gates  // of the launch
DEVICE void bulk_open(unsigned long long *gate, simt::Site site = simt::caller()) {
    if (!BULK_GATES) return;
    if (threadIdx.x % 32 == 0) simt::gate_open(site, gate);
    simt::warp_collective(site, simt::Collective::sync, FULL_WARP, 0, 0, 32);
}
DEVICE void bulk_expect(unsigned long long *gate, int bytes, simt::Site site = simt::caller()) {
    if (BULK_GATES && threadIdx.x % 32 == 0) simt::gate_expect(site, gate, bytes);
}
DEVICE void bulk_copy(void *shared, const void *global, int bytes, unsigned long long *gate,
                      simt::Site site = simt::caller()) {
    if (!BULK_GATES)
        plain_bulk_copy(shared, global, bytes);
    else if (threadIdx.x % 32 == 0)
        simt::bulk_copy(site, shared, global, bytes, gate);
}
DEVICE void bulk_wait(unsigned long long *gate, unsigned turn, simt::Site site = simt::caller()) {
    if (BULK_GATES)
        simt::gate_wait(site, gate, turn);
    else
        plain_bulk_wait();
}
#endif

DEVICE int lane_id() { return (int)(threadIdx.x & 31u); }
DEVICE int warp_id() { return (int)(threadIdx.x >> 5); }
DEVICE int warp_count() { return (int)(blockDim.x >> 5); }

// Counts this block's arrival at a counter that wraps to zero; the last of `blocks` gets true and sees what all of
// them wrote. The whole block calls it; `slot` is u32[1] of shared memory.
DEVICE bool last_block_to_arrive(unsigned *counter, int blocks, unsigned *slot) {
    __syncthreads();
    if (threadIdx.x == 0) *slot = arrive(counter, (unsigned)blocks - 1u);  // the barriers make it the whole block's
    __syncthreads();
    return *slot == (unsigned)blocks - 1u;
}

// Maximum over the lanes that differ in the bits of `lanes - 1` (lanes: a power of two). Integer, so order-free.
DEVICE unsigned group_max_u32(unsigned v, int lanes) {
    for (int step = 1; step < lanes; step <<= 1) {
        const unsigned other = __shfl_xor_sync(FULL_WARP, v, step);
        v = other > v ? other : v;
    }
    return v;
}

// Sum over the same lanes; integer, so order-free.
DEVICE int group_sum_s32(int v, int lanes) {
    for (int step = 1; step < lanes; step <<= 1) v += __shfl_xor_sync(FULL_WARP, v, step);
    return v;
}

// hsum8 over lanes 0..7 of each group of 8: f32 addition commutes, so both partners of a shuffle get the same bits.
DEVICE float group_hsum8(float a) {
    a = a + __shfl_xor_sync(FULL_WARP, a, 4);  // lo[k] = a[k] + a[k+4]
    a = a + __shfl_xor_sync(FULL_WARP, a, 1);  // lo0 + lo1, lo2 + lo3
    return a + __shfl_xor_sync(FULL_WARP, a, 2);
}

// hsum32 over the lanes of a warp; every lane gets it.
DEVICE float warp_hsum32(float a) {
    a = a + __shfl_xor_sync(FULL_WARP, a, 16);  // b[k] = a[k] + a[k+16]
    a = a + __shfl_xor_sync(FULL_WARP, a, 8);   // c[k] = b[k] + b[k+8]
    return group_hsum8(a);
}
