// Argument structs of the ops, one per op of kestrel/ops.py, read by the C++ reference, by NVRTC and by the
// kernels compiled for the CPU. Plain C with builtin types only: NVRTC has no <cstdint>. Every struct lists its
// 8-byte members first, so that no compiler inserts padding; kestrel/ops.py repeats the layout and
// tests/ops/test_layout.py compares the two member by member.
//
// Letters in shapes: M rows (tokens) of one forward pass, H hidden size, V vocabulary, F FFN width, E experts,
// T experts chosen per token, G = K/32 groups, nh/nkv query/KV heads, hd head size, S KV slots.
#pragma once

// Where element i of a row lies of which all multiprocessors read everything at a time: on a GPU, in steps of one row, `spread`
// elements that nobody uses lie behind every 32 (128 bytes), a multiple of 4. Neighbouring lines of L2 are few places' own, which
// such readers crowd. Otherwise spread is 0.
#define KESTREL_SPREAD_AT(i, spread) ((i) + (i) / 32 * (spread))

// Weight formats, contract section 1.
#define KESTREL_BF16 0     // codes: bf16 bits [N, K]; no scale
#define KESTREL_Q4LOCAL 1  // codes: u8 [N, G, 16]; scale: f16 bits [N, G]
#define KESTREL_Q8LOCAL 2  // codes: i8 [N, G, 32]; scale: f16 bits [N, G]

// One matrix, or a stack of equal matrices (experts): expert e starts at e * n rows.
struct Weight {
    const void *codes;            // layout by wtype, above
    const unsigned short *scale;  // f16 bits [N, G], or null for bf16
    int wtype;                    // KESTREL_BF16 | KESTREL_Q4LOCAL | KESTREL_Q8LOCAL
    int n;                        // output rows (of one expert, when stacked)
    int k;                        // input length
    int reserved;
};

// x[m] = row ids[m] of the table.
struct EmbedArgs {
    Weight w;        // [V, H]
    const int *ids;  // i32[M]
    float *x;        // f32[M, H]
    int M;
    int spread;       // of x
};

// out[m] = (x[m] * r) * w, r = 1/sqrt(ss/d + eps).
struct RmsNormArgs {
    const float *x;  // f32[M, d]
    const float *w;  // f32[d]
    float *out;      // f32[M, d]
    int M, d;
    float eps;
    int spread;      // of x
};

// a8: per group of 32 an int8 code row, its scale, and the sum of its codes.
struct QuantizeA8Args {
    const float *x;   // f32[M, K]
    signed char *q;   // i8[M, K]
    float *d;         // f32[M, G]
    int *gsum;        // i32[M, G]; sum of the 32 codes, for the q4local offset of 8
    int M, K;
};

// y[m] = concat over i of w[i] . x[m]; bf16 parts read x, q4local/q8local parts read (xq, xd, gsum).
struct MatmulArgs {
    Weight w[3];            // n_w matrices over the same input, outputs concatenated
    const float *x;         // f32[M, K]; may be null when no part is bf16
    const signed char *xq;  // i8[M, K]; may be null when every part is bf16
    const float *xd;        // f32[M, G]
    const int *gsum;        // i32[M, G]
    float *y;               // f32[M, sum of n]
    int n_w, M;
};

// In place, per head: x = (x * r) * w.
struct QkNormArgs {
    float *x;        // f32[M, heads, hd], rows ld apart
    const float *w;  // f32[hd]
    int M, heads, hd, ld;
    float eps;
    int reserved;
};

// In place, half-split pairs (i, i + hd/2).
struct RopeArgs {
    float *x;               // f32[M, heads, hd], rows ld apart
    const int *pos;         // i32[M]
    const float *inv_freq;  // f32[hd/2]
    int M, heads, hd, ld;
    float factor;           // attention factor of scaled RoPE, else 1
    int reserved;
};

// Quantises the K and V row of each token into slot base[m] + pos[m] of one layer's cache.
struct KvAppendArgs {
    const float *k;   // f32[M, nkv, hd], rows ld apart
    const float *v;   // f32[M, nkv, hd], rows ld apart
    signed char *kq;  // i8[S, nkv, hd]
    float *ks;        // f32[S, nkv]
    signed char *vq;  // i8[S, nkv, hd]
    float *vs;        // f32[S, nkv]
    const int *pos;   // i32[M]; position of the token in its sequence
    const int *base;  // i32[M]; slot of the sequence's position 0
    int M, nkv, hd, ld;
};

// Causal attention of row m over slots base[m] .. base[m] + pos[m].
struct AttentionArgs {
    const float *q;         // f32[M, nh, hd], rows ld apart
    const signed char *kq;  // i8[S, nkv, hd]
    const float *ks;        // f32[S, nkv]
    const signed char *vq;  // i8[S, nkv, hd]
    const float *vs;        // f32[S, nkv]
    const int *pos;         // i32[M]
    const int *base;        // i32[M]
    float *out;             // f32[M, nh, hd]
    void *work;             // backend's scratch, or null
    float *copies;          // f32[2, nh + nkv, hd], or null: for q and k after the norm and after RoPE, where a kernel that
                            // makes them on its way leaves q and k as they are
    int M, nh, nkv, hd, ld;
    float qscale;           // (float)(1/sqrt((double)hd))
};

// out = x + y, elementwise.
struct AddArgs {
    const float *x;  // f32[n]
    const float *y;  // f32[n]
    float *out;      // f32[n]; may be x
    long long n;
    int spread;      // of x and out, of one row
    int reserved;
};

// h = silu(gate) * up.
struct SwigluArgs {
    const float *gu;  // f32[R, 2, F]: gate then up
    float *h;         // f32[R, F]
    int R, F;
};

// Top-k experts of each row and their combination weights.
struct RouterTopkArgs {
    const float *logits;  // f32[M, E]
    int *ids;             // i32[M, T]; rank order
    float *weights;       // f32[M, T]
    int M, E, T;
    int norm_topk_prob;   // 0 | 1
};

// y[m, t] = concat over i of w[i][ids[m, t]] . input; the input row is m, or m*T + t when per_slot.
struct MoeMatmulArgs {
    Weight w[2];            // stacks of E matrices
    const int *ids;         // i32[M, T]
    const float *x;         // f32[M or M*T, K]
    const signed char *xq;  // i8[M or M*T, K]
    const float *xd;        // f32[M or M*T, G]
    const int *gsum;        // i32[M or M*T, G]
    float *y;               // f32[M, T, sum of n]
    int n_w, M, T, E;
    int per_slot;           // 0 | 1
    int reserved;
};

// out[m] = fma chain over t ascending of weights[m, t] * y[m, t], from +0.
struct MoeCombineArgs {
    const float *y;        // f32[M, T, H]
    const float *weights;  // f32[M, T]
    float *out;            // f32[M, H]
    int M, T, H;
    int reserved;
};

// Greedy choice: the lowest index among equal maxima, or -1 where any logit is not finite.
struct ArgmaxArgs {
    const float *logits;  // f32[M, V]
    int *ids;             // i32[M]
    int M, V;
};

// FNV-1a 64 of each row's bytes; NaNs of f32 rows hash as 0x7fc00000.
struct L2HashArgs {
    const void *x;            // row m starts at x + (row0 ? row0[m] + row1[m] : m) * stride
    const int *row0;          // i32[M] or null
    const int *row1;          // i32[M] or null
    unsigned long long *out;  // u64[M]
    long long stride;         // bytes from row to row
    int M;
    int bytes;                // bytes hashed per row
    int is_f32;               // 0 | 1
    int reserved;
};
