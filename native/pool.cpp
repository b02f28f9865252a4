#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include "cpu.h"
#include "fpenv.h"

namespace kestrel {

std::atomic<long long> hostile_fpenv_count{0};

namespace {

void futex_wait(std::atomic<uint32_t> &word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t> &word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// About 50 us of spinning when every thread has a CPU; none when they have to share.
int spins_for(int threads) { return threads <= default_threads() ? 2000 : 0; }

}  // namespace

// ---- Barrier ----

// Either a sleeper sees the new generation, or release() sees the sleeper: all four accesses are sequentially
// consistent, and futex_wait() compares the word again under the kernel's lock.
void Barrier::release() {
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake_all(generation_);
}

void Barrier::await(uint32_t generation) {
    for (int i = 0; i < spins_; i++) {
        if (generation_.load(std::memory_order_acquire) != generation) return;
        _mm_pause();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (generation_.load(std::memory_order_seq_cst) == generation) futex_wait(generation_, generation);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

// ---- ThreadContext ----

void ThreadContext::split(int64_t n, int64_t grain, int64_t *begin, int64_t *end) const {
    const int64_t blocks = (n + grain - 1) / grain;
    const int64_t first = blocks * index / count * grain, last = blocks * (index + 1) / count * grain;
    *begin = first < n ? first : n;
    *end = last < n ? last : n;
}

void ThreadContext::barrier() {
    if (count > 1) pool->op_barrier();
}

void *ThreadContext::scratch(size_t bytes) { return pool->thread_scratch(index, bytes); }

void *ThreadContext::shared_scratch(size_t bytes) { return pool->op_scratch(*this, bytes); }

// ---- Pool ----

void *Pool::Memory::at_least(size_t bytes) {
    if (bytes > capacity) {
        std::free(data);
        capacity = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        data = std::aligned_alloc(64, capacity);
        if (data == nullptr) {
            // No op can go on, and its other threads wait: nothing to unwind to.
            std::fprintf(stderr, "kestrel: out of memory: %zu bytes of scratch for an operation\n", capacity);
            std::abort();
        }
    }
    return data;
}

Pool::Pool(int threads)
    : threads_(threads), spins_(spins_for(threads)), barrier_(threads, spins_), start_(threads, spins_) {
    scratch_.resize(threads);
    for (int i = 1; i < threads; i++) std::thread(&Pool::worker, this, i).detach();
}

void Pool::op_barrier() {
    barrier_.wait([] {});
}

void *Pool::thread_scratch(int index, size_t bytes) { return scratch_[index].at_least(bytes); }

void *Pool::op_scratch(ThreadContext &context, size_t bytes) {
    if (context.count == 1) return shared_.at_least(bytes);
    // The capacity only changes between two barriers of all threads, so they all take the same branch.
    if (bytes > shared_.capacity) {
        barrier_.wait([] {});
        if (context.index == 0) shared_.at_least(bytes);
        barrier_.wait([] {});
    }
    return shared_.data;
}

void Pool::worker(int index) {
    for (;;) {
        start_.wait([] {});
        FpenvGuard guard;
        walk(index, nullptr);
    }
}

bool Pool::run(const BoundOp *ops, size_t begin, size_t end, const std::function<bool()> &poll) {
    FpenvGuard guard;
    // Workers of the previous job read these only before its last barrier.
    job_++;
    ops_ = ops;
    begin_ = begin;
    end_ = end;
    chunk_counter_.store(0, std::memory_order_relaxed);
    if (threads_ > 1) start_.wait([] {});
    return walk(0, &poll);
}

// Every thread takes the same decisions from the same list, so barriers match: one between neighbouring ops unless
// thread 0 runs both alone, and one after the last op. Thread 0 announces a stop before some op; the others learn of it
// at the first barrier from that op on, which thread 0 joins. The announcement names the op, because a thread may be
// slow to look after an earlier barrier, and the job, because it may look when the next job has begun.
bool Pool::walk(int index, const std::function<bool()> *poll) {
    const uint64_t job = job_;
    const BoundOp *const ops = ops_;
    const size_t begin = begin_, end = end_;
    const auto meet = [&] {
        if (threads_ > 1) barrier_.wait([&] { chunk_counter_.store(0, std::memory_order_relaxed); });
        else chunk_counter_.store(0, std::memory_order_relaxed);
    };
    ThreadContext context;
    context.index = index;
    context.chunk_counter = &chunk_counter_;
    context.pool = this;
    for (size_t i = begin; i < end; i++) {
        const BoundOp &op = ops[i];
        // Not before the first op: the others may already be inside it.
        if (i > begin && poll != nullptr && (*poll)()) {
            stop_.store(job << kOpBits | i, std::memory_order_release);
            meet();
            return false;
        }
        if (i > begin && !(op.serial && ops[i - 1].serial)) {
            meet();
            const uint64_t stop = stop_.load(std::memory_order_acquire);
            if (index != 0 && stop >> kOpBits == job && (stop & (kMaxOps - 1)) <= i) return false;
        } else if (i > begin && index == 0) {
            chunk_counter_.store(0, std::memory_order_relaxed);
        }
        if (op.serial) {
            if (index != 0) continue;
            context.count = 1;
        } else {
            context.count = threads_;
        }
        op.run(op.args, context);
    }
    meet();
    return true;
}

// ---- the pools of a process ----

struct Registry {
    std::timed_mutex running;  // held by the one run in progress
    std::map<int, Pool *> pools;
};

namespace {

// Never freed: workers may still look at their pool while the process exits.
Registry *registry = new Registry;

// A fork copies one thread only: the child starts with no pools and a free lock.
void forget_pools_in_child() { registry = new Registry; }

const int fork_handler_installed = pthread_atfork(nullptr, nullptr, forget_pools_in_child);

}  // namespace

PoolLease::PoolLease(int threads, const std::function<void()> &wait_poll) : registry_(registry), pool_(nullptr) {
    (void)fork_handler_installed;
    while (!registry_->running.try_lock_for(std::chrono::milliseconds(50))) wait_poll();
    Pool *&pool = registry_->pools[threads];
    if (pool == nullptr) pool = new Pool(threads);
    pool_ = pool;
}

PoolLease::~PoolLease() { registry_->running.unlock(); }

}  // namespace kestrel
