/* The fields of a record, one row each: what it is called, what it is, where it comes from
 * (record_schema.h). `deltaproof list --schema` prints them as JSON Schema. */
#include "record_schema.h"
#include "record.h"
#include "ref/files/output.h"
#include "ref/vocabulary/text.h"

#include <cblas.h>
#include <math.h>
#include <mpfr.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef DP_COMMIT
#define DP_COMMIT "unknown"
#endif

extern char *openblas_get_config(void);

#define SIZE(S, MEMBER) sizeof(((S *)0)->MEMBER)
#define MEMBER(S, M) .offset = offsetof(S, M), .size = SIZE(S, M)
#define ARRAY(S, M) .offset = offsetof(S, M), .text = SIZE(S, M)
#define WORDS(LIST, N) .kind = DP_KIND_WORD, .words = LIST, .nwords = N
#define GET(F) .get = F
#define WRITTEN .written = 1
#define NONE .none = 1
#define WHEN(F) .when = F
#define IF(S, M) .if_offset = offsetof(S, M), .if_size = SIZE(S, M)
#define COUNT_OF(LIST) ((int)(sizeof(LIST) / sizeof *(LIST)))
#define OBJECT(NAME, FIELDS) \
    { .name = NAME, .field = FIELDS, .n = COUNT_OF(FIELDS) }
#define OBJECT_OF(S, NAME, FIELDS) \
    { .name = NAME, .field = FIELDS, .n = COUNT_OF(FIELDS), .size = sizeof(S) }

#define TEXT .kind = DP_KIND_TEXT
#define NUMBER .kind = DP_KIND_NUMBER
#define HEX .kind = DP_KIND_HEX
#define INTEGER .kind = DP_KIND_INTEGER
#define COUNT .kind = DP_KIND_COUNT
#define BOOLEAN .kind = DP_KIND_BOOLEAN
#define NUMBERS .kind = DP_KIND_NUMBERS
#define RANKS .most = DP_RECORD_MAX_RANKS /* of them, or one of them */
#define OF(SCHEMA) .kind = DP_KIND_OBJECT, .of = &SCHEMA
#define LIST_OF(SCHEMA) .kind = DP_KIND_OBJECTS, .of = &SCHEMA

/* ---- the expected tier ----------------------------------------------------------------------- */

/* Numbers of a picture or a table, to so many digits. */
static json_t *numbers_of(const double *x, int n, int digits) {
    DP_OWN double *y = dp_calloc((size_t)n + 1, sizeof *y);
    for (int i = 0; i < n; i++)
        y[i] = dp_schema_rounded(x[i], digits);
    return dp_schema_numbers(y, n);
}

/* Within its limit ratio and limit say it all. */
static int over_limit(const void *x) {
    const dp_level_result *l = x;
    return !(l->ratio <= l->limit);
}
static const dp_record_field LEVEL[] = {
    {"ratio", NUMBER, WRITTEN, "error / expected error", MEMBER(dp_level_result, ratio), NONE},
    {"limit", NUMBER, WRITTEN, "of the ratio", MEMBER(dp_level_result, limit)},
    {"median", NUMBER, .what = "of the ratio over the level's units, where it is beyond its limit",
     MEMBER(dp_level_result, median), NONE, WHEN(over_limit)},
    {"units", COUNT, .what = "rows, windows, ranks ..", MEMBER(dp_level_result, units),
     WHEN(over_limit)},
    {"freedom", NUMBER, .what = "degrees of freedom", MEMBER(dp_level_result, freedom),
     WHEN(over_limit)},
    {"draw", NUMBER, .what = "largest ratio of a draw to the others", MEMBER(dp_level_result, draw),
     NONE, WHEN(over_limit)}};
static const dp_object_schema LEVEL_OBJECT = OBJECT("level", LEVEL);

/* How many times what is expected an error must be to fail: the whole tensor's, one window's, one
 * row's; infinite: at no size. Then the whole tensor's degrees of freedom. */
static json_t *power(const void *x) {
    const dp_level_result *at = ((const dp_levels_result *)x)->at, *all = &at[DP_LEVEL_TENSOR];
    double y[4] = {INFINITY, INFINITY, INFINITY, all->freedom};
    for (int i = 0; i < DP_LEVEL_FACTOR; i++)
        if (at[i].ratio > 0) y[0] = fmin(y[0], at[i].limit / at[i].ratio * all->ratio);
    if (at[DP_LEVEL_WINDOW].median > 0) y[1] = at[DP_LEVEL_WINDOW].limit;
    if (at[DP_LEVEL_ROW].median > 0) y[2] = at[DP_LEVEL_ROW].limit;
    return numbers_of(y, 4, 4);
}
static int has_power(const void *x) {
    return ((const dp_levels_result *)x)->at[DP_LEVEL_TENSOR].ratio > 0;
}

static const dp_record_field EXPECTED[] = {
    {"rel", NUMBER, WRITTEN, "what the design makes of these inputs, over |want|_F",
     MEMBER(dp_levels_result, expected)},
    {"excess", NUMBER, WRITTEN, "largest ratio / limit over the levels: above 1 fails",
     MEMBER(dp_levels_result, excess)},
    {"level", WORDS(dp_level_names, DP_NLEVELS), WRITTEN, "where", MEMBER(dp_levels_result, level)},
    {"power", NUMBERS,
     .what = "what an error must be times rel to fail: of the tensor, a window, a "
             "row; the tensor's degrees of freedom",
     GET(power), WHEN(has_power)}};

/* For an error within its limits, the level nearest to its own is enough. */
static const void *level_at(const void *x, int i) {
    const dp_levels_result *all = x;
    const dp_level_result *r = &all->at[i];
    if (all->excess <= 1 && i != (int)all->level) return NULL;
    return isnan(r->ratio) && isnan(r->limit) ? NULL : r;
}
static const dp_object_schema EXPECTED_OBJECT = {.name = "expected",
                                                 .field = EXPECTED,
                                                 .n = COUNT_OF(EXPECTED),
                                                 .each = &LEVEL_OBJECT,
                                                 .each_name = dp_level_names,
                                                 .neach = DP_NLEVELS,
                                                 .each_at = level_at};

/* ---- tensors --------------------------------------------------------------------------------- */

#define JUDGED(M) MEMBER(dp_judgement, M)
#define PLACE(ROW)                                                                                \
    {"rank", INTEGER, WRITTEN, NULL, JUDGED(ROW.at.rank)},                                        \
        {"sequence", INTEGER, WRITTEN, "-1: of none", JUDGED(ROW.at.sequence)},                   \
        {"token", INTEGER, WRITTEN, "-1: of none", JUDGED(ROW.at.token)},                         \
        {"head", INTEGER, WRITTEN, NULL, JUDGED(ROW.at.head)},                                    \
        {"index", INTEGER, WRITTEN, "the row's entry with the largest error", JUDGED(ROW.index)}, \
        {"got", HEX, WRITTEN, "that entry", JUDGED(ROW.got)}, {                                   \
        "want", HEX, WRITTEN, "its truth", JUDGED(ROW.want)                                       \
    }

static const dp_record_field WORST[] = {
    PLACE(worst),
    {"rel", NUMBER, WRITTEN, "|err|_2 over the rms row norm of its head", JUDGED(worst_rel)}};
static const dp_object_schema WORST_OBJECT = OBJECT("worst_token", WORST);

static json_t *marginal(const void *x) { return json_boolean(dp_judgement_marginal(x)); }
static const dp_record_field FAILED[] = {
    PLACE(failed),
    {"error", NUMBER, WRITTEN, "|err|_2 of the row", JUDGED(failed.err)},
    {"bound", NUMBER, WRITTEN, "of the row", JUDGED(failed.bound), NONE},
    {"size", NUMBER, WRITTEN, "|want|_2 of the row", JUDGED(failed.size)},
    {"scale", NUMBER, WRITTEN, "rms |want|_2 of its head's rows", JUDGED(scale)},
    {"times", NUMBER, WRITTEN, "error over its limit", JUDGED(times), NONE},
    {"marginal", BOOLEAN, WRITTEN, "within 1.3 of the limit", GET(marginal)}};
static const dp_object_schema FAILED_OBJECT = OBJECT("failed", FAILED);

static const dp_record_field FIRST[] = {
    {"rank", INTEGER, WRITTEN, NULL, JUDGED(first.at.rank)},
    {"sequence", INTEGER, WRITTEN, "-1: of none", JUDGED(first.at.sequence)},
    {"token", INTEGER, WRITTEN, "-1: of none", JUDGED(first.at.token)},
    {"head", INTEGER, WRITTEN, NULL, JUDGED(first.at.head)},
    {"rows", COUNT, WRITTEN, "that are beyond their bounds", JUDGED(nover)}};
static const dp_object_schema FIRST_OBJECT = OBJECT("first_over", FIRST);

static json_t *window_size(const void *x) { return (void)x, json_integer(64); }
static json_t *window_errors(const void *x) {
    const dp_judgement *t = x;
    return dp_schema_numbers(t->window, t->nwindow);
}
static const dp_record_field WINDOWS[] = {
    {"size", COUNT, WRITTEN, "tokens of a window", GET(window_size), .least = 1},
    {"rel", NUMBERS, WRITTEN, "|err|_F / |want|_F of the head with the largest",
     GET(window_errors)}};
static const dp_object_schema WINDOWS_OBJECT = OBJECT("windows", WINDOWS);

static json_t *per_rank(const void *x) {
    const dp_judgement *t = x;
    return numbers_of(t->per_rank, t->N, 5);
}
static json_t *per_head(const void *x) {
    const dp_judgement *t = x;
    json_t *a = json_array();
    for (int r = 0; r < t->N; r++)
        json_array_append_new(
            a, numbers_of(t->heads ? t->per_head + r * t->heads : NULL, t->heads, 5));
    return a;
}
static json_t *per_rank_ratio(const void *x) {
    const dp_judgement *t = x;
    return numbers_of(t->per_rank_ratio, t->N, 5);
}
static int is_shown(const void *x) { return ((const dp_judgement *)x)->verdict != DP_PASS; }
static int has_worst(const void *x) {
    const dp_judgement *t = x;
    return t->worst.at.rank >= 0 && t->worst_rel != 0;
}
static int has_failed(const void *x) {
    return is_shown(x) && ((const dp_judgement *)x)->failed.at.rank >= 0;
}
static int has_windows(const void *x) {
    return is_shown(x) && ((const dp_judgement *)x)->nwindow > 0;
}
static int has_bound(const void *x) { return !isnan(((const dp_judgement *)x)->bound); }
static int has_draws(const void *x) { return !isnan(((const dp_judgement *)x)->expected.excess); }
static int has_before(const void *x) { return !isnan(((const dp_judgement *)x)->before.excess); }
static int has_tier(const void *x) {
    const char *tier = ((const dp_judgement *)x)->tier;
    return tier && *tier;
}
static int has_seen(const void *x) { return isfinite(((const dp_judgement *)x)->seen); }
static int has_blind_head(const void *x) {
    const dp_judgement *t = x;
    return t->heads > 1 && t->blind_head >= 0 && isfinite(t->seen_head) &&
           dp_schema_rounded(t->seen_head - 1, 4) != dp_schema_rounded(t->seen - 1, 4);
}

static const dp_record_field TENSOR[] = {
    {"name", TEXT, WRITTEN,
     "a result, a stage, what a convolution gives, or the slots that a session must not write",
     ARRAY(dp_judgement, name)},
    {"rel_fro", NUMBER, WRITTEN, "|got - want|_F / |want|_F", JUDGED(rel_fro), .digits = 9},
    {"per_rank", NUMBERS, WRITTEN, "the same rank by rank; null: the rank has none", GET(per_rank),
     RANKS},
    {"per_head", .kind = DP_KIND_ROWS, .what = "the same, [rank][head], for all but pass",
     GET(per_head), WHEN(is_shown)},
    {"worst_token", OF(WORST_OBJECT),
     .what = "row with the largest |err|_2 / rms row norm; absent: no row has an error",
     WHEN(has_worst)},
    {"failed", OF(FAILED_OBJECT), .what = "the row that carries the failure", WHEN(has_failed)},
    {"first_over", OF(FIRST_OBJECT), .what = "the first row beyond its bound, whatever decided",
     IF(dp_judgement, nover)},
    {"windows", OF(WINDOWS_OBJECT), .what = "errors along the tokens, for all but pass",
     WHEN(has_windows)},
    {"bound", NUMBER, .what = "bound / |want|_F", JUDGED(bound), WHEN(has_bound)},
    {"ratio", NUMBER, .what = "largest err / bound of a row", JUDGED(ratio), NONE, WHEN(has_bound)},
    {"per_rank_ratio", NUMBERS, .what = "the same rank by rank", GET(per_rank_ratio),
     WHEN(has_bound), RANKS},
    {"expected", OF(EXPECTED_OBJECT), .what = "against draws (verdict/expected.h)",
     JUDGED(expected), WHEN(has_draws)},
    {"first_draws", OF(EXPECTED_OBJECT),
     .what = "against the first set of draws, where a second one decided", JUDGED(before),
     WHEN(has_before)},
    {"tier", TEXT, .what = "exact, bound, expected, sum: what decided", JUDGED(tier),
     WHEN(has_tier)},
    {"seen", NUMBER, .what = "power: the tensor times this, or more, would have failed",
     JUDGED(seen), WHEN(has_seen), .digits = 4, .above_1 = 1},
    {"seen_head", NUMBER, .what = "the same of one head, where it is largest and another number",
     JUDGED(seen_head), WHEN(has_blind_head), .digits = 4, .above_1 = 1},
    {"blind_head", INTEGER, .what = "that head", JUDGED(blind_head), WHEN(has_blind_head)},
    {"allowed", BOOLEAN, .what = "unjudged, as the case or the caller lets it be", JUDGED(allowed),
     IF(dp_judgement, allowed)},
    {"verdict", WORDS(dp_verdict_names, DP_NVERDICTS), WRITTEN, NULL, JUDGED(verdict)},
    {"why", TEXT, .what = "for all but pass", ARRAY(dp_judgement, why), IF(dp_judgement, why[0])}};
static const dp_object_schema TENSOR_OBJECT = OBJECT_OF(dp_judgement, "tensor", TENSOR);

/* ---- runs ------------------------------------------------------------------------------------ */

#define RUN(M) MEMBER(dp_run, M)

static json_t *chain_format(const void *x) {
    return json_string(dp_formats[((const dp_run *)x)->chain].name);
}
static json_t *design(const void *x) {
    const dp_run *r = x;
    char text[DP_DESIGN_TEXT] = "";
    dp_design d = r->undeclared ? dp_design_formats(&r->design) : r->design;
    d.undeclared = r->undeclared;
    if (r->has_base || r->undeclared) dp_design_text(&d, text);
    return *text ? json_string(text) : NULL;
}
static json_t *explained(const void *x) {
    const dp_run *r = x;
    char text[DP_DESIGN_TEXT] = "";
    if (!r->undeclared || r->verdict == DP_SKIPPED) return NULL;
    dp_design_text(&r->explained, text);
    return json_string(text);
}
static json_t *fault(const void *x) {
    return json_string(dp_faults[((const dp_run *)x)->fault].name);
}
static const dp_record_field POLICY[] = {
    {"base", WORDS(dp_base_names, DP_NBASES), .what = "formats of all but the chain of M",
     RUN(base), IF(dp_run, has_base)},
    {"chain", TEXT, .what = "format of the chain of M", GET(chain_format), IF(dp_run, has_chain)},
    {"design", TEXT, .what = "where not the base's default (design.h), or undeclared", GET(design)},
    {"explained_by", TEXT,
     .what = "undeclared: the common design (dp_design_common) that explains it, or comes nearest; "
             "empty: the base's default",
     GET(explained)},
    {"merge", WORDS(dp_exchange_names, DP_NRUN_EXCHANGES), .what = "exchange of states", RUN(merge),
     IF(dp_run, has_merge)},
    {"payload", WORDS(dp_payload_names, DP_NRUN_PAYLOADS),
     .what = "what pairs and states are sent as, if not as computed", RUN(payload),
     IF(dp_run, payload)},
    {"own", WORDS(dp_own_names, DP_NOWNS), .what = "which rank owns which tokens, if not T / N",
     RUN(own), IF(dp_run, own)},
    {"fault", TEXT, .what = "a deliberate fault", GET(fault), IF(dp_run, fault)}};
static const dp_object_schema POLICY_OBJECT = OBJECT("policy", POLICY);

static int exchanges(const void *x) {
    const dp_run *r = x;
    return r->has_merge && r->ranks > 1 && r->sized.K && !r->parts;
}
static dp_exchange_size exchanged(const dp_run *r) {
    dp_exchange_size s = r->sized;
    s.N = r->ranks;
    s.L = s.L / s.N > 0 ? s.L / s.N : 1;
    s.payload = r->payload == DP_PAYLOAD_FULL ? DP_PAYLOAD_FP32 : r->payload;
    s.rank = s.K / 8 > 0 ? s.K / 8 : 1;
    return s;
}
static dp_exchange_price price(const void *x) {
    const dp_run *r = x;
    const dp_exchange_size s = exchanged(r);
    return dp_exchange_price_of(r->merge, &s, &dp_exchange_usual);
}
static json_t *messages(const void *x) { return json_integer((json_int_t)price(x).messages); }
static json_t *bytes(const void *x) { return json_integer((json_int_t)price(x).bytes); }
static json_t *buffer(const void *x) {
    const dp_exchange_size s = exchanged(x);
    return json_integer((json_int_t)dp_exchange_buffer_bytes(((const dp_run *)x)->merge, &s));
}
static json_t *entering(const void *x) {
    const dp_exchange_size s = exchanged(x);
    return json_integer((json_int_t)dp_exchange_saved_of(&s).entering);
}
static json_t *share(const void *x) {
    const dp_exchange_price p = price(x);
    return json_real(p.path_s / p.compute_s - 1);
}
static const dp_record_field EXCHANGE[] = {
    {"messages", COUNT, WRITTEN, "of all ranks, one direction", GET(messages)},
    {"bytes", COUNT, WRITTEN, "of these, in fp32 where the payload is full", GET(bytes)},
    {"buffer_bytes", COUNT, WRITTEN, "that a rank sends from and receives into", GET(buffer)},
    {"kept_bytes", COUNT, WRITTEN, "of the state that enters a rank, for its backward",
     GET(entering)},
    {"share", NUMBER, WRITTEN,
     "time of the exchange for that of pre-scan and state pass, predicted "
     "(ref/chunk/exchange_price.h)",
     GET(share)}};
static const dp_object_schema EXCHANGE_OBJECT = OBJECT("exchange", EXCHANGE);

static json_t *seed(const void *x) {
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)((const dp_truth_audit *)x)->seed);
    return json_string(text);
}
static const dp_record_field AUDIT[] = {
    {"columns", COUNT, WRITTEN, "of the state, again in MPFR", MEMBER(dp_truth_audit, columns)},
    {"tokens", COUNT, WRITTEN, "of all together", MEMBER(dp_truth_audit, tokens)},
    {"seed", TEXT, WRITTEN, "decimal digits", GET(seed)},
    {"worst", NUMBER, WRITTEN, "largest difference over the sum of both radii",
     MEMBER(dp_truth_audit, worst), NONE}};
static const dp_object_schema AUDIT_OBJECT = OBJECT("audit", AUDIT);

static const dp_record_field TRUTH[] = {
    {"kind", TEXT, WRITTEN, "mpfr, double-double, fp64", RUN(truth_kind)},
    {"bits", COUNT, WRITTEN, NULL, RUN(truth_bits)},
    {"radius", NUMBER, WRITTEN, "largest, relative to its tensor", RUN(truth_radius), NONE},
    {"cached", BOOLEAN, WRITTEN, NULL, RUN(truth_cached)},
    {"device", TEXT, .what = "that computed it; absent: the CPU, or it was cached",
     RUN(truth_device), IF(dp_run, truth_device)},
    {"audit", OF(AUDIT_OBJECT), .what = "double-double: random columns again in MPFR",
     RUN(truth_audit), IF(dp_run, truth_audit.columns)}};
static const dp_object_schema TRUTH_OBJECT = OBJECT("truth", TRUTH);

#define POINT(M) MEMBER(dp_chain_point, M)
static const dp_record_field CHAIN[] = {
    {"rank", INTEGER, WRITTEN, NULL, POINT(rank), RANKS},
    {"chunks", COUNT, WRITTEN, "factors so far", POINT(chunks)},
    {"rel", NUMBER, WRITTEN, "|dM|_F / |M|_F", POINT(rel), NONE},
    {"effect", NUMBER, WRITTEN, "|dM S_in|_F / |S_in|_F; null without S_in", POINT(effect), NONE},
    {"bound", NUMBER, WRITTEN, "bound / |M|_F", POINT(bound), NONE},
    {"abs", NUMBER, WRITTEN, "|dM|_F", POINT(abs)},
    {"norm", NUMBER, WRITTEN, "|M|_F", POINT(norm)}};
static const dp_object_schema CHAIN_OBJECT = OBJECT_OF(dp_chain_point, "chain_point", CHAIN);

#define BITS(M) MEMBER(dp_bits, M)
static json_t *like(const void *x) {
    const int f = ((const dp_bits *)x)->like;
    return f < 0 ? json_null() : json_string(dp_formats[f].name);
}
static const dp_record_field EFFECTIVE_BITS[] = {
    {"store", NUMBER, WRITTEN, "bits, were it rounded when stored", BITS(bits[DP_BITS_STORE])},
    {"operand", NUMBER, WRITTEN, "bits, were operands rounded", BITS(bits[DP_BITS_OPERAND])},
    {"accumulate", NUMBER, WRITTEN, "bits, were sums rounded", BITS(bits[DP_BITS_ACCUMULATE])},
    {"truncated", NUMBER, WRITTEN, "of truncated operands; null: not along M", BITS(truncated),
     NONE},
    {"model", WORDS(dp_bits_models, DP_NBITMODELS), WRITTEN, "where it rounds", BITS(model)},
    {"effective", NUMBER, WRITTEN, "bits", BITS(effective)},
    {"slope", NUMBER, WRITTEN, "d log error / d log chunks", BITS(slope), NONE},
    {"biased", BOOLEAN, WRITTEN, "slope above 0.75", BITS(biased)},
    {"like", TEXT, WRITTEN, "chain format with that law", GET(like), NONE},
    {"wrong", BOOLEAN, WRITTEN, "fewer bits than claimed, or biased against the claim",
     BITS(wrong)},
    {"says", TEXT, WRITTEN, NULL, ARRAY(dp_bits, says)}};
static const dp_object_schema BITS_OBJECT = OBJECT("bits", EFFECTIVE_BITS);

#define CONDITION(M) RUN(cond.M)
static json_t *ill(const void *x) {
    const dp_run *r = x;
    return json_boolean(dp_ill_conditioned(&r->cond, r->base));
}
static const dp_record_field CONDITIONS[] = {
    {"condition", NUMBER, WRITTEN, "largest |A|_1 |A^-1|_1 of a chunk", CONDITION(condition)},
    {"inverse", NUMBER, WRITTEN, "largest |A^-1|_1", CONDITION(inverse)},
    {"entry", NUMBER, WRITTEN, "largest entry of an inverse", CONDITION(entry)},
    {"rank", INTEGER, WRITTEN, NULL, CONDITION(rank), RANKS},
    {"head", COUNT, WRITTEN, NULL, CONDITION(head)},
    {"token", COUNT, WRITTEN, "the chunk's first", CONDITION(token)},
    {"ill", BOOLEAN, WRITTEN, "costs half of the digits of the base's arithmetic", GET(ill)}};
static const dp_object_schema CONDITION_OBJECT = OBJECT("condition", CONDITIONS);

static int64_t tensors(const void *x) { return ((const dp_run *)x)->ntensor; }
static int64_t points(const void *x) { return ((const dp_run *)x)->npoint; }
static int has_segments(const void *x) { return ((const dp_run *)x)->segments > 1; }
static int was_run(const void *x) { return ((const dp_run *)x)->verdict != DP_SKIPPED; }
static int has_slope(const void *x) { return !isnan(((const dp_run *)x)->slope); }
static int has_condition(const void *x) { return ((const dp_run *)x)->cond.condition > 0; }
static int failed_by_tier(const void *x) {
    const dp_run *r = x;
    return r->verdict == DP_FAIL && r->tier && *r->tier;
}

static json_t *acted(const void *x) {
    const dp_run *r = x;
    json_t *a = json_array();
    for (int i = 0; i < r->nhit; i++)
        json_array_append_new(a, json_integer(r->hit[i]));
    return a;
}
static int has_acted(const void *x) {
    return ((const dp_run *)x)->fault && ((const dp_run *)x)->nhit;
}

static const dp_record_field RUNS[] = {
    {"id", TEXT, WRITTEN, "`deltaproof run --id` reproduces it bit for bit", RUN(id)},
    {"case", TEXT, WRITTEN, NULL, RUN(case_name)},
    {"op", TEXT, WRITTEN,
     "gdn, kda, mkda, gdn2, gla, ssd, gated-deltaproduct, dplr, chain, conv, step", RUN(op)},
    {"ranks", COUNT, WRITTEN, NULL, RUN(ranks), RANKS},
    {"parts", COUNT, .what = "that the ranks own, where not one each: `rank` of a place is a part",
     RUN(parts), IF(dp_run, own)},
    {"backend", WORDS(dp_backend_names, DP_NBACKENDS), WRITTEN,
     "lapack: the simulated ranks over CBLAS and LAPACKE; file: tensors that judge read; subject: "
     "a shared library",
     RUN(backend)},
    {"path", TEXT,
     .what = "cuda, nccl: which kernels ran; lapack: the BLAS's; subject: the library's name",
     RUN(path), IF(dp_run, path)},
    {"outcome", TEXT, .what = "subject: what its process did", RUN(outcome), IF(dp_run, outcome)},
    {"segments", COUNT, .what = "cuda, nccl: that a rank cut its sequence in", RUN(segments),
     WHEN(has_segments)},
    {"saved_bytes", COUNT, .what = "cuda, nccl: of a rank's saved tensors", RUN(saved),
     IF(dp_run, kept)},
    {"kept_bytes", COUNT, .what = "cuda, nccl: all that a rank keeps for the backward", RUN(kept),
     IF(dp_run, kept)},
    {"way", WORDS(dp_cuda_variant_names, DP_NCUDA_VARIANTS),
     .what = "cuda, nccl: variant of the kernels", RUN(variant), IF(dp_run, variant)},
    {"rollback", TEXT, .what = "a session with rejected tokens: where its states came from",
     RUN(rollback), IF(dp_run, rollback)},
    {"windows", COUNT, .what = "of that session", RUN(windows), IF(dp_run, rollback)},
    {"windows_judged", COUNT, .what = "with their rejected tokens", RUN(windows_judged),
     IF(dp_run, rollback)},
    {"policy", OF(POLICY_OBJECT), WRITTEN},
    {"exchange", OF(EXCHANGE_OBJECT), .what = "its volume, by formulas", WHEN(exchanges)},
    {"acted", NUMBERS, .what = "1: the fault changed numbers there, [rank][value head]", GET(acted),
     WHEN(has_acted)},
    {"truth", OF(TRUTH_OBJECT), WHEN(was_run)},
    {"tensors", LIST_OF(TENSOR_OBJECT), WRITTEN, NULL, RUN(tensor), .count = tensors},
    {"chain", LIST_OF(CHAIN_OBJECT), WRITTEN, "M after that many chunks", RUN(point),
     .count = points},
    {"slope", NUMBER, .what = "op chain: 0.5 unbiased rounding, 1 biased", RUN(slope),
     WHEN(has_slope)},
    {"bits", OF(BITS_OBJECT), .what = "op chain, regime reflect: effective bits (verdict/bits.h)",
     RUN(bits), IF(dp_run, bits.npoint)},
    {"condition", OF(CONDITION_OBJECT), .what = "of the chunks' triangular systems",
     WHEN(has_condition)},
    {"settled", BOOLEAN, .what = "a second set of draws decided", RUN(settled),
     IF(dp_run, settled)},
    {"verdict", WORDS(dp_verdict_names, DP_NVERDICTS), WRITTEN, NULL, RUN(verdict)},
    {"tier", TEXT, .what = "of a failed run: what decided on its worst tensor", RUN(tier),
     WHEN(failed_by_tier)},
    {"why", TEXT, .what = "for all but pass", ARRAY(dp_run, why), IF(dp_run, why[0])},
    {"seconds", NUMBER, WRITTEN, NULL, RUN(seconds)}};
static const dp_object_schema run_schema = OBJECT("run", RUNS);

/* ---- cases ----------------------------------------------------------------------------------- */

#define CASE(M) MEMBER(dp_case, M)
static const dp_operation *op_of(const void *x) { return ((const dp_case *)x)->op; }
static int has_problem(const void *x) { return op_of(x)->has_problem; }
static int has_factors(const void *x) { return op_of(x)->has_factors; }
static int has_conv(const void *x) { return op_of(x)->has_conv; }

/* NULL: this operation has no such axis. */
static json_t *axis(const void *x, dp_axis a) {
    const int64_t n = op_of(x)->dims(x).of[a];
    return n ? json_integer(n) : NULL;
}
static json_t *tokens(const void *x) { return axis(x, DP_AXIS_T); }
static json_t *key_width(const void *x) { return axis(x, DP_AXIS_K); }
static json_t *sequences(const void *x) { return axis(x, DP_AXIS_NSEQ); }
static int has_session(const void *x) { return dp_case_session(x) != NULL; }
static json_t *session_kept(const void *x) {
    return json_string(dp_session_kept(dp_case_session(x)));
}
static json_t *regime(const void *x) {
    const dp_case *c = x;
    return json_string(c->data ? "given" : dp_regime_names[c->ch.regime]);
}
static json_t *data(const void *x) {
    const char *path = ((const dp_case *)x)->data;
    return path ? dp_json_text(dp_base_name(path)) : NULL;
}
static json_t *warnings(const void *x) {
    const dp_case *c = x;
    json_t *a = json_array();
    for (int i = 0; i < c->nwarn; i++)
        json_array_append_new(a, dp_json_text(c->warn[i]));
    return a;
}
#define WORD(ID, WORD, ...) WORD,
static const char *const GATES[] = {DP_GATES(WORD)};
#undef WORD
static json_t *beta_form(const void *x) {
    return json_string(dp_betas[((const dp_case *)x)->p.beta_form].word);
}
static int has_beta(const void *x) { return has_problem(x) && ((const dp_case *)x)->p.beta; }
static json_t *inputs(const void *x) {
    return json_string(dp_formats[((const dp_case *)x)->input_dtype].name);
}
static const dp_record_field CASES[] = {
    {"name", TEXT, WRITTEN, NULL, CASE(name)},
    {"op", TEXT, WRITTEN, NULL, CASE(op_name)},
    {"reason", TEXT, WRITTEN, NULL, CASE(reason)},
    {"source", TEXT, WRITTEN, NULL, CASE(source)},
    {"regime", TEXT, .what = "op chain", GET(regime), WHEN(has_factors)},
    {"T", COUNT, .what = "tokens", GET(tokens)},
    {"H", COUNT, .what = "query and key heads", CASE(p.H), WHEN(has_problem)},
    {"HV", COUNT, .what = "value heads", CASE(p.HV), WHEN(has_problem)},
    {"K", COUNT, .what = "key width", GET(key_width)},
    {"V", COUNT, .what = "value width", CASE(p.V), WHEN(has_problem)},
    {"R", COUNT, .what = "keys a token", CASE(p.R), WHEN(has_problem)},
    {"inputs", TEXT, .what = "the widest format of q k v g beta do", GET(inputs),
     WHEN(has_problem)},
    {"gate", WORDS(GATES, DP_NGATES), .what = "form of g", CASE(p.gate), WHEN(has_problem)},
    {"beta", TEXT, .what = "its form", GET(beta_form), WHEN(has_beta)},
    {"l2norm", BOOLEAN, .what = "q and k are normalised", CASE(p.l2norm), WHEN(has_problem)},
    {"scale", NUMBER, .what = "of q in o", CASE(p.scale), .digits = 9, WHEN(has_problem)},
    {"chunks", COUNT, .what = "op chain: factors", CASE(ch.n), WHEN(has_factors)},
    {"D", COUNT, .what = "channels of a convolution", CASE(conv.D), WHEN(has_conv)},
    {"W", COUNT, .what = "its width", CASE(conv.W), WHEN(has_conv)},
    {"Nseq", COUNT, .what = "sequences", GET(sequences)},
    {"data", TEXT, .what = "file of its inputs", GET(data)},
    {"session", TEXT, .what = "calls that hand the state on", CASE(session.text),
     WHEN(has_session)},
    {"session_state", TEXT, .what = "format that it is kept in between calls", GET(session_kept),
     WHEN(has_session)},
    {"session_stagger", COUNT, .what = "calls between the begins of two sequences",
     CASE(session.stagger), WHEN(has_session)},
    {"session_prefix", COUNT, .what = "tokens that all sequences share, computed once",
     CASE(session.prefix), WHEN(has_session)},
    {"session_slots", COUNT, .what = "of the pool that its states lie in; 0: none",
     CASE(session.slots), WHEN(has_session)},
    {"warnings", .kind = DP_KIND_TEXTS, WRITTEN, NULL, GET(warnings)}};
static const dp_object_schema CASE_OBJECT = OBJECT("case", CASES);

/* ---- many cases together --------------------------------------------------------------------- */

#define POOLED(M) MEMBER(dp_pooled_row, M)
static json_t *pooled_fault_name(const void *x) {
    return json_string(dp_faults[((const dp_pooled_row *)x)->fault].name);
}
static json_t *pooled_says(const void *x) {
    char text[400];
    dp_pooled_text(x, text, sizeof text);
    return json_string(text);
}
static const dp_record_field POOLS[] = {
    {"tensor", TEXT, WRITTEN, NULL, POOLED(tensor)},
    {"backend", WORDS(dp_backend_names, DP_NBACKENDS), WRITTEN, NULL, POOLED(backend)},
    {"way", WORDS(dp_cuda_variant_names, DP_NCUDA_VARIANTS),
     .what = "cuda, nccl: variant of the kernels", POOLED(variant), IF(dp_pooled_row, variant)},
    {"base", WORDS(dp_base_names, DP_NBASES), WRITTEN, NULL, POOLED(base)},
    {"undeclared", BOOLEAN, .what = "the subject does not say how it computes", POOLED(undeclared),
     IF(dp_pooled_row, undeclared)},
    {"fault", TEXT, .what = "a deliberate fault", GET(pooled_fault_name), IF(dp_pooled_row, fault)},
    {"cases", COUNT, WRITTEN, NULL, POOLED(is.cases)},
    {"ratio", NUMBER, WRITTEN, "root mean square of error / expected error", POOLED(is.ratio)},
    {"freedom", NUMBER, WRITTEN, "degrees of freedom of all cases", POOLED(is.freedom)},
    {"chance", NUMBER, WRITTEN, "that a right kernel shows as much", POOLED(is.chance)},
    {"detects", NUMBER, WRITTEN, "factor on these errors that would be at the limit",
     POOLED(is.detects)},
    {"verdict", WORDS(dp_verdict_names, DP_NVERDICTS), WRITTEN, NULL, POOLED(verdict)},
    {"says", TEXT, WRITTEN, "that in words", GET(pooled_says)}};
static const dp_object_schema POOL_OBJECT = OBJECT_OF(dp_pooled_row, "pooled", POOLS);

static int64_t pooled(const void *x) { return ((const dp_record *)x)->npooled; }

/* ---- the record ------------------------------------------------------------------------------ */

#define RECORD(M) MEMBER(dp_record, M)

static json_t *version(const void *x) { return (void)x, json_string(DP_VERSION); }
static json_t *commit(const void *x) { return (void)x, json_string(DP_COMMIT); }
static json_t *compiler(const void *x) { return (void)x, json_string("gcc " __VERSION__); }
static json_t *blas(const void *x) { return (void)x, dp_json_text(openblas_get_config()); }
static json_t *mpfr(const void *x) { return (void)x, json_string(mpfr_get_version()); }
static json_t *cores(const void *x) { return (void)x, json_integer(omp_get_num_procs()); }
static json_t *device(const void *x) { return (void)x, dp_json_text(dp_cuda_device()); }
static const dp_record_field PROGRAM[] = {{"version", TEXT, WRITTEN, NULL, GET(version)},
                                          {"commit", TEXT, WRITTEN, NULL, GET(commit)},
                                          {"compiler", TEXT, WRITTEN, NULL, GET(compiler)},
                                          {"blas", TEXT, WRITTEN, NULL, GET(blas)},
                                          {"mpfr", TEXT, WRITTEN, NULL, GET(mpfr)},
                                          {"cores", COUNT, WRITTEN, NULL, GET(cores)},
                                          {"device", TEXT, WRITTEN, NULL, GET(device)},
                                          {"command", TEXT,
                                           .what = "what made the record, for a shell",
                                           RECORD(command), IF(dp_record, command)}};
static const dp_object_schema PROGRAM_OBJECT = OBJECT("program", PROGRAM);

static const dp_record_field DIGEST[] = {
    {"value", TEXT, WRITTEN, "32 hexadecimal digits", ARRAY(dp_digest, hex)},
    {"runs", COUNT, WRITTEN, NULL, MEMBER(dp_digest, runs)}};
static const dp_object_schema DIGEST_OBJECT = OBJECT("digest", DIGEST);

static json_t *schema_name(const void *x) { return (void)x, json_string(DP_RECORD_SCHEMA); }
static json_t *schema_version(const void *x) { return (void)x, json_integer(DP_RECORD_VERSION); }
static json_t *created(DP_UNUSED const void *x) {
    char when[40];
    const time_t now = time(NULL);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    return json_string(when);
}
static json_t *digest(const void *x) {
    const dp_digest d = dp_digest_of(((const dp_record *)x)->runs);
    return d.runs ? dp_schema_write(&DIGEST_OBJECT, &d) : NULL;
}
static json_t *provenance(const void *x) {
    return dp_provenance_json(((const dp_record *)x)->provenance);
}

static const dp_record_field TOTALS[] = {{"pass", COUNT, WRITTEN},
                                         {"fail", COUNT, WRITTEN},
                                         {"skipped", COUNT, WRITTEN, "not run"},
                                         {"unjudged", COUNT, WRITTEN, "a tensor is not judged"}};
static const dp_object_schema TOTALS_OBJECT = OBJECT("totals", TOTALS);
static json_t *totals(const void *x) {
    json_t *o = json_object();
    int n[DP_NVERDICTS];
    dp_record_totals(x, n);
    for (int i = 0; i < DP_NVERDICTS; i++)
        json_object_set_new(o, dp_verdict_names[i], json_integer(n[i]));
    return o;
}

static json_t *verdict(const void *x) { return json_string(dp_record_verdict(x)); }
static const char *const VERDICTS[] = {"pass", "fail", "error"};
static json_t *cases(const void *x) {
    const dp_record *r = x;
    json_t *a = json_array();
    for (int i = 0; i < r->ncase; i++)
        json_array_append_new(a, dp_schema_write(&CASE_OBJECT, r->cases[i]));
    return a;
}
static json_t *runs(const void *x) {
    const dp_record *r = x;
    json_t *a = json_array();
    for (int i = 0; i < r->runs->n; i++)
        json_array_append_new(a, dp_schema_write(&run_schema, &r->runs->run[i]));
    return a;
}

static const dp_record_field TOP[] = {
    {"schema", TEXT, WRITTEN, DP_RECORD_SCHEMA, GET(schema_name)},
    {"schema_version", INTEGER, WRITTEN, "a field never changes its meaning within one of these",
     GET(schema_version)},
    {"program", OF(PROGRAM_OBJECT), WRITTEN},
    {"created", TEXT, WRITTEN, "2026-11-20T19:00:00Z", GET(created)},
    {"seconds", NUMBER, WRITTEN, NULL, RECORD(seconds)},
    {"digest", OF(DIGEST_OBJECT),
     .what = "of all results of simulated ranks (record/record.h), the same on every machine",
     GET(digest)},
    {"provenance", OF(dp_provenance_schema), .what = "whence the numbers come", GET(provenance)},
    {"totals", OF(TOTALS_OBJECT), WRITTEN, "runs by verdict", GET(totals)},
    {"errors", COUNT, WRITTEN, "cases that could not be judged at all", RECORD(errors)},
    {"empty", COUNT, .what = "those of them that offer no run with these options", RECORD(empty),
     IF(dp_record, empty)},
    {"verdict", WORDS(VERDICTS, 3), WRITTEN, NULL, GET(verdict)},
    {"cases", LIST_OF(CASE_OBJECT), WRITTEN, NULL, GET(cases)},
    {"runs", LIST_OF(run_schema), WRITTEN, NULL, GET(runs)},
    {"pooled", LIST_OF(POOL_OBJECT),
     .what = "tensors of a kernel over all its cases (verdict/levels.h)", RECORD(pooled),
     .count = pooled, IF(dp_record, npooled)}};
const dp_object_schema dp_record_schema = OBJECT("record", TOP);
