/* A case as tensors over named axes, from which indices are taken away (shrink_work.h). */
#include "shrink_work.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- the inputs of a case as a table of tensors over named axes ------------------------------ */

/* The axes here of one of the table: value heads are those of the groups. */
static void add_axis(dp_shrink_tensor *t, dp_axis axis, int one_gate) {
    static const int of[DP_NAXES] = {
        [DP_AXIS_T] = DP_SHRINK_TOK,   [DP_AXIS_NSEQ] = DP_SHRINK_SEQ, [DP_AXIS_H] = DP_SHRINK_HEAD,
        [DP_AXIS_HV] = DP_SHRINK_HEAD, [DP_AXIS_R] = DP_SHRINK_KEY,    [DP_AXIS_K] = DP_SHRINK_CHAN,
        [DP_AXIS_V] = DP_SHRINK_COL,   [DP_AXIS_KG] = DP_SHRINK_CHAN,  [DP_AXIS_D] = DP_SHRINK_DIM,
        [DP_AXIS_W] = DP_SHRINK_TAP};
    t->ax[t->nax++] = axis == DP_AXIS_KG && one_gate ? DP_SHRINK_NONE : of[axis];
    if (axis == DP_AXIS_HV) t->ax[t->nax++] = DP_SHRINK_GROUP;
}

/* t [DP_CASE_MAX_INPUTS]; returns the count. */
int dp_shrink_tensors(dp_case *c, dp_shrink_tensor *t) {
    dp_case_input s[DP_CASE_MAX_INPUTS];
    const int n = dp_case_inputs(c, s);
    for (int i = 0; i < n; i++) {
        t[i] = (dp_shrink_tensor){.field = s[i].field, .x = s[i].where};
        for (int d = 0; d < s[i].ndim; d++)
            add_axis(&t[i], s[i].field->axis[d], dp_models[c->p.model].one_gate);
    }
    return n;
}

int64_t dp_shrink_length(const dp_case *c, int ax) {
    const int ranks = dp_op_of(c)->has_ranks;
    const dp_dims d = dp_op_of(c)->dims(c);
    const int64_t H = d.of[DP_AXIS_H];
    int64_t n = 1;
    switch (ax) {
    case DP_SHRINK_TOK: return d.of[ranks ? DP_AXIS_T : DP_AXIS_CHUNKS];
    case DP_SHRINK_SEQ: n = d.of[DP_AXIS_NSEQ]; break;
    case DP_SHRINK_HEAD: n = H; break;
    case DP_SHRINK_GROUP: n = H ? d.of[DP_AXIS_HV] / H : 1; break;
    case DP_SHRINK_KEY: n = d.of[DP_AXIS_R]; break;
    case DP_SHRINK_CHAN: n = d.of[DP_AXIS_K]; break;
    case DP_SHRINK_COL: n = d.of[DP_AXIS_V]; break;
    case DP_SHRINK_DIM: n = d.of[DP_AXIS_D]; break;
    case DP_SHRINK_TAP: n = d.of[DP_AXIS_W]; break;
    case DP_SHRINK_RANK: n = ranks ? c->ranks[0] : 1; break;
    case DP_SHRINK_LOCAL: n = ranks ? d.of[DP_AXIS_T] / c->ranks[0] : 1; break;
    default: break;
    }
    return n ? n : 1;
}

int64_t dp_shrink_count(const dp_case *c, const dp_shrink_tensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->nax; i++)
        n *= dp_shrink_length(c, t->ax[i]);
    return n;
}

int64_t dp_case_numbers(const dp_case *c, int64_t *nonzero) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const int n = dp_shrink_tensors((dp_case *)c, t);
    int64_t all = 0, some = 0;
    for (int i = 0; i < n; i++) {
        const int64_t m = *t[i].x ? dp_shrink_count(c, &t[i]) : 0;
        all += m;
        for (int64_t j = 0; j < m; j++)
            some += (*t[i].x)[j] != 0;
    }
    if (dp_op_of(c)->has_factors) all = some = (int64_t)c->ch.n * c->ch.K * c->ch.K;
    if (nonzero) *nonzero = some;
    return all;
}

/* Arrays and cu are the copy's own, names the original's. */
dp_case dp_shrink_copy(const dp_case *from) {
    dp_case c = *from;
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const int n = dp_shrink_tensors(&c, t);
    for (int i = 0; i < n; i++)
        *t[i].x = dp_copy(*t[i].x, dp_shrink_count(from, &t[i]));
    int64_t **cu = dp_case_packing(&c).cu;
    if (cu && *cu) {
        int64_t *own = dp_calloc((size_t)dp_shrink_length(from, DP_SHRINK_SEQ) + 1, sizeof *own);
        memcpy(own, *cu, sizeof *own * (size_t)(dp_shrink_length(from, DP_SHRINK_SEQ) + 1));
        *cu = own;
    }
    return c;
}

void dp_shrink_copy_free(dp_case *c) { dp_problem_free(&c->p), dp_conv_free(&c->conv); }

/* ---- taking away ----------------------------------------------------------------------------- */

static void gather(dp_case *c, int ax, const unsigned char *gone) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const int n = dp_shrink_tensors(c, t);
    const int64_t len = dp_shrink_length(c, ax);
    for (int i = 0; i < n; i++) {
        int64_t outer = 1, inner = 1, m = 0;
        int at = -1;
        for (int d = 0; d < t[i].nax; d++) {
            if (t[i].ax[d] == ax)
                at = d;
            else
                *(at < 0 ? &outer : &inner) *= dp_shrink_length(c, t[i].ax[d]);
        }
        if (!*t[i].x || at < 0) continue;
        for (int64_t o = 0; o < outer; o++)
            for (int64_t j = 0; j < len; j++)
                if (!gone[j]) {
                    memmove(*t[i].x + m, *t[i].x + (o * len + j) * inner,
                            sizeof(double) * (size_t)inner);
                    m += inner;
                }
    }
}

static void set_length(dp_case *c, int ax, int64_t n) {
    switch (ax) {
    case DP_SHRINK_TOK: *dp_case_packing(c).T = n; break;
    case DP_SHRINK_SEQ: *dp_case_packing(c).Nseq = (int)n; break;
    case DP_SHRINK_HEAD:
        c->p.HV = (int)(n * dp_G(&c->p));
        c->p.H = (int)n;
        break;
    case DP_SHRINK_GROUP: c->p.HV = (int)(c->p.H * n); break;
    case DP_SHRINK_KEY: c->p.R = (int)n; break;
    case DP_SHRINK_CHAN: c->p.K = (int)n; break;
    case DP_SHRINK_COL: c->p.V = (int)n; break;
    case DP_SHRINK_DIM: c->conv.D = (int)n; break;
    case DP_SHRINK_TAP: c->conv.W = (int)n; break;
    default: assert(0);
    }
}

static void drop_tokens(dp_case *c, const unsigned char *gone) {
    int64_t *cu = *dp_case_packing(c).cu, T = dp_shrink_length(c, DP_SHRINK_TOK), kept = 0;
    const int64_t nseq = dp_shrink_length(c, DP_SHRINK_SEQ);
    gather(c, DP_SHRINK_TOK, gone);
    for (int64_t t = 0, s = 0; t <= T; t++) {
        while (s <= nseq && cu[s] == t)
            cu[s++] = kept;
        kept += t < T && !gone[t];
    }
    set_length(c, DP_SHRINK_TOK, kept);
}

/* Tokens of a sequence that goes belong to the one before it, those of the first to the next. */
static void drop_sequences(dp_case *c, const unsigned char *gone) {
    int64_t *cu = *dp_case_packing(c).cu, n = dp_shrink_length(c, DP_SHRINK_SEQ), kept = 0;
    const int64_t T = cu[n];
    gather(c, DP_SHRINK_SEQ, gone);
    for (int64_t s = 0; s < n; s++)
        if (!gone[s]) {
            cu[kept] = kept ? cu[s] : 0;
            kept++;
        }
    cu[kept] = T;
    set_length(c, DP_SHRINK_SEQ, kept);
}

/* Takes indices [at, at + len) of an axis away. */
void dp_shrink_drop(dp_case *c, int ax, int64_t at, int64_t len) {
    const int64_t n = dp_shrink_length(c, ax), T = dp_shrink_length(c, DP_SHRINK_TOK),
                  L = dp_op_of(c)->has_ranks ? T / c->ranks[0] : T;
    if (dp_op_of(c)->has_factors) {
        *(ax == DP_SHRINK_TOK ? &c->ch.n : &c->ch.K) -= (int)len;
        return;
    }
    unsigned char *gone = dp_calloc((size_t)(T > n ? T : n), 1);
    if (ax == DP_SHRINK_RANK || ax == DP_SHRINK_LOCAL) {
        for (int64_t t = 0; t < T; t++) {
            const int64_t i = ax == DP_SHRINK_RANK ? t / L : t % L;
            gone[t] = i >= at && i < at + len;
        }
        drop_tokens(c, gone);
        if (ax == DP_SHRINK_RANK) c->ranks[0] -= (int)len;
    } else {
        memset(gone + at, 1, (size_t)len);
        if (ax == DP_SHRINK_SEQ)
            drop_sequences(c, gone);
        else {
            gather(c, ax, gone);
            set_length(c, ax, n - len);
        }
    }
    free(gone);
}
