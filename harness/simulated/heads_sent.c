/* The exchange of heads where ranks are processes: two all-to-alls (ranks_stages.h). Tokens go from
 * their owners to the ranks that have their value heads, each with its query head, what those make
 * comes back. Gradients of activated q and k return a value head each. Their owner adds them, in
 * the order of heads, and computes the activations' backward, as one rank does. So the bits are one
 * rank's, whatever divides.
 */
#include "ranks_stages.h"

#include <stdlib.h>
#include <string.h>

/* Rows of n numbers, from rows of one width to rows of another. */
static void copy_columns(double *to, int64_t to_width, const double *from, int64_t from_width,
                         int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++)
        memcpy(to + r * to_width, from + r * from_width, sizeof *to * (size_t)n);
}

/* ---- which tokens a rank has ----------------------------------------------------------------- */

static int64_t tokens_of(const dp_sim *s, int rank) {
    return dp_own_count(s->p->own, s->p->cu[s->p->Nseq], s->N, rank);
}

/* One tensor of all tokens, in their order, and of a rank's alone, in that of its parts. */
static void move_tokens(const dp_sim *s, int rank, int64_t width, double *all, double *own,
                        int back) {
    dp_own_move(s->p->own, s->p->cu[s->p->Nseq], s->N, rank, width, all, own, back);
}

/* ---- inputs ---------------------------------------------------------------------------------- */

/* The value heads of a rank, n of them from `first` on. */
typedef struct {
    int first, n;
} heads_of_rank;

static heads_of_rank heads_of(const dp_sim *s, int rank) {
    const int n = s->p->HV / s->peers->N;
    return (heads_of_rank){rank * n, n};
}

/* The columns of an input that a rank's value heads read, side by side: [rows][n][numbers of a
 * head]. Returns how many numbers. */
static int64_t pack_columns(const dp_sim *s, int input, int64_t rows, heads_of_rank of,
                            double *to) {
    const dp_problem *p = s->given;
    const int64_t width = dp_input_width(p, input), each = width / dp_input_heads(p, input);
    const int share = dp_input_heads(p, input) == p->HV ? 1 : dp_G(p);
    for (int i = 0; i < of.n; i++)
        copy_columns(to + i * each, of.n * each,
                     dp_input_of(p, input) + (of.first + i) / share * each, width, rows, each);
    return rows * of.n * each;
}

static int is_sent(const dp_sim *s, int input) {
    return dp_input_of(s->given, input) && dp_input_fields[input].kind == DP_OF_TOKENS;
}

/* This rank's tokens for the heads of rank `to`, one input behind the other. */
static void pack_inputs(const dp_sim *s, int to, double *message) {
    const int64_t T = tokens_of(s, s->peers->rank);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (is_sent(s, i)) message += pack_columns(s, i, T, heads_of(s, to), message);
}

/* The tokens of rank `from`, for this rank's heads, to where they lie among all. */
static void unpack_inputs(const dp_sim *s, int from, double *message, dp_problem *heads) {
    const int64_t T = tokens_of(s, from);
    for (int i = 0; i < DP_NINPUTS; i++) {
        if (!is_sent(s, i)) continue;
        const int64_t width = dp_input_width(heads, i);
        move_tokens(s, from, width, *dp_input_at(heads, i), message, 1);
        message += T * width;
    }
}

/* Room for tokens, and of states and parameters, which every rank has, those of its heads. */
static void open_inputs(const dp_sim *s, dp_problem *heads) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int64_t rows = dp_input_fields[i].kind == DP_OF_SEQUENCES ? heads->Nseq : 1;
        if (!dp_input_of(s->given, i)) continue;
        double *x = *dp_input_at(heads, i) = dp_doubles(dp_input_count(heads, i));
        if (!is_sent(s, i)) pack_columns(s, i, rows, heads_of(s, s->peers->rank), x);
    }
}

static int64_t numbers_of_token(const dp_problem *heads) {
    int64_t n = 0;
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_of(heads, i) && dp_input_fields[i].kind == DP_OF_TOKENS)
            n += dp_input_width(heads, i);
    return n;
}

dp_problem dp_sim_receive_heads(dp_sim *s) {
    const dp_peers *peers = s->peers;
    const int me = peers->rank;
    dp_problem heads = *s->given;
    heads.T = heads.cu[heads.Nseq];
    heads.H = heads.HV = s->p->HV / peers->N;
    heads.own = (dp_owners){0};
    heads.cu = dp_cu_copy(&heads);
    open_inputs(s, &heads);
    const int64_t each = numbers_of_token(&heads);
    double *message = dp_doubles(heads.T * each);
    for (int k = 1; k < peers->N; k++) { /* not all to the same one at once */
        const int to = (me + k) % peers->N;
        pack_inputs(s, to, message);
        peers->send(peers->who, to, message, tokens_of(s, me) * each);
    }
    for (int from = 0; from < peers->N; from++) {
        if (from == me)
            pack_inputs(s, me, message);
        else
            peers->receive(peers->who, from, message, tokens_of(s, from) * each,
                           "its tokens of these heads");
        unpack_inputs(s, from, message, &heads);
    }
    free(message);
    return heads;
}

/* ---- what heads make ------------------------------------------------------------------------- */

/* One tensor of a simulation: `width` numbers a row, of its tokens or of `rows` others. */
typedef struct {
    double *x;
    int64_t rows, width;
    int of_query; /* value heads of a query head are added */
} made;
enum { OF_TOKENS = -1, MOST_MADE = DP_NRESULTS };

/* All results. */
static int list_results(const dp_sim *s, int backward, made list[MOST_MADE]) {
    int n = 0;
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_tensor_field *f = &dp_result_fields[i];
        int64_t shape[DP_MAX_AXES], width = f->kind == DP_OF_HEADS ? s->p->HV : 1;
        double *x = *dp_result_at((dp_result *)&s->out, i);
        for (int axis = dp_result_axes(s->p, i, shape) - 1; axis > 0; axis--)
            width *= shape[axis];
        if (x && (backward || !f->backward))
            list[n++] = (made){x,
                               f->kind == DP_OF_TOKENS      ? OF_TOKENS
                               : f->kind == DP_OF_SEQUENCES ? s->p->Nseq
                                                            : 1,
                               width, 0};
    }
    return n;
}

/* All of them, in one order: results where every value head has a query head. Elsewhere gradients
 * stand after o and final_state. They are of activated inputs, from which their owner continues,
 * and sums over tokens. */
static int list_made(const dp_sim *s, int backward, made list[MOST_MADE]) {
    if (dp_by_rows(s->p)) return list_results(s, backward, list);
    const dp_problem *p = s->p;
    const dp_result *out = &s->out;
    const int R = dp_rows(p), HV = p->HV;
    const int64_t state = (int64_t)HV * p->K * p->V;
    const made all[] = {{out->o, OF_TOKENS, (int64_t)HV * p->V, 0},
                        {out->final_state, p->Nseq, state, 0},
                        {s->dq, OF_TOKENS, (int64_t)p->H * p->K, 1},
                        {s->dk, OF_TOKENS, (int64_t)p->H * R * p->K, 1},
                        {s->dg, OF_TOKENS, (int64_t)HV * dp_Kg(p), 0},
                        {s->dbeta, OF_TOKENS, (int64_t)HV * R, 0},
                        {s->values ? s->derasing : out->dv, OF_TOKENS,
                         (int64_t)HV * R * (s->values ? p->K : p->V), 0},
                        {s->dvalues, OF_TOKENS, s->values ? (int64_t)HV * R * p->V : 0, 0},
                        {out->ds0, p->Nseq, state, 0},
                        {out->dA_log, 1, p->A_log ? HV : 0, 0},
                        {out->ddt_bias, 1, p->dt_bias ? (int64_t)HV * dp_Kg(p) : 0, 0}};
    int n = 0;
    for (int i = 0; i < (backward ? (int)(sizeof all / sizeof *all) : 2); i++)
        if (all[i].width) list[n++] = all[i];
    return n;
}

static int64_t rows_of(const made *m, int64_t T) { return m->rows == OF_TOKENS ? T : m->rows; }

/* Numbers that a rank's heads make for a rank of T tokens. */
static int64_t numbers_made(const dp_sim *heads, int backward, int64_t T) {
    made list[MOST_MADE];
    int64_t n = 0;
    for (int i = list_made(heads, backward, list) - 1; i >= 0; i--)
        n += rows_of(&list[i], T) * list[i].width;
    return n;
}

static void pack_made(const dp_sim *s, const dp_sim *heads, int backward, int to, double *message) {
    const int64_t T = tokens_of(s, to);
    made list[MOST_MADE];
    const int n = list_made(heads, backward, list);
    for (int i = 0; i < n; i++) {
        const made *m = &list[i];
        if (m->rows == OF_TOKENS)
            move_tokens(s, to, m->width, m->x, message, 0);
        else
            memcpy(message, m->x, sizeof *message * (size_t)(m->rows * m->width));
        message += rows_of(m, T) * m->width;
    }
}

/* Gradients [T][n][each] of value heads to those of their query heads, [T][H][each]. */
static void add_heads(const dp_sim *s, const made *to, heads_of_rank of, int64_t T,
                      const double *from) {
    const int64_t each = to->width / s->p->H;
    const dp_base b = s->at[DP_STAGE_INTRA_BWD];
    for (int64_t i = 0; i < T * of.n * each; i++) {
        const int64_t t = i / (of.n * each), hv = of.first + i / each % of.n;
        double *y = to->x + t * to->width + hv / dp_G(s->p) * each + i % each;
        *y = dp_round_arith(b, *y + from[i]);
    }
}

/* Results of the heads of rank `from` for this rank's tokens. */
static void unpack_made(dp_sim *s, int backward, int from, const double *message) {
    const heads_of_rank of = heads_of(s, from);
    const int64_t T = tokens_of(s, s->peers->rank);
    made list[MOST_MADE];
    const int n = list_made(s, backward, list);
    for (int i = 0; i < n; i++) {
        const made *m = &list[i];
        const int64_t rows = rows_of(m, T);
        const int64_t width = m->width / (m->of_query ? s->p->H : s->p->HV) * of.n;
        if (m->of_query)
            add_heads(s, m, of, T, message);
        else
            copy_columns(m->x + from * width, m->width, message, width, rows, width);
        message += rows * width;
    }
}

void dp_sim_return_heads(dp_sim *s, const dp_sim *heads, int backward) {
    const dp_peers *peers = s->peers;
    const int me = peers->rank;
    if (backward) dp_sim_fresh(s, DP_STAGE_WY_BWD);
    if (backward) dp_sim_fresh(s, DP_STAGE_INTRA_BWD);
    for (int k = 1; k < peers->N; k++) {
        const int to = (me + k) % peers->N;
        const int64_t n = numbers_made(heads, backward, tokens_of(s, to));
        double *message = dp_doubles(n);
        pack_made(s, heads, backward, to, message);
        peers->send(peers->who, to, message, n);
        free(message);
    }
    const int64_t n = numbers_made(heads, backward, tokens_of(s, me));
    double *message = dp_doubles(n);
    for (int from = 0; from < peers->N; from++) {
        if (from == me)
            pack_made(s, heads, backward, me, message);
        else
            peers->receive(peers->who, from, message, n, "what its heads made");
        unpack_made(s, backward, from, message);
    }
    free(message);
    if (backward && !dp_by_rows(s->p)) dp_sim_activations_bwd(s, NULL);
}
