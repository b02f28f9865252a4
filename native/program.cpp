#include "program.h"

#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace kestrel {

constexpr int kMaxThreads = 1024;

// Whether an op's row of x is spread, as only the kernels of a GPU take it (kernels/op_args.h).
static bool is_spread(const std::string &name, const void *args) {
    if (name == "embed") return static_cast<const EmbedArgs *>(args)->spread != 0;
    if (name == "rms_norm") return static_cast<const RmsNormArgs *>(args)->spread != 0;
    return name == "add" && static_cast<const AddArgs *>(args)->spread != 0;
}

Program::Program(const std::vector<std::pair<std::string, std::string>> &ops, int threads, Isa isa)
    : threads_(threads), isa_(isa) {
    if (threads < 1 || threads > kMaxThreads)
        throw std::invalid_argument("threads must be 1 to " + std::to_string(kMaxThreads) + ", not " +
                                    std::to_string(threads));
    if (ops.size() >= kMaxOps) throw std::invalid_argument("a program has fewer than 2^24 ops");
    for (size_t i = 0; i < ops.size(); i++) {
        const auto &[name, bytes] = ops[i];
        const OpEntry *entry = find_op(name.c_str());
        if (entry == nullptr)
            throw std::invalid_argument("op " + std::to_string(i) + ": no native op is called '" + name + "'");
        if (bytes.size() != entry->args_size)
            throw std::invalid_argument("op " + std::to_string(i) + " (" + name + "): its arguments are " +
                                        std::to_string(bytes.size()) + " bytes, the native module expects " +
                                        std::to_string(entry->args_size) +
                                        "; rebuild it with `make native` if kestrel/ops.py changed");
        const size_t units = (bytes.size() + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
        storage_.emplace_back(new std::max_align_t[units]);
        std::memcpy(storage_.back().get(), bytes.data(), bytes.size());
        const void *args = storage_.back().get();
        if (is_spread(name, args))
            throw std::invalid_argument("op " + std::to_string(i) + " (" + name + "): a row of the CPU is not spread");
        ops_.push_back({entry, entry->run[static_cast<int>(isa)], args, threads == 1 || entry->serial(args)});
    }
}

void Program::run(size_t begin, size_t end, const std::function<void()> &check) {
    using Clock = std::chrono::steady_clock;
    std::exception_ptr interrupted;
    auto next_check = Clock::now() + std::chrono::milliseconds(50);
    const auto poll = [&]() -> bool {
        if (!check || Clock::now() < next_check) return false;
        try {
            check();
        } catch (...) {
            interrupted = std::current_exception();
            return true;
        }
        next_check = Clock::now() + std::chrono::milliseconds(50);
        return false;
    };
    if (begin < end) {
        PoolLease pool(threads_, [&] {
            if (check) check();
        });
        pool->run(ops_.data(), begin, end, poll);
    }
    if (interrupted) std::rethrow_exception(interrupted);
}

}  // namespace kestrel
