/* A pool of slots, call by call (slots.h). */
#include "slots.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NONE = -1 };

struct dp_slots {
    int Nseq, HV;
    int64_t slots, width, state; /* entries of a head's state, of all heads of a slot */
    int64_t *own;                /* [Nseq] */
    int64_t *planned;            /* [Nseq]: who is to write what in the present call */
    int64_t *read, *write;       /* [Nseq] in the present run of it */
    int64_t *right;              /* [Nseq]: what write should be */
    int64_t drafts;              /* slots of each sequence; 0: as planned above */
    int64_t *draft, *listed;     /* [Nseq][drafts]: those it owns, those it is told in the call */
    int64_t *accepted, *passed;  /* [Nseq]: kept, and told in the call */
    int64_t *brought, *tokens;   /* [Nseq] to the call; of a window, 0: it is none */
    const int64_t *parent;
    int64_t ring;         /* tokens of a ring; 0: none */
    int64_t *rings;       /* [Nseq] slots */
    int64_t *held, *told; /* [Nseq] tokens in a ring after the call, and before it */
    int64_t prefix;
    int calls;
    double *pool, *before;
    unsigned char *taken; /* [slots] */
};

void dp_pool_seen_free(dp_pool_seen *s) {
    free(s->was);
    free(s->is);
    *s = (dp_pool_seen){0};
}

static double *slot(const dp_slots *s, int64_t i) { return s->pool + i * s->state; }
static size_t bytes(const dp_slots *s) { return sizeof(double) * (size_t)s->state; }

static int64_t *indices(int n) {
    int64_t *x = dp_calloc((size_t)n, sizeof *x);
    for (int i = 0; i < n; i++)
        x[i] = NONE;
    return x;
}

/* Token j of sequence i lies as many slots before those of token 0 as there are sequences. */
static void own_drafts(dp_slots *s) {
    for (int i = 0; i < s->Nseq; i++)
        for (int64_t j = 0; j < s->drafts; j++)
            s->draft[i * s->drafts + j] = s->slots - 1 - i - j * s->Nseq;
    for (int i = 0; i < s->Nseq; i++)
        s->accepted[i] = 1;
}

dp_slots *dp_slots_new(const dp_problem *p, const dp_session *session, int64_t drafts, int rings) {
    if (!session->slots) return NULL;
    dp_slots *s = dp_calloc(1, sizeof *s);
    s->Nseq = p->Nseq;
    s->HV = p->HV;
    s->ring = rings ? session->ring : 0;
    s->slots = session->slots + (s->ring ? s->Nseq : 0);
    s->width = (int64_t)p->K * p->V;
    s->state = s->HV * s->width;
    s->own = indices(s->Nseq);
    s->planned = indices(s->Nseq);
    s->read = indices(s->Nseq);
    s->write = indices(s->Nseq);
    s->right = indices(s->Nseq);
    s->prefix = NONE;
    s->drafts = drafts;
    s->draft = indices(s->Nseq * (int)(drafts + 1));
    s->listed = indices(s->Nseq * (int)(drafts + 1));
    s->accepted = indices(s->Nseq);
    s->passed = indices(s->Nseq);
    s->tokens = dp_calloc((size_t)s->Nseq, sizeof *s->tokens);
    s->brought = dp_calloc((size_t)s->Nseq, sizeof *s->brought);
    own_drafts(s);
    s->rings = indices(s->Nseq);
    s->held = dp_calloc((size_t)s->Nseq, sizeof *s->held);
    s->told = dp_calloc((size_t)s->Nseq, sizeof *s->told);
    s->taken = dp_calloc((size_t)s->slots, 1);
    s->pool = dp_doubles(s->slots * s->state);
    s->before = dp_doubles(s->slots * s->state);
    for (int i = 0; i < (session->prefix ? 1 : s->Nseq); i++)
        s->own[i] = session->slots - 1 - i;
    return s;
}

void dp_slots_free(dp_slots *s) {
    if (!s) return;
    free(s->own);
    free(s->planned);
    free(s->read);
    free(s->write);
    free(s->right);
    free(s->draft);
    free(s->listed);
    free(s->accepted);
    free(s->passed);
    free(s->tokens);
    free(s->brought);
    free(s->rings);
    free(s->held);
    free(s->told);
    free(s->taken);
    free(s->pool);
    free(s->before);
    free(s);
}

/* ---- who reads and writes what --------------------------------------------------------------- */

/* The next slot behind `from` that nobody owns or is to write; `from` where there is none. */
static int64_t next_free(const dp_slots *s, int64_t from) {
    for (int64_t k = 1; k < s->slots; k++)
        if (!s->taken[(from + k) % s->slots]) return (from + k) % s->slots;
    return from;
}

static int64_t ring_of(const dp_slots *s, int i) { return s->slots - s->Nseq + i; }

static void mark_owned(const dp_slots *s) {
    memset(s->taken, 0, (size_t)s->slots);
    for (int i = 0; i < s->Nseq && s->ring; i++)
        s->taken[ring_of(s, i)] = s->held[i] > 0;
    if (s->prefix != NONE) s->taken[s->prefix] = 1;
    for (int i = 0; i < s->Nseq; i++)
        if (s->own[i] != NONE) s->taken[s->own[i]] = 1;
}

/* Every format holds it. */
static void empty_unowned(const dp_slots *s) {
    for (int64_t i = 0; i < s->slots; i++)
        for (int64_t z = 0; z < s->state && !s->taken[i]; z++)
            slot(s, i)[z] = NAN;
}

/* Plans the slots that each sequence is told; without a window its state goes to the first. */
static void plan_drafts(dp_slots *s, const unsigned char *idle) {
    for (int i = 0; i < s->Nseq; i++) {
        s->planned[i] = idle[i] ? NONE : s->draft[i * s->drafts];
        s->passed[i] = idle[i] ? 0 : s->accepted[i];
        for (int64_t j = 0; j < s->drafts; j++)
            s->listed[i * s->drafts + j] = idle[i] ? NONE : s->draft[i * s->drafts + j];
        if (!idle[i]) s->accepted[i] = 1;
    }
}

static void as_planned(dp_slots *s) {
    for (int i = 0; i < s->Nseq; i++) {
        s->read[i] = s->planned[i] == NONE ? NONE : s->own[i];
        s->write[i] = s->right[i] = s->planned[i];
    }
}

void dp_slots_plan(dp_slots *s, const double *S, const unsigned char *idle, int window) {
    for (int i = 0; i < s->Nseq; i++)
        if (s->own[i] != NONE) memcpy(slot(s, s->own[i]), S + i * s->state, bytes(s));
    mark_owned(s);
    empty_unowned(s);
    if (s->drafts) plan_drafts(s, idle);
    for (int i = 0; i < s->Nseq && s->ring; i++)
        s->taken[ring_of(s, i)] = 1; /* empty or not, nobody's state goes there */
    for (int i = 0; i < s->Nseq && !s->drafts; i++) {
        const int shared = s->prefix != NONE && s->own[i] == s->prefix;
        const int moves = shared || window || (s->calls + i) % 2;
        s->planned[i] = idle[i] ? NONE : moves ? next_free(s, s->own[i]) : s->own[i];
        if (!idle[i]) s->taken[s->planned[i]] = 1;
    }
    s->calls++;
    as_planned(s);
}

void dp_slots_draft(dp_slots *s, const int64_t *tokens, const unsigned char *window,
                    const int64_t *parent) {
    s->parent = parent;
    for (int i = 0; i < s->Nseq && s->drafts; i++) {
        s->brought[i] = tokens[i];
        s->tokens[i] = window[i] && s->planned[i] != NONE ? tokens[i] : 0;
        if (s->tokens[i])
            s->write[i] = s->right[i] = s->planned[i] = s->draft[i * s->drafts + s->tokens[i] - 1];
    }
}

void dp_slots_replay(dp_slots *s, const int64_t *tokens, const unsigned char *last) {
    for (int i = 0; i < s->Nseq; i++) {
        const int padding = s->planned[i] == NONE;
        const int64_t all = s->held[i] + tokens[i];
        s->rings[i] = padding ? NONE : ring_of(s, i);
        s->told[i] = padding ? 0 : s->held[i];
        if (padding) continue;
        s->held[i] = last[i] || all > s->ring ? 0 : all;
        if (!s->held[i]) continue;
        s->planned[i] = s->own[i]; /* where it stays */
        s->write[i] = s->right[i] = NONE;
    }
}

double *dp_slots_drafted(const dp_slots *s) {
    int64_t all = 0, windows = 0, at = 0;
    for (int i = 0; i < s->Nseq; i++) {
        all += s->brought[i];
        windows += s->tokens[i];
    }
    double *states = windows ? dp_doubles(all * s->state) : NULL;
    for (int i = 0; i < s->Nseq && windows; at += s->brought[i++])
        for (int64_t j = 0; j < s->tokens[i]; j++)
            memcpy(states + (at + j) * s->state, slot(s, s->draft[i * s->drafts + j]), bytes(s));
    return states;
}

void dp_slots_accept(dp_slots *s, int i, int64_t place) {
    s->planned[i] = s->draft[i * s->drafts + place];
    s->accepted[i] = place + 1;
}

int dp_slots_spoil(dp_slots *s, dp_fault fault) {
    int acted = 0;
    for (int i = 0; i < s->Nseq; i++) {
        const int padding = s->planned[i] == NONE;
        const int64_t read = s->read[i], write = s->write[i];
        if (padding && fault == DP_FAULT_PADDING_WRITES)
            s->read[i] = s->write[i] = s->own[i];
        else if (padding && fault == DP_FAULT_PADDING_LAST_SLOT)
            s->read[i] = s->write[i] = s->slots - 1;
        else if (!padding && fault == DP_FAULT_SLOT_NEIGHBOUR)
            s->read[i] = (read + 1) % s->slots;
        else if (!padding && fault == DP_FAULT_SLOT_IN_PLACE)
            s->write[i] = read;
        acted |= s->read[i] != read || s->write[i] != write;
    }
    return acted;
}

void dp_slots_only(dp_slots *s, const int64_t *tokens) {
    for (int i = 0; i < s->Nseq; i++)
        if (!tokens[i]) s->read[i] = s->write[i] = s->right[i] = NONE;
}

void dp_slots_again(dp_slots *s) { as_planned(s); }

void dp_slots_share(dp_slots *s) {
    s->prefix = s->own[0];
    for (int i = 0; i < s->Nseq; i++)
        s->own[i] = s->prefix;
}

/* ---- one run of a call ----------------------------------------------------------------------- */

dp_state_pool dp_slots_begin(dp_slots *s) {
    memcpy(s->before, s->pool, bytes(s) * (size_t)s->slots);
    dp_state_pool p = {.slots = s->slots,
                       .read = s->read,
                       .write = s->write,
                       .state = s->pool,
                       .drafts = s->drafts,
                       .parent = s->parent};
    if (s->ring) p.ring = s->rings;
    if (s->ring) p.held = s->told;
    if (s->drafts) p.draft = s->listed;
    if (s->drafts) p.accepted = s->passed;
    return p;
}

/* [Nseq] states from those slots; 0 where there is none. */
static void gather(const dp_slots *s, const int64_t *from, double *states) {
    for (int i = 0; i < s->Nseq; i++)
        if (from[i] == NONE)
            memset(states + i * s->state, 0, bytes(s));
        else
            memcpy(states + i * s->state, slot(s, from[i]), bytes(s));
}

void dp_slots_read(const dp_slots *s, double *s0) { gather(s, s->read, s0); }

double *dp_slots_written(const dp_slots *s) {
    double *states = dp_doubles(s->Nseq * s->state);
    gather(s, s->write, states);
    return states;
}

void dp_slots_write(dp_slots *s, const double *final_state) {
    for (int i = 0; i < s->Nseq; i++)
        if (s->write[i] != NONE) memcpy(slot(s, s->write[i]), final_state + i * s->state, bytes(s));
}

static int is_written(const dp_slots *s, int64_t slot) {
    int any = 0;
    for (int i = 0; i < s->Nseq; i++) {
        any |= s->right[i] == slot || (s->ring && s->rings[i] == slot);
        for (int64_t j = 0; j < s->tokens[i]; j++)
            any |= s->draft[i * s->drafts + j] == slot;
    }
    return any;
}

static int owner_of(const dp_slots *s, int64_t slot) {
    if (slot == s->prefix) return DP_SLOT_OF_PREFIX;
    for (int i = 0; i < s->Nseq; i++)
        if (s->own[i] == slot) return i;
    return DP_SLOT_FREE;
}

static void begin_seen(const dp_slots *s, dp_pool_seen *seen) {
    *seen = (dp_pool_seen){.slots = s->slots, .width = s->width, .slot = NONE};
    seen->was = dp_copy(s->before, s->slots * s->state);
    seen->is = dp_copy(s->before, s->slots * s->state);
}

void dp_slots_look(const dp_slots *s, int64_t call, dp_pool_seen *seen) {
    if (!seen) return;
    if (!seen->was) begin_seen(s, seen);
    for (int64_t i = 0; i < s->slots; i++) {
        const double *was = s->before + i * s->state;
        double *known = seen->was + i * s->state;
        if (is_written(s, i) || !memcmp(was, slot(s, i), bytes(s))) continue;
        if (memcmp(known, seen->is + i * s->state, bytes(s))) continue; /* it is known already */
        memcpy(known, was, bytes(s));
        memcpy(seen->is + i * s->state, slot(s, i), bytes(s));
        if (seen->overwritten++) continue;
        seen->slot = i;
        seen->call = call;
        seen->owner = owner_of(s, i);
    }
}

/* ---- between and behind its runs ------------------------------------------------------------- */

void dp_slots_restore(dp_slots *s, const double *S) {
    for (int i = 0; i < s->Nseq; i++)
        if (s->planned[i] != NONE) memcpy(slot(s, s->own[i]), S + i * s->state, bytes(s));
}

void dp_slots_put(dp_slots *s, int i, const double *state) {
    if (s->planned[i] != NONE) memcpy(slot(s, s->planned[i]), state, bytes(s));
}

void dp_slots_take(dp_slots *s, double *S) {
    for (int i = 0; i < s->Nseq; i++) {
        if (s->planned[i] != NONE) s->own[i] = s->planned[i];
        if (s->own[i] != NONE) memcpy(S + i * s->state, slot(s, s->own[i]), bytes(s));
    }
}
