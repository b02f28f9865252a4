// l2_hash, contract section 12: FNV-1a 64 of each row's bytes; every NaN of an f32 row counts as 0x7fc00000.
#include "../kernels/contract.cuh"
#include "ops.h"

namespace kestrel {
namespace {

constexpr unsigned long long kOffset = 1469598103934665603ull, kPrime = 1099511628211ull;

unsigned long long fnv1a(const unsigned char *p, int bytes) {
    unsigned long long h = kOffset;
    for (int i = 0; i < bytes; i++) h = (h ^ p[i]) * kPrime;
    return h;
}

unsigned long long fnv1a_f32(const float *p, int count) {
    unsigned long long h = kOffset;
    for (int i = 0; i < count; i++) {
        unsigned u = f32_bits(p[i]);
        if ((u & 0x7fffffffu) > KESTREL_INF_BITS) u = KESTREL_NAN_BITS;
        for (int b = 0; b < 4; b++) h = (h ^ (u >> 8 * b & 0xffu)) * kPrime;
    }
    return h;
}

}  // namespace

void l2_hash_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const L2HashArgs *>(args);
    int64_t begin, end;
    context.split(a.M, 1, &begin, &end);
    for (int64_t m = begin; m < end; m++) {
        const int64_t row = a.row0 != nullptr ? static_cast<int64_t>(a.row0[m]) + a.row1[m] : m;
        const auto *p = static_cast<const unsigned char *>(a.x) + row * a.stride;
        a.out[m] = a.is_f32 ? fnv1a_f32(reinterpret_cast<const float *>(p), a.bytes / 4) : fnv1a(p, a.bytes);
    }
}

bool l2_hash_serial(const void *args) {
    const auto &a = *static_cast<const L2HashArgs *>(args);
    return a.M == 1 || static_cast<int64_t>(a.M) * a.bytes <= kSerialElements;
}

}  // namespace kestrel
