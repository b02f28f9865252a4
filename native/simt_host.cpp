// The scheduler of the CUDA shim: fibers, barriers, warp operations (see simt_host.h).
#include "simt_fibers.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// The linker's names for the ends of the section that holds every __shared__ variable.
extern "C" {
extern unsigned char __start_simt_shared[] __attribute__((weak));
extern unsigned char __stop_simt_shared[] __attribute__((weak));
}

namespace simt {

uint3 grid_dim, block_dim, block_index;
const uint3 *thread_index;
bool bulk_gates;
Counters counters;

std::vector<std::unique_ptr<Fiber>> fibers;
unsigned block_threads;
Fiber *current;
bool shuffled;
unsigned char *shared_base;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 227 << 10;  // the largest a supported GPU gives one block

struct Warp {
    unsigned existing, ended, arrived;  // lane masks
    Site site[32];
    Collective kind[32];
    unsigned mask[32];
    uint64_t value[32], result[32];
    int arg[32], width[32];
};

std::vector<Warp> warps;
unsigned ended_threads;  // of the running block
size_t shared_bytes;     // of dynamic shared memory, as the launch asked for them
size_t shared_room;      // the same, rounded up as a GPU allocates them

// Dynamic shared memory ends where a page begins that nobody may touch, so that a read past the end is seen, too: on a
// GPU it is an illegal address.
class SharedMemory {
  public:
    unsigned char *place(size_t bytes) {
        if (!memory_) {
            page_ = (size_t)sysconf(_SC_PAGESIZE);
            size_ = (kMaxSharedBytes + 128 + page_ - 1) / page_ * page_;
            void *const found = mmap(nullptr, size_ + page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (found == MAP_FAILED) throw std::runtime_error("no memory for shared memory");
            memory_ = static_cast<unsigned char *>(found);
            mprotect(memory_ + size_, page_, PROT_NONE);
            struct sigaction action = {};
            action.sa_sigaction = on_fault;
            action.sa_flags = SA_SIGINFO;
            sigaction(SIGSEGV, &action, &before_);
        }
        return memory_ + size_ - bytes;
    }

  private:
    // Says what it was, then dies as without it.
    static void on_fault(int, siginfo_t *info, void *) {
        const unsigned char *const at = static_cast<unsigned char *>(info->si_addr);
        if (at >= memory_ + size_ && at < memory_ + size_ + page_) {
            static const char text[] = "simt: an access past the end of dynamic shared memory\n";
            if (write(2, text, sizeof text - 1) < 0) _exit(1);
        }
        sigaction(SIGSEGV, &before_, nullptr);  // the access is tried again
    }

    static inline unsigned char *memory_;
    static inline size_t size_, page_;
    static inline struct sigaction before_;
} shared_memory;

jmp_buf scheduler_context;
ucontext_t entry_return;
void (*kernel_function)(const void *);
const void *kernel_args;
std::string error;  // set by a fiber, thrown by the scheduler

uint64_t random_state;

template <class T>
void shuffle_order(std::vector<T> &order) {
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[next_random() % i]);
}

__attribute__((noinline)) void switch_context(jmp_buf from, jmp_buf to) {
    if (_setjmp(from) == 0) _longjmp(to, 1);
}

size_t static_bytes() { return statics() ? static_cast<size_t>(__stop_simt_shared - __start_simt_shared) : 0; }

}  // namespace

uint64_t next_random() {  // splitmix64
    uint64_t z = (random_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

unsigned char *statics() { return __start_simt_shared; }
bool in_dynamic(const unsigned char *at, size_t bytes) {
    return at >= shared_base && at + bytes <= shared_base + shared_bytes;
}
bool in_statics(const unsigned char *at, size_t bytes) {
    return at >= statics() && at + bytes <= statics() + static_bytes();
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

std::string name(const Fiber &f) { return "thread " + name(f.index) + " of block " + name(block_index); }

void suspend(State state) {
    Fiber *self = current;
    self->state = state;
    counters.switches++;
    switch_context(self->context, scheduler_context);
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
        if (++ended_threads == block_threads) check_gates();
        Warp &warp = warps[self->warp];
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

void prepare_fibers(unsigned count) {
    while (fibers.size() < count) {
        auto f = std::make_unique<Fiber>();
        void *stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) throw std::bad_alloc();
        mprotect(stack, 4096, PROT_NONE);  // an overflow faults instead of writing elsewhere
        f->stack = static_cast<char *>(stack);
        fibers.push_back(std::move(f));
    }
}

void start_block() {
    const unsigned warp_total = (block_threads + 31) / 32;
    ended_threads = 0;
    start_copies();
    warps.resize(std::max<size_t>(warps.size(), warp_total));
    for (unsigned w = 0; w < warp_total; w++) {
        const unsigned lanes = std::min(32u, block_threads - 32 * w);
        warps[w].existing = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1u;
        warps[w].ended = warps[w].arrived = 0;
    }
    for (unsigned i = 0; i < block_threads; i++) {
        Fiber &f = *fibers[i];
        f.index = {i % block_dim.x, i / block_dim.x % block_dim.y, i / (block_dim.x * block_dim.y)};
        f.warp = i / 32;
        f.lane = i % 32;
        f.state = State::ready;
    }
    if (static_bytes()) std::memset(statics(), kPoison, static_bytes());
    std::memset(shared_base, kPoison, shared_room);
    counters.blocks++;
}

// Called when no fiber can go on and none waits for a gate: releases the block's barrier, or says why it cannot.
void release_barrier() {
    const Fiber *first = nullptr, *ended = nullptr;
    for (unsigned i = 0; i < block_threads; i++) {
        const Fiber &f = *fibers[i];
        if (f.state == State::ended) {
            ended = &f;
        } else if (f.state == State::in_warp) {
            const Warp &warp = warps[f.warp];
            std::ostringstream s;
            s << "deadlock: " << name(f) << " waits in the warp operation at " << name(f.site) << " for lanes 0x" << std::hex
              << (warp.mask[f.lane] & ~warp.arrived) << " of mask 0x" << warp.mask[f.lane] << ", which wait elsewhere";
            throw std::runtime_error(s.str());
        } else if (first == nullptr) {
            first = &f;
        } else if (!(first->site == f.site)) {
            throw std::runtime_error("divergent barrier: " + name(*first) + " waits at " + name(first->site) + ", " + name(f) +
                                     " at " + name(f.site));
        }
    }
    if (ended != nullptr)
        throw std::runtime_error("divergent barrier: " + name(*first) + " waits at " + name(first->site) + ", but " +
                                 name(*ended) + " has ended");
    for (unsigned i = 0; i < block_threads; i++) fibers[i]->state = State::ready;
    counters.barriers++;
}

// One block to its end; `order` is that of its threads.
void run_block(std::vector<unsigned> &order) {
    start_block();
    while (ended_threads < block_threads) {
        if (shuffled) shuffle_order(order);
        bool progress = false;
        for (unsigned i : order) {
            Fiber &f = *fibers[i];
            if (f.state != State::ready) continue;
            progress = true;
            resume(f);
            if (!error.empty()) throw std::runtime_error(error);
        }
        if (progress)
            arrive_some();
        else if (!arrive_awaited())
            release_barrier();
    }
    // What lies behind dynamic shared memory must still be poison.
    for (size_t i = shared_bytes; i < shared_room; i++)
        if (shared_base[i] != kPoison) throw std::runtime_error("a write past the end of dynamic shared memory");
}

Fiber &fiber_of(const Warp &warp, int lane) { return *fibers[32 * (&warp - warps.data()) + lane]; }

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

unsigned char *dynamic_shared() { return shared_base; }

void block_barrier(Site site) {
    current->site = site;
    suspend(State::at_barrier);
}

uint64_t warp_collective(Site site, Collective kind, unsigned mask, uint64_t value, int arg, int width) {
    Fiber &self = *current;
    Warp &warp = warps[self.warp];
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

void run(const Launch &launch, void (*kernel)(const void *), const void *args) {
    const uint3 g = launch.grid, b = launch.block;
    const uint64_t threads = (uint64_t)b.x * b.y * b.z;
    if (threads == 0 || threads > kMaxThreads || b.z > 64)
        throw std::runtime_error("a block needs 1 to 1024 threads, not " + std::to_string(threads));
    if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535)
        throw std::runtime_error("grid out of range: x is 1 to 2^31-1, y and z are 1 to 65535");
    if (launch.shared_bytes > kMaxSharedBytes)
        throw std::runtime_error("more than 227 KB of shared memory: " + std::to_string(launch.shared_bytes) + " bytes");
    block_threads = (unsigned)threads;
    prepare_fibers(block_threads);
    shared_bytes = launch.shared_bytes;
    shared_room = (launch.shared_bytes + 127) / 128 * 128;
    shared_base = shared_memory.place(shared_room);
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
    std::vector<uint64_t> blocks((size_t)g.x * g.y * g.z);
    for (size_t i = 0; i < blocks.size(); i++) blocks[i] = i;
    if (shuffled) shuffle_order(blocks);
    try {
        for (uint64_t i : blocks) {
            block_index = {(unsigned)(i % g.x), (unsigned)(i / g.x % g.y), (unsigned)(i / ((uint64_t)g.x * g.y))};
            run_block(order);
        }
    } catch (...) {
        for (auto &f : fibers) {  // abandoned in mid-kernel: start afresh next time
            f->started = false;
            f->copies.clear();
        }
        throw;
    }
}

}  // namespace simt
