/* gpu/token/gradients.cu - gradients of the raw inputs from gradients of the activated ones
 * (math.md b, c, i), by the product rule over the rows. No shared memory.
 *
 *   k_token_input_bwd    a warp a token and head           gradient of one input; of the log gate
 *                                                          what rows add
 *   k_token_gate_bwd     a block a chunk and value head    dg; its sums for dA_log and ddt_bias */
#include "token/rows.cuh"

/* Calls f(place, row, j, factor) for the rows of key r of a token, then for those of the token
 * after it. Factor: the one that the first token's input is in the row. */
template <class F>
__device__ __forceinline__ void both_tokens(Place p, int input, int r, F f, int back = 0) {
    for (; back < 2; back++) {
        for (int j = 0; j < p.a.n; j++)
            if (p.key_of(j) == r) f(p, p.row(j), j, back ? input | DP_PREVIOUS : input);
        if (p.after < 0 || !p.a.looks_back) return;
        p.before = p.t;
        p.t = p.after;
    }
}
/* Does the gradient of an input get a part from the next rank? */
__device__ __forceinline__ bool comes(const Place &p, int input) {
    return p.came && p.a.halo_at[input] >= 0;
}

/* += the gradient of factor `of` through an entry whose gradient is dy. */
__device__ __forceinline__ void through_entry(const Place &p, const dp_entry &e, int of, int r,
                                              const float *dy, Row &sum) {
    for (int m = 0; m < e.n; m++) {
        if (e.of[m] != of) continue;
        float rate = DP_FACTOR_RATE(of);
        Row c = p.product(e, r, rate != 0.f || FAULT(TOKEN_FACTOR) ? -1 : m),
            own = p.rotated(Row::load(dy, p.d.K), p.rotated_key(e), 1);
        if (rate == 0.f) rate = 1.f;
        Row::rows(p.d.K, [&](int i, int) { sum.x[i] = fmaf(rate * c.x[i], own.x[i], sum.x[i]); });
    }
}
__device__ __forceinline__ void through_scalar(const Place &p, const dp_entry &e, int of, int r,
                                               int v, float dy, float &sum) {
    for (int m = 0; m < e.n; m++)
        if (e.of[m] == of) sum = fmaf(p.scalar(e, r, v, m), dy, sum);
}
__device__ __forceinline__ void through_rows(const Place &p, const TokenGrads &y, int input, int r,
                                             Row &sum, int back = 0) {
    auto f = [&](const Place &p, const dp_token_row &row, int j, int of) {
        through_entry(p, row.write, of, r, y.k + p.entry(j) * p.d.K, sum);
        through_entry(p, row.read, of, r, y.e + p.entry(j) * p.d.K, sum);
    };
    both_tokens(p, input, r, f, back);
}
/* The gradient of a value at column v; of a number, through strengths. */
__device__ __forceinline__ float through_values(const Place &p, const TokenGrads &y, int input,
                                                int r, int v, int back = 0) {
    float sum = 0.f;
    auto f = [&](const Place &p, const dp_token_row &row, int j, int of) {
        through_scalar(p, row.value, of, r, v, y.u[p.entry(j) * p.d.V + v], sum);
    };
    both_tokens(p, input, r, f, back);
    return sum;
}
__device__ __forceinline__ float through_strengths(const Place &p, const TokenGrads &y, int input,
                                                   int r, float sum, int back = 0) {
    auto f = [&](const Place &p, const dp_token_row &row, int j, int of) {
        through_scalar(p, row.strength, of, r, 0, y.b[p.entry(j)], sum);
    };
    both_tokens(p, input, r, f, back);
    return sum;
}

/* Rows of the query or of keys, over the value heads of a group, through the norm of the input:
 * (dy - slope <unit, dy>) / norm. */
__device__ void key_bwd(Place p, const TokenGrads &y, int input, int r) {
    const Dims &d = p.d;
    int64_t to = p.at(input, r) * d.K;
    Row dy = {}, x = p.given(input, r), unit = p.unit(input, r),
        slope = p.norm_slope(p.a.norm.power == 2 ? unit : x); /* a small x over its norm may be 0 */
    for (int i = 0; i < (is_in(BY_QUERY, input) ? d.G : 1); i++, p.hv++) {
        if (input == DP_INPUT_Q)
            dy.add(p.rotated(Row::load(y.q + p.head() * d.K, d.K), DP_INPUT_Q, 1), 1.f);
        through_rows(p, y, input, r, dy);
        if (comes(p, input))
            Row::rows(d.K, [&](int i, int x) { dy.x[i] += p.halo_word(p.came, input, d.K, x); });
    }
    int normed = p.a.rows.normed >> input & 1;
    float norm = p.norm(input, x), along = normed ? unit.dot(dy) : 0.f;
    Row::rows(d.K, [&](int i, int row) {
        stx(y.in[input], to + row, is_in(BY_QUERY, input) ? d.qk_bf16 : d.d_bf16,
            normed ? (dy.x[i] - slope.x[i] * along) / norm : dy.x[i]);
    });
}

__device__ void value_bwd(const Place &p, const TokenGrads &y, int input, int r) {
    int64_t V = p.d.V, to = p.at(input, r) * V;
    for (int v = threadIdx.x % 32; v < V; v += 32) {
        float sum = through_values(p, y, input, r, v);
        if (comes(p, input)) sum += p.halo_word(p.came, input, p.d.V, v);
        stx(y.in[input], to + v, p.d.d_bf16, sum);
    }
}

__device__ __forceinline__ float sum_of(const Dims &d, const Row &x) {
    Row one = {};
    Row::rows(d.K, [&](int i, int) { one.x[i] = 1.f; });
    return x.dot(one);
}

__device__ void number_bwd(const Place &p, const TokenGrads &y, int input, int r) {
    Row keys = {};
    through_rows(p, y, input, r, keys);
    float sum = through_strengths(p, y, input, r, sum_of(p.d, keys));
    if (comes(p, input)) sum += p.halo_word(p.came, input, 1, 0);
    int64_t at = p.at(input, r);
    if (input == DP_INPUT_BETA) sum *= beta_slope(p.d, ldx(p.a.in[input], at, p.d.g_bf16));
    if (threadIdx.x % 32 == 0) stx(y.in[input], at, p.d.dg_bf16, sum);
}

/* Adds what entries with factors of the gate say of its log. */
__device__ void gate_bwd(const Place &p, const TokenGrads &y) {
    Row sum = {};
    float *g = y.g + p.head() * p.d.Kg;
    for (int f = DP_NINPUTS; f < DP_FACTORS_END; f++)
        through_rows(p, y, f, 0, sum);
    if (p.d.Kg > 1) {
        sum.add(Row::load(g, p.d.K), 1.f);
        return sum.store(g, p.d.K);
    }
    float all = sum_of(p.d, sum);
    if (threadIdx.x % 32 == 0) *g += all;
}

/* Pairs of channels: a lane has every 32nd. */
struct Pairs {
    static const int MOST = 4; /* K up to 256 */
    float x[MOST];
    template <class F> __device__ __forceinline__ static void each(int pairs, F f) {
#pragma unroll
        for (int j = 0; j < MOST; j++)
            if (int(threadIdx.x % 32) + 32 * j < pairs) f(j, threadIdx.x % 32 + 32 * j);
    }
};
/* += x1 dx2 - x2 dx1 of each pair: the gradient of the angle of x. */
__device__ __forceinline__ void through_rotation(const Place &p, const float *x, const float *dx,
                                                 Pairs &sum) {
    Pairs::each(p.a.pairs, [&](int j, int pair) {
        dp_pair z = dp_pair_of(p.a.rows.rotation, p.a.pairs, pair, 0);
        sum.x[j] += x[z.first] * dx[z.second] - x[z.second] * dx[z.first];
    });
}
__device__ __forceinline__ void through_turned_keys(const Place &p, const TokenGrads &y, Pairs &sum,
                                                    int back = 0) {
    auto f = [&](const Place &p, const dp_token_row &row, int j, int of) {
        int key = p.rotated_key(row.write);
        if (key >= 0 && (key & DP_PREVIOUS) == (of & DP_PREVIOUS))
            through_rotation(p, p.a.k + p.entry(j) * p.d.K, y.k + p.entry(j) * p.d.K, sum);
    };
    both_tokens(p, 0, 0, f, back);
}
/* The gradient of a token's sum of angles. */
__device__ void angle_bwd(const Place &p, const TokenGrads &y) {
    Pairs sum = {};
    through_rotation(p, p.a.q + p.head() * p.d.K, y.q + p.head() * p.d.K, sum);
    through_turned_keys(p, y, sum);
    Pairs::each(p.a.pairs, [&](int j, int i) { y.angle[p.head() * p.a.pairs + i] = sum.x[j]; });
}
/* Gradients of angles: sums over a token and all after it. */
__global__ void k_token_angle_sums(Dims d, Token a, TokenGrads y) {
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, width = (int64_t)d.HV * a.pairs;
    if (i >= d.nseq * width) return;
    Seq seq = d.seq[i / width];
    Chunk last = d.chunk[seq.c1 - 1];
    float sum = 0.f;
    if (a.dhalo && !seq.ends) {
        Link l = a.link[seq.part];
        for (int r = l.part + 1; r <= l.part + l.post; r++)
            sum +=
                a.dhalo[(int64_t)a.place[r] * a.halo_words + a.halo_at[DP_INPUT_ANGLE] + i % width];
    }
    for (int64_t t = last.t0 + last.len - 1; t >= d.chunk[seq.c0].t0; t--) {
        sum += y.angle[t * width + i % width];
        stx(y.in[DP_INPUT_ANGLE], t * width + i % width, d.dg_bf16, sum);
    }
}

__global__ void k_token_input_bwd(Dims d, Token a, TokenGrads y, int input, int heads) {
    Place p(d, a, heads);
    if (p.t < 0) return;
    for (int r = 0; r < (is_in(BY_KEY, input) ? d.R : 1); r++)
        if (input == DP_INPUT_G)
            gate_bwd(p, y);
        else if (input == DP_INPUT_ANGLE)
            angle_bwd(p, y);
        else if (is_in(KEYS, input))
            key_bwd(p, y, input, r);
        else if (is_in(VALUES, input))
            value_bwd(p, y, input, r);
        else
            number_bwd(p, y, input, r);
}

/* The gradient of what a part got of the token before its first. That of the angles' sum is over
 * all of the part's tokens in that sequence. */
__global__ void k_token_halo_bwd(Dims d, Token a, TokenGrads y, float *to) {
    Place p = Place::first(d, a);
    if (p.t < 0) return;
    int lane = threadIdx.x % 32;
    to += (int64_t)blockIdx.y * a.halo_words;
    for (int i = 0; i < DP_NINPUTS; i++) {
        Row sum = {};
        Pairs angles = {};
        if (a.halo_at[i] < 0) continue;
        if (i == DP_INPUT_ANGLE)
            through_turned_keys(p, y, angles, 1);
        else if (!is_in(VALUES, i))
            through_rows(p, y, i, 0, sum, 1);
        float *out = to + a.halo_at[i];
        if (is_in(KEYS, i)) {
            sum.store(out + p.hv * d.K, d.K, 1); /* what precedes it may be numbers */
        } else if (is_in(VALUES, i)) {
            for (int v = lane; v < d.V; v += 32)
                out[p.hv * d.V + v] = through_values(p, y, i, 0, v, 1);
        } else if (i != DP_INPUT_ANGLE) {
            float one = through_strengths(p, y, i, 0, sum_of(d, sum), 1);
            if (!lane) out[p.hv] = one;
        } else {
            Seq seq = d.seq[a.link[blockIdx.y].first];
            Chunk last = d.chunk[seq.c1 - 1];
            Pairs::each(a.pairs, [&](int j, int pair) {
                for (int64_t t = last.t0 + last.len - 1; t >= p.t; t--)
                    angles.x[j] += y.angle[(t * d.HV + p.hv) * a.pairs + pair];
                out[p.hv * a.pairs + pair] = angles.x[j];
            });
        }
    }
}

__global__ void k_token_gate_bwd(Dims d, dpg_tensors t, dpg_grads g, const float *dg, float *part) {
    int64_t tile = blockIdx.x;
    Chunk c = d.chunk[tile / d.HV];
    gate_grads_of_tile(d, t, g, tile, part, [&](int s, int k) {
        return dg[((c.t0 + s) * d.HV + tile % d.HV) * d.Kg + k];
    });
}

static dp_status input_bwd(const Call &c, int input) {
    const Dims &d = c.p->d;
    int heads = is_in(BY_QUERY, input) ? d.H : d.HV;
    k_token_input_bwd<<<places_of(d, heads), THREADS, 0, c.s>>>(d, token_of(c), token_grads_of(c),
                                                                input, heads);
    CK_LAUNCH(c.e, "k_token_input_bwd");
    return DP_OK;
}

dp_status halo_grads(const Call &c) {
    TokenGrads y = token_grads_of(c);
    float *to = at<float>(c, B_DHALO);
    CK(c.e, cudaMemsetAsync(to, 0, c.p->buf[B_DHALO].bytes, c.s));
    if (c.p->is_first || !c.p->nlink) return DP_OK;
    if (y.angle) TRY(input_bwd(c, DP_INPUT_ANGLE));
    k_token_halo_bwd<<<dim3(blocks_of(c.p->d.HV), c.p->nlink), THREADS, 0, c.s>>>(
        c.p->d, token_of(c), y, to);
    CK_LAUNCH(c.e, "k_token_halo_bwd");
    return DP_OK;
}

dp_status token_norm(const Call &c) {
    TokenGrads y = token_grads_of(c);
    for (const Input *x = inputs_of_tokens; x->id >= 0; x++)
        if (y.in[x->id] && x->id != DP_INPUT_G) TRY(input_bwd(c, x->id));
    if (!y.angle) return DP_OK;
    Token a = token_of(c);
    k_token_angle_sums<<<angles_of(c.p->d, a), THREADS, 0, c.s>>>(c.p->d, a, y);
    CK_LAUNCH(c.e, "k_token_angle_sums");
    return DP_OK;
}

dp_status token_sums(const Call &c) {
    const dp_recurrence *a = &c.p->rows;
    if (dp_recurrence_has_gates(a)) TRY(input_bwd(c, DP_INPUT_G));
    k_token_gate_bwd<<<tile_count(c.p), THREADS, 0, c.s>>>(c.p->d, *c.t, *c.g, token_grads_of(c).g,
                                                           at<float>(c, B_PART));
    CK_LAUNCH(c.e, "k_token_gate_bwd");
    return sum_over_chunks(c);
}
