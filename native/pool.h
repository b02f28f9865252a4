// Persistent threads that walk a list of ops together.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "op.h"

namespace kestrel {

// One op of a program, ready to run.
struct BoundOp {
    const OpEntry *entry;
    OpFunction run;
    const void *args;
    bool serial;
};

// A meeting point: waiters spin for a short while, then sleep.
class Barrier {
  public:
    explicit Barrier(int count, int spins) : count_(count), spins_(spins) {}
    // `last` runs on the last thread to arrive, before anyone leaves.
    template <class F>
    void wait(F &&last) {
        const uint32_t generation = generation_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
            last();
            arrived_.store(0, std::memory_order_relaxed);
            release();
        } else {
            await(generation);
        }
    }

  private:
    void release();
    void await(uint32_t generation);

    const int count_, spins_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    std::atomic<int> sleepers_{0};
};

constexpr int kOpBits = 24;
constexpr size_t kMaxOps = size_t{1} << kOpBits;  // of one program

struct Pool {
  public:
    explicit Pool(int threads);
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int threads() const { return threads_; }

    // Runs ops begin .. end-1 with all threads, the caller as thread 0. `poll` is called on the caller between ops and
    // returns true to stop early. Returns false when stopped. One caller at a time.
    bool run(const BoundOp *ops, size_t begin, size_t end, const std::function<bool()> &poll);

    // For ThreadContext.
    void op_barrier();
    void *thread_scratch(int index, size_t bytes);
    void *op_scratch(ThreadContext &context, size_t bytes);

  private:
    struct Memory {  // 64-byte aligned, grows
        void *data = nullptr;
        size_t capacity = 0;
        void *at_least(size_t bytes);
    };

    void worker(int index);
    bool walk(int index, const std::function<bool()> *poll);

    const int threads_, spins_;
    Barrier barrier_;  // the threads of a job, between ops and inside them
    Barrier start_;    // the same threads, before a job
    std::vector<Memory> scratch_;
    Memory shared_;
    alignas(64) std::atomic<int64_t> chunk_counter_{0};
    alignas(64) std::atomic<uint64_t> stop_{0};  // the last stopped job's number << kOpBits | the op not begun
    // The job: written by the caller before the start barrier.
    uint64_t job_ = 0;
    const BoundOp *ops_ = nullptr;
    size_t begin_ = 0, end_ = 0;
};

// The pool of `threads` threads of this process, made at first use and kept; holds the lock that serialises runs until
// destroyed. `wait_poll` is called about every 50 ms while another run has the lock, and may throw.
class PoolLease {
  public:
    PoolLease(int threads, const std::function<void()> &wait_poll);
    ~PoolLease();
    PoolLease(const PoolLease &) = delete;
    PoolLease &operator=(const PoolLease &) = delete;
    Pool &operator*() const { return *pool_; }
    Pool *operator->() const { return pool_; }

  private:
    struct Registry *registry_;
    Pool *pool_;
};

}  // namespace kestrel
