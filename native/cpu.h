// What this machine can do: instruction sets, CPUs this process may use, plain read bandwidth.
#pragma once

#include <cstddef>

#include "op.h"

namespace kestrel {

const char *isa_name(Isa isa);
bool isa_usable(Isa isa);  // by this CPU and operating system

// CPUs in this process' affinity mask, at most the whole CPUs of its cgroup quota; at least 1.
int default_threads();

// GB/s (10^9 bytes) of `threads` threads that sum a buffer of `nbytes` together; the best of several passes.
double read_bandwidth(size_t nbytes, int threads);

}  // namespace kestrel
