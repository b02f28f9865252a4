// What the parts of the CUDA shim share: simt_host.cpp runs the fibers of a launch, simt_blocks.cpp holds the memory of its
// blocks, simt_copies.cpp moves what they copy.
#pragma once

#include <setjmp.h>

#include <string>
#include <vector>

#include "simt_host.h"

namespace simt {

constexpr int kPoison = 0xff;  // NaN as a float, -1 as an integer
constexpr unsigned kAlways = 4;  // what a seed decides happens so many times, or fewer, out of so many
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kMaxSharedBytes = 227 << 10;  // the largest a supported GPU gives one block

enum class State : uint8_t { ready, at_barrier, in_warp, at_gate, in_cluster, ended };
// Of a fiber at the cluster's barrier: `passed` when all have arrived and it has not called cluster_wait since.
enum class Phase : uint8_t { outside, arrived, passed };

struct PendingCopy {
    void *to;
    const void *from;
    size_t bytes;
    unsigned set;
};

struct Block;

struct Fiber {
    const Block *block;
    uint3 index;
    unsigned warp, lane;
    State state;
    bool started = false;  // its stack holds the entry loop
    Site site;
    jmp_buf context;
    unsigned char *stack;               // u8[kStackBytes]; fibers of the same number in their blocks share it
    unsigned char *lowest;              // what it needs of its stack begins here
    std::vector<unsigned char> frames;  // the same, from there to the end, while another block is in place
    std::vector<PendingCopy> copies;
    unsigned sets = 0;    // of copies, that it has closed
    unsigned gate, turn;  // at_gate
    Phase phase;
    unsigned met;          // cluster barriers that it has waited at
    const Block *reached;  // the one it has accessed since it last arrived at such a barrier, or null
    Site reach_site;
};

struct Warp {
    unsigned existing, ended, arrived;  // lane masks
    Site site[32];
    Collective kind[32];
    unsigned mask[32];
    uint64_t value[32], result[32];
    int arg[32], width[32];
};

// An mbarrier with a count of one. A turn begins when the one before is over, and is over when it has been told what to
// expect and as much has arrived.
struct Gate {
    const unsigned char *at;  // while its block is in place
    uint3 block;
    bool dynamic;  // at `offset` of dynamic shared memory, else of the __shared__ variables
    long long offset;
    bool of_cluster;         // for sends, not bulk copies
    unsigned opened;         // its opener had arrived at so many cluster barriers
    uint64_t received = 0;   // threads that have received a turn, of all turns together
    unsigned turn = 0;       // the one it is in
    unsigned seen = 0;       // a thread has returned from waiting for each turn before this one
    bool expects = false;    // this turn has been told
    long long expected = 0;  // bytes of this turn: told,
    long long asked = 0;     // asked for or sent: on their way or there,
    long long arrived = 0;   // there
    Site expect_site = {}, ask_site = {};  // of the latest
};

// Or a send, which has no source.
struct BulkCopy {
    unsigned gate;
    unsigned char *to;  // while the block that it comes to is in place
    const unsigned char *from;
    std::vector<unsigned char> bytes;  // as they were when it was asked for
    Site site;
};

// Dynamic shared memory ends where a page begins that nobody may touch, so that a read past the end is seen, too: on a
// GPU it is an illegal address.
class SharedMemory {
  public:
    // The last `bytes` ahead of that page, at most kMaxSharedBytes rounded up to 128; at the same address each time.
    unsigned char *place(size_t bytes);
    bool guards(const unsigned char *at) const;

  private:
    unsigned char *memory_ = nullptr;
    size_t size_ = 0;
};

// How far the threads of a block have come with one half of the cluster's barrier.
struct Meeting {
    unsigned count;  // of them
    Site site;       // where the first of them is
};

// One block of a cluster. Its stacks and __shared__ variables lie where those of every block lie; it is in place while
// they are its own.
struct Block {
    uint3 index;
    unsigned rank;              // in its cluster
    std::vector<Fiber> fibers;  // kept between launches; the running one has the first block_threads
    std::vector<Warp> warps;
    unsigned ended_threads;
    bool begun;  // has been in place
    bool stuck;  // goes on only when all have arrived at the cluster's barrier, or a send comes to it
    Meeting arriving, waiting;
    SharedMemory memory;
    unsigned char *shared_base;          // dynamic shared memory
    std::vector<unsigned char> statics;  // its __shared__ variables, while another block is in place
    std::vector<Gate> gates;             // open ones
    std::vector<BulkCopy> under_way;
    unsigned prompt;  // how often a bulk copy does not wait to be waited for, out of kAlways times
};

// ---- simt_host.cpp: fibers ----

extern unsigned block_threads;  // of each block of the launch
extern Fiber *current;
extern bool shuffled;  // the launch has a seed
uint64_t next_random();

std::string name(const Site &site);
std::string name(const uint3 &index);
std::string name(const Fiber &f);
// "thread ... at ...", behind which it says what the thread does.
std::string caller_name(Site site);

// Back to the scheduler until this fiber is ready again.
void suspend(State state);
// Of a fiber: ends the launch.
[[noreturn]] void fail(const std::string &message);

// ---- simt_blocks.cpp: the memory of blocks ----

extern Block *running;  // the one in place
// `count` blocks, kept between launches, for a launch with as many bytes of dynamic shared memory.
std::vector<Block *> prepare_blocks(size_t count, size_t shared_bytes);
// Makes it a new block of the launch.
void start_block(Block &block, uint3 index, unsigned rank);
void put_in_place(Block &block);
// What lies behind the dynamic shared memory of the running block must still be poison.
void check_shared_end();
// After a launch that ended in mid-kernel: all fibers start afresh next time.
void abandon_blocks();

unsigned char *statics();  // the __shared__ variables of the running block
bool in_dynamic(const unsigned char *at, size_t bytes);
bool in_statics(const unsigned char *at, size_t bytes);
// Where `block` has what the running block has at `at`, in shared memory of either kind.
unsigned char *same_place(Block &block, unsigned char *at);
// Where that lies while `block` is in place.
unsigned char *place_in(const Block &block, unsigned char *at);

// ---- simt_host.cpp: clusters ----

// The block of this number in the cluster, which the running thread may access at `shared`, so many bytes; `sends`: by a send.
Block &reach(Site site, const void *shared, int rank, size_t bytes, bool sends);
// Cluster barriers that the running thread has arrived at.
unsigned arrivals();

// ---- simt_copies.cpp: copies and gates of the running block ----

void start_copies(Block &block);
// What the gates of a block say when its last thread ends.
void check_gates();
// Some of the bulk copies and sends that nothing makes arrive yet.
void arrive_some();
// Called when no fiber can go on: bulk copies and sends of a gate that one of them waits for arrive. Returns false when there
// are none.
bool arrive_awaited();
// Whether a thread of a block waits for sends.
bool awaits_sends(const Block &block);
// Called when none of them ever will: throws when a fiber waits for a gate.
void refuse_gate_waits();

}  // namespace simt
