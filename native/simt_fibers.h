// What the two halves of the CUDA shim share: simt_host.cpp runs the fibers of a block, simt_copies.cpp moves what they
// copy.
#pragma once

#include <setjmp.h>

#include <memory>
#include <string>
#include <vector>

#include "simt_host.h"

namespace simt {

constexpr int kPoison = 0xff;  // NaN as a float, -1 as an integer

enum class State : uint8_t { ready, at_barrier, in_warp, at_gate, ended };

struct PendingCopy {
    void *to;
    const void *from;
    size_t bytes;
    unsigned set;
};

struct Fiber {
    uint3 index;
    unsigned warp, lane;
    State state;
    bool started = false;  // its stack holds the entry loop
    Site site;
    jmp_buf context;
    char *stack = nullptr;
    std::vector<PendingCopy> copies;
    unsigned sets = 0;  // of copies, that it has closed
    unsigned gate, turn;  // at_gate
};

// ---- simt_host.cpp: fibers ----

extern std::vector<std::unique_ptr<Fiber>> fibers;  // kept between launches; the running block has the first
extern unsigned block_threads;                      // so many
extern Fiber *current;
extern bool shuffled;  // the launch has a seed
uint64_t next_random();

extern unsigned char *shared_base;  // dynamic shared memory of the running block
unsigned char *statics();           // its __shared__ variables
bool in_dynamic(const unsigned char *at, size_t bytes);
bool in_statics(const unsigned char *at, size_t bytes);

std::string name(const Site &site);
std::string name(const uint3 &index);
std::string name(const Fiber &f);

// Back to the scheduler until this fiber is ready again.
void suspend(State state);
// Of a fiber: ends the launch.
[[noreturn]] void fail(const std::string &message);

// ---- simt_copies.cpp: copies and gates of the running block ----

void start_copies();
// What the gates of a block say when its last thread ends.
void check_gates();
// Some of the bulk copies that nothing makes arrive yet.
void arrive_some();
// Called when no fiber can go on: bulk copies of a gate that one of them waits for arrive. Returns false when there are
// none; throws when there never will be.
bool arrive_awaited();

}  // namespace simt
