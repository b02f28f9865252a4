// Greedy decoding without the host: the chosen token becomes the next step's input on the device.
#include "port.cuh"

#if !KESTREL_FAST

struct FeedbackArgs {
    int *ids;                          // i32[1]: input token, replaced
    int *pos;                          // i32[1]: its position, advanced
    const int *next;                   // i32[1]: what argmax chose, -1 when a logit was not finite
    unsigned *step;                    // u32[1]: steps so far, advanced
    int *token_log;                    // i32[slots], host memory: the chosen token of step s in slot s mod slots
    const unsigned long long *hashes;  // u64[taps]: taps of this step
    unsigned long long *hash_log;      // u64[slots, taps], host memory
    int slots, taps;
};
static_assert(sizeof(FeedbackArgs) == 64, "kestrel/cuda/feedback.py repeats this layout");

// One block. After a step that failed, token and position stay: what is queued behind it writes nothing new.
KERNEL void k_feedback(const FeedbackArgs a) {
    wait_for_previous();
    start_next();
    const unsigned step = *a.step, slot = step % (unsigned)a.slots;
    for (int i = threadIdx.x; i < a.taps; i += blockDim.x) a.hash_log[(long long)slot * a.taps + i] = a.hashes[i];
    __syncthreads();  // every thread has read the step
    if (threadIdx.x == 0) {
        const int token = *a.next;
        a.token_log[slot] = token;
        if (token >= 0) {
            *a.ids = token;
            *a.pos += 1;
        }
        *a.step = step + 1;
    }
}

#endif
