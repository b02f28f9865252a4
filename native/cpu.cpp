#include "cpu.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
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

// The whole of a small file; empty when it cannot be read. No iostreams in this module: where the compiler links them
// statically, a second copy of libstdc++ in the process makes their locales crash.
std::string file_text(const std::string &path) {
    std::string text;
    FILE *file = std::fopen(path.c_str(), "r");
    if (file == nullptr) return text;
    char buffer[4096];
    for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;) text.append(buffer, n);
    std::fclose(file);
    return text;
}

// CPUs by the quota files of one cgroup folder; 0 when there is no quota.
double quota_of(const std::string &folder) {
    double quota = 0, period = 0;
    if (std::string v2 = file_text(folder + "/cpu.max"); !v2.empty()) {  // "QUOTA PERIOD", or "max PERIOD"
        if (std::sscanf(v2.c_str(), "%lf %lf", &quota, &period) != 2) return 0;
    } else {
        quota = std::atof(file_text(folder + "/cpu.cfs_quota_us").c_str());
        period = std::atof(file_text(folder + "/cpu.cfs_period_us").c_str());
    }
    return quota > 0 && period > 0 ? quota / period : 0;
}

// The smallest quota on the way from this process' cgroup to the root; 0 when there is none.
double cgroup_cpus() {
    const std::string text = file_text("/proc/self/cgroup");  // lines of "id:controllers:/path"
    double least = 0;
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        const std::string line = text.substr(begin, end - begin);
        begin = end + 1;
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        std::string path = line.substr(second + 1);
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
