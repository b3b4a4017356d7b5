/* gpu/decode/slots.cuh - from which slot a request's state comes, and to which it goes
 * (dp_decode.h). */
#ifndef DPG_SLOTS_CUH
#define DPG_SLOTS_CUH
#include "fault.cuh"
#include <cuda_runtime.h>
#include <stdint.h>

#ifdef __CUDACC__
struct Slots {
    int T, kept;
    int64_t slots;
    const int32_t *slot, *accepted, *length;

    /* A slot that is there; -1: none. */
    __device__ int64_t valid(int32_t s) const {
        if (FAULT(SLOT_PADDING) && s < 0) return slots - 1;
        return s < 0 || s >= slots ? -1 : s;
    }
    __device__ int64_t at(int b, int i) const { return valid(slot[(int64_t)b * kept + i]); }
    /* The slot to read as it is named, whose load nothing waits for; the slot of that name. */
    __device__ int32_t named(int b) const {
        const int n = kept > 1 && accepted ? accepted[b] : 1;
        return n < 1 || n > kept ? -1 : slot[(int64_t)b * kept + n - 1];
    }
    __device__ int64_t read(int32_t name) const {
        const int64_t s = valid(name);
        return FAULT(SLOT_NEIGHBOUR) && s >= 0 ? (s + 1) % slots : s;
    }
    /* After token t of n. */
    __device__ int64_t write(int b, int t, int n) const {
        if (FAULT(SLOT_IN_PLACE)) return t == n - 1 ? read(named(b)) : -1;
        return kept > 1 ? at(b, t) : t == n - 1 ? at(b, 0) : -1;
    }
    __device__ int tokens(int b) const {
        return !length ? T : length[b] < 0 ? 0 : length[b] > T ? T : length[b];
    }
};
#endif
#endif
