// The memory of a block in the CUDA shim: its stacks, dynamic shared memory and __shared__ variables (see simt_host.h).
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include "simt_fibers.h"

// The linker's names for the ends of the section that holds every __shared__ variable.
extern "C" {
extern unsigned char __start_simt_shared[] __attribute__((weak));
extern unsigned char __stop_simt_shared[] __attribute__((weak));
}

namespace simt {

Block *running;

namespace {

std::vector<std::unique_ptr<Block>> blocks;  // kept between launches
std::vector<unsigned char *> stacks;         // of the threads of the block in place, by their number
size_t shared_bytes;                         // of dynamic shared memory, as the launch asked for them
size_t shared_room;                          // the same, rounded up as a GPU allocates them

struct sigaction fault_before;

size_t page_bytes() {
    static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

// Says what it was, then dies as without it.
void on_fault(int, siginfo_t *info, void *) {
    const unsigned char *const at = static_cast<unsigned char *>(info->si_addr);
    const auto guards = [&](const std::unique_ptr<Block> &block) { return block->memory.guards(at); };
    if (std::any_of(blocks.begin(), blocks.end(), guards)) {
        static const char text[] = "simt: an access past the end of dynamic shared memory\n";
        if (write(2, text, sizeof text - 1) < 0) _exit(1);
    }
    sigaction(SIGSEGV, &fault_before, nullptr);  // the access is tried again
}

void catch_faults() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &fault_before);
}

unsigned char *map(size_t bytes) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *const found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    return static_cast<unsigned char *>(found);
}

void prepare_stacks() {
    while (stacks.size() < block_threads) {
        stacks.push_back(map(kStackBytes));
        mprotect(stacks.back(), page_bytes(), PROT_NONE);  // an overflow faults instead of writing elsewhere
    }
}

size_t static_bytes() { return statics() ? static_cast<size_t>(__stop_simt_shared - __start_simt_shared) : 0; }

void put_aside(Block &block) {
    for (Fiber &f : block.fibers) {
        if (f.started && f.state != State::ended)
            f.frames.assign(f.lowest, f.stack + kStackBytes);
        else
            f.started = false;
    }
    block.statics.assign(statics(), statics() + static_bytes());
}

}  // namespace

unsigned char *SharedMemory::place(size_t bytes) {
    if (!memory_) {
        const size_t page = page_bytes();
        size_ = (kMaxSharedBytes + 128 + page - 1) / page * page;
        memory_ = map(size_ + page);
        mprotect(memory_ + size_, page, PROT_NONE);
    }
    return memory_ + size_ - bytes;
}

bool SharedMemory::guards(const unsigned char *at) const {
    return memory_ && at >= memory_ + size_ && at < memory_ + size_ + page_bytes();
}

std::vector<Block *> prepare_blocks(size_t count, size_t bytes) {
    if (blocks.empty()) catch_faults();
    while (blocks.size() < count) blocks.push_back(std::make_unique<Block>());
    prepare_stacks();
    shared_bytes = bytes;
    shared_room = (bytes + 127) / 128 * 128;
    std::vector<Block *> found(count);
    for (size_t i = 0; i < count; i++) found[i] = blocks[i].get();
    return found;
}

void start_block(Block &block, uint3 index, unsigned rank) {
    block.index = index;
    block.rank = rank;
    block.ended_threads = 0;
    block.begun = block.stuck = false;
    block.arriving = block.waiting = {};
    start_copies(block);
    const unsigned warp_total = (block_threads + 31) / 32;
    block.warps.resize(std::max<size_t>(block.warps.size(), warp_total));
    for (unsigned w = 0; w < warp_total; w++) {
        const unsigned lanes = std::min(32u, block_threads - 32 * w);
        block.warps[w].existing = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1u;
        block.warps[w].ended = block.warps[w].arrived = 0;
    }
    block.fibers.resize(std::max<size_t>(block.fibers.size(), block_threads));
    for (unsigned i = 0; i < block_threads; i++) {
        Fiber &f = block.fibers[i];
        f.block = &block;
        f.index = {i % block_dim.x, i / block_dim.x % block_dim.y, i / (block_dim.x * block_dim.y)};
        f.warp = i / 32;
        f.lane = i % 32;
        f.state = State::ready;
        f.phase = Phase::outside;
        f.met = 0;
        f.reached = nullptr;
        f.stack = stacks[i];
    }
    block.shared_base = block.memory.place(shared_room);
    std::memset(block.shared_base, kPoison, shared_room);
    counters.blocks++;
}

// Stacks are copied, not kept apart: pointers into them stay good, and each has its guard page, of which a process may not
// have as many as there are threads in a launch.
void put_in_place(Block &block) {
    block_index = block.index;
    if (running != &block) {
        if (running) put_aside(*running);
        running = &block;
        for (Fiber &f : block.fibers)
            if (f.started) std::copy(f.frames.begin(), f.frames.end(), f.lowest);
        if (block.begun) std::copy(block.statics.begin(), block.statics.end(), statics());
    }
    if (!block.begun && static_bytes()) std::memset(statics(), kPoison, static_bytes());
    block.begun = true;
}

void check_shared_end() {
    for (size_t i = shared_bytes; i < shared_room; i++)
        if (running->shared_base[i] != kPoison) throw std::runtime_error("a write past the end of dynamic shared memory");
}

void abandon_blocks() {
    for (const auto &block : blocks) {
        for (Fiber &f : block->fibers) {
            f.started = false;
            f.copies.clear();
        }
    }
}

unsigned char *dynamic_shared() { return running->shared_base; }
unsigned char *statics() { return __start_simt_shared; }
bool in_dynamic(const unsigned char *at, size_t bytes) {
    return at >= running->shared_base && at + bytes <= running->shared_base + shared_bytes;
}
bool in_statics(const unsigned char *at, size_t bytes) {
    return at >= statics() && at + bytes <= statics() + static_bytes();
}
unsigned char *same_place(Block &block, unsigned char *at) {
    if (&block == running) return at;
    return in_dynamic(at, 1) ? block.shared_base + (at - running->shared_base) : block.statics.data() + (at - statics());
}
unsigned char *place_in(const Block &block, unsigned char *at) {
    return in_dynamic(at, 1) ? block.shared_base + (at - running->shared_base) : at;
}

}  // namespace simt
