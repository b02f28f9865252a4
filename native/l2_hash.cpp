// l2_hash, contract section 12: FNV-1a 64 of each row's bytes; every NaN of an f32 row counts as 0x7fc00000.
#include "../kernels/contract.cuh"
#include "ops.h"

namespace kestrel {
namespace {

constexpr unsigned long long kOffset = 1469598103934665603ull, kPrime = 1099511628211ull;

// One row alone waits for every multiply of its chain: rows are hashed kRows at a time.
constexpr int kRows = 4;

template <int N>
void hash_bytes(const unsigned char *const *p, int bytes, unsigned long long *h) {
    for (int r = 0; r < N; r++) h[r] = kOffset;
    for (int i = 0; i < bytes; i++)
        for (int r = 0; r < N; r++) h[r] = (h[r] ^ p[r][i]) * kPrime;
}

template <int N>
void hash_f32(const unsigned char *const *p, int count, unsigned long long *h) {
    for (int r = 0; r < N; r++) h[r] = kOffset;
    for (int i = 0; i < count; i++) {
        unsigned u[N];
        for (int r = 0; r < N; r++) {
            __builtin_memcpy(&u[r], p[r] + 4 * static_cast<int64_t>(i), 4);
            if ((u[r] & 0x7fffffffu) > KESTREL_INF_BITS) u[r] = KESTREL_NAN_BITS;
        }
        for (int b = 0; b < 32; b += 8)
            for (int r = 0; r < N; r++) h[r] = (h[r] ^ (u[r] >> b & 0xffu)) * kPrime;
    }
}

template <int N>
void hash_rows(const L2HashArgs &a, int64_t m) {
    const unsigned char *p[N];
    for (int r = 0; r < N; r++) {
        const int64_t row = a.row0 != nullptr ? static_cast<int64_t>(a.row0[m + r]) + a.row1[m + r] : m + r;
        p[r] = static_cast<const unsigned char *>(a.x) + row * a.stride;
    }
    unsigned long long h[N];  // not a.out, which the compiler must take for a part of the bytes
    if (a.is_f32) hash_f32<N>(p, a.bytes / 4, h);
    else hash_bytes<N>(p, a.bytes, h);
    for (int r = 0; r < N; r++) a.out[m + r] = h[r];
}

}  // namespace

void l2_hash_scalar(const void *args, ThreadContext &context) {
    const auto &a = *static_cast<const L2HashArgs *>(args);
    int64_t begin, end;
    context.split(a.M, kRows, &begin, &end);
    int64_t m = begin;
    for (; m + kRows <= end; m += kRows) hash_rows<kRows>(a, m);
    for (; m < end; m++) hash_rows<1>(a, m);
}

bool l2_hash_serial(const void *args) {
    const auto &a = *static_cast<const L2HashArgs *>(args);
    return a.M == 1 || static_cast<int64_t>(a.M) * a.bytes <= kSerialElements;
}

}  // namespace kestrel
