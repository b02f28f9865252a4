// The floating-point environment of the contract (section 0): round to nearest even, no flush-to-zero, no
// denormals-are-zero. A library built with -Ofast switches the latter two on for the whole process when it is loaded.
#pragma once

#include <xmmintrin.h>

#include <atomic>

namespace kestrel {

constexpr unsigned kMxcsrFlushToZero = 0x8000, kMxcsrRounding = 0x6000, kMxcsrDenormalsAreZero = 0x0040;
constexpr unsigned kMxcsrContract = 0x1f80;  // all exceptions masked, nearest even, gradual underflow
constexpr unsigned kMxcsrHostile = kMxcsrFlushToZero | kMxcsrRounding | kMxcsrDenormalsAreZero;

// How many times a guard found a setting that would have changed bits.
extern std::atomic<long long> hostile_fpenv_count;

// Sets the contract's environment on this thread and puts the old one back.
class FpenvGuard {
  public:
    FpenvGuard() : saved_(_mm_getcsr()) {
        if (saved_ & kMxcsrHostile) hostile_fpenv_count.fetch_add(1, std::memory_order_relaxed);
        _mm_setcsr(kMxcsrContract);
    }
    ~FpenvGuard() { _mm_setcsr(saved_); }
    FpenvGuard(const FpenvGuard &) = delete;
    FpenvGuard &operator=(const FpenvGuard &) = delete;

  private:
    unsigned saved_;
};

}  // namespace kestrel
