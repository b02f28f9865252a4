// Copies to shared memory in the CUDA shim: asynchronous ones of a thread, bulk ones with their gates (see simt_host.h).
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "simt_fibers.h"

namespace simt {

namespace {

constexpr uint64_t kGateMark = 0x67617465;  // upper half of an open gate; the lower one is its number
constexpr long long kMaxGateBytes = (1 << 20) - 1;

// A turn of a gate.
std::string name(const Gate &gate, unsigned turn) {
    return "turn " + std::to_string(turn) + " (parity " + std::to_string(turn % 2) + ") of the gate at byte " +
           std::to_string(gate.offset) + " of " + (gate.dynamic ? "dynamic shared memory" : "static shared memory") +
           (gate.of_cluster ? " of block " + simt::name(gate.block) : "");
}

std::string asked_by(const BulkCopy &copy) {
    return copy.from ? "bulk copy asked for at " + name(copy.site) : "send at " + name(copy.site);
}

// Ends the turn of a gate when all has arrived.
void end_turn(unsigned number) {
    Gate &gate = running->gates[number];
    if (!gate.expects || gate.arrived < gate.expected) return;
    gate.turn++;
    gate.expects = false;
    gate.expected = gate.asked = gate.arrived = 0;
    for (unsigned i = 0; i < block_threads; i++)
        if (running->fibers[i].state == State::at_gate && running->fibers[i].gate == number)
            running->fibers[i].state = State::ready;
}

// A bulk copy or a send arrives, in whatever order. On a GPU its bytes may move at any time since it was asked for.
void arrive(size_t which) {
    std::vector<BulkCopy> &under_way = running->under_way;
    std::swap(under_way[which], under_way.back());
    const BulkCopy copy = std::move(under_way.back());
    under_way.pop_back();
    const size_t bytes = copy.bytes.size();
    const auto poison = [](unsigned char byte) { return byte == kPoison; };
    const auto refuse = [&](const char *end) {
        throw std::runtime_error(end + (" of the " + asked_by(copy)) + " has been written while it was on its way");
    };
    if (!std::all_of(copy.to, copy.to + bytes, poison)) refuse("the destination");
    if (copy.from && std::memcmp(copy.from, copy.bytes.data(), bytes) != 0) refuse("the source");
    std::memcpy(copy.to, copy.bytes.data(), bytes);
    running->gates[copy.gate].arrived += static_cast<long long>(bytes);
    end_turn(copy.gate);
}

const unsigned char *gate_address(Site site, const unsigned long long *gate) {
    const unsigned char *const at = reinterpret_cast<const unsigned char *>(gate);
    if (reinterpret_cast<uintptr_t>(at) % 8 || (!in_dynamic(at, 8) && !in_statics(at, 8)))
        fail(caller_name(site) + " names a gate that is not 8 aligned bytes of its shared memory");
    return at;
}

// The number of a gate of `block`, which the running one names by its own of the same place.
unsigned find_gate(Site site, Block &block, const unsigned long long *gate, bool of_cluster) {
    unsigned char *const own = const_cast<unsigned char *>(gate_address(site, gate));
    const unsigned char *const at = place_in(block, own);
    const std::vector<Gate> &gates = block.gates;
    uint64_t mark;
    std::memcpy(&mark, same_place(block, own), sizeof mark);
    const unsigned number = static_cast<unsigned>(mark & 0xffffffffu);
    const auto gate_name = [&] { return "a gate" + (&block == running ? "" : ", of block " + simt::name(block.index) + ","); };
    if (mark >> 32 == kGateMark && number < gates.size() && gates[number].at == at) {
        if (gates[number].of_cluster != of_cluster)
            fail(caller_name(site) + " uses a gate of " + (of_cluster ? "bulk copies for sends" : "sends for bulk copies"));
        return number;
    }
    for (const Gate &g : gates)
        if (g.at == at) fail(caller_name(site) + " uses " + gate_name() + " whose memory has been written since it was opened");
    fail(caller_name(site) + " uses " + gate_name() + " that nobody has opened yet");
}

// The first that is said of a turn; ahead of that somebody must have seen that the one before is over.
void check_turn(Site site, const Gate &gate) {
    if (!gate.expects && gate.asked == 0 && gate.seen < gate.turn)
        fail(caller_name(site) + " begins " + name(gate, gate.turn) + " before anyone has waited for the one before");
}

void check_bytes(Site site, const Gate &gate) {
    if (gate.expects && gate.asked > gate.expected)
        fail(caller_name(site) + ": " + name(gate, gate.turn) + " expects " + std::to_string(gate.expected) +
             " bytes, and more were " + (gate.of_cluster ? "sent: " : "asked for: ") + std::to_string(gate.asked));
    if (gate.asked > kMaxGateBytes || gate.expected > kMaxGateBytes)
        fail(caller_name(site) + ": more bytes on their way than a gate can count: " +
             std::to_string(std::max(gate.asked, gate.expected)));
}

}  // namespace

void start_copies(Block &block) {
    block.gates.clear();
    block.under_way.clear();
    block.prompt = shuffled ? static_cast<unsigned>(next_random() % (kAlways + 1)) : 0;
}

void check_gates() {
    const std::string who = "block " + name(block_index) + " ended ";
    for (const Gate &g : running->gates) {
        const unsigned begun = g.turn + (g.expects ? 1 : 0);
        if (g.expects && g.asked < g.expected)
            fail(who + "while " + name(g, g.turn) + " expects " + std::to_string(g.expected - g.asked) + " bytes that nobody " +
                 (g.of_cluster ? "has sent: see " : "asks for: see ") + name(g.expect_site));
        if (!g.expects && g.asked)
            fail(who + (g.of_cluster ? "with bytes, sent" : "with a bulk copy, asked for") + " at " + name(g.ask_site) +
                 ", that " + name(g, g.turn) + " does not expect");
        if (g.seen < begun)
            fail(who + "without waiting for " + name(g, g.seen) + ", expected at " + name(g.expect_site));
        if (g.of_cluster && g.received != static_cast<uint64_t>(begun) * block_threads)
            fail(who + "and not all of its threads have received each turn up to " + name(g, begun - 1));
    }
}

void arrive_some() {
    const std::vector<BulkCopy> &under_way = running->under_way;
    while (!under_way.empty() && next_random() % kAlways < running->prompt) arrive(next_random() % under_way.size());
}

bool arrive_awaited() {
    const std::vector<BulkCopy> &under_way = running->under_way;
    std::vector<unsigned> awaited;
    for (unsigned i = 0; i < block_threads; i++) {
        const Fiber &f = running->fibers[i];
        if (f.state != State::at_gate) continue;
        const auto comes = [&](const BulkCopy &copy) { return copy.gate == f.gate; };
        if (std::any_of(under_way.begin(), under_way.end(), comes)) awaited.push_back(f.gate);
        if (!awaited.empty() && !shuffled) break;
    }
    if (awaited.empty()) return false;
    const unsigned gate = awaited[shuffled ? next_random() % awaited.size() : 0];
    for (size_t i = under_way.size(); i-- > 0;)
        if (under_way[i].gate == gate) arrive(i);
    return true;
}

bool awaits_sends(const Block &block) {
    for (unsigned i = 0; i < block_threads; i++) {
        const Fiber &f = block.fibers[i];
        if (f.state == State::at_gate && block.gates[f.gate].of_cluster) return true;
    }
    return false;
}

void refuse_gate_waits() {
    for (unsigned i = 0; i < block_threads; i++) {
        const Fiber &f = running->fibers[i];
        if (f.state != State::at_gate) continue;
        const Gate &g = running->gates[f.gate];
        throw std::runtime_error("deadlock: " + name(f) + " waits at " + name(f.site) + " for " + name(g, f.turn) +
                                 ", which expects " +
                                 (g.expects ? std::to_string(g.expected) + " bytes, of which " : "nothing yet; ") +
                                 std::to_string(g.asked) + (g.expects ? " were " : " bytes were ") +
                                 (g.of_cluster ? "sent" : "asked for"));
    }
}

void copy_async(void *to, const void *from, size_t bytes) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes)
        fail("an asynchronous copy of " + std::to_string(bytes) + " bytes is not aligned to its size");
    if (shuffled && next_random() % 4 == 0)
        std::memcpy(to, from, bytes);
    else
        current->copies.push_back({to, from, bytes, current->sets});
}

void copy_wait_all() {
    for (const PendingCopy &c : current->copies) std::memcpy(c.to, c.from, c.bytes);
    current->copies.clear();
}

void copy_close() { current->sets++; }

void copy_wait_closed() {
    std::vector<PendingCopy> left;
    for (const PendingCopy &c : current->copies) {
        if (c.set + 1 < current->sets)
            std::memcpy(c.to, c.from, c.bytes);
        else
            left.push_back(c);
    }
    current->copies.swap(left);
}

namespace {

void open(Site site, unsigned long long *gate, bool of_cluster) {
    const unsigned char *const at = gate_address(site, gate);
    std::vector<Gate> &gates = running->gates;
    for (const Gate &g : gates)
        if (g.at == at) fail(caller_name(site) + " opens a gate a second time");
    *gate = kGateMark << 32 | gates.size();
    gates.emplace_back();
    Gate &g = gates.back();
    g.at = at;
    g.block = block_index;
    g.dynamic = in_dynamic(at, 8);
    g.offset = at - (g.dynamic ? running->shared_base : statics());
    g.of_cluster = of_cluster;
    g.opened = arrivals();
}

void expect(Site site, unsigned number, int bytes, int multiple) {
    Gate &g = running->gates[number];
    if (bytes < 0 || bytes % multiple)
        fail(caller_name(site) + " expects " + std::to_string(bytes) + " bytes, no multiple of " + std::to_string(multiple));
    if (g.expects) fail(caller_name(site) + " tells " + name(g, g.turn) + " a second time what to expect");
    check_turn(site, g);
    g.expects = true;
    g.expected = bytes;
    g.expect_site = site;
    check_bytes(site, g);
    end_turn(number);
}

void wait(Site site, unsigned number, unsigned turn) {
    Fiber &self = *current;
    if (turn == running->gates[number].turn) {
        self.site = site;
        self.gate = number;
        self.turn = turn;
        suspend(State::at_gate);
    }
    Gate &g = running->gates[number];
    // The hardware compares parities: it lets the thread pass too early, or make it wait for a turn that need not come.
    if (g.turn != turn + 1)
        fail(caller_name(site) + " waits for " + name(g, turn) + ", which is in turn " + std::to_string(g.turn));
    g.seen = std::max(g.seen, turn + 1);
}

}  // namespace

void gate_open(Site site, unsigned long long *gate) { open(site, gate, false); }
void gate_expect(Site site, unsigned long long *gate, int bytes) {
    expect(site, find_gate(site, *running, gate, false), bytes, 16);
}
void gate_wait(Site site, unsigned long long *gate, unsigned turn) {
    wait(site, find_gate(site, *running, gate, false), turn);
}

void bulk_copy(Site site, void *to, const void *from, int bytes, unsigned long long *gate) {
    const unsigned number = find_gate(site, *running, gate, false);
    Gate &g = running->gates[number];
    BulkCopy copy{number, static_cast<unsigned char *>(to), static_cast<const unsigned char *>(from), {}, site};
    if (bytes <= 0 || bytes % 16) fail(caller_name(site) + " copies " + std::to_string(bytes) + " bytes, no multiple of 16");
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16)
        fail(caller_name(site) + " copies from or to an address that is not aligned to 16 bytes");
    const size_t size = static_cast<size_t>(bytes);
    if (!in_dynamic(copy.to, size) && !in_statics(copy.to, size))
        fail(caller_name(site) + " copies to what is not in its shared memory");
    std::vector<BulkCopy> &under_way = running->under_way;
    for (const BulkCopy &other : under_way)
        if (copy.to < other.to + other.bytes.size() && other.to < copy.to + size)
            fail(caller_name(site) + " copies to where the " + asked_by(other) + " has yet to arrive");
    check_turn(site, g);
    g.asked += bytes;
    g.ask_site = site;
    check_bytes(site, g);
    copy.bytes.assign(copy.from, copy.from + size);
    std::memset(copy.to, kPoison, size);
    under_way.push_back(std::move(copy));
    if (shuffled && next_random() % kAlways < running->prompt) arrive(under_way.size() - 1);
}

void cluster_open(Site site, unsigned long long *gate) { open(site, gate, true); }
void cluster_expect(Site site, unsigned long long *gate, int bytes) {
    const unsigned number = find_gate(site, *running, gate, true);
    const Gate &g = running->gates[number];
    if (g.received != static_cast<uint64_t>(g.turn) * block_threads)
        fail(caller_name(site) + " says what " + name(g, g.turn) + " expects before all threads have received the one before");
    expect(site, number, bytes, 4);
}

void cluster_send(Site site, void *to, int rank, const void *from, size_t bytes, const unsigned long long *gate) {
    unsigned char *const at = static_cast<unsigned char *>(to);
    const unsigned char *const value = static_cast<const unsigned char *>(from);
    Block &other = reach(site, to, rank, bytes, true);
    const unsigned number = find_gate(site, other, gate, true);
    Gate &g = other.gates[number];
    if (current->met <= g.opened)
        fail(caller_name(site) + " sends by way of a gate of block " + simt::name(other.index) +
             " that was opened behind the last cluster barrier, which that block may not have opened yet");
    check_turn(site, g);
    g.asked += static_cast<long long>(bytes);
    g.ask_site = site;
    check_bytes(site, g);
    std::memset(same_place(other, at), kPoison, bytes);
    other.under_way.push_back({number, place_in(other, at), nullptr, {value, value + bytes}, site});
    other.stuck = false;
    if (&other == running && shuffled && next_random() % kAlways < running->prompt) arrive(other.under_way.size() - 1);
}

void cluster_receive(Site site, unsigned long long *gate, unsigned turn) {
    const unsigned number = find_gate(site, *running, gate, true);
    wait(site, number, turn);
    running->gates[number].received++;
}

}  // namespace simt
