// Stages of a decode step (M = 1) around one matrix product: ops of one layer joined into one launch, because between
// short launches a GPU waits. The arithmetic is that of the single ops, from the same device functions. Each stage asks
// for its weights before it waits for anything else. Where a stage may meet all formats of weights, q4local has kernels of
// its own: instructions that are not there need not be fetched. A stage is a function of (arguments, block of so many blocks,
// dynamic shared memory) behind a thin kernel, with the same bits for every number of blocks. Each kernel exists in
// both forms: k_x and k_x_fast.
#include "q4_stream.cuh"

// Rows in turn to the blocks; any M.
DEVICE void norm_a8(const NormA8Args &a, int block, int blocks, unsigned char *shared) {
    const NormShared sh = norm_shared(shared, a.norm.d);
    const NormPart all = norm_part(a.norm.d, 0, 1);
    for (int m = block; m < a.norm.M; m += blocks) block_norm_a8(a.norm, a.a8, m, sh, false, all);
}

// Dynamic shared: NormShared.
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_norm_a8)(const NormA8Args a) {
    DYNAMIC_SHARED(shared);
    norm_a8(a, blockIdx.x, gridDim.x, shared);
}

// y, as WarpUnits hands it over.
struct StoreRows {
    float *y;

    DEVICE_MEMBER void open(const RowUnit &, int) {}
    DEVICE_MEMBER void close(const RowUnit &at, int row, float mine) {
        if ((unsigned)row < (unsigned)at.rows) y[at.out + row] = mine;
    }
};

// Every block norms the row for itself while its first weights travel; the blocks share the storing of norm and a8.
template <int U, int R>
DEVICE void norm_matmul_any(const NormMatmulArgs &a, int block, int blocks, unsigned char *shared) {
    const NormShared sh = norm_shared(shared, a.norm.d);
    const A8Row in = {sh.q, sh.d, sh.gsum};
    WarpUnits<WarpRows<U, R>> units;
    units.begin(a.mm, block, blocks);
    block_norm_a8(a.norm, a.a8, 0, sh, reads_bf16(a.mm), norm_part(a.norm.d, block, blocks));
    StoreRows out = {a.mm.y};
    units.finish(a.mm, in, sh.x, out);
}

// The same of q4local rows.
DEVICE void norm_matmul_q4(const NormMatmulArgs &a, int block, int blocks, unsigned char *shared) {
    MatrixStream<4> stream(a.mm);
    SplitRow in;
    float *const terms = (float *)in.open(stream.begin(shared, a.stream, block, blocks), a.norm.d);
    const NormPart part = norm_part(a.norm.d, block, blocks);
    norm_a8_row<1>(a.norm, a.a8, terms, in, part);
    StoreRows out = {a.mm.y};
    stream.finish(in, out);
    store_groups(a.a8, in, part);
}

// Dynamic shared: MatrixStream, SplitRow, f32[norm_terms(d)]. At most 512 threads; the bound says 576, so that it takes 56
// registers: beside blocks of the two stages around it there is room for one of this.
KERNEL LAUNCH_BOUNDS(576, 2) void FORM(k_norm_matmul_q4)(const NormMatmulArgs a) {
    DYNAMIC_SHARED(shared);
    norm_matmul_q4(a, blockIdx.x, gridDim.x, shared);
}
// u: loads of a thread in flight for a row, r: rows of a warp; kestrel/stages/matmul.py chooses. Dynamic shared: NormShared.
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_norm_matmul_any_u2r4)(const NormMatmulArgs a) {
    DYNAMIC_SHARED(shared);
    norm_matmul_any<2, 4>(a, blockIdx.x, gridDim.x, shared);
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_norm_matmul_any_u4r2)(const NormMatmulArgs a) {
    DYNAMIC_SHARED(shared);
    norm_matmul_any<4, 2>(a, blockIdx.x, gridDim.x, shared);
}

// y, and out = x + y. x travels while the row is computed.
struct AddRows {
    float *y;
    const float *x;
    float *out;
    int spread;
    float old;

    DEVICE_MEMBER void open(const RowUnit &at, int row) {
        if ((unsigned)row < (unsigned)at.rows) old = load_l2(x + KESTREL_SPREAD_AT(at.out + row, spread));
    }
    DEVICE_MEMBER void close(const RowUnit &at, int row, float mine) {
        if ((unsigned)row < (unsigned)at.rows) {
            y[at.out + row] = mine;
            out[KESTREL_SPREAD_AT(at.out + row, spread)] = old + mine;
        }
    }
};

// Warps take rows in turn. Dynamic shared, where the input fits (a.staged): i8[K] q, f32[G] d and i32[G] gsum, each
// rounded up to 16 bytes, or f32[K] x before them if there is a bf16 matrix.
template <int U, int R>
DEVICE void matmul_add_any(const MatmulAddArgs &a, int block, int blocks, unsigned char *shared) {
    A8Row in = {a.mm.xq, a.mm.xd, a.mm.gsum};
    const float *x = a.mm.x;
    WarpUnits<WarpRows<U, R>> units;
    units.begin(a.mm, block, blocks);
    wait_for_previous();
    start_next();
    AddRows out = {a.mm.y, a.add.x, a.add.out, a.add.spread, 0.0f};
    if (units.any()) out.open(units.at, units.rows.row());
    if (a.staged) {
        const int k = a.mm.w[0].k, groups = k / 32;
        if (reads_bf16(a.mm)) {
            block_copy(shared, x, k);
            x = (const float *)shared;
            shared += 4 * k;
        }
        if (in.q != nullptr) {
            float *const d = (float *)(shared + k);
            int *const gsum = (int *)(d + (groups + 3) / 4 * 4);
            block_copy(shared, in.q, k / 4);
            block_copy(d, in.d, groups);
            block_copy(gsum, in.gsum, groups);
            in = {(const signed char *)shared, d, gsum};
        }
        __syncthreads();
    }
    units.finish(a.mm, in, x, out);
}

// The same of q4local rows.
DEVICE void matmul_add_q4(const MatmulAddArgs &a, int block, int blocks, unsigned char *shared) {
    const int k = a.mm.w[0].k;
    MatrixStream<2> stream(a.mm);
    SplitRow in;
    in.open(stream.begin(shared, a.stream, block, blocks), k);
    AddRows out = {a.mm.y, a.add.x, a.add.out, a.add.spread, 0.0f};
    start_next();
    wait_for_previous();
    stream.open(out);  // what is added to comes while the input row does
    in.copy(a.mm, k);
    __syncthreads();
    stream.finish(in, out);
}

// Dynamic shared: MatrixStream, SplitRow.
KERNEL LAUNCH_BOUNDS(512, 2) void FORM(k_matmul_add_q4)(const MatmulAddArgs a) {
    DYNAMIC_SHARED(shared);
    matmul_add_q4(a, blockIdx.x, gridDim.x, shared);
}
// The _any forms take what the q4 forms do not: other formats, several at once, lengths that are no multiple of 256, rows too
// long for shared memory.
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_matmul_add_any_u2r4)(const MatmulAddArgs a) {
    DYNAMIC_SHARED(shared);
    matmul_add_any<2, 4>(a, blockIdx.x, gridDim.x, shared);
}
KERNEL LAUNCH_BOUNDS(256, 2) void FORM(k_matmul_add_any_u4r2)(const MatmulAddArgs a) {
    DYNAMIC_SHARED(shared);
    matmul_add_any<4, 2>(a, blockIdx.x, gridDim.x, shared);
}
