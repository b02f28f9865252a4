// Small kernels in clusters of blocks, which test the CUDA shim. Those named *_fault hold the mistake that their test must see,
// or `n` names it.
#include "simt_selftest.h"

// Blocks of a cluster hand values on: each reads from the block that lies `round` ahead, in turns through two buffers in
// dynamic shared memory, writes to the one behind, and adds what its __shared__ variable says of its block and what its warp
// exchanges. `arrive_early`: work lies between the halves of the barrier.
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
        int lanes = 0;
        if (arrive_early) {
            cluster_arrive();
            __syncthreads();
            lanes = __shfl_xor_sync(FULL_WARP, mine[i], 5);
            cluster_wait();
        } else {
            if (barrier) cluster_sync();
            lanes = __shfl_xor_sync(FULL_WARP, mine[i], 5);
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
        total = got[i].count + mine[(i + 1) % threads] + lanes + (int)got[i].wide.w;
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

// Bulk copies of each block while blocks take turns, one to static shared memory and one to dynamic. For the latter the first
// warp asks behind the cluster's barrier, when the block behind has told it the round; the others wait for it ahead of that.
// in: i32[blocks, reserved, 64]. Mistakes: 1, the last copy is not waited for; 2, it is read ahead of that; 3, nobody asks for
// it; 4, its place is written while other blocks run; 5, a block leaves ahead of the last barrier, and so nobody asks.
KERNEL void t_cluster_bulk(const SelftestArgs a) {
    __shared__ __align__(16) int tile[32];
    __shared__ unsigned long long gate;
    __shared__ int told;
    DYNAMIC_SHARED(dynamic);
    unsigned long long *const far_gate = reinterpret_cast<unsigned long long *>(dynamic);
    int *const far_tile = reinterpret_cast<int *>(dynamic + 16);
    const int lane = lane_id(), block = linear_block();
    const bool asks = warp_id() == 0;
    if (asks) {
        bulk_open(&gate);
        bulk_open(far_gate);
    }
    __syncthreads();
    cluster_sync();
    int sum = 0;
    for (int round = 0; round < a.reserved; round++) {
        const bool last = round == a.reserved - 1;
        const int *const piece = a.in + 64 * (block * a.reserved + round);
        if (asks) {
            bulk_expect(&gate, 128);
            bulk_copy(tile, piece, 128, &gate);
        } else if (linear_thread() == 32 && !(last && a.n == 5)) {
            cluster_store(&told, (cluster_rank() + 1) % cluster_size(), round);
        }
        if (last && a.n == 5 && cluster_rank() == 1) {
            bulk_wait(&gate, (unsigned)round);
            return;
        }
        cluster_arrive();
        if (!asks && !(last && (a.n == 1 || a.n == 2))) bulk_wait(far_gate, (unsigned)round);
        cluster_wait();
        if (asks) {
            bulk_expect(far_gate, 128);
            if (!last || a.n != 3) bulk_copy(far_tile, piece + 32 * (told == round), 128, far_gate);
            if (last && a.n == 4 && lane == 0) far_tile[3] = 1;
        }
        bulk_wait(&gate, (unsigned)round);
        if (last && a.n == 2) sum += far_tile[31 - lane];
        if (!last || a.n != 1) bulk_wait(far_gate, (unsigned)round);
        sum += tile[lane] + 2 * far_tile[lane];
        cluster_sync();
    }
    a.out[block * block_size() + linear_thread()] = sum;
}

// Which block of a cluster runs when: out[ticket] = block, of every thread.
KERNEL void t_cluster_order(const SelftestArgs a) {
    for (int i = 0; i < a.n; i++) {
        a.out[atomicAdd(a.in, 1)] = linear_block();
        __syncwarp();
    }
}

// Int `n` of dynamic shared memory is written, which is past its end for a mistake, in the block `reserved`, when all have begun.
KERNEL void t_cluster_overflow_fault(const SelftestArgs a) {
    DYNAMIC_SHARED(dynamic);
    cluster_sync();
    if (threadIdx.x == 0 && cluster_rank() == a.reserved) reinterpret_cast<int *>(dynamic)[a.n] = 1;
}

namespace simt {

const std::vector<Kernel> &cluster_selftest_kernels() {
    static const std::vector<Kernel> table = {
        SIMT_KERNEL(t_cluster, SelftestArgs),
        SIMT_KERNEL(t_cluster_early, SelftestArgs),
        SIMT_KERNEL(t_missing_cluster_barrier_fault, SelftestArgs),
        SIMT_KERNEL(t_cluster_access, SelftestArgs),
        SIMT_KERNEL(t_cluster_barrier_fault, SelftestArgs),
        SIMT_KERNEL(t_cluster_bulk, SelftestArgs),
        SIMT_KERNEL(t_cluster_order, SelftestArgs),
        SIMT_KERNEL(t_cluster_overflow_fault, SelftestArgs),
    };
    return table;
}

}  // namespace simt
