// A list of ops with their arguments, checked once and run many times.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "op.h"
#include "pool.h"

namespace kestrel {

class Program {
  public:
    // Each op is its registry name and the bytes of its argument struct. Throws std::invalid_argument.
    Program(const std::vector<std::pair<std::string, std::string>> &ops, int threads, Isa isa);

    size_t size() const { return ops_.size(); }
    int threads() const { return threads_; }
    Isa isa() const { return isa_; }

    // Runs ops begin .. end-1. `check` is called about every 50 ms on the calling thread, outside any op, and throws to
    // interrupt: the run then stops after the op in progress and the exception comes out here. May be empty.
    void run(size_t begin, size_t end, const std::function<void()> &check);

  private:
    std::vector<std::unique_ptr<std::max_align_t[]>> storage_;  // one argument struct each
    std::vector<BoundOp> ops_;
    int threads_;
    Isa isa_;
};

}  // namespace kestrel
