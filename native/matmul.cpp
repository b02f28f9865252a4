// matmul: the driver, and the scalar form that states the order of contract section 3.
#include "matmul.h"

#include <algorithm>
#include <cmath>

#include "../kernels/contract.cuh"

namespace kestrel {
namespace {

// f16 bits to f32, exact; a NaN keeps its payload and becomes quiet, as the vector conversion does.
float f32_of_f16(unsigned short bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 1023u;
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    uint32_t out = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
    if (exponent == 31 && mantissa != 0) out |= 0x00400000u;
    float value;
    std::memcpy(&value, &out, 4);
    return value;
}

float f32_of_bf16(unsigned short bits) {
    const uint32_t out = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &out, 4);
    return value;
}

// codes u8[G, 16]: low nibbles are elements 0..15 of the group, high nibbles 16..31; value = code - 8.
int dot_q4(const unsigned char *codes, const signed char *q, int gsum) {
    int dot = 0;
    for (int j = 0; j < 16; j++) dot += (codes[j] & 15) * q[j] + (codes[j] >> 4) * q[j + 16];
    return dot - 8 * gsum;
}

int dot_q8(const signed char *codes, const signed char *q) {
    int dot = 0;
    for (int j = 0; j < 32; j++) dot += codes[j] * q[j];
    return dot;
}

float row_quantised(const Weight &w, int64_t row, const signed char *q, const float *d, const int *gsum) {
    const int groups = w.k / 32;
    const auto *scale = w.scale + row * groups;
    const auto *q4 = static_cast<const unsigned char *>(w.codes) + row * groups * 16;
    const auto *q8 = static_cast<const signed char *>(w.codes) + row * groups * 32;
    float acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int g = 0; g < groups; g++) {
        const int dot = w.wtype == KESTREL_Q4LOCAL ? dot_q4(q4 + 16 * g, q + 32 * g, gsum[g])
                                                   : dot_q8(q8 + 32 * g, q + 32 * g);
        const float ws = f32_of_f16(scale[g]) * d[g];
        acc[g % 8] = std::fma(static_cast<float>(dot), ws, acc[g % 8]);
    }
    return hsum8(acc);
}

float row_bf16(const Weight &w, int64_t row, const float *x) {
    const auto *bits = static_cast<const unsigned short *>(w.codes) + row * w.k;
    float acc[32] = {};
    for (int k = 0; k < w.k; k++) acc[k % 32] = std::fma(f32_of_bf16(bits[k]), x[k], acc[k % 32]);
    return hsum32(acc);
}

void run_scalar(const MatmulTask &task, const MatmulInput &input, char *) {
    const Weight &w = task.w;
    const int64_t k = w.k, groups = w.k / 32;
    for (int n = task.begin; n < task.end; n++) {
        for (int c = 0; c < task.count; c++) {
            const int64_t in = task.in_row[c];
            float *y = task.y + task.out_row[c] * task.ldy + n;
            *y = w.wtype == KESTREL_BF16
                     ? row_bf16(w, n, input.x + in * k)
                     : row_quantised(w, n, input.xq + in * k, input.xd + in * groups, input.gsum + in * groups);
        }
    }
}

size_t no_workspace(int, int) { return 0; }

}  // namespace

int rows_per_task(int64_t rows, int threads, int inputs) {
    const int64_t tasks = static_cast<int64_t>(threads) * (threads == 1 ? 1 : 8);
    const int64_t even = (rows + tasks - 1) / tasks;
    if (inputs <= kFewInputs) return static_cast<int>(round_up(std::min<int64_t>(even, 4096), 8));
    return static_cast<int>(std::min(std::max<int64_t>(even / 32 * 32, 32), int64_t{64}));
}

std::atomic<bool> use_vnni{__builtin_cpu_supports("avx512vnni") != 0};

const MatmulForm matmul_form_scalar = {run_scalar, no_workspace};

void run_matmul(const MatmulArgs &args, const MatmulForm &form, ThreadContext &context) {
    int64_t ldy = 0;
    int widest = 0;
    for (int i = 0; i < args.n_w; i++) {
        ldy += args.w[i].n;
        widest = std::max(widest, args.w[i].k);
    }
    const size_t index_bytes = round_up(args.M * sizeof(int), 64);
    char *scratch = static_cast<char *>(context.scratch(index_bytes + form.workspace_bytes(widest, args.M)));
    int *identity = reinterpret_cast<int *>(scratch);
    for (int m = 0; m < args.M; m++) identity[m] = m;

    const MatmulInput input = {args.x, args.xq, args.xd, args.gsum};
    const int step = rows_per_task(ldy, context.count, args.M);
    // Too few tasks for the threads: the input rows are cut as well, into parts that still repay unpacking the weights.
    const int64_t row_tasks = (ldy + step - 1) / step;
    const int64_t wanted_parts = context.count == 1 ? 1 : (4 * context.count + row_tasks - 1) / row_tasks;
    const int parts = static_cast<int>(std::max<int64_t>(std::min<int64_t>(wanted_parts, args.M / 32), 1));
    int64_t chunk = context.next_chunk(), first_chunk = 0, column = 0;
    for (int i = 0; i < args.n_w; i++) {
        const Weight &w = args.w[i];
        const int64_t chunks = static_cast<int64_t>(parts) * ((w.n + step - 1) / step);
        for (; chunk < first_chunk + chunks; chunk = context.next_chunk()) {
            const int64_t at = chunk - first_chunk;
            const int begin = static_cast<int>(at / parts) * step, part = static_cast<int>(at % parts);
            const int m0 = static_cast<int>(static_cast<int64_t>(args.M) * part / parts);
            const int m1 = static_cast<int>(static_cast<int64_t>(args.M) * (part + 1) / parts);
            const MatmulTask task = {w,
                                     begin,
                                     std::min(begin + step, w.n),
                                     m1 - m0,
                                     identity + m0,
                                     identity + m0,
                                     args.y + column,
                                     ldy};
            form.run(task, input, scratch + index_bytes);
        }
        first_chunk += chunks;
        column += w.n;
    }
}

void matmul_scalar(const void *args, ThreadContext &context) {
    run_matmul(*static_cast<const MatmulArgs *>(args), matmul_form_scalar, context);
}

bool matmul_serial(const void *) { return false; }

}  // namespace kestrel
