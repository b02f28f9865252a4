// What one unit of the attention stage makes of its rows (attention_unit.cuh): scores, the weights of V and their codes, its
// partial states (contract section 7). HS heads of a unit are 1, 2, 4 or 8: as many warps share a head as there are to one, and
// each takes as many stripes of positions as there are heads.
#pragma once

#include "attention_result.cuh"
#include "attention_unit.cuh"

// Scores of the chunk, a warp to 32 positions, in int8: of several heads s[j][t], eight at a time; what lies past the heads makes
// scores that nobody reads. Of a single head this thread's, the one of position threadIdx.x, for then all eight columns of the
// products are that head's; the maxima by warp are in sh.totals.
template <int W> DEVICE float unit_scores(const UnitShared &sh, int HS, int hd, int count, const UnitKeys<W> &keys) {
    const int group = lane_id() / 4, part = lane_id() % 4, first = 32 * warp_id() + 4 * group;
    const signed char *const q = sh.q8 + (HS == 1 ? 0 : group) * hd;
    int dots[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) dots[i / 4][i % 4] = DOT_BIAS;
#pragma unroll
    for (int j = 0; j < W / 4; j++) {
        if (64 * j < hd) {
            const int at = 16 * part + 64 * j;
            uint4 q8 = make_uint4(0u, 0u, 0u, 0u);  // where there is nothing of q, there may be anything of K
            if (at < hd) q8 = *(const uint4 *)(q + at);
            const unsigned low[2] = {q8.x, q8.y}, high[2] = {q8.z, q8.w};
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {  // positions first + 2 * tile and the next one
                const uint4 even = keys.rows[2 * tile][j], odd = keys.rows[2 * tile + 1][j];
                const unsigned k_low[4] = {even.x, odd.x, even.y, odd.y}, k_high[4] = {even.z, odd.z, even.w, odd.w};
                mma_s8(dots[tile], k_low, low);
                mma_s8(dots[tile], k_high, high);
            }
        }
    }
    if (HS == 1) {
        const int even = part < 2 ? dots[0][0] : dots[1][0], odd = part < 2 ? dots[0][2] : dots[1][2], t = threadIdx.x;
        const float score = t < count ? biased_dot(part % 2 == 0 ? even : odd) * (sh.qs[0] * sh.ks[t]) : MINUS_INFINITY;
        const unsigned total = warp_max_key(score);
        if (lane_id() == 0) sh.totals[warp_id()] = total;
        return score;
    }
    const float2 qs = *(const float2 *)(sh.qs + 2 * part);
    const float4 ks = *(const float4 *)(sh.ks + first);
    const float scale[4] = {ks.x, ks.y, ks.z, ks.w};
#pragma unroll
    for (int i = 0; i < 2; i++) {  // head 2 * part + i
        float s[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float score = biased_dot(dots[n / 2][n % 2 * 2 + i]) * ((i == 0 ? qs.x : qs.y) * scale[n]);
            s[n] = first + n < count ? score : MINUS_INFINITY;
        }
        *(float4 *)(sh.s + (2 * part + i) * UNIT_PITCH + first) = make_float4(s[0], s[1], s[2], s[3]);
    }
    return 0.0f;
}

// Which head a warp works on, and the first of its stripes.
struct UnitPart {
    int head, first;
};
DEVICE UnitPart unit_part(int HS) {
    int stripe = warp_id() * HS;
    settle(stripe);  // or what follows from it is kept in registers from unit to unit
    return {stripe / UNIT_WARPS, stripe % UNIT_WARPS};
}

// Scores of eight heads to the codes, each by one warp, which waits for no other.
DEVICE void unit_soften_all(const UnitShared &sh) {
    const int head = warp_id();
    const HeadState state = soften_head(sh.s + head * UNIT_PITCH, sh.vs, sh.exp_table, codes_at(sh.codes, head, 0));
    if (lane_id() == 0) {
        sh.max[head] = state.m;
        sh.sum[head] = state.l;
        sh.d[head] = state.d;
    }
}

// The same of less than eight: s are this lane's I scores, I the heads of the unit, m the maximum of its head. With a barrier.
template <int I> DEVICE void unit_soften(const UnitShared &sh, const float (&s)[I], float m) {
    const UnitPart part = unit_part(I);
    float vs[I];
    load_stripes(sh.vs, part.first, vs);
    Softened<I> x;
    x.make(s, m, vs, sh.exp_table);
    const unsigned own = x.largest();
    if (lane_id() == 0) sh.largest[warp_id()] = own;
#pragma unroll
    for (int i = 0; i < I; i++) sh.p[part.head * UNIT_PITCH + STRIPE * (part.first + i) + lane_id()] = x.p[i];
    __syncthreads();
    const int warps = UNIT_WARPS / I;  // of the head
    const unsigned all = __reduce_max_sync(FULL_WARP, sh.largest[warps * part.head + lane_id() % warps]);
    const ValueScale scale = value_scale(all);
    x.store(scale, codes_at(sh.codes, part.head, lane_id()), part.first);
    if (lane_id() == 0 && part.first == 0) {
        sh.max[part.head] = m;
        sh.d[part.head] = scale.d;
    }
}

// The same of two or four heads, from the scores in shared memory; every warp of a head finds its maximum for itself.
template <int I> DEVICE void unit_soften_some(const UnitShared &sh) {
    const UnitPart part = unit_part(I);
    const float *const scores = sh.s + part.head * UNIT_PITCH;
    float all[STRIPES], s[I];
    load_stripes(scores, 0, all);
    load_stripes(scores, part.first, s);
    unit_soften(sh, s, head_max(all));
}

// The same of a single head, whose scores are each in a register, their maxima by warp in sh.totals.
DEVICE void unit_soften_one(const UnitShared &sh, float score) {
    const float s[1] = {score};
    unit_soften(sh, s, of_order_key(__reduce_max_sync(FULL_WARP, sh.totals[lane_id() % UNIT_WARPS])));
}

// The partial states of the unit's heads: sums of values and of exponentials, and the maximum. The sum of exponentials, a chain
// of additions and shuffles, is made beside the matrix instructions by every warp for its head, where it is not there yet: so
// nothing here branches.
// states: f32[heads, hd + 4], of this chunk.
template <int W> DEVICE void unit_states(const UnitShared &sh, const Unit &u, int HS, int hd, float *states) {
    const int pitch = hd + 4, units = hd / 16, group = lane_id() / 4, part = lane_id() % 4;
    const UnitPart own = unit_part(HS);
    float p[STRIPES];
    load_stripes(sh.p + (own.head % (UNIT_HEADS / 2)) * UNIT_PITCH, 0, p);
    const float made = stripes_sum(p), sum = HS == UNIT_HEADS ? sh.sum[own.head] : made;
    float *const elements = states + group * pitch + 4 * part;
#pragma unroll
    for (int round = 0; round < W / UNIT_WARPS; round++) {
        const int unit = warp_id() + UNIT_WARPS * round;
        ValueTile tile;
        int dots[4];
        tile.load(sh.v8, hd, unit < units ? unit : 0);
        tile.sums(sh.codes, dots);
        if (unit < units && group < u.heads) *(float4 *)(elements + 16 * unit) = scaled_sums(dots, sh.d[group]);
    }
    if (lane_id() == 0 && own.first == 0 && own.head < u.heads)
        *(float2 *)(states + own.head * pitch + hd) = make_float2(sh.max[own.head], sum);
}

// What a block has at hand for its units from the stage's beginning.
struct UnitStart {
    int HS;       // query heads of a unit
    bool waited;  // for the kernel before
};

// The rows of a unit, of whose first chunk the new row has position t_new. first: weights of this warp's first row. The first
// call lets the next kernel begin, and waits for the one before, when all that does not need it is under way.
template <int N>
DEVICE void unit_rows(const AttentionStageArgs &st, const UnitShared &sh, const Unit &u, int hd, UnitStart &start,
                      const RowWeights<N> &first, int t_new) {
    const int HS = start.HS;
    int last = u.slot;  // of the unit's chunks
#pragma unroll 1
    while (last + u.slots < u.chunks) last += u.slots;
    const bool has_new = last == u.chunks - 1;
    const int rows = has_new ? HS + 2 : HS;
    RowSource source = unit_row_source<N>(st, u, HS, hd, warp_id(), rows);
    settle(source.at);  // ahead of the wait for what lies there
    settle(source.has);
    const float inverse_hd = reciprocal((float)hd);
    if (!start.waited) {
        unit_angles(st.rope, hd, u.pos, sh.angle);
        __syncthreads();
        start_next();
        wait_for_previous();
        start.waited = true;
    }
    RowValues<N> x = unit_row_load<N>(source, hd);
#pragma unroll 1
    for (int row = warp_id(); row < rows; row += UNIT_WARPS) {
        RowWeights<N> weights = first;
        if (row >= UNIT_WARPS) {
            weights = unit_row_weights<N>(st, HS, hd, row);
            x = unit_row_load<N>(unit_row_source<N>(st, u, HS, hd, row, rows), hd);
        }
        unit_row(st, sh, u, HS, hd, row, x, weights, inverse_hd, t_new, u.stores_q, has_new && u.stores_kv);
    }
}

// The states of a unit's chunks, from slot on, each to states_of(chunk), f32[heads, hd + 4]. The first call waits (unit_rows).
// made(chunk) is called when a chunk's states are there, behind a barrier. AHEAD: V of the next chunk may have a place of its
// own (st.ahead); then it is asked for together with K, as soon as K of this one is used up.
template <int W, bool AHEAD, class States, class Made>
DEVICE void unit_chunks(const AttentionStageArgs &st, UnitShared sh, const Unit &u, int hd, UnitStart &start,
                        const States &states_of, const Made &made) {
    const bool ahead = AHEAD && st.ahead;
    const AttentionArgs &a = st.attn;
    const int HS = start.HS;
    int chunk = u.slot;
    if (chunk >= u.chunks) return;
    const RowWeights<W / 4> weights = unit_row_weights<W / 4>(st, HS, hd, warp_id());
    UnitScales scales = unit_scales(a, u, chunk);
    UnitKeys<W> keys;
    keys.ask(a, hd, u, chunk);
    unit_fetch(a, sh.v8, hd, u, chunk);
    if (ahead) copy_close();
    float *states = states_of(chunk);
    settle(states);  // ahead of the wait
    unit_rows(st, sh, u, hd, start, weights, u.pos - chunk * CHUNK);
#pragma unroll 1
    for (;;) {
        const int next = chunk + u.slots;
        const int t_new = u.pos - chunk * CHUNK;  // past the chunk unless it is the last
        const int count = t_new < CHUNK ? t_new + 1 : CHUNK;
        if ((int)threadIdx.x < t_new) sh.ks[threadIdx.x] = scales.k;  // not earlier: it may take long to come
        if ((int)threadIdx.x != t_new) sh.vs[threadIdx.x] = scales.v;
        __syncthreads();
        keys.place(sh.new_row, hd, t_new);
        const float score = unit_scores<W>(sh, HS, hd, count, keys);
        __syncthreads();
        if (next < u.chunks) {  // K has done its work, and V has when the states are made
            scales = unit_scales(a, u, next);
            keys.ask(a, hd, u, next);
        }
        if (ahead) {
            unit_fetch(a, sh.v8_ahead, hd, u, next);
            copy_close();
        }
        if (HS == UNIT_HEADS)
            unit_soften_all(sh);
        else if (HS == 4)
            unit_soften_some<4>(sh);
        else if (HS == 2)
            unit_soften_some<2>(sh);
        else
            unit_soften_one(sh, score);
        if (ahead)
            copy_wait_closed();  // V of this chunk
        else
            copy_wait_all();
        __syncthreads();
        unit_states<W>(sh, u, HS, hd, states);
        __syncthreads();
        if (ahead) {
            signed char *const free = sh.v8;
            sh.v8 = sh.v8_ahead;
            sh.v8_ahead = free;
        } else {
            unit_fetch(a, sh.v8, hd, u, next);
        }
        made(chunk);
        chunk = next;
        if (chunk >= u.chunks) break;
        states = states_of(chunk);
        if (u.pos - chunk * CHUNK < CHUNK) unit_place_row(sh, hd, u.pos - chunk * CHUNK);
    }
}

// The results of a unit's heads, from the states of all chunks together, f32[heads, hd + 4] in shared memory.
DEVICE void store_unit(const AttentionStageArgs &st, const Unit &u, int hd, const float *states) {
    const int parts = (hd + 31) / 32;
#pragma unroll 1
    for (int i = warp_id(); i < u.heads * parts; i += UNIT_WARPS) {
        const int j = whole_quotient(i, parts), part = i - j * parts;
        const float *const state = states + j * (hd + 4);
        store_result(st, hd, u.h0 + j, 32 * part, state[32 * part + lane_id() < hd ? 32 * part + lane_id() : 0], state[hd + 1]);
    }
}
