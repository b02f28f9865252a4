#include "cpu.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace kestrel {

const char *isa_name(Isa isa) {
    switch (isa) {
        case Isa::scalar: return "scalar";
        case Isa::avx2: return "avx2";
        case Isa::avx512: return "avx512";
    }
    return "?";
}

bool isa_usable(Isa isa) {
    switch (isa) {
        case Isa::scalar: return true;
        case Isa::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        case Isa::avx512:
            return isa_usable(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    }
    return false;
}

namespace {

int affinity_cpus() {
    // The kernel refuses a mask smaller than its own: grow it until it fits.
    for (int cpus = 1024; cpus <= 1 << 20; cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC(cpus);
        if (set == nullptr) break;
        const size_t size = CPU_ALLOC_SIZE(cpus);
        const int failed = sched_getaffinity(0, size, set);
        const int count = failed ? 0 : CPU_COUNT_S(size, set);
        CPU_FREE(set);
        if (!failed) return std::max(count, 1);
    }
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// CPUs by the quota files of one cgroup folder; 0 when there is no quota.
double quota_of(const std::string &folder) {
    double quota = 0, period = 0;
    std::string first;
    if (std::ifstream v2(folder + "/cpu.max"); v2 >> first >> period) {
        if (first != "max") quota = std::atof(first.c_str());
    } else if (std::ifstream q(folder + "/cpu.cfs_quota_us"), p(folder + "/cpu.cfs_period_us"); q >> quota) {
        if (!(p >> period)) quota = 0;
    }
    return quota > 0 && period > 0 ? quota / period : 0;
}

// The smallest quota on the way from this process' cgroup to the root; 0 when there is none.
double cgroup_cpus() {
    std::ifstream file("/proc/self/cgroup");  // lines of "id:controllers:/path"
    std::string line;
    double least = 0;
    while (std::getline(file, line)) {
        std::istringstream fields(line);
        std::string id, controllers, path;
        std::getline(fields, id, ':');
        std::getline(fields, controllers, ':');
        std::getline(fields, path);
        std::string root = "/sys/fs/cgroup";
        if (!controllers.empty()) {
            if (("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
            root += "/cpu";
        }
        for (;;) {
            const double cpus = quota_of(root + (path == "/" ? "" : path));
            if (cpus > 0 && (least == 0 || cpus < least)) least = cpus;
            const size_t slash = path.rfind('/');
            if (path.empty() || path == "/" || slash == std::string::npos) break;
            path = slash == 0 ? "/" : path.substr(0, slash);
        }
    }
    return least;
}

}  // namespace

int default_threads() {
    int threads = affinity_cpus();
    const double quota = cgroup_cpus();
    if (quota > 0) threads = std::min(threads, std::max(1, static_cast<int>(quota)));
    return threads;
}

double read_bandwidth(size_t nbytes, int threads) {
    constexpr int kPasses = 5;
    const size_t share = std::max<size_t>(nbytes / threads / 64, 1) * 64;
    std::vector<std::thread> workers;
    std::vector<uint64_t> sums(threads);
    std::atomic<int> ready{0}, failed{0};
    std::atomic<int> pass{0}, done{0};
    for (int t = 0; t < threads; t++) {
        workers.emplace_back([&, t] {
            // Each thread first touches its own share, so that the pages lie near it.
            auto *p = static_cast<uint64_t *>(std::aligned_alloc(64, share));
            if (p == nullptr) failed.fetch_add(1);
            else std::memset(p, 1, share);
            ready.fetch_add(1);
            for (int i = 1; i <= kPasses; i++) {
                while (pass.load(std::memory_order_acquire) < i) std::this_thread::yield();
                uint64_t sum[8] = {};
                if (p != nullptr)
                    for (size_t k = 0; k < share / 8; k += 8)
                        for (int l = 0; l < 8; l++) sum[l] += p[k + l];
                for (int l = 0; l < 8; l++) sums[t] += sum[l];
                done.fetch_add(1, std::memory_order_release);
            }
            std::free(p);
        });
    }
    double best = 0;
    while (ready.load() < threads) std::this_thread::yield();
    for (int i = 1; i <= kPasses; i++) {
        const auto start = std::chrono::steady_clock::now();
        pass.store(i, std::memory_order_release);
        while (done.load(std::memory_order_acquire) < i * threads) std::this_thread::yield();
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        best = std::max(best, static_cast<double>(share) * threads / seconds / 1e9);
    }
    for (auto &worker : workers) worker.join();
    if (failed.load()) throw std::bad_alloc();
    // Used, so that the reads cannot be dropped.
    volatile uint64_t sink = sums[0];
    (void)sink;
    return best;
}

}  // namespace kestrel
