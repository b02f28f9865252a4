// Small kernels whose blocks wait for each other, which test the CUDA shim. They leave words for each other in `in`, which
// holds UNWRITTEN ahead of the launch; `n` names the mistake that the test must see.
#include "simt_selftest.h"

namespace {

int word(const float4 &v, int i) { return (int)__float_as_uint(i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w); }

// A word that another block writes, by way of the 16 bytes it lies in.
int await_word(const int *words, int i, simt::Site site = simt::caller()) {
    return word(await_values(reinterpret_cast<const float4 *>(words + i / 4 * 4), site), i % 4);
}

}  // namespace

// In each of `reserved` rounds every block gives its values to the one before it, and all that a block has goes into the
// next: its stacks, both kinds of shared memory, what warps exchange. out: [2][blocks][threads], the second half 1 where
// shared memory began as poison.
KERNEL void t_exchange(const SelftestArgs a) {
    __shared__ int tile[384];
    DYNAMIC_SHARED(dynamic);
    int *const pairs = reinterpret_cast<int *>(dynamic);
    const int t = linear_thread(), n = block_size(), block = linear_block(), blocks = (int)gridDim.x;
    a.out[(blocks + block) * n + t] = tile[t] == -1 && pairs[t] == -1;
    int v = block * n + t, product[4] = {0, 0, 0, 0};
    for (int round = 0; round < a.reserved; round++) {
        int *const mail = a.in + round * blocks * n;
        tile[t] = v;
        pairs[t] = v % 1000;
        mail[block * n + t] = v;
        const int received = await_word(mail, (block + 1) % blocks * n + t);
        __syncthreads();
        v = (received + 3 * tile[n - 1 - t] + 5 * pairs[(t + 1) % n]) % 1000003;
        v = v + 7 * __shfl_xor_sync(FULL_WARP, v, 5);
        const unsigned rows = 0x01010101u * (unsigned)(1 + (block + round) % 100), ones = 0x01010101u;
        const unsigned left[4] = {rows, rows, rows, rows}, right[2] = {ones, ones};
        mma_s8(product, left, right);
        __syncthreads();
    }
    a.out[block * n + t] = v + product[t % 4];
}

// Every thread writes one word and sums those of all threads of all blocks. Mistakes: 1, one word is missing; 2, nobody
// awaits them.
KERNEL void t_all_await(const SelftestArgs a) {
    const int i = linear_block() * block_size() + linear_thread(), n = (int)gridDim.x * block_size();
    if (a.n != 1 || i != n / 2) a.in[i] = 1 + i;
    int sum = 0;
    for (int first = 0; first < n; first += 4) {
        const float4 *const from = reinterpret_cast<const float4 *>(a.in + (first + i / 4 * 4) % n);
        const float4 v = a.n == 2 ? load_l2(from) : await_values(from);
        for (int j = 0; j < 4; j++) sum += word(v, j);
    }
    a.out[i] = sum;
}

// A value goes from block 0 from block to block and back. Of each block the first warp awaits it while the others are at the
// barrier, and the last thread hands it on. Mistakes: 1, block 0 awaits it before it has given it; 2, a warp has left ahead of
// the barrier.
static void hand_on(const SelftestArgs &a) {
    __shared__ int held;
    const int t = linear_thread(), n = block_size(), block = linear_block(), blocks = (int)gridDim.x;
    const auto give = [&](int v) {
        if (t != n - 1) return;
        for (int i = 0; i < 4; i++) a.in[4 * block + i] = v + i;
    };
    if (block == 0 && a.n != 1) give(1000);
    if (a.n == 2 && t / 32 == 1) return;
    if (t < 32) {
        const int v = await_word(a.in, 4 * ((block + blocks - 1) % blocks) + t % 4);
        if (t == 5) held = v + 1;
    }
    __syncthreads();
    a.out[block * n + t] = held;
    if (block != 0 || a.n == 1) give(held);
}
KERNEL void t_chain(const SelftestArgs a) { hand_on(a); }
KERNEL void t_chain_not_resident_fault(const SelftestArgs a) { hand_on(a); }

// The first warp of each block asks for copies when the block behind it says so; all others wait at the gates by then, one in
// static shared memory and one in dynamic. Mistakes: 1, the last copy is not waited for; 2, it is read ahead of that; 3, nobody
// asks for it; 4, its place is written while other blocks run.
KERNEL void t_bulk_together(const SelftestArgs a) {
    __shared__ __align__(16) int tile[32];
    __shared__ unsigned long long gate;
    DYNAMIC_SHARED(dynamic);
    unsigned long long *const far_gate = reinterpret_cast<unsigned long long *>(dynamic);
    int *const far_tile = reinterpret_cast<int *>(dynamic + 16);
    const int t = linear_thread(), lane = lane_id(), n = block_size(), block = linear_block(), blocks = (int)gridDim.x;
    int *const mail = a.in, *const source = a.in + 4 * blocks * a.reserved;
    if (warp_id() == 0) {
        bulk_open(&gate);
        bulk_open(far_gate);
    }
    __syncthreads();
    int sum = 0;
    for (int round = 0; round < a.reserved; round++) {
        const bool last = round == a.reserved - 1;
        const int piece = 64 * (block * a.reserved + round);
        if (t / 32 == 1 && lane < 4) mail[4 * (blocks * round + block) + lane] = round;
        if (warp_id() == 0) {
            bulk_expect(&gate, 128);
            bulk_copy(tile, source + piece, 128, &gate);
            const int seen = await_word(mail, 4 * (blocks * round + (block + 1) % blocks) + lane % 4);
            bulk_expect(far_gate, 128);
            if (!last || a.n != 3) bulk_copy(far_tile, source + piece + 32 * (seen == round), 128, far_gate);
            if (last && a.n == 4 && lane == 0) far_tile[3] = 1;
        }
        bulk_wait(&gate, (unsigned)round);
        if (last && a.n == 2) sum += far_tile[31 - lane];
        if (!last || a.n != 1) bulk_wait(far_gate, (unsigned)round);
        sum += tile[lane] + 2 * far_tile[lane];
        __syncthreads();
    }
    a.out[block * n + t] = sum;
}

// Block `reserved` writes int `n` of its dynamic shared memory when all others have begun.
KERNEL void t_overflow_together_fault(const SelftestArgs a) {
    DYNAMIC_SHARED(dynamic);
    if (threadIdx.x < 4) a.in[4 * linear_block() + (int)threadIdx.x] = 1;
    for (int i = 0; i < (int)gridDim.x; i++) a.out[i] = await_word(a.in, 4 * i);
    if (linear_block() == a.reserved && threadIdx.x == 0) reinterpret_cast<int *>(dynamic)[a.n] = 1;
}

// Awaits what is not aligned, or in shared memory of either kind.
KERNEL void t_await_place_fault(const SelftestArgs a) {
    __shared__ __align__(16) int tile[4];
    DYNAMIC_SHARED(dynamic);
    await_values(reinterpret_cast<const float4 *>(a.n == 0 ? a.in + 1 : a.n == 1 ? tile : reinterpret_cast<int *>(dynamic)));
}

// Which block runs when: out[ticket] = block, of every thread.
KERNEL void t_turns(const SelftestArgs a) {
    for (int i = 0; i < a.n; i++) {
        a.out[atomicAdd(a.in, 1)] = linear_block();
        __syncwarp();
    }
}

namespace simt {

const std::vector<Kernel> &resident_selftest_kernels() {
    static const std::vector<Kernel> table = {
        SIMT_RESIDENT_KERNEL(t_exchange, SelftestArgs),
        SIMT_RESIDENT_KERNEL(t_all_await, SelftestArgs),
        SIMT_RESIDENT_KERNEL(t_chain, SelftestArgs),
        SIMT_KERNEL(t_chain_not_resident_fault, SelftestArgs),
        SIMT_RESIDENT_KERNEL(t_bulk_together, SelftestArgs),
        SIMT_RESIDENT_KERNEL(t_overflow_together_fault, SelftestArgs),
        SIMT_RESIDENT_KERNEL(t_await_place_fault, SelftestArgs),
        SIMT_RESIDENT_KERNEL(t_turns, SelftestArgs),
    };
    return table;
}

}  // namespace simt
