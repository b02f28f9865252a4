// What one unit of the attention stage makes of its rows (attention_unit.cuh): scores, the running maximum and the
// exponentials, the chains over its positions, its partial states (contract section 7).
#pragma once

#include "attention_unit.cuh"

// This lane's share of a row of hd int8 in shared memory: every fourth 16-byte unit, or where rows are not made of 64
// bytes every fourth word. Which elements they are does not matter to a dot, as long as both factors agree. t: the row's
// number in sh.k8, 0 for other rows.
template <int W> DEVICE void unit_words(const signed char *rows, int hd, int t, int part, unsigned *words) {
    if (hd % 64 == 0) {
#pragma unroll
        for (int j = 0; j < W / 4; j++) {
            if (64 * j < hd) {
                const uint4 v = *(const uint4 *)(rows + unit_place(hd, t, part + 4 * j));
                words[4 * j] = v.x, words[4 * j + 1] = v.y, words[4 * j + 2] = v.z, words[4 * j + 3] = v.w;
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < W; j++)
            if (16 * j < hd) words[j] = ((const unsigned *)(rows + t * hd))[part + 4 * j];
    }
}

// s[t][j] of the chunk, 16 positions by up to eight heads at a time, in int8.
template <int W> DEVICE void unit_scores(const UnitShared &sh, int HS, int hd, int count) {
    const int group = lane_id() / 4, part = lane_id() % 4;
    unsigned q8[W] = {};  // of head `group`; what lies past the heads, and past the positions, makes scores that nobody reads
    unit_words<W>(sh.q8 + group * hd, hd, 0, part, q8);
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        const int t0 = 32 * warp_id() + 16 * tile;
        if (t0 < count) {
            unsigned k8[2][W] = {};  // rows t0 + group and t0 + group + 8
#pragma unroll
            for (int i = 0; i < 2; i++) unit_words<W>(sh.k8, hd, t0 + group + 8 * i, part, k8[i]);
            int dots[4] = {0, 0, 0, 0};
#pragma unroll
            for (int step = 0; step < W / 2; step++) {
                if (32 * step < hd) {
                    const unsigned ka[4] = {k8[0][2 * step], k8[1][2 * step], k8[0][2 * step + 1], k8[1][2 * step + 1]};
                    mma_s8(dots, ka, q8 + 2 * step);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = 2 * part + i % 2, t = t0 + group + 8 * (i / 2);
                if (j < HS && t < count) sh.s[j * UNIT_PITCH + t] = (float)dots[i] * (sh.qs[j] * sh.ks[t]);
            }
        }
    }
}

// Scores to exponentials p, weights w and factors c of this thread's position; vs is its V scale. The warp made the scores
// itself. Heads go by twos, which saves registers. No barrier at the end.
DEVICE void unit_softmax(const UnitShared &sh, int HS, int count, float vs) {
    const int t = threadIdx.x, lane = lane_id();
    constexpr int TURN = 2;
#if !KESTREL_FAST
    float before[TURN];  // maximum of the positions before t in this warp; of more heads than two, in c
#endif
    if (HS > TURN)
        __syncthreads();  // c takes the place of K
    else
        __syncwarp();
#pragma unroll 1
    for (int j0 = 0; j0 < HS; j0 += TURN) {
        float run[TURN];
#pragma unroll
        for (int j = 0; j < TURN; j++) {
            run[j] = t < count && j0 + j < HS ? sh.s[(j0 + j) * UNIT_PITCH + t] : MINUS_INFINITY;
            run[j] = run[j] > MINUS_INFINITY ? run[j] : MINUS_INFINITY;  // the rule s > m is false for NaN
        }
#if KESTREL_FAST
        for (int step = 16; step > 0; step >>= 1) {
#pragma unroll
            for (int j = 0; j < TURN; j++) run[j] = fmaxf(run[j], __shfl_xor_sync(FULL_WARP, run[j], step));
        }
#else
        // The running maximum: a prefix maximum over lanes here, over warps behind the barrier.
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
#pragma unroll
            for (int j = 0; j < TURN; j++) {
                const float left = __shfl_up_sync(FULL_WARP, run[j], step);
                if (lane >= step) run[j] = run[j] > left ? run[j] : left;
            }
        }
#pragma unroll
        for (int j = 0; j < TURN; j++) {
            before[j] = __shfl_up_sync(FULL_WARP, run[j], 1);
            if (lane == 0) before[j] = MINUS_INFINITY;
            if (HS > TURN && j0 + j < HS) sh.c[(j0 + j) * UNIT_PITCH + t] = before[j];
        }
#endif
#pragma unroll
        for (int j = 0; j < TURN; j++)
            if (lane == 31 && j0 + j < HS) sh.totals[(j0 + j) * UNIT_WARPS + warp_id()] = run[j];
    }
    __syncthreads();
    bool any[2] = {false, false};
#pragma unroll 1
    for (int j0 = 0; j0 < HS; j0 += TURN) {
#pragma unroll
        for (int j = 0; j < TURN; j++) {
            if (j0 + j >= HS) continue;
            const int at = (j0 + j) * UNIT_PITCH + t;
            const float s = t < count ? sh.s[at] : MINUS_INFINITY;
            float totals[UNIT_WARPS];
#pragma unroll
            for (int v = 0; v < UNIT_WARPS; v += 4) {
                const float4 four = *(const float4 *)(sh.totals + (j0 + j) * UNIT_WARPS + v);
                totals[v] = four.x, totals[v + 1] = four.y, totals[v + 2] = four.z, totals[v + 3] = four.w;
            }
#if KESTREL_FAST
            float m = totals[0];
#pragma unroll
            for (int v = 1; v < UNIT_WARPS; v++) m = fmaxf(m, totals[v]);
#else
            float m_before = HS > TURN ? sh.c[at] : before[j];
#pragma unroll
            for (int v = 0; v < UNIT_WARPS - 1; v++)
                if (v < warp_id()) m_before = m_before > totals[v] ? m_before : totals[v];
            const bool moved = s > m_before;
            const float m = moved ? s : m_before;
            float c = 1.0f;
            if (moved) c = exp_form(m_before - s);
            any[0] = any[0] || (moved && j0 < 4);
            any[1] = any[1] || (moved && j0 >= 4);
            sh.c[at] = c;
#endif
            // -0 changes no sum, of whatever sign.
            const float p = t < count ? exp_form(s - m) : -0.0f;
            sh.s[at] = p;
            sh.w[at] = t < count ? p * vs : -0.0f;
        }
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        unsigned bits = __ballot_sync(FULL_WARP, any[k]);
        bits = (bits | bits >> 1 | bits >> 2 | bits >> 3) & 0x11111111u;  // four positions to a bit, then side by side
        bits = (bits | bits >> 3) & 0x03030303u;
        bits = (bits | bits >> 6) & 0x000f000fu;
        if (lane == 0) sh.moved[k * UNIT_WARPS + warp_id()] = (unsigned char)(bits | bits >> 12);
    }
}

// The same of the whole chunk, for the heads that j is one of: bit i for positions 4 * i to 4 * i + 3.
DEVICE unsigned long long unit_moved(const UnitShared &sh, int j) {
    return *(const unsigned long long *)(sh.moved + j / 4 * UNIT_WARPS);
}

// Byte `i` of the word as the float it stands for: 2^23 + 128 + v, less the constant, both exact. A conversion of an
// integer takes several times as long.
DEVICE float value_float(unsigned word, int i) {
    return f32_from_bits(__byte_perm(word, 0x4b000000u, 0x7440u + (unsigned)i)) - 8388736.0f;
}

DEVICE void load_four(const float *p, float *to) {
    const float4 four = *(const float4 *)p;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// What SIZE neighbouring positions add to an element of HPT heads: V, in rows of PITCH words to four positions, and the
// weights.
template <int HPT, int PITCH> struct ValueGroup {
    static constexpr int SIZE = HPT == 4 ? 4 : 8;
    unsigned x[SIZE / 4];  // four positions each
    float w[HPT][SIZE];

    // v: the element's word at the first of the positions; weights: f32[HPT, UNIT_PITCH] there
    DEVICE_MEMBER void load(const unsigned *v, const float *weights) {
#pragma unroll
        for (int i = 0; i < SIZE / 4; i++) {
            x[i] = v[i * PITCH];
#pragma unroll
            for (int j = 0; j < HPT; j++) load_four(weights + j * UNIT_PITCH + 4 * i, w[j] + 4 * i);
        }
    }

    // acc[j] = fma(w, v, acc[j] * c) in order; c is 1 where the maximum of a head did not move, which changes nothing. Four
    // heads leave the products out where no maximum `moved`; for fewer a branch would take longer than they do.
    DEVICE_MEMBER void add(bool moved, const float *factors, float *acc) const {
        if (KESTREL_FAST || (HPT == 4 && !moved)) {  // the fast form has no c
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                const float value = value_float(x[i / 4], i % 4);
#pragma unroll
                for (int j = 0; j < HPT; j++) acc[j] = fma_f32(w[j][i], value, acc[j]);
            }
            return;
        }
        float c[HPT][SIZE];
#pragma unroll
        for (int j = 0; j < HPT; j++) {
#pragma unroll
            for (int i = 0; i < SIZE; i += 4) load_four(factors + j * UNIT_PITCH + i, c[j] + i);
        }
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const float value = value_float(x[i / 4], i % 4);
#pragma unroll
            for (int j = 0; j < HPT; j++) acc[j] = fma_f32(w[j][i], value, acc[j] * c[j][i]);
        }
    }
};

// acc[j] of the element of word `at` of HPT heads, the first of them j0, over positions begin .. end - 1, both multiples of
// UNIT_STEP. Two groups take turns, so that the next is read behind the chain of this one; at the end what lies behind the
// arrays of the chunk is read, too, and not used.
template <int HPT, int PITCH>
DEVICE void unit_values(const UnitShared &sh, int at, int j0, int begin, int end, float *acc) {
    typedef ValueGroup<HPT, PITCH> Group;
    constexpr int SIZE = Group::SIZE, FOURS = SIZE / 4;
    const unsigned *v = (const unsigned *)sh.v8 + at + begin / 4 * PITCH;
    const float *w = sh.w + j0 * UNIT_PITCH + begin, *c = sh.c + j0 * UNIT_PITCH + begin;
    unsigned long long moved = unit_moved(sh, j0) >> (begin / 4);
#pragma unroll
    for (int j = 0; j < HPT; j++) acc[j] = 0.0f;
    Group even, odd;
    even.load(v, w);
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += 2 * SIZE) {
        odd.load(v + FOURS * PITCH, w + SIZE);
        even.add(((unsigned)moved & ((1u << FOURS) - 1u)) != 0u, c, acc);
        v += 2 * FOURS * PITCH;
        w += 2 * SIZE;
        even.load(v, w);
        odd.add(((unsigned)moved >> FOURS & ((1u << FOURS) - 1u)) != 0u, c + SIZE, acc);
        c += 2 * SIZE;
        moved >>= 2 * FOURS;
    }
}

// The sum of exponentials of head j of the unit over `end` positions, in order.
DEVICE float unit_sum(const UnitShared &sh, int j, int end) {
    const float *const p = sh.s + j * UNIT_PITCH, *const c = sh.c + j * UNIT_PITCH;  // f32[UNIT_PITCH]
    float l = 0.0f;
    unsigned long long moved = unit_moved(sh, j);
#pragma unroll 1
    for (int t0 = 0; t0 < end; t0 += 16) {
        if (((unsigned)moved & 15u) == 0u) {
            l = ordered_sum(p + t0, 16, l);
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                l *= c[t0 + i];  // 1 where the maximum did not move
                l += p[t0 + i];
            }
        }
        moved >>= 4;
    }
    return l;
}

// One element of HPT heads to to[j * pitch], heads past `heads` left out; at: its word.
template <int HPT, int PITCH>
DEVICE void unit_element(const UnitShared &sh, int at, int j0, int begin, int end, float *to, int pitch, int heads) {
    float acc[HPT];
    unit_values<HPT, PITCH>(sh, at, j0, begin, end, acc);
#pragma unroll
    for (int j = 0; j < HPT; j++) {
        if (j0 + j < heads) *to = acc[j];
        to += pitch;
    }
}

// The elements of all heads over positions begin .. end - 1 to to[j * pitch + element], by `threads` threads of which this
// one is the thread-th: a thread to an element of as few heads as leave work for all.
template <int PITCH>
DEVICE void unit_elements(const UnitShared &sh, int HS, int hd, int begin, int end, float *to, int pitch, int heads, int thread,
                          int threads) {
    const int each = HS == 1 || HS * hd <= threads ? 1 : HS == 2 || HS * hd <= 2 * threads ? 2 : 4;  // heads of a thread
#pragma unroll 1
    for (int item = thread; item < HS / each * hd; item += threads) {
        const int part = item < hd ? 0 : item / hd, j0 = part * each, at = item - part * hd;
        float *const first = to + j0 * pitch + unit_element_at(at, hd);
        if (each == 1)
            unit_element<1, PITCH>(sh, at, j0, begin, end, first, pitch, heads);
        else if (each == 2)
            unit_element<2, PITCH>(sh, at, j0, begin, end, first, pitch, heads);
        else
            unit_element<4, PITCH>(sh, at, j0, begin, end, first, pitch, heads);
    }
}

// The partial states of the unit's heads: sums of values and of exponentials, and the maximum.
template <int PITCH>
DEVICE void unit_states(const AttentionArgs &a, const UnitShared &sh, const Unit &u, int HS, int chunk, int count) {
    float *const states = partial_state(a, chunk, 0, u.h0);  // f32[heads, hd + 4]
    const int hd = a.hd, pitch = hd + 4, end = (count + UNIT_STEP - 1) / UNIT_STEP * UNIT_STEP;
#if KESTREL_FAST
    if (HS * hd <= UNIT_THREADS / 2) {  // too few elements for the block: two halves of the positions, in the place of c
        const int half = UNIT_THREADS / 2, part = threadIdx.x / half, cut = end / (2 * UNIT_STEP) * UNIT_STEP;
        unit_elements<PITCH>(sh, HS, hd, part * cut, part == 0 ? cut : end, sh.c + part * half, hd, HS, threadIdx.x % half, half);
        __syncthreads();
        for (int i = threadIdx.x; i < u.heads * hd; i += UNIT_THREADS)
            states[i / hd * pitch + i % hd] = sh.c[i] + sh.c[half + i];
    } else {
        unit_elements<PITCH>(sh, HS, hd, 0, end, states, pitch, u.heads, threadIdx.x, UNIT_THREADS);
    }
    for (int j = warp_id(); j < u.heads; j += UNIT_WARPS) {
        float l = 0.0f;
        for (int t = lane_id(); t < count; t += 32) l += sh.s[j * UNIT_PITCH + t];
        l = warp_sum_f32(l);
        if (lane_id() == 0) states[j * pitch + hd + 1] = l;
    }
#else
    unit_elements<PITCH>(sh, HS, hd, 0, end, states, pitch, u.heads, threadIdx.x, UNIT_THREADS);
    const int j = UNIT_THREADS - 1 - (int)threadIdx.x;  // threads that have no element, if there are any
    if (j < u.heads) states[j * pitch + hd + 1] = unit_sum(sh, j, end);
#endif
    const int k = (int)threadIdx.x - 5 * 32;  // of a warp that has less to do
    if (k >= 0 && k < u.heads) {
        float m = MINUS_INFINITY;
#pragma unroll
        for (int v = 0; v < UNIT_WARPS; v++) {
            const float other = sh.totals[k * UNIT_WARPS + v];
            m = m > other ? m : other;
        }
        states[k * pitch + hd] = m;
    }
}
