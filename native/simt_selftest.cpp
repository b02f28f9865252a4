// Small kernels that test the CUDA shim itself: each says what a correct shim makes of it. Those named *_fault hold the
// mistake that their test must see.
#include "simt_selftest.h"

namespace {

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

// in: u32[32, 6], a lane's words of A and of B; out: [12, 32], its elements of 5 + A B with A signed and unsigned, and its words
// of halves of A's words as 32 rows, the last one first.
KERNEL void t_matrices(const SelftestArgs a) {
    __shared__ __align__(16) unsigned char rows[512];
    const int lane = lane_id();
    const unsigned *const own = reinterpret_cast<const unsigned *>(a.in) + 6 * lane;
    int both[2][4] = {{5, 5, 5, 5}, {5, 5, 5, 5}};
    mma_s8(both[0], own, own + 4);
    mma_u8_s8(both[1], own, own + 4);
    for (int i = 0; i < 16; i++) rows[16 * lane + i] = static_cast<unsigned char>(own[i / 4] >> (8 * (i % 4)));
    __syncwarp();
    unsigned words[4];
    load_halves(words, rows + 16 * (31 - lane));
    for (int i = 0; i < 4; i++) {
        a.out[32 * i + lane] = both[0][i];
        a.out[32 * (4 + i) + lane] = both[1][i];
        a.out[32 * (8 + i) + lane] = static_cast<int>(words[i]);
    }
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

// Four sets of copies of a thread, the third of none: out[i] is what has arrived when all closed sets but the last have.
KERNEL void t_copy_sets(const SelftestArgs a) {
    __shared__ __align__(16) int tile[16];
    for (int i = 0; i < 4; i++) {
        if (i != 2) copy_async_16(tile + 4 * i, a.in + 4 * i);
        if (i < 3) copy_close();
        if (i == a.n) copy_wait_closed();
    }
    for (int i = 0; i < 16; i++) a.out[i] = tile[i];
    copy_wait_all();
}
KERNEL void t_missing_copy_wait_fault(const SelftestArgs a) { copy_through_shared(a, false); }

// Which block runs when: out[ticket] = block.
KERNEL void t_order(const SelftestArgs a) {
    if (linear_thread() == 0) a.out[atomicAdd(a.in, 1)] = linear_block();
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
        SIMT_KERNEL(t_copy_sets, SelftestArgs),
        SIMT_KERNEL(t_matrices, SelftestArgs),
        SIMT_KERNEL(t_missing_copy_wait_fault, SelftestArgs),
        SIMT_KERNEL(t_order, SelftestArgs),
        SIMT_KERNEL(t_bulk, SelftestArgs),
        SIMT_KERNEL(t_bulk_shared, SelftestArgs),
        SIMT_KERNEL(t_bulk_early, SelftestArgs),
    };
    return table;
}

}  // namespace simt
