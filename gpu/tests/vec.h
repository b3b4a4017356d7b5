/* gpu/tests/vec.h - tensors on the host in fp64, and how far two of them are apart. */
#ifndef DPG_TESTS_VEC_H
#define DPG_TESTS_VEC_H
#include <algorithm>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <vector>

typedef std::vector<double> Vec;

static inline void put(Vec &to, int64_t at, const Vec &from) {
    std::copy(from.begin(), from.end(), to.begin() + at);
}

/* |got - want|_F and |want|_F. */
struct Distance {
    double off = 0, size = 0;
    Distance(const Vec &got, const Vec &want) {
        for (size_t i = 0; i < want.size(); i++) {
            off += (got[i] - want[i]) * (got[i] - want[i]);
            size += want[i] * want[i];
        }
        off = got.size() == want.size() ? sqrt(off) : NAN;
        size = sqrt(size);
    }
};

/* Relative to |want|, absolute where that is zero. */
static inline double rel_fro(const Vec &got, const Vec &want) {
    Distance d(got, want);
    return d.size > 0 ? d.off / d.size : d.off;
}

/* Every bit, those of NaN too. */
static inline bool same_bits(const Vec &a, const Vec &b) {
    return a.size() == b.size() && !memcmp(a.data(), b.data(), a.size() * sizeof(double));
}
#endif
