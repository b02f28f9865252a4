// kestrel._simt: launches kernels on the CUDA shim. Bindings only; tests use it, nothing else.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>

#include "simt_host.h"
#include "simt_kernels.h"

namespace py = pybind11;

namespace {

const simt::Kernel &find(const std::string &name) {
    for (const auto *table : {&simt::exact_kernels(), &simt::fast_kernels(), &simt::selftest_kernels(),
                              &simt::cluster_selftest_kernels()})
        for (const simt::Kernel &k : *table)
            if (name == k.name) return k;
    throw py::key_error("no kernel " + name + " in the shim");
}

void launch(const std::string &name, std::array<unsigned, 3> grid, std::array<unsigned, 3> block, size_t shared,
            const std::string &args, uint64_t seed, bool gates, unsigned cluster) {
    const simt::Kernel &kernel = find(name);
    if (args.size() != kernel.args_size)
        throw py::value_error(name + " takes " + std::to_string(kernel.args_size) + " bytes of arguments, not " +
                              std::to_string(args.size()));
    alignas(16) char copy[4096];
    if (args.size() > sizeof copy) throw py::value_error("a kernel takes at most 4096 bytes of arguments");
    std::memcpy(copy, args.data(), args.size());
    const simt::Launch geometry{{grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared, seed, gates,
                                cluster};
    simt::run(geometry, kernel.run, copy);
}

}  // namespace

PYBIND11_MODULE(_simt, m) {
    m.doc() = "The kernels under kernels/ on a CUDA execution model of fibers; for tests.";
    m.def(
        "launch",
        [](const std::string &name, std::array<unsigned, 3> grid, std::array<unsigned, 3> block, size_t shared,
           const py::bytes &args, uint64_t seed, bool gates,
           unsigned cluster) { launch(name, grid, block, shared, args, seed, gates, cluster); },
        py::arg("kernel"), py::arg("grid"), py::arg("block"), py::arg("shared"), py::arg("args"), py::arg("seed") = 0,
        py::arg("gates") = true, py::arg("cluster") = 1,
        "Run one kernel to its end, `cluster` blocks along x at a time; seed 0 keeps the order of blocks and threads, others "
        "shuffle it. Without `gates` bulk copies are made as below sm_90, where there are no clusters either.");
    m.def("kernels", [] {
        std::vector<std::string> names;
        for (const auto *table : {&simt::exact_kernels(), &simt::fast_kernels()})
            for (const simt::Kernel &k : *table) names.emplace_back(k.name);
        return names;
    });
    m.def("counters", [] {
        py::dict d;
        d["launches"] = simt::counters.launches;
        d["blocks"] = simt::counters.blocks;
        d["switches"] = simt::counters.switches;
        d["barriers"] = simt::counters.barriers;
        return d;
    });
}
