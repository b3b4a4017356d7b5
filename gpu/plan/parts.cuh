/* gpu/plan/parts.cuh - which rank owns which tokens of a problem: the parts of a table
 * (dpg_owners), or one of T / N tokens a rank. */
#ifndef DPG_PARTS_CUH
#define DPG_PARTS_CUH
#include "dp_gpu.h"

struct Parts {
    const dpg_problem *p;
    int N;
    int n() const { return p->own.parts ? p->own.parts : N; }
    int64_t cut(int i) const { return p->own.parts ? p->own.cut[i] : p->T / N * i; }
    int owner(int i) const { return p->own.parts ? p->own.owner[i] : i; }
    /* The part that holds token t. */
    int at(int64_t t) const {
        int lo = 0, hi = n() - 1;
        while (lo < hi) {
            int mid = (lo + hi) / 2;
            if (cut(mid + 1) > t)
                hi = mid;
            else
                lo = mid + 1;
        }
        return lo;
    }
};
#endif
