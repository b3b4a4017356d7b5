/* gpu/token/rows.cuh - entries of a token's rows, products of its inputs
 * (ref/vocabulary/recurrence.h). A warp has a token of a head. */
#ifndef DPG_ROWS_CUH
#define DPG_ROWS_CUH
#include "plan/tensors.cuh"
#include "token/token.cuh"

#ifdef __CUDACC__
/* As a token: the one before the rank's first. */
enum { HALO = -2 };

/* A token of a value head. */
struct Place {
    const Dims &d;
    const Token &a;
    int64_t t, before, after; /* in its sequence; -1: there is none */
    int hv;
    const float *halo; /* of its part */
    const float *came; /* gradients from the next part, where that has the token after; or NULL */

    /* That of this warp, of `heads` a token; t = -1: there is none. */
    __device__ __forceinline__ Place(const Dims &d, const Token &a, int heads) : Place(d, a) {
        int64_t warp = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, slot = warp / heads;
        hv = warp % heads * (d.HV / heads);
        if (slot >= (int64_t)d.NT * d.tok) return;
        Chunk chunk = d.chunk[slot / d.tok];
        if (slot % d.tok >= chunk.len) return;
        Seq seq = d.seq[chunk.seq];
        Chunk last = d.chunk[seq.c1 - 1];
        t = chunk.t0 + slot % d.tok;
        if (t > d.chunk[seq.c0].t0)
            before = t - 1;
        else if (!seq.starts && a.halo)
            before = HALO;
        if (a.halo) halo = a.halo + (int64_t)seq.part * a.halo_words;
        if (t < last.t0 + last.len - 1)
            after = t + 1;
        else if (!seq.ends && a.dhalo)
            came = a.dhalo + (int64_t)a.place[a.link[seq.part].part + 1] * a.halo_words;
    }
    /* The first token of part blockIdx.y, at each head a warp; t = -1: nothing is before it. */
    __device__ __forceinline__ static Place first(const Dims &d, const Token &a) {
        Place p(d, a);
        p.hv = blockIdx.x * WARPS + threadIdx.x / 32;
        p.t = p.hv < d.HV && a.link[blockIdx.y].pre ? d.chunk[d.seq[a.link[blockIdx.y].first].c0].t0
                                                    : -1;
        p.before = HALO;
        p.halo = a.halo + (int64_t)blockIdx.y * a.halo_words;
        return p;
    }
    __device__ __forceinline__ Place(const Dims &d, const Token &a)
        : d(d), a(a), t(-1), before(-1), after(-1), hv(0), halo(NULL), came(NULL) {}
    /* Number x of an input in a halo, or its gradient, of `width` numbers a head. */
    __device__ __forceinline__ float halo_word(const float *halo, int input, int width,
                                               int x) const {
        return halo[a.halo_at[input] + hv * width + x];
    }
    __device__ __forceinline__ bool in_halo(int of) const {
        return of & DP_PREVIOUS && before == HALO;
    }
    __device__ __forceinline__ int64_t head() const { return t * d.HV + hv; }
    __device__ __forceinline__ int64_t query_head() const { return t * d.H + hv / d.G; }
    /* Row j, the key that it has, and where its activated entries stand. */
    __device__ __forceinline__ const dp_token_row &row(int j) const {
        return a.rows.row[a.rows.n > 1 && !FAULT(TOKEN_ROW) ? j : 0];
    }
    __device__ __forceinline__ int key_of(int j) const { return a.rows.n > 1 ? 0 : j; }
    __device__ __forceinline__ int64_t entry(int j) const { return head() * a.n + j; }

    /* The row of a factor's input, of key r; -1: there is none. */
    __device__ __forceinline__ int64_t at(int of, int r) const {
        int input = of & ~DP_PREVIOUS;
        int64_t token = of & DP_PREVIOUS ? before : t;
        if (token < 0) return -1;
        int64_t i = is_in(BY_QUERY, input) ? token * d.H + hv / d.G : token * d.HV + hv;
        return is_in(BY_KEY, input) ? i * d.R + r : i;
    }
    /* A number, or a value at column v. */
    __device__ __forceinline__ float number(int of, int r, int v = 0) const {
        int64_t i = at(of, r);
        int input = of & ~DP_PREVIOUS;
        if (in_halo(of))
            return is_in(VALUES, input) ? halo_word(halo, input, d.V, v)
                                        : halo_word(halo, input, 1, 0);
        if (i < 0) return 0.f;
        if (is_in(VALUES, input)) return ldx(a.in[input], i * d.V + v, d.in_bf16);
        float x = ldx(a.in[input], i, d.g_bf16);
        return input == DP_INPUT_BETA ? beta_value(d, x) : x;
    }
    __device__ __forceinline__ float log_decay(int x) const {
        int channel = hv * d.Kg + (d.Kg > 1 ? x : 0);
        return gate_value(d, ldx(a.in[DP_INPUT_G], t * d.HV * d.Kg + channel, d.g_bf16),
                          expf(param(a.in[DP_INPUT_A_LOG], hv, d.A_type)),
                          param(a.in[DP_INPUT_DT_BIAS], channel, d.bias_type));
    }
    /* A raw row of the query or of keys, and its norm; 1: it has none. */
    __device__ __forceinline__ Row given(int of, int r) const {
        int64_t i = at(of, r);
        Row y = {};
        if (in_halo(of))
            Row::rows(d.K,
                      [&](int j, int x) { y.x[j] = halo_word(halo, of & ~DP_PREVIOUS, d.K, x); });
        else if (i >= 0)
            Row::rows(d.K, [&](int j, int x) {
                y.x[j] = ldx(a.in[of & ~DP_PREVIOUS], i * d.K + x, d.in_bf16);
            });
        return y;
    }
    __device__ __forceinline__ float norm(int of, const Row &x) const {
        if (!(a.rows.normed >> (of & ~DP_PREVIOUS) & 1)) return 1.f;
        float sum = x.dot(norm_slope(x)) + (float)a.rows.eps;
        return a.norm.power == 2 ? sqrtf(sum) : sum;
    }
    /* The slope of the norm by y (ref/vocabulary/recurrence.h). */
    __device__ __forceinline__ Row norm_slope(Row y) const {
        float mean = a.norm.mean ? 1.f / d.K : 1.f;
        Row::rows(d.K, [&](int i, int) {
            y.x[i] = (a.norm.power == 2 ? y.x[i] : (y.x[i] > 0.f) - (y.x[i] < 0.f)) * mean;
        });
        return y;
    }
    __device__ __forceinline__ Row unit(int of, int r) const {
        Row y = given(of, r);
        float length = norm(of, y);
        Row::rows(d.K, [&](int j, int) { y.x[j] /= length; });
        return y;
    }
    /* y times a factor of write or read, of key r. */
    __device__ __forceinline__ void multiply(Row &y, int of, int r) const {
        if (FAULT(TOKEN_ERASE) && of == DP_INPUT_ERASE) return;
        if (is_in(KEYS, of & ~DP_PREVIOUS)) return y.times(unit(of, r));
        if (DP_FACTOR_RATE(of) == 0.f) {
            float c = number(of, r);
            return Row::rows(d.K, [&](int j, int) { y.x[j] *= c; });
        }
        Row::rows(d.K, [&](int j, int x) { y.x[j] *= expf(DP_FACTOR_RATE(of) * log_decay(x)); });
    }
    __device__ __forceinline__ float sign(const dp_entry &e) const {
        return FAULT(TOKEN_SIGN) ? e.sign * e.sign : e.sign;
    }
    /* The product of all factors but number `but`, with its sign: of write or read; of values at
     * column v, or of a strength. */
    __device__ __forceinline__ Row product(const dp_entry &e, int r, int but = -1) const {
        Row y = {};
        Row::rows(d.K, [&](int j, int) { y.x[j] = sign(e); });
        for (int m = 0; m < e.n; m++)
            if (m != but) multiply(y, e.of[m], r);
        return y;
    }
    __device__ __forceinline__ float scalar(const dp_entry &e, int r, int v, int but = -1) const {
        float y = sign(e);
        for (int m = 0; m < e.n; m++)
            if (m != but) y *= number(e.of[m], r, v);
        return y;
    }
    /* A row of the query or of a key, rotated by the sum of its token's angles, or back. */
    __device__ __forceinline__ Row rotated(Row y, int of, int back = 0) const {
        int64_t token = of & DP_PREVIOUS ? before : t;
        if (!a.cos_sin || of < 0 || token == -1) return y;
        const float *pair = a.cos_sin + (token * d.HV + hv) * 2 * a.pairs;
        Row out = y;
#pragma unroll
        for (int i = 0; i < Row::ROWS; i++) {
            int x = Row::row(i);
            bool turns = x < 2 * a.pairs;
            dp_pair at = dp_pair_of(a.rows.rotation, a.pairs, -1, turns ? x : 0);
            float other =
                a.rows.rotation == DP_ROTATE_PAIRS ? y.x[i ^ 1] : y.at(at.first + at.second - x);
            if (!turns) continue;
            float phi = in_halo(of) ? halo_word(halo, DP_INPUT_ANGLE, a.pairs, at.i) : 0.f,
                  c = in_halo(of) ? cosf(phi) : pair[2 * at.i],
                  s = in_halo(of) ? sinf(phi) : pair[2 * at.i + 1];
            if (back) s = -s;
            out.x[i] = x == at.first ? y.x[i] * c - other * s : other * s + y.x[i] * c;
        }
        return out;
    }
    /* The factor of an entry that is a rotated key; -1: none is. */
    __device__ __forceinline__ int rotated_key(const dp_entry &e) const {
        for (int m = 0; m < e.n; m++)
            if (a.rows.rotated >> (e.of[m] & ~DP_PREVIOUS) & 1) return e.of[m];
        return -1;
    }
};

/* Blocks of threads that have an angle of a head and sub-sequence each. */
static inline unsigned angles_of(const Dims &d, const Token &a) {
    return (unsigned)(((int64_t)d.nseq * d.HV * a.pairs + THREADS - 1) / THREADS);
}
/* Blocks of warps that have a place each. */
static inline unsigned places_of(const Dims &d, int heads) {
    return blocks_of((int64_t)d.NT * d.tok * heads);
}
#endif
#endif
