// The scheduler of the CUDA shim: fibers, barriers, warp operations, clusters (see simt_host.h).
#include "simt_fibers.h"

#include <ucontext.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace simt {

uint3 grid_dim, block_dim, block_index;
const uint3 *thread_index;
bool bulk_gates;
Counters counters;

unsigned block_threads;
Fiber *current;
bool shuffled;

namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxCluster = 8;  // that every GPU with clusters runs

jmp_buf scheduler_context;
ucontext_t entry_return;
void (*kernel_function)(const void *);
const void *kernel_args;
std::string error;  // set by a fiber, thrown by the scheduler

std::vector<Block *> cluster;  // the blocks that are alive at once, by rank
unsigned cluster_arrived;      // threads of theirs, at its barrier

uint64_t random_state;

template <class T>
void shuffle_order(std::vector<T> &order) {
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[next_random() % i]);
}

// From a fiber to the scheduler. This function calls others, so it keeps nothing below its stack pointer.
__attribute__((noinline)) void leave(Fiber &self) {
    if (_setjmp(self.context) != 0) return;
    asm volatile("mov %%rsp, %0" : "=m"(self.lowest));
    _longjmp(scheduler_context, 1);
}

}  // namespace

uint64_t next_random() {  // splitmix64
    uint64_t z = (random_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

std::string name(const Site &site) {
    const char *slash = std::strrchr(site.file, '/');
    return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string name(const uint3 &index) {
    std::ostringstream s;
    s << "(" << index.x << "," << index.y << "," << index.z << ")";
    return s.str();
}

std::string name(const Fiber &f) { return "thread " + name(f.index) + " of block " + name(f.block->index); }

std::string caller_name(Site site) { return name(*current) + " at " + name(site); }

void suspend(State state) {
    current->state = state;
    counters.switches++;
    leave(*current);
}

[[noreturn]] void fail(const std::string &message) {
    error = message;
    // The launch is over: this fiber is abandoned where it stands.
    _longjmp(scheduler_context, 1);
}

namespace {

void fiber_main() {
    for (;;) {
        kernel_function(kernel_args);
        Fiber *self = current;
        if (!self->copies.empty()) fail(name(*self) + " ended without waiting for its asynchronous copies");
        if (self->phase != Phase::outside) fail(name(*self) + " ended between cluster_arrive and cluster_wait");
        if (self->reached)
            fail(name(*self) + " at " + name(self->reach_site) + " accesses shared memory of block " +
                 name(self->reached->index) + " after its last cluster barrier, when that block may have ended");
        if (++running->ended_threads == block_threads) check_gates();
        Warp &warp = running->warps[self->warp];
        warp.ended |= 1u << self->lane;
        suspend(State::ended);
    }
}

void resume(Fiber &f) {
    current = &f;
    thread_index = &f.index;
    if (_setjmp(scheduler_context) != 0) return;
    if (f.started) _longjmp(f.context, 1);
    f.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = f.stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = &entry_return;
    makecontext(&context, fiber_main, 0);
    setcontext(&context);
}

// The first thread of a block in that state; null when there is none.
const Fiber *find(const Block &block, State state) {
    for (unsigned i = 0; i < block_threads; i++)
        if (block.fibers[i].state == state) return &block.fibers[i];
    return nullptr;
}

// Whether a block none of whose fibers can go on may do so when others of the cluster have: threads of it wait for those, and
// none but them at all, or for a gate that one of them may still ask copies for; or threads wait for what others send.
bool waits_for_others(const Block &block) {
    if (awaits_sends(block)) return true;
    return find(block, State::in_cluster) && !find(block, State::at_barrier) && !find(block, State::in_warp) &&
           !find(block, State::ended);
}

// Called when no fiber can go on and none waits for a gate or for other blocks alone: releases the block's barrier, or says why
// it cannot.
void release_barrier() {
    const Fiber *first = nullptr, *ended = nullptr;
    for (unsigned i = 0; i < block_threads; i++) {
        const Fiber &f = running->fibers[i];
        if (f.state == State::ended) {
            ended = &f;
        } else if (f.state == State::in_warp) {
            const Warp &warp = running->warps[f.warp];
            std::ostringstream s;
            s << "deadlock: " << name(f) << " waits in the warp operation at " << name(f.site) << " for lanes 0x" << std::hex
              << (warp.mask[f.lane] & ~warp.arrived) << " of mask 0x" << warp.mask[f.lane] << ", which wait elsewhere";
            throw std::runtime_error(s.str());
        } else if (first == nullptr) {
            first = &f;
        } else if (first->state != f.state || !(first->site == f.site)) {
            throw std::runtime_error("divergent barrier: " + name(*first) + " waits at " + name(first->site) + ", " + name(f) +
                                     " at " + name(f.site));
        }
    }
    if (ended != nullptr)
        throw std::runtime_error("divergent barrier: " + name(*first) + " waits at " + name(first->site) + ", but " +
                                 name(*ended) + " has ended");
    for (unsigned i = 0; i < block_threads; i++) running->fibers[i].state = State::ready;
    counters.barriers++;
}

// Lets a block go on until it ends, waits for others of its cluster, or has resumed threads so many times; says whether it has
// resumed any. `order` is that of its threads.
bool advance(Block &block, std::vector<unsigned> &order, uint64_t resumptions) {
    if (block.stuck) return false;
    put_in_place(block);
    if (shuffled) arrive_some();  // what others have sent
    bool moved = false;
    while (block.ended_threads < block_threads) {
        if (shuffled) shuffle_order(order);
        bool progress = false;
        for (unsigned i : order) {
            Fiber &f = block.fibers[i];
            if (f.state != State::ready) continue;
            if (resumptions-- == 0) return true;
            progress = moved = true;
            resume(f);
            if (!error.empty()) throw std::runtime_error(error);
        }
        if (progress) {
            arrive_some();
        } else if (!arrive_awaited()) {
            block.stuck = waits_for_others(block);
            if (block.stuck) return moved;
            refuse_gate_waits();
            release_barrier();
        }
    }
    check_shared_end();
    return true;
}

// Called when no block of the cluster can go on: says why.
[[noreturn]] void refuse_cluster_wait(const std::vector<Block *> &living) {
    for (Block *block : living) {
        put_in_place(*block);
        refuse_gate_waits();
    }
    const Fiber *const waits = find(*living[0], State::in_cluster);
    const auto ended = std::find_if(cluster.begin(), cluster.end(), [](const Block *b) { return find(*b, State::ended); });
    throw std::runtime_error("divergent barrier: " + name(*waits) + " waits for its cluster at " + name(waits->site) + ", but " +
                             name(*find(**ended, State::ended)) + " has ended");
}

// The blocks of the cluster, in turns, to their ends.
void run_cluster(std::vector<unsigned> &order) {
    std::vector<Block *> living = cluster;
    // How often a block is left while it could go on, out of kAlways times.
    const uint64_t restless = shuffled && living.size() > 1 ? next_random() % (kAlways + 1) : 0;
    while (!living.empty()) {
        if (shuffled) shuffle_order(living);
        bool moved = false;
        for (Block *block : living) {
            const bool leave_early = restless > 0 && next_random() % kAlways < restless;
            moved |= advance(*block, order, leave_early ? 1 + next_random() % (2 * block_threads) : UINT64_MAX);
        }
        if (!moved) refuse_cluster_wait(living);
        const auto ended = [](const Block *block) { return block->ended_threads == block_threads; };
        living.erase(std::remove_if(living.begin(), living.end(), ended), living.end());
    }
}

Fiber &fiber_of(const Warp &warp, int lane) { return running->fibers[32 * (&warp - running->warps.data()) + lane]; }

int source_lane(const Warp &warp, int lane) {
    const int width = warp.width[lane], arg = warp.arg[lane];
    const int first = lane & ~(width - 1), last = first + width - 1;
    switch (warp.kind[lane]) {
    case Collective::shuffle_index: return first + (arg & (width - 1));
    case Collective::shuffle_up: return lane - arg < first ? lane : lane - arg;
    case Collective::shuffle_down: return lane + arg > last ? lane : lane + arg;
    default: return (lane ^ arg) > last ? lane : lane ^ arg;
    }
}

// The operands of all lanes, by the layout of mma.m16n8k32: see mma_s8 in kernels/port.cuh.
void multiply(Warp &warp, bool unsigned_a) {
    const MmaOperands *lanes[32];
    for (int l = 0; l < 32; l++) lanes[l] = reinterpret_cast<const MmaOperands *>(warp.value[l]);
    const auto byte = [](unsigned word, int i, bool is_unsigned = false) {
        const unsigned bits = word >> (8 * i) & 0xffu;
        return is_unsigned ? static_cast<int>(bits) : static_cast<int>(static_cast<signed char>(bits));
    };
    for (int row = 0; row < 16; row++) {
        for (int column = 0; column < 8; column++) {
            unsigned sum = 0;
            for (int k = 0; k < 32; k++) {
                const int word = k / 4, c = word % 4;
                const unsigned a = lanes[4 * (row % 8) + c]->a[row / 8 + 2 * (word / 4)];
                const unsigned b = lanes[4 * column + c]->b[word / 4];
                sum += static_cast<unsigned>(byte(a, k % 4, unsigned_a) * byte(b, k % 4));
            }
            int &d = lanes[4 * (row % 8) + column / 2]->d[2 * (row / 8) + column % 2];
            d = static_cast<int>(static_cast<unsigned>(d) + sum);
        }
    }
}

// The words of all lanes, by the layout of load_halves in kernels/port.cuh.
void give_halves(Warp &warp) {
    const HalvesOperands *lanes[32];
    for (int l = 0; l < 32; l++) lanes[l] = reinterpret_cast<const HalvesOperands *>(warp.value[l]);
    for (int l = 0; l < 32; l++) {
        for (int q = 0; q < 4; q++) {
            uint16_t half[2];
            for (int i = 0; i < 2; i++) std::memcpy(half + i, lanes[8 * q + 2 * (l % 4) + i]->row + 2 * (l / 4), 2);
            lanes[l]->words[q] = half[0] | static_cast<unsigned>(half[1]) << 16;
        }
    }
}

// All lanes of `mask` have arrived: gives each its result.
void complete(Warp &warp, unsigned mask, int lane) {
    uint64_t ballot = 0, max = 0, sum = 0;
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1u)) continue;
        if (warp.mask[l] != mask || warp.kind[l] != warp.kind[lane] || !(warp.site[l] == warp.site[lane]))
            fail("divergent warp operation: " + name(fiber_of(warp, lane)) + " at " + name(warp.site[lane]) +
                 " names lane " + std::to_string(l) + ", which is at " + name(warp.site[l]) + " or has another mask");
        ballot |= (warp.value[l] & 1u) << l;
        max = std::max(max, warp.value[l]);
        sum += warp.value[l];
    }
    const Collective kind = warp.kind[lane];
    if (kind == Collective::mma_s8 || kind == Collective::mma_u8_s8) multiply(warp, kind == Collective::mma_u8_s8);
    if (kind == Collective::load_halves) give_halves(warp);
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1u)) continue;
        switch (warp.kind[l]) {
        case Collective::mma_s8:
        case Collective::mma_u8_s8:
        case Collective::load_halves:
        case Collective::sync: break;
        case Collective::ballot: warp.result[l] = ballot; break;
        case Collective::reduce_max: warp.result[l] = max; break;
        case Collective::reduce_add: warp.result[l] = sum; break;
        default: {
            const int source = source_lane(warp, l);
            if (!(mask >> source & 1u))
                fail("shuffle at " + name(warp.site[l]) + " reads lane " + std::to_string(source) + ", which is not in its mask");
            warp.result[l] = warp.value[source];
        }
        }
        Fiber &f = fiber_of(warp, l);
        if (f.state == State::in_warp) f.state = State::ready;
    }
    warp.arrived &= ~mask;
}

}  // namespace

void block_barrier(Site site) {
    current->site = site;
    suspend(State::at_barrier);
}

uint64_t warp_collective(Site site, Collective kind, unsigned mask, uint64_t value, int arg, int width) {
    Fiber &self = *current;
    Warp &warp = running->warps[self.warp];
    const unsigned bit = 1u << self.lane;
    if (!(mask & bit)) fail(name(self) + " is not in the mask of its own warp operation at " + name(site));
    if (mask & ~warp.existing) fail("the mask at " + name(site) + " names lanes that the block does not have");
    if (mask & warp.ended) fail("the mask at " + name(site) + " names lanes that have ended");
    const unsigned lane = self.lane;
    self.site = warp.site[lane] = site;
    warp.kind[lane] = kind;
    warp.mask[lane] = mask;
    warp.value[lane] = value;
    warp.arg[lane] = arg;
    warp.width[lane] = width;
    warp.arrived |= bit;
    if ((warp.arrived & mask) == mask)
        complete(warp, mask, (int)lane);
    else
        suspend(State::in_warp);
    return warp.result[lane];
}

void mma(Site site, Collective kind, int *d, const unsigned *a, const unsigned *b) {
    const MmaOperands operands{d, a, b};
    warp_collective(site, kind, 0xffffffffu, reinterpret_cast<uint64_t>(&operands), 0, 32);
}

void load_halves(Site site, unsigned *words, const void *row) {
    const auto *at = static_cast<const unsigned char *>(row);
    if (reinterpret_cast<uintptr_t>(row) % 16) fail(name(*current) + " loads a row at " + name(site) + " that is not aligned");
    if (!in_dynamic(at, 16) && !in_statics(at, 16))
        fail(name(*current) + " loads a row at " + name(site) + " that is not in its shared memory");
    const HalvesOperands operands{words, at};
    warp_collective(site, Collective::load_halves, 0xffffffffu, reinterpret_cast<uint64_t>(&operands), 0, 32);
}

int cluster_rank() { return static_cast<int>(running->rank); }
int cluster_size() { return static_cast<int>(cluster.size()); }

namespace {

// All threads of a block must arrive, and wait, at one place; blocks may differ.
void meet(Meeting &m, Site site, const char *what) {
    if (m.count == 0) m.site = site;
    m.count = (m.count + 1) % block_threads;  // nobody is here again before all have been
    if (!(m.site == site))
        fail("divergent barrier: " + name(*current) + " calls " + what + " at " + name(site) +
             ", another thread of its block at " + name(m.site));
}

}  // namespace

namespace {

void arrive_at_cluster(Site site, const char *what) {
    Fiber &self = *current;
    if (self.phase != Phase::outside) fail(caller_name(site) + " calls " + what + " again without cluster_wait");
    meet(running->arriving, site, what);
    self.phase = Phase::arrived;
    if (++cluster_arrived < cluster.size() * block_threads) return;
    cluster_arrived = 0;
    for (Block *block : cluster) {
        block->stuck = false;
        for (unsigned i = 0; i < block_threads; i++) {
            Fiber &f = block->fibers[i];
            f.phase = Phase::passed;
            if (f.state == State::in_cluster) f.state = State::ready;
        }
    }
    counters.barriers++;
}

}  // namespace

void cluster_arrive(Site site) {
    current->reached = nullptr;
    arrive_at_cluster(site, "cluster_arrive");
}

void cluster_begin(Site site) {
    if (current->reached)
        fail(caller_name(site) + " calls cluster_begin, which does not publish what it has stored at " +
             name(current->reach_site) + " to block " + name(current->reached->index));
    arrive_at_cluster(site, "cluster_begin");
}

unsigned arrivals() { return current->met + (current->phase == Phase::outside ? 0 : 1); }

void cluster_wait(Site site) {
    Fiber &self = *current;
    if (self.phase == Phase::outside) fail(caller_name(site) + " calls cluster_wait without cluster_arrive");
    self.site = site;
    if (self.phase == Phase::arrived) suspend(State::in_cluster);
    meet(running->waiting, site, "cluster_wait");
    self.phase = Phase::outside;
    self.met++;
}

Block &reach(Site site, const void *shared, int rank, size_t bytes, bool sends) {
    Fiber &self = *current;
    const unsigned char *const at = static_cast<const unsigned char *>(shared);
    if (rank < 0 || rank >= cluster_size())
        fail(caller_name(site) + " names block " + std::to_string(rank) + " of a cluster of " + std::to_string(cluster_size()));
    if (reinterpret_cast<uintptr_t>(at) % bytes)
        fail(caller_name(site) + " accesses " + std::to_string(bytes) + " bytes that are not aligned to their size");
    if (!in_dynamic(at, bytes) && !in_statics(at, bytes))
        fail(caller_name(site) + " names an address that is not in its shared memory");
    Block &other = *cluster[static_cast<size_t>(rank)];
    if (&other == running && !sends) return other;
    const auto what = [&] { return caller_name(site) + " accesses shared memory of block " + name(other.index); };
    if (self.met == 0) fail(what() + " before its first cluster barrier, when that block may not have begun");
    if (other.ended_threads) fail(what() + ", of which threads have ended");
    if (!sends) {  // a send keeps the other from leaving: it is counted
        self.reached = &other;
        self.reach_site = site;
    }
    return other;
}

unsigned char *cluster_address(Site site, const void *shared, int rank, size_t bytes) {
    Block &other = reach(site, shared, rank, bytes, false);
    return same_place(other, static_cast<unsigned char *>(const_cast<void *>(shared)));
}

void run(const Launch &launch, void (*kernel)(const void *), const void *args) {
    const uint3 g = launch.grid, b = launch.block;
    const uint64_t threads = (uint64_t)b.x * b.y * b.z;
    if (threads == 0 || threads > kMaxThreads || b.z > 64)
        throw std::runtime_error("a block needs 1 to 1024 threads, not " + std::to_string(threads));
    if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535)
        throw std::runtime_error("grid out of range: x is 1 to 2^31-1, y and z are 1 to 65535");
    if (launch.shared_bytes > kMaxSharedBytes)
        throw std::runtime_error("more than 227 KB of shared memory: " + std::to_string(launch.shared_bytes) + " bytes");
    const uint64_t total = (uint64_t)g.x * g.y * g.z;
    if (launch.cluster == 0 || launch.cluster > kMaxCluster)
        throw std::runtime_error("a cluster has 1 to 8 blocks, not " + std::to_string(launch.cluster));
    if (launch.cluster > 1 && !launch.gates)
        throw std::runtime_error("clusters of " + std::to_string(launch.cluster) + " blocks: below sm_90 there are none");
    if (g.x % launch.cluster)
        throw std::runtime_error("a grid of " + std::to_string(g.x) + " blocks along x is no multiple of clusters of " +
                                 std::to_string(launch.cluster));
    block_threads = (unsigned)threads;
    grid_dim = g;
    block_dim = b;
    kernel_function = kernel;
    kernel_args = args;
    error.clear();
    random_state = launch.seed;
    shuffled = launch.seed != 0;
    bulk_gates = launch.gates;
    counters.launches++;

    std::vector<unsigned> order((size_t)threads);
    for (unsigned i = 0; i < threads; i++) order[i] = i;
    std::vector<uint64_t> firsts((size_t)(total / launch.cluster));  // blocks of rank 0
    for (size_t i = 0; i < firsts.size(); i++) firsts[i] = i * launch.cluster;
    if (shuffled) shuffle_order(firsts);
    cluster = prepare_blocks(launch.cluster, launch.shared_bytes);
    try {
        for (const uint64_t n : firsts) {
            const uint3 first = {(unsigned)(n % g.x), (unsigned)(n / g.x % g.y), (unsigned)(n / ((uint64_t)g.x * g.y))};
            cluster_arrived = 0;
            for (unsigned rank = 0; rank < launch.cluster; rank++)
                start_block(*cluster[rank], {first.x + rank, first.y, first.z}, rank);
            run_cluster(order);
        }
    } catch (...) {
        abandon_blocks();
        throw;
    }
}

}  // namespace simt
