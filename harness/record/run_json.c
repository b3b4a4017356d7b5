/* All that a run holds, one row each, and runs as JSON by these rows (run_json.h). */
#include "run_json.h"
#include "ref/chunk/chunk_gated.h"
#include "run_id.h"
#include "schema.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Rows of the struct S. */
#define IN(M) .offset = offsetof(S, M), .size = sizeof(((S *)0)->M)
#define REQUIRED .need = DP_FIELD_REQUIRED
#define FIELDS(NAME, ...) static const dp_record_field NAME[] = {__VA_ARGS__}
#define ROW(M, KIND) #M, .kind = DP_KIND_##KIND, REQUIRED, IN(M)
#define REAL(M) \
    { ROW(M, HEX) }
#define INTEGER(M, MOST) \
    { ROW(M, INTEGER), .least = -1, .most = MOST }
#define COUNT(M, MOST) \
    { ROW(M, COUNT), .most = MOST }
#define FLAG(M) COUNT(M, 1)
#define ONE_OF(M, N) COUNT(M, (N)-1) /* an enum, an index below N */
#define TEXT(M) \
    { ROW(M, TEXT), .text = sizeof(((S *)0)->M) }
#define OWN_TEXT(M) \
    { ROW(M, TEXT), .own = 1 }
#define WORD_OR_NONE(M) \
    { #M, .kind = DP_KIND_TEXT, IN(M), .none = 1 }
#define ONE_WORD(M, WORDS, N) \
    { #M, .kind = DP_KIND_TEXT, IN(M), .none = 1, .words = WORDS, .nwords = N }
#define OBJECT(M, OF) \
    { ROW(M, OBJECT), .of = &OF }
#define NUMBERS(M, COUNT_OF) \
    { ROW(M, HEXES), .count = COUNT_OF }
#define OBJECTS(M, COUNT_OF, OF) \
    { ROW(M, OBJECTS), .count = COUNT_OF, .of = &OF }
#define FIXED(M, KIND, N, ...) \
    { ROW(M, KIND), .fixed = N, __VA_ARGS__ }
#define SCHEMA(NAME, FIELDS) \
    { .name = NAME, .field = FIELDS, .n = sizeof(FIELDS) / sizeof *(FIELDS), .size = sizeof(S) }

#define MOST_PLACES (INT64_C(1) << 40) /* tokens, rows; as of a file of tensors */
#define MOST_HEADS (1 << 20)
#define MOST_TENSORS 1024
#define MOST_SMALL (1 << 30)

static const char *const TIERS[] = {"", "exact", "bound", "expected", "sum", "bits"};
static const char *const TRUTHS[] = {"mpfr", "double-double", "fp64"};
static const char *const ROLLBACKS[] = {"accepted tokens run again", "states of every token"};

/* ---- tensors --------------------------------------------------------------------------------- */

#define S dp_place
FIELDS(PLACE, INTEGER(rank, DP_MAX_RANKS), INTEGER(head, MOST_HEADS), INTEGER(sequence, MOST_SMALL),
       INTEGER(chunk, MOST_SMALL), INTEGER(token, MOST_PLACES));
static const dp_object_schema PLACE_OF = SCHEMA("place", PLACE);

#undef S
#define S dp_row
FIELDS(LINE, OBJECT(at, PLACE_OF), INTEGER(index, MOST_SMALL), REAL(got), REAL(want), REAL(err),
       REAL(bound), REAL(size));
static const dp_object_schema LINE_OF = SCHEMA("row", LINE);

#undef S
#define S dp_level_result
FIELDS(LEVEL, REAL(ratio), REAL(median), REAL(limit), REAL(freedom), REAL(draw), REAL(seen),
       INTEGER(units, MOST_PLACES), INTEGER(at, MOST_PLACES));
static const dp_object_schema LEVEL_OF = SCHEMA("level", LEVEL);

#undef S
#define S dp_share
FIELDS(SHARE, REAL(square), REAL(top), REAL(bottom));
static const dp_object_schema SHARE_OF = SCHEMA("share", SHARE);

#undef S
#define S dp_levels_result
FIELDS(LEVELS, REAL(expected), REAL(excess), REAL(seen), ONE_OF(level, DP_NLEVELS),
       INTEGER(row, MOST_PLACES), FIXED(at, OBJECTS, DP_NLEVELS, .of = &LEVEL_OF),
       OBJECT(share, SHARE_OF));
static const dp_object_schema LEVELS_OF = SCHEMA("levels", LEVELS);

static int64_t ranks_of(const void *x) { return ((const dp_judgement *)x)->N; }
static int64_t heads_of(const void *x) {
    const dp_judgement *j = x;
    return (int64_t)j->N * j->heads;
}
static int64_t windows_of(const void *x) { return ((const dp_judgement *)x)->nwindow; }

#undef S
#define S dp_judgement
FIELDS(TENSOR, TEXT(name), COUNT(N, DP_MAX_RANKS), COUNT(heads, MOST_HEADS), REAL(rel_fro),
       REAL(bound), REAL(ratio), NUMBERS(per_rank, ranks_of), NUMBERS(per_head, heads_of),
       NUMBERS(per_rank_ratio, ranks_of), REAL(scale), OBJECT(worst, LINE_OF), REAL(worst_rel),
       OBJECT(over, LINE_OF), INTEGER(nover, MOST_PLACES), OBJECT(first, LINE_OF),
       OBJECT(last, LINE_OF), INTEGER(nblank, MOST_PLACES), OBJECT(failed, LINE_OF),
       COUNT(nwindow, MOST_SMALL), NUMBERS(window, windows_of), OBJECT(expected, LEVELS_OF),
       OBJECT(before, LEVELS_OF), ONE_WORD(tier, TIERS, 6), REAL(times),
       ONE_OF(verdict, DP_NVERDICTS), ONE_OF(flaw, DP_FLAW_NOT_FINITE + 1), REAL(seen),
       REAL(seen_head), INTEGER(blind_head, MOST_HEADS), FLAG(allowed), TEXT(why), TEXT(source));
static const dp_object_schema TENSOR_OF = SCHEMA("tensor", TENSOR);

/* ---- the rest of a run ----------------------------------------------------------------------- */

#undef S
#define S dp_sending
FIELDS(SENDING, ONE_OF(exchange, DP_NEXCHANGES), ONE_OF(payload, DP_NPAYLOADS), FLAG(begins));
static const dp_object_schema SENDING_OF = SCHEMA("sending", SENDING);

#undef S
#define S dp_design
FIELDS(DESIGN, ONE_OF(base, DP_NBASES), COUNT(chunk, DP_CHUNK_MOST),
       COUNT(chunk_backward, DP_CHUNK_MOST), ONE_OF(factors, DP_FP16 + 1),
       ONE_OF(state, DP_NSTORED), ONE_OF(dstate, DP_FP16 + 1),
       FIXED(out, INTEGERS, DP_NRESULTS, .most = DP_FP16), ONE_OF(decays, DP_FP16 + 1),
       ONE_OF(final_state, DP_NSTORED), COUNT(gated, DP_NSCORES - 1), FLAG(scored), FLAG(late),
       FLAG(summed), ONE_OF(anchor, DP_ANCHORS), COUNT(product, DP_INVERSE_MERGED), FLAG(read_kept),
       FLAG(fast_decays), FLAG(stored_inputs), FLAG(fold_beta), OBJECT(sending, SENDING_OF),
       COUNT(drop, DP_DROP_BITS_MOST), COUNT(chunks, 2 * DP_CHUNK_MOST), FLAG(undeclared));
static const dp_object_schema DESIGN_OF = SCHEMA("design", DESIGN);

#undef S
#define S dp_exchange_size
FIELDS(SIZED, COUNT(N, DP_MAX_RANKS), COUNT(HV, MOST_HEADS), COUNT(K, MOST_SMALL),
       COUNT(V, MOST_SMALL), COUNT(L, MOST_PLACES), ONE_OF(payload, DP_NPAYLOADS),
       COUNT(rank, MOST_SMALL));
static const dp_object_schema SIZED_OF = SCHEMA("sized", SIZED);

#undef S
#define S dp_truth_audit
FIELDS(AUDIT, COUNT(columns, MOST_SMALL), INTEGER(tokens, MOST_PLACES), {ROW(seed, INTEGER)},
       REAL(worst));
static const dp_object_schema AUDIT_OF = SCHEMA("audit", AUDIT);

#undef S
#define S dp_chain_point
FIELDS(POINT, COUNT(rank, DP_MAX_RANKS), COUNT(chunks, MOST_SMALL), REAL(rel), REAL(effect),
       REAL(bound), REAL(abs), REAL(norm));
static const dp_object_schema POINT_OF = SCHEMA("point", POINT);

#undef S
#define S dp_bits
FIELDS(BITS, COUNT(npoint, DP_BITS_POINTS),
       FIXED(chunks, INTEGERS, DP_BITS_POINTS, .most = MOST_SMALL),
       FIXED(at, HEXES, DP_BITS_POINTS *DP_NBITMODELS), FIXED(bits, HEXES, DP_NBITMODELS),
       REAL(truncated), COUNT(width, 1024), REAL(slope), FLAG(biased), ONE_OF(model, DP_NBITMODELS),
       REAL(effective), INTEGER(like, DP_FP16), FLAG(wrong), TEXT(says));
static const dp_object_schema BITS_OF = SCHEMA("bits", BITS);

#undef S
#define S dp_condition
FIELDS(CONDITION, REAL(inverse), REAL(entry), REAL(condition), INTEGER(rank, DP_MAX_RANKS),
       INTEGER(head, MOST_HEADS), INTEGER(token, MOST_PLACES));
static const dp_object_schema CONDITION_OF = SCHEMA("condition", CONDITION);

static int64_t hits_of(const void *x) {
    const dp_run *r = x;
    return r->nhit;
}
static int64_t tensors_of(const void *x) { return ((const dp_run *)x)->ntensor; }
static int64_t points_of(const void *x) { return ((const dp_run *)x)->npoint; }

#undef S
#define S dp_run
FIELDS(RUN, OWN_TEXT(id), OWN_TEXT(case_name), WORD_OR_NONE(op), ONE_OF(backend, DP_NBACKENDS),
       WORD_OR_NONE(path), ONE_WORD(outcome, dp_subject_outcomes, DP_SUBJECT_NOUTCOMES),
       ONE_OF(variant, DP_NCUDA_VARIANTS), COUNT(segments, MOST_SMALL), COUNT(saved, INT64_MAX),
       COUNT(kept, INT64_MAX), COUNT(ranks, DP_MAX_RANKS), OBJECT(sized, SIZED_OF),
       ONE_OF(own, DP_NOWNS), COUNT(parts, MOST_SMALL), ONE_OF(base, DP_NBASES), FLAG(has_chain),
       FLAG(has_base), FLAG(has_merge), ONE_OF(chain, DP_FP16 + 1), ONE_OF(merge, DP_NEXCHANGES),
       ONE_OF(payload, DP_NPAYLOADS), ONE_OF(fault, DP_NFAULTS),
       COUNT(nhit, (int64_t)DP_MAX_RANKS *MOST_HEADS),
       {"hit", .kind = DP_KIND_FLAGS, IN(hit), .count = hits_of}, OBJECT(design, DESIGN_OF),
       FLAG(undeclared), OBJECT(explained, DESIGN_OF), FLAG(other_design), FLAG(set), FLAG(settled),
       ONE_WORD(rollback, ROLLBACKS, 2), COUNT(windows, MOST_SMALL),
       COUNT(windows_judged, MOST_SMALL), FLAG(exact), ONE_WORD(truth_kind, TRUTHS, 3),
       COUNT(truth_bits, MOST_SMALL), FLAG(truth_cached), WORD_OR_NONE(truth_device),
       OBJECT(truth_audit, AUDIT_OF), REAL(truth_radius), COUNT(ntensor, MOST_TENSORS),
       OBJECTS(tensor, tensors_of, TENSOR_OF), COUNT(npoint, MOST_SMALL),
       OBJECTS(point, points_of, POINT_OF), REAL(slope), OBJECT(bits, BITS_OF),
       OBJECT(cond, CONDITION_OF), WORD_OR_NONE(may_unjudged), WORD_OR_NONE(let_unjudged),
       ONE_OF(verdict, DP_NVERDICTS), INTEGER(speaks, MOST_TENSORS - 1), ONE_WORD(tier, TIERS, 6),
       TEXT(why), REAL(seconds));
const dp_object_schema dp_run_members = SCHEMA("run", RUN);

/* ---- what holds of every run ----------------------------------------------------------------- */

static const char *bad_tensor(const dp_judgement *t) {
    const dp_place *const at[] = {&t->worst.at, &t->over.at, &t->first.at, &t->last.at,
                                  &t->failed.at};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        if (at[i]->rank >= (t->N ? t->N : 1) || at[i]->head >= (t->heads ? t->heads : 1))
            return "a row of a rank or a head that it does not have";
    if (t->verdict == DP_PASS && t->expected.excess > 1)
        return "verdict: pass, with an error beyond its limit";
    return NULL;
}

/* NULL: nothing is wrong. */
static const char *bad_run(const dp_run *r, const char *case_name) {
    int n[DP_NVERDICTS] = {0};
    for (int i = 0; i < r->ntensor; i++)
        n[r->tensor[i].verdict]++;
    char *id = dp_run_id(r);
    const int same = !strcmp(id, r->id);
    free(id);
    if (case_name && strcmp(case_name, r->case_name)) return "case_name: of another case";
    if (!same) return "id: says another run than the other fields";
    if (r->speaks >= r->ntensor) return "speaks: there is no such tensor";
    if (!r->truth_kind) return "truth_kind: missing";
    if (n[DP_FAIL] && r->verdict != DP_FAIL) return "verdict: a tensor failed";
    if (r->verdict == DP_PASS && r->ntensor && !n[DP_PASS]) return "verdict: no tensor passed";
    return NULL;
}

static dp_status check_run(const dp_run *r, const char *path, const char *where,
                           const char *case_name, dp_err *e) {
    const char *why = bad_run(r, case_name);
    if (why) return dp_fail(e, DP_EINPUT, "%s: %s%s", path, where, why);
    for (int i = 0; i < r->ntensor; i++)
        if ((why = bad_tensor(&r->tensor[i])))
            return dp_fail(e, DP_EINPUT, "%s: %stensor[%d].%s", path, where, i, why);
    return DP_OK;
}

/* ---- runs ------------------------------------------------------------------------------------ */

json_t *dp_runs_json(const dp_runs *r) {
    json_t *list = json_array();
    for (int i = 0; i < r->n; i++)
        json_array_append_new(list, dp_schema_write(&dp_run_members, &r->run[i]));
    return list;
}

dp_status dp_runs_from_json(const json_t *list, const char *path, const char *case_name, dp_runs *r,
                            dp_err *e) {
    DP_FREED(dp_runs_free) dp_runs got = {0};
    dp_status st = DP_OK;
    if (!json_is_array(list)) return dp_fail(e, DP_EINPUT, "%s: runs: must be a list", path);
    got.run = dp_calloc(json_array_size(list) + 1, sizeof *got.run);
    got.cap = (int)json_array_size(list) + 1;
    for (size_t i = 0; i < json_array_size(list) && !st; i++) {
        char where[40];
        dp_run *x = &got.run[got.n++];
        snprintf(where, sizeof where, "runs[%zu].", i);
        st = dp_schema_read(&dp_run_members, json_array_get(list, i), x, path, where, e);
        if (!x->tensor) x->ntensor = 0; /* for dp_runs_free, where reading ended before it */
        if (!st) st = check_run(x, path, where, case_name, e);
    }
    if (!st) dp_runs_move(r, &got);
    return st;
}

char *dp_runs_pack(const dp_runs *r, size_t *bytes) {
    json_auto_t *list = dp_runs_json(r);
    char *text = json_dumps(list, JSON_COMPACT);
    if (!text) abort();
    *bytes = strlen(text);
    return text;
}

dp_status dp_runs_unpack(const char *from, size_t bytes, const char *path, const char *case_name,
                         dp_runs *r, dp_err *e) {
    json_error_t je;
    json_auto_t *list = json_loadb(from, bytes, JSON_REJECT_DUPLICATES, &je);
    if (!list) return dp_fail(e, DP_EINPUT, "%s:%d: not JSON: %s", path, je.line, je.text);
    return dp_runs_from_json(list, path, case_name, r, e);
}
