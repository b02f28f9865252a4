// Matrix times rows, contract section 3: what the matmul and moe_matmul ops share. A driver cuts an op into tasks (some
// rows of one matrix times some input rows); a form of an ISA level carries a task out. Forms differ in speed only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ops.h"

namespace kestrel {

// The input rows of an op; null where no matrix of the op reads them.
struct MatmulInput {
    const float *x;         // f32[rows, K]
    const signed char *xq;  // i8[rows, K]
    const float *xd;        // f32[rows, G]
    const int *gsum;        // i32[rows, G]
};

// Weight rows begin .. end-1 of one matrix times `count` input rows:
// y[out_row[c] * ldy + n] = row n . input row in_row[c], for c = 0 .. count-1.
struct MatmulTask {
    Weight w;            // codes and scale at the matrix' own row 0 (an expert's, in a stack)
    int begin, end;      // weight rows
    int count;           // input rows
    const int *in_row;   // i32[count]
    const int *out_row;  // i32[count]
    float *y;            // f32[.., ldy], at the matrix' first column
    int64_t ldy;
};

struct MatmulForm {
    void (*run)(const MatmulTask &task, const MatmulInput &input, char *workspace);
    // Bytes, 64-byte aligned, that run() needs for tasks of at most this many weights a row and input rows.
    size_t (*workspace_bytes)(int k, int count);
};

static constexpr size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Up to this many input rows a product is bound by reading weights, above by computing.
static constexpr int kFewInputs = 4;

// Weight rows of one task of an op with `rows` weight rows: several tasks per thread, so that a delayed thread does not
// hold up the rest. Few inputs: a multiple of 8 (outputs of a task fill cache lines); many: whole tiles of 16 or 32 rows.
int rows_per_task(int64_t rows, int threads, int inputs);

// The ops, given a form; called by all threads of the pool together.
void run_matmul(const MatmulArgs &args, const MatmulForm &form, ThreadContext &context);
void run_moe_matmul(const MoeMatmulArgs &args, const MatmulForm &form, ThreadContext &context);

extern const MatmulForm matmul_form_scalar;
extern const MatmulForm matmul_form_avx2;
extern const MatmulForm matmul_form_avx512;      // without VNNI
extern const MatmulForm matmul_form_avx512vnni;  // AVX-512 with VNNI

// Which of the two the AVX-512 level takes: true at start where the CPU has VNNI. Tests switch it off to reach the other.
extern std::atomic<bool> use_vnni;

}  // namespace kestrel
