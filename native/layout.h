// The layout of the argument structs as this compiler sees it, for the comparison with kestrel/ops.py.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace kestrel {

struct MemberLayout {
    const char *name;
    size_t offset, size;
};

struct StructLayout {
    const char *op;
    size_t size;
    std::vector<MemberLayout> members;
};

// One for each op, and one named "Weight".
std::vector<StructLayout> struct_layouts();

}  // namespace kestrel
