// Small kernels in clusters of blocks, which test the CUDA shim. Those named *_fault hold the mistake that their test must see,
// or `n` names it.
#include "simt_selftest.h"

// Blocks of a cluster hand values on: each writes its total to the block for which it lies `round` + 1 ahead, in turns to two
// buffers in dynamic shared memory, hands what it got to the one behind, and adds what its __shared__ variable says of its
// block, what its warp exchanges, and the round. `arrive_early`: work lies between the halves of the barrier.
namespace {

void exchange(const SelftestArgs &a, bool barrier, bool arrive_early) {
    __shared__ int mine[256];
    DYNAMIC_SHARED(dynamic);
    const int threads = block_size(), i = linear_thread(), rank = cluster_rank(), size = cluster_size();
    int *const turns = reinterpret_cast<int *>(dynamic), *const got = turns + 2 * threads;  // i32[2, threads], i32[threads]
    const int number = linear_block() * threads + i;
    int total = a.in[number];
    mine[i] = 1000 * linear_block() + i;
    cluster_sync();
    for (int round = 0; round < a.n; round++) {
        int *const turn = turns + round % 2 * threads + i;
        cluster_store(turn, (rank + size - (round + 1) % size) % size, total);
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
        cluster_store(got + i, (rank + size - 1) % size, *turn);
        if (barrier || arrive_early) cluster_sync();
        total = got[i] + mine[(i + 1) % threads] + lanes + round;
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
    if (a.n == 1) cluster_store(values, other, 1);  // it may not have begun
    cluster_sync();
    if (a.n == 0) cluster_store(tile + 1, other, 7 + cluster_rank());
    if (a.n == 2) cluster_store(&local, other, 1);
    if (a.n == 3) cluster_store(values, cluster_size(), 1);
    if (a.n == 4) cluster_store(values, -1, 1);
    if (a.n == 5) cluster_store(reinterpret_cast<int *>(dynamic + 2), other, 1);
    if (a.n == 6) cluster_store(values + 32, other, 1);  // the first that the launch did not ask for
    if (a.n == 7 && cluster_rank() == 1 && threadIdx.x == 3) return;
    cluster_sync();
    if (a.n == 8 && cluster_rank() == 0) cluster_store(values, other, 1);  // it may have left
    if (a.n == 9 && cluster_rank() == 0) return;
    if (a.n == 9) cluster_store(values, other, 1);
    if (a.n == 9) cluster_sync();
    if (a.n == 10) cluster_store(tile + 1, cluster_rank(), 5);  // its own
    a.out[linear_block() * block_size() + linear_thread()] = tile[1];
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

// Each thread sends its total to all blocks, and four numbers to the next one, in turns to two places, each with a gate, and
// makes its next total of what its neighbours' numbers are; nothing but gates says when. in: i32[blocks, threads].
// Dynamic: float4[2, threads], i32[2, cluster, threads].
KERNEL void t_cluster_send(const SelftestArgs a) {
    __shared__ unsigned long long gates[2];
    DYNAMIC_SHARED(dynamic);
    const int threads = block_size(), i = linear_thread(), rank = cluster_rank(), size = cluster_size();
    float4 *const quads = reinterpret_cast<float4 *>(dynamic);
    int *const words = reinterpret_cast<int *>(quads + 2 * threads);
    const int number = linear_block() * threads + i;
    int total = a.in[number];
    if (warp_id() == 1 % warp_count())
        for (int turn = 0; turn < 2; turn++) cluster_open(gates + turn);
    cluster_begin();
    cluster_wait();
    for (int round = 0; round < a.n; round++) {
        float4 *const quad = quads + round % 2 * threads;
        int *const word = words + round % 2 * size * threads;
        unsigned long long *const gate = gates + round % 2;
        const bool expects = warp_id() == round % warp_count();
        if (expects && round % 3 != 0) cluster_expect(gate, 4 * size * threads + 16 * threads);
        for (int to = 0; to < size; to++) cluster_send(word + rank * threads + i, to, total, gate);
        cluster_send(quad + i, (rank + 1) % size,
                     make_float4((float)(total & 0xfff), (float)i, (float)rank, (float)round), gate);
        if (expects && round % 3 == 0) cluster_expect(gate, 4 * size * threads + 16 * threads);
        __syncthreads();  // all have received the turn before this one
        cluster_receive(gate, (unsigned)(round / 2));
        const float4 four = quad[(i + 3) % threads];
        total = (int)(four.x + 2 * four.y + 3 * four.z + 5 * four.w);
        for (int from = 0; from < size; from++)
            total += (int)((from + 1u) * (unsigned)word[from * threads + (i + 1) % threads]);
    }
    a.out[number] = total;
}

// By `n`: what may go wrong with sends; 0: nothing. Each thread of a block sends one word to the other block.
KERNEL void t_cluster_send_fault(const SelftestArgs a) {
    __shared__ int words[64], twice;
    __shared__ unsigned long long gate, late, bulk;
    DYNAMIC_SHARED(dynamic);
    const int i = linear_thread(), other = cluster_size() - 1 - cluster_rank(), bytes = 4 * block_size();
    const bool first = warp_id() == 0, second = cluster_rank() == 1;
    int local = 0;
    if (a.n == 3 ? first && second : first) cluster_open(&gate);
    if (a.n == 15 && first) bulk_open(&bulk);
    if (a.n == 22 && first) cluster_open(&gate);
    if (a.n == 9) {
        cluster_sync();
        if (i == 0) cluster_store(&twice, other, 1);
    }
    cluster_begin();
    if (a.n == 20) return;
    if (a.n == 1) cluster_send(words + i, other, i, &gate);
    if (a.n == 23) cluster_send(words + i, cluster_rank(), i, &gate);
    cluster_wait();
    if (a.n == 2) {
        if (first) cluster_open(&late);
        __syncthreads();
        cluster_send(words + i, other, i, &late);
    }
    if (a.n == 21 && i == 0) gate = 1;
    if (a.n == 12) cluster_send(words + i, 2, i, &gate);
    if (a.n == 13) cluster_send(reinterpret_cast<int *>(dynamic + 2), other, i, &gate);
    if (a.n == 14) cluster_send(&local, other, i, &gate);
    if (first && (a.n != 5 || second)) cluster_expect(&gate, a.n == 4 ? bytes - 4 : a.n == 6 || a.n == 7 ? bytes + 4 : bytes);
    if (a.n == 11 && warp_id() == 1) cluster_expect(&gate, bytes);
    if (a.n == 25 && first) cluster_expect(&gate, 2);
    if (a.n == 7 && second) return;
    cluster_send(words + (a.n == 18 ? i / 2 : i), other, i, a.n == 15 ? &bulk : &gate);
    if (a.n == 10) cluster_send(words + i, other, i, &gate);  // of the next turn, which nobody awaits yet
    if (a.n == 16) local = words[63 - i] != -1;
    if (a.n == 26) bulk_wait(&gate, 0);
    if (a.n != 8 || i != 40) cluster_receive(&gate, a.n == 17 ? 1 : 0);
    if (a.n == 8) __syncthreads();  // which is no reason not to receive
    if (a.n == 19 && i == 0) cluster_expect(&gate, bytes);  // some threads may not have seen the end of this turn
    if (a.n == 27 && !second) cluster_send(words + i, other, i, &gate);  // the other block may have left
    a.out[linear_block() * block_size() + i] = words[63 - i] + 100 * local;
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
        SIMT_KERNEL(t_cluster_send, SelftestArgs),
        SIMT_KERNEL(t_cluster_send_fault, SelftestArgs),
        SIMT_KERNEL(t_cluster_order, SelftestArgs),
        SIMT_KERNEL(t_cluster_overflow_fault, SelftestArgs),
    };
    return table;
}

}  // namespace simt
