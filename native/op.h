// How an op of the registry plugs into the native executor. One .cpp per op family registers, for each ISA level, a
// function that all threads of the pool call together with the same arguments.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../kernels/op_args.h"

namespace kestrel {

enum class Isa { scalar = 0, avx2 = 1, avx512 = 2 };
constexpr int kIsaLevels = 3;

// What one thread sees while an op runs. Threads may not depend on how work is split: every output element is
// computed by one thread in the contract's order.
class ThreadContext {
  public:
    int index = 0;  // of this thread, 0 .. count-1
    int count = 1;

    // Static split of n items: this thread's half-open range, in multiples of `grain`.
    void split(int64_t n, int64_t grain, int64_t *begin, int64_t *end) const;

    // Dynamic split: the next unclaimed chunk index of this op (0, 1, 2, ... across all threads).
    int64_t next_chunk() { return chunk_counter->fetch_add(1, std::memory_order_relaxed); }

    // All threads of the op meet; every thread must call it the same number of times.
    void barrier();

    // 64-byte aligned memory of this thread, kept between ops; contents undefined.
    void *scratch(size_t bytes);

    // 64-byte aligned memory shared by the threads of this op: every thread must call it with the same size.
    // Contents undefined; valid until the op ends.
    void *shared_scratch(size_t bytes);

    std::atomic<int64_t> *chunk_counter = nullptr;
    struct Pool *pool = nullptr;
};

using OpFunction = void (*)(const void *args, ThreadContext &context);

struct OpEntry {
    const char *name;
    size_t args_size;
    OpFunction run[kIsaLevels];  // every level is filled; a level without its own form repeats a lower one
    // True when the op is so small that thread 0 runs it alone (count = 1); runs of such ops need no barrier.
    bool (*serial)(const void *args);
};

// Looks an op up by its registry name; null when there is none.
const OpEntry *find_op(const char *name);

}  // namespace kestrel
