// moe_matmul: the driver. With several rows, the (row, slot) pairs are grouped by expert, so that every chosen expert's
// weights are read once, whatever the number of rows that chose it.
#include <algorithm>

#include "matmul.h"

namespace kestrel {
namespace {

// Counting sort of the pairs p = m*T + t by expert: order[start[e] .. start[e+1]-1] are the pairs that chose e,
// ascending.
void group_by_expert(const MoeMatmulArgs &args, int *start, int *order) {
    const int pairs = args.M * args.T;
    std::fill(start, start + args.E + 1, 0);
    for (int p = 0; p < pairs; p++) start[args.ids[p] + 1]++;
    for (int e = 0; e < args.E; e++) start[e + 1] += start[e];
    for (int p = 0; p < pairs; p++) order[start[args.ids[p]]++] = p;
    for (int e = args.E; e > 0; e--) start[e] = start[e - 1];  // each start[e] has moved on to the next expert's
    start[0] = 0;
}

}  // namespace

void run_moe_matmul(const MoeMatmulArgs &args, const MatmulForm &form, ThreadContext &context) {
    const int pairs = args.M * args.T;
    int64_t ldy = 0;
    int widest = 0;
    for (int i = 0; i < args.n_w; i++) {
        ldy += args.w[i].n;
        widest = std::max(widest, args.w[i].k);
    }
    const size_t index_bytes = round_up((args.E + 1 + 2 * static_cast<size_t>(pairs)) * sizeof(int), 64);
    char *scratch = static_cast<char *>(context.scratch(index_bytes + form.workspace_bytes(widest, pairs)));
    int *start = reinterpret_cast<int *>(scratch);
    int *order = start + args.E + 1;
    int *in_row = order + pairs;
    group_by_expert(args, start, order);
    for (int p = 0; p < pairs; p++) in_row[p] = args.per_slot ? order[p] : order[p] / args.T;

    int experts = 0;  // that were chosen
    for (int e = 0; e < args.E; e++) experts += start[e + 1] > start[e];
    const int step = rows_per_task(ldy * experts, context.count, pairs / std::max(experts, 1));

    const MatmulInput input = {args.x, args.xq, args.xd, args.gsum};
    int64_t chunk = context.next_chunk(), first_chunk = 0;
    for (int e = 0; e < args.E; e++) {
        const int count = start[e + 1] - start[e];
        if (count == 0) continue;
        int64_t column = 0;
        for (int i = 0; i < args.n_w; i++) {
            Weight w = args.w[i];
            const int64_t chunks = (w.n + step - 1) / step;
            const int64_t row0 = static_cast<int64_t>(e) * w.n;
            const int64_t code_bytes = w.wtype == KESTREL_BF16      ? 2 * static_cast<int64_t>(w.k)
                                       : w.wtype == KESTREL_Q4LOCAL ? w.k / 2
                                                                    : w.k;
            w.codes = static_cast<const char *>(w.codes) + row0 * code_bytes;
            if (w.scale != nullptr) w.scale += row0 * (w.k / 32);
            for (; chunk < first_chunk + chunks; chunk = context.next_chunk()) {
                const int begin = static_cast<int>(chunk - first_chunk) * step;
                const MatmulTask task = {w,
                                         begin,
                                         std::min(begin + step, w.n),
                                         count,
                                         in_row + start[e],
                                         order + start[e],
                                         args.y + column,
                                         ldy};
                form.run(task, input, scratch + index_bytes);
            }
            first_chunk += chunks;
            column += w.n;
        }
    }
}

void moe_matmul_scalar(const void *args, ThreadContext &context) {
    run_moe_matmul(*static_cast<const MoeMatmulArgs *>(args), matmul_form_scalar, context);
}

bool moe_matmul_serial(const void *) { return false; }

}  // namespace kestrel
