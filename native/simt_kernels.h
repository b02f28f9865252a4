// Kernels by name, for the module that launches them.
#pragma once

#include <cstddef>
#include <vector>

namespace simt {

struct Kernel {
    const char *name;
    size_t args_size;
    void (*run)(const void *args);  // one thread
};

#define SIMT_KERNEL(kernel, Args) \
    simt::Kernel { #kernel, sizeof(Args), [](const void *args) { kernel(*static_cast<const Args *>(args)); } }

const std::vector<Kernel> &exact_kernels();
const std::vector<Kernel> &fast_kernels();
const std::vector<Kernel> &selftest_kernels();  // small kernels that test the shim itself
const std::vector<Kernel> &cluster_selftest_kernels();

}  // namespace simt
