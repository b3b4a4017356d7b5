/* harness/subject/example_subject.c, which replays tokens from rings (key session_ring). A ring
 * holds rows of k, v, g and beta, one token behind the other. BAD=late: it replays one token less.
 */
#define deltaproof_subject_about no_about
#define deltaproof_subject_run good_run
#include "../../subject/example_subject.c"
#undef deltaproof_subject_about
#undef deltaproof_subject_run

static const deltaproof_subject_info RINGS = {.abi = DP_SUBJECT_ABI,
                                              .kind = DP_SUBJECT_WHOLE,
                                              .max_ranks = 1,
                                              .name = "rings",
                                              .base = "fp32",
                                              .chain = "fp32",
                                              .writes = "o final_state pool ring"};
const deltaproof_subject_info *deltaproof_subject_about(void) { return &RINGS; }

enum { Q, KEY, VALUE, GATE, BETA, INPUTS };

/* A sequence by itself: the tokens of its ring, then those of the call. */
typedef struct {
    int64_t width[INPUTS], row; /* row: of the ring */
    double *x[INPUTS], *o;
    int64_t old, n;
} sequence;

static void inputs_of(const problem *p, const double *of[INPUTS], int64_t width[INPUTS]) {
    const double *x[] = {p->q, p->k, p->v, p->g, p->beta};
    const int64_t n[] = {p->H * p->K, p->H * p->K, p->HV * p->V, p->HV * p->Kg, p->HV};
    memcpy(of, x, sizeof x);
    memcpy(width, n, sizeof n);
}

static sequence gathered(const problem *p, int i, const double *ring) {
    const double *of[INPUTS];
    const char *bad = getenv("BAD");
    sequence s = {.n = p->cu[i + 1] - p->cu[i], .old = p->ring_tokens[i]};
    if (bad && !strcmp(bad, "late") && s.old) s.old--;
    inputs_of(p, of, s.width);
    const int64_t T = s.old + s.n;
    for (int j = 0; j < INPUTS; j++) {
        s.x[j] = calloc((size_t)(T * s.width[j] + 1), sizeof(double));
        for (int64_t t = 0; j != Q && t < s.old; t++)
            for (int64_t z = 0; z < s.width[j]; z++)
                s.x[j][t * s.width[j] + z] =
                    ring[z + s.row +
                         t * (s.width[KEY] + s.width[VALUE] + s.width[GATE] + s.width[BETA])];
        s.row += j == Q ? 0 : s.width[j];
        memcpy(s.x[j] + s.old * s.width[j], of[j] + p->cu[i] * s.width[j],
               sizeof(double) * (size_t)(s.n * s.width[j]));
    }
    s.o = calloc((size_t)(T * s.width[VALUE] + 1), sizeof(double));
    return s;
}

static void keep(const sequence *s, int64_t held, double *ring) {
    for (int64_t t = 0; t < s->n; t++) {
        double *row = ring + (held + t) * s->row;
        for (int j = KEY; j < INPUTS; row += s->width[j++])
            memcpy(row, s->x[j] + (s->old + t) * s->width[j], sizeof *row * (size_t)s->width[j]);
    }
}

static int one(const problem *p, int i, double *pool, double *o) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    double *ring = pool + p->ring_slot[i] * n, *state = calloc((size_t)n, sizeof *state);
    sequence s = gathered(p, i, ring);
    const int64_t cu[] = {0, s.old + s.n};
    problem alone = *p;
    alone.Nseq = 1;
    alone.nslot = 0;
    alone.T = alone.tokens = cu[1];
    alone.cu = cu;
    alone.q = s.x[Q];
    alone.k = s.x[KEY];
    alone.v = s.x[VALUE];
    alone.g = s.x[GATE];
    alone.beta = s.x[BETA];
    alone.initial_state = pool + p->read_slot[i] * n;
    const deltaproof_subject_tensor out[] = {{.name = "o", .data = s.o},
                                             {.name = "final_state", .data = state}};
    const deltaproof_subject_call c = {.count = 2, .tensor = out};
    const int rc = good_run(&alone, &c);
    memcpy(o + p->cu[i] * s.width[VALUE], s.o + s.old * s.width[VALUE],
           sizeof *o * (size_t)(s.n * s.width[VALUE]));
    if (p->write_slot[i] >= 0)
        memcpy(pool + p->write_slot[i] * n, state, sizeof *state * (size_t)n);
    else
        keep(&s, p->ring_tokens[i], ring);
    for (int j = 0; j < INPUTS; j++)
        free(s.x[j]);
    free(s.o);
    free(state);
    return rc;
}

int deltaproof_subject_run(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    double *pool = deltaproof_subject_find(c, "pool"), *o = deltaproof_subject_find(c, "o");
    int rc = DP_SUBJECT_OK;
    if (!deltaproof_subject_rings(p)) return good_run(p, c);
    for (int i = 0; i < p->Nseq && !rc; i++)
        if (p->ring_slot[i] >= 0) rc = one(p, i, pool, o);
    return rc;
}
