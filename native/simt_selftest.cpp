// Small kernels that test the CUDA shim itself: each says what a correct shim makes of it. Those named *_fault hold the
// mistake that their test must see.
#include "simt_kernels.h"

#include "../kernels/port.cuh"

struct SelftestArgs {
    int *out;
    int *in;
    int n;
    int reserved;
};

namespace {

int linear_thread() { return (int)((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x); }
int linear_block() { return (int)((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x); }
int block_size() { return (int)(blockDim.x * blockDim.y * blockDim.z); }

// out[thread] = in[block_size - 1 - thread], by way of shared memory.
void reverse(const SelftestArgs &a, bool barrier) {
    __shared__ int tile[1024];
    const int i = linear_thread(), n = block_size(), base = linear_block() * n;
    tile[i] = a.in[base + i];
    if (barrier) __syncthreads();
    a.out[base + i] = tile[n - 1 - i];
}

}  // namespace

KERNEL void t_reverse(const SelftestArgs a) { reverse(a, true); }
KERNEL void t_missing_barrier_fault(const SelftestArgs a) { reverse(a, false); }

// Half of the threads meet another barrier.
KERNEL void t_divergent_barrier_fault(const SelftestArgs a) {
    if (threadIdx.x % 2)
        __syncthreads();
    else
        __syncthreads();
    a.out[linear_thread()] = 1;
}

// A thread leaves before the barrier.
KERNEL void t_early_exit_fault(const SelftestArgs a) {
    if (threadIdx.x == 0) return;
    __syncthreads();
    a.out[linear_thread()] = 1;
}

// Lanes of a full mask that never come.
KERNEL void t_missing_lane_fault(const SelftestArgs a) {
    if (threadIdx.x % 2 == 0) a.out[linear_thread()] = __shfl_sync(0xffffffffu, (int)threadIdx.x, 0);
    __syncthreads();
}

// Reads what no thread wrote.
KERNEL void t_uninitialised_shared(const SelftestArgs a) {
    __shared__ int tile[32];
    DYNAMIC_SHARED(dynamic);
    a.out[2 * threadIdx.x] = tile[threadIdx.x];
    a.out[2 * threadIdx.x + 1] = reinterpret_cast<int *>(dynamic)[threadIdx.x];
    tile[threadIdx.x] = 5;  // must not be seen by the next block
}

// One int past what the launch asked for.
KERNEL void t_shared_overflow_fault(const SelftestArgs a) {
    DYNAMIC_SHARED(dynamic);
    if (threadIdx.x == 0) reinterpret_cast<int *>(dynamic)[a.n] = 1;
}

// out: [8][32], one row per operation.
KERNEL void t_shuffles(const SelftestArgs a) {
    const int lane = (int)threadIdx.x, v = a.in[lane];
    const unsigned all = 0xffffffffu;
    a.out[0 * 32 + lane] = __shfl_sync(all, v, 5);
    a.out[1 * 32 + lane] = __shfl_up_sync(all, v, 3);
    a.out[2 * 32 + lane] = __shfl_down_sync(all, v, 3);
    a.out[3 * 32 + lane] = __shfl_xor_sync(all, v, 7);
    a.out[4 * 32 + lane] = __shfl_xor_sync(all, v, 2, 8);
    a.out[5 * 32 + lane] = (int)__ballot_sync(all, v % 3 == 0);
    a.out[6 * 32 + lane] = (int)__reduce_max_sync(all, (unsigned)v);
    // Two halves of the warp with masks of their own.
    const unsigned mine = lane < 16 ? 0xffffu : 0xffff0000u;
    if (lane < 16)
        a.out[7 * 32 + lane] = __shfl_sync(mine, v, 2);
    else
        a.out[7 * 32 + lane] = __shfl_sync(mine, v, 20);
}

// A value handed from lane to lane through shared memory; without __syncwarp the order of lanes shows.
static void rotate_in_warp(const SelftestArgs &a, bool sync) {
    __shared__ int slot[32];
    const int lane = (int)threadIdx.x;
    int v = a.in[lane];
    for (int round = 0; round < a.n; round++) {
        slot[lane] = v;
        if (sync) __syncwarp();
        v = slot[(lane + 1) % 32] + 1;
        if (sync) __syncwarp();
    }
    a.out[lane] = v;
}
KERNEL void t_syncwarp(const SelftestArgs a) { rotate_in_warp(a, true); }
KERNEL void t_missing_syncwarp_fault(const SelftestArgs a) { rotate_in_warp(a, false); }

// Every (block, thread) of a 3-D launch writes its own cell.
KERNEL void t_grid(const SelftestArgs a) {
    const int cell = linear_block() * block_size() + linear_thread();
    a.out[cell] = (int)(blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z) * 1000 +
                  (int)(threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z);
}

// out[0] += 1 per thread; out[1] = largest thread of all; out[2] counts who saw the last ticket.
KERNEL void t_atomics(const SelftestArgs a) {
    __shared__ int in_block;
    if (linear_thread() == 0) in_block = 0;
    __syncthreads();
    atomicAdd(&in_block, 1);
    __syncthreads();
    if (linear_thread() == 0) atomicAdd(a.out, in_block);
    atomicMax(a.out + 1, linear_block() * block_size() + linear_thread());
    const unsigned total = gridDim.x * (unsigned)block_size();
    if (atomicInc(reinterpret_cast<unsigned *>(a.in), total - 1) == total - 1) atomicAdd(a.out + 2, 1);
}

// Copies that are waited for, or not.
static void copy_through_shared(const SelftestArgs &a, bool wait) {
    DYNAMIC_SHARED(dynamic);
    int *const tile = reinterpret_cast<int *>(dynamic);
    if (threadIdx.x < 8) simt::copy_async(tile + 4 * threadIdx.x, a.in + 4 * threadIdx.x, 16);
    if (wait) simt::copy_wait_all();
    __syncthreads();
    a.out[threadIdx.x] = tile[threadIdx.x];
    __syncthreads();
    if (!wait) simt::copy_wait_all();
}
KERNEL void t_copy_async(const SelftestArgs a) { copy_through_shared(a, true); }
KERNEL void t_missing_copy_wait_fault(const SelftestArgs a) { copy_through_shared(a, false); }

// Which block runs when: out[ticket] = block.
KERNEL void t_order(const SelftestArgs a) {
    if (linear_thread() == 0) a.out[atomicAdd(a.in, 1)] = linear_block();
}

// Blocks of a cluster hand values on: each reads from the block that lies `round` ahead, in turns through two buffers in
// dynamic shared memory, writes to the one behind, and adds what its __shared__ variable says of its block.
// `arrive_early`: work lies between the halves of the barrier.
namespace {

struct Exchange {
    float4 wide;
    uint2 pair;
    float number;
    int count;
};

void exchange(const SelftestArgs &a, bool barrier, bool arrive_early) {
    __shared__ int mine[256];
    DYNAMIC_SHARED(dynamic);
    const int threads = block_size(), i = linear_thread(), rank = cluster_rank(), size = cluster_size();
    Exchange *const all = reinterpret_cast<Exchange *>(dynamic), *const got = all + 2 * threads;
    const int number = linear_block() * threads + i;
    int total = a.in[number];
    mine[i] = 1000 * linear_block() + i;
    cluster_sync();
    for (int round = 0; round < a.n; round++) {
        Exchange &e = all[round % 2 * threads + i];
        const float f = (float)total;
        e = {{f, f + 1.0f, f + 2.0f, f + 3.0f}, {(unsigned)total, 5u}, f + 4.0f, total + 6};
        if (arrive_early) {
            cluster_arrive();
            __syncthreads();
            cluster_wait();
        } else if (barrier) {
            cluster_sync();
        }
        const int from = (rank + round + 1) % size, behind = (rank + size - 1) % size;
        const float4 wide = cluster_load(&e.wide, from);
        const uint2 pair = cluster_load(&e.pair, from);
        const float one = cluster_load(&e.number, from);
        const int count = cluster_load(&e.count, from);
        const bool whole = wide.y == wide.x + 1.0f && wide.z == wide.x + 2.0f && wide.w == wide.x + 3.0f && pair.y == 5u &&
                           one == wide.x + 4.0f && (int)pair.x == (int)wide.x && count == (int)pair.x + 6;
        // What this block gives to the one behind it: its total and the number of its own thread.
        cluster_store(&got[i].count, behind, whole ? (int)pair.x : -1000);
        cluster_store(&got[i].wide, behind, make_float4(1.0f, 2.0f, 3.0f, (float)round));
        if (barrier || arrive_early) cluster_sync();
        total = got[i].count + mine[(i + 1) % threads] + (int)got[i].wide.w;
        __syncthreads();
    }
    a.out[number] = total;
    cluster_sync();
}

}  // namespace

KERNEL void t_cluster(const SelftestArgs a) { exchange(a, true, false); }
KERNEL void t_cluster_early(const SelftestArgs a) { exchange(a, true, true); }
KERNEL void t_missing_cluster_barrier_fault(const SelftestArgs a) { exchange(a, false, false); }

// Static shared memory of another block, by `n`: as it is, or with a mistake.
KERNEL void t_cluster_access(const SelftestArgs a) {
    __shared__ int tile[2];
    DYNAMIC_SHARED(dynamic);
    int *const values = reinterpret_cast<int *>(dynamic);
    const int other = cluster_size() - 1 - cluster_rank();
    int local = 0;
    if (threadIdx.x == 0) tile[1] = 7 + cluster_rank();
    if (a.n == 1) a.out[0] = cluster_load(values, other);  // it may not have begun
    cluster_sync();
    int v = 0;
    if (a.n == 0) v = cluster_load(tile + 1, other);
    if (a.n == 2) v = cluster_load(&local, other);
    if (a.n == 3) v = cluster_load(values, cluster_size());
    if (a.n == 4) v = cluster_load(values, -1);
    if (a.n == 5) v = (int)cluster_load(reinterpret_cast<const uint2 *>(values + 1), other).x;
    if (a.n == 6) v = cluster_load(values + 32, other);  // the first that the launch did not ask for
    if (a.n == 7 && cluster_rank() == 1 && threadIdx.x == 3) return;
    cluster_sync();
    if (a.n == 8 && cluster_rank() == 0) v = cluster_load(values, other);  // it may have left
    if (a.n == 9 && cluster_rank() == 0) return;
    if (a.n == 9) v = cluster_load(values, other);
    if (a.n == 9) cluster_sync();
    if (a.n == 10) v = cluster_load(values, cluster_rank());  // its own
    a.out[linear_block() * block_size() + linear_thread()] = v;
}

// By `n`: how the barrier of a cluster is called amiss.
KERNEL void t_cluster_barrier_fault(const SelftestArgs a) {
    const bool odd = threadIdx.x % 2 != 0, second = cluster_rank() == 1;
    switch (a.n) {
    case 0:
        if (odd)
            cluster_sync();
        else
            cluster_sync();
        break;
    case 1:
        if (!second) cluster_sync();  // the whole block leaves it out
        break;
    case 2:
        if (!second || odd) cluster_sync();  // a part of the block
        break;
    case 3:
        second && odd ? __syncthreads() : cluster_sync();
        break;
    case 4: cluster_arrive(); break;
    case 5: cluster_wait(); break;
    case 6:
        cluster_arrive();
        cluster_arrive();
        break;
    case 7:
        cluster_arrive();
        if (odd)
            cluster_wait();
        else
            cluster_wait();
        break;
    case 8:
        if (second && threadIdx.x == 0) __syncwarp();
        cluster_sync();
        break;
    default:  // no mistake: blocks may meet from different places
        if (second)
            cluster_sync();
        else
            cluster_sync();
    }
    a.out[linear_block() * block_size() + linear_thread()] = 1;
}

// Which block of a cluster runs when: out[ticket] = block.
KERNEL void t_cluster_order(const SelftestArgs a) {
    for (int i = 0; i < a.n; i++) {
        if (linear_thread() == 0) a.out[atomicAdd(a.in, 1)] = linear_block();
        __syncthreads();
    }
}

// One int past what the launch asked for, in the block `reserved`.
KERNEL void t_cluster_overflow_fault(const SelftestArgs a) {
    DYNAMIC_SHARED(dynamic);
    if (threadIdx.x == 0 && cluster_rank() == a.reserved) reinterpret_cast<int *>(dynamic)[a.n] = 1;
}

// Each warp brings `reserved` pieces of 32 ints from `in` to `out` by way of a ring of two places, each with a gate: two
// lanes ask for the halves of a piece, and all lanes read it the other way round.
namespace {

// Mistakes, by `n`; tests/kernels/test_shim.py has the same numbers.
enum {
    kNoMistake,
    kNotOpened,
    kOpenedTwice,
    kTurnAhead,
    kTurnBehind,
    kFewerBytes,
    kMoreBytes,
    kNotExpected,
    kExpectedTwice,
    kWrongPlace,
    kWrongGate,
    kPlaceOff,
    kSourceOff,
    kOddLength,
    kLocalPlace,
    kStrangeGate,
    kGateWritten,
    kPlaceWritten,
    kSourceWritten,
    kLastNotWaited,
    kOneWaitMore,
    kNoWait,
    kNoSync,
    kAskedTooEarly,
    kLastNotExpected,
    kLastMoreBytes,
};

void bulk_stream(const SelftestArgs &a) {
    DYNAMIC_SHARED(shared);
    const int warp = warp_id(), lane = lane_id(), pieces = a.reserved, fault = a.n;
    unsigned long long *const gates = reinterpret_cast<unsigned long long *>(shared) + 2 * warp;
    int *const ring = reinterpret_cast<int *>(shared + 16 * warp_count()) + 64 * warp;
    const int first = 32 * pieces * (linear_block() * warp_count() + warp);
    int *const from = a.in + first, *const to = a.out + first;
    alignas(16) int local[32];
    const auto ask = [&](int piece) {
        if (piece >= pieces) return;
        const int place = piece % 2;
        const bool last = piece == pieces - 1;
        unsigned long long *gate = gates + place;
        int *half = ring + 32 * (fault == kWrongPlace && piece >= 2 ? 1 - place : place);
        const int *source = from + 32 * piece;
        int bytes = 128;
        if (fault == kFewerBytes) bytes = 64;
        if (fault == kMoreBytes || (fault == kLastMoreBytes && last)) bytes = 144;
        if (fault != kNotExpected && !(fault == kLastNotExpected && last)) bulk_expect(gate, bytes);
        if (fault == kExpectedTwice) bulk_expect(gate, 0);
        if (fault == kWrongGate && piece >= 2) gate = gates + 1 - place;
        if (fault == kStrangeGate) gate = reinterpret_cast<unsigned long long *>(local);
        if (fault == kPlaceOff) half += 1;
        if (fault == kSourceOff) source += 1;
        if (fault == kLocalPlace) half = local;
        for (int i = 0; i < 32; i += 16) bulk_copy(half + i, source + i, fault == kOddLength ? 60 : 64, gate);
        if (fault == kPlaceWritten && lane == 1) half[19] = 7;
        if (fault == kSourceWritten && lane == 1) const_cast<int *>(source)[19]++;
    };
    for (int i = 0; i < 2; i++) {
        if (fault != kNotOpened || i == 0) bulk_open(gates + i);
        if (fault == kOpenedTwice) bulk_open(gates + i);
        if (fault == kGateWritten && lane == 0) gates[0] = 5;
        __syncwarp();
        ask(i);
    }
    unsigned turn = 0;
    for (int piece = 0; piece < pieces; piece++) {
        const int place = piece % 2;
        unsigned seen = turn;
        if (fault == kTurnAhead) seen++;
        if (fault == kTurnBehind) seen = 0;
        const bool last_missing = fault == kLastNotWaited || fault == kLastNotExpected || fault == kLastMoreBytes;
        if (last_missing && piece == pieces - 1) return;
        if (fault != kNoWait) bulk_wait(gates + place, seen);
        if (fault == kAskedTooEarly) ask(piece + 2);
        to[32 * piece + lane] = ring[32 * place + 31 - lane];
        if (fault != kNoSync) __syncwarp();
        if (fault == kNoWait) bulk_wait(gates + place, seen);
        if (fault != kAskedTooEarly) ask(piece + 2);
        if (place) turn++;
    }
    if (fault == kOneWaitMore) bulk_wait(gates, turn + (unsigned)(pieces % 2));
}

}  // namespace

KERNEL void t_bulk(const SelftestArgs a) { bulk_stream(a); }

// One warp of a block opens gates in static shared memory and asks; all wait. `n`: 1 without a barrier ahead of the wait, 2
// with a first gate that is two turns ahead by then, 3 with a warp that waits once more where the others meet.
KERNEL void t_bulk_shared(const SelftestArgs a) {
    __shared__ __align__(16) int tile[64];
    __shared__ unsigned long long gates[2];
    const int i = linear_thread();
    if (warp_id() == 0) {
        for (int g = 0; g < 2; g++) {
            bulk_open(gates + g);
            bulk_expect(gates + g, 128);
            bulk_copy(tile + 32 * g, a.in + 64 * linear_block() + 32 * g, 128, gates + g);
        }
    }
    if (a.n == 2 && warp_id() == 0) {
        bulk_wait(gates, 0);
        __syncwarp();
        bulk_expect(gates, 0);
        bulk_wait(gates, 1);
    }
    if (a.n != 1) __syncthreads();
    int sum = 0;
    for (int g = 0; g < 2; g++) {
        bulk_wait(gates + g, 0);
        for (int j = 0; j < 32; j++) sum += tile[32 * g + j];
    }
    a.out[linear_block() * block_size() + i] = sum;
    if (a.n == 3) {
        if (warp_id() == 1)
            bulk_wait(gates, 1);
        else
            __syncthreads();
    }
    cluster_sync();
}

// How many copies have arrived when they need not: out[block] counts those of eight that a thread sees.
KERNEL void t_bulk_early(const SelftestArgs a) {
    __shared__ __align__(16) int tile[32];
    __shared__ unsigned long long gate;
    bulk_open(&gate);
    bulk_expect(&gate, 128);
    for (int i = 0; i < 8; i++) bulk_copy(tile + 4 * i, a.in + 4 * i, 16, &gate);
    __syncwarp();
    const int seen = __popc(__ballot_sync(FULL_WARP, tile[lane_id()] != -1)) / 4;
    if (lane_id() == 0) a.out[linear_block()] = seen;
    bulk_wait(&gate, 0);
}

namespace simt {

const std::vector<Kernel> &selftest_kernels() {
    static const std::vector<Kernel> table = {
        SIMT_KERNEL(t_reverse, SelftestArgs),
        SIMT_KERNEL(t_missing_barrier_fault, SelftestArgs),
        SIMT_KERNEL(t_divergent_barrier_fault, SelftestArgs),
        SIMT_KERNEL(t_early_exit_fault, SelftestArgs),
        SIMT_KERNEL(t_missing_lane_fault, SelftestArgs),
        SIMT_KERNEL(t_uninitialised_shared, SelftestArgs),
        SIMT_KERNEL(t_shared_overflow_fault, SelftestArgs),
        SIMT_KERNEL(t_shuffles, SelftestArgs),
        SIMT_KERNEL(t_syncwarp, SelftestArgs),
        SIMT_KERNEL(t_missing_syncwarp_fault, SelftestArgs),
        SIMT_KERNEL(t_grid, SelftestArgs),
        SIMT_KERNEL(t_atomics, SelftestArgs),
        SIMT_KERNEL(t_copy_async, SelftestArgs),
        SIMT_KERNEL(t_missing_copy_wait_fault, SelftestArgs),
        SIMT_KERNEL(t_order, SelftestArgs),
        SIMT_KERNEL(t_cluster, SelftestArgs),
        SIMT_KERNEL(t_cluster_early, SelftestArgs),
        SIMT_KERNEL(t_missing_cluster_barrier_fault, SelftestArgs),
        SIMT_KERNEL(t_cluster_access, SelftestArgs),
        SIMT_KERNEL(t_cluster_barrier_fault, SelftestArgs),
        SIMT_KERNEL(t_cluster_order, SelftestArgs),
        SIMT_KERNEL(t_cluster_overflow_fault, SelftestArgs),
        SIMT_KERNEL(t_bulk, SelftestArgs),
        SIMT_KERNEL(t_bulk_shared, SelftestArgs),
        SIMT_KERNEL(t_bulk_early, SelftestArgs),
    };
    return table;
}

}  // namespace simt
