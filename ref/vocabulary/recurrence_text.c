/* The text of a user's own recurrence, and what it changes in the tables (recurrence_text.h). */
#include "recurrence_text.h"
#include "text.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define COUNT(X) ((int)(sizeof(X) / sizeof *(X)))

/* Where inputs lie, in the order in which a statement names them. */
static const dp_input_id QUERY[] = {DP_INPUT_Q}, GATE[] = {DP_INPUT_G}, ANGLE[] = {DP_INPUT_ANGLE},
                         NUMBERS[] = {DP_INPUT_BETA, DP_INPUT_NUMBER};
static const struct {
    const char *word;
    const dp_input_id *of;
    int least, most;
} INPUTS[] = {{"query", QUERY, 1, 1},
              {"gate", GATE, 1, 1},
              {"keys", dp_row_keys, 1, DP_KEYS_MOST},
              {"values", dp_row_values, 1, DP_VALUES_MOST},
              {"number", NUMBERS, 0, COUNT(NUMBERS)},
              {"angle", ANGLE, 0, 1}};
enum { WORDS_MOST = 16, WORD_MOST = 200 };

typedef struct {
    const char *path;
    int line;
    dp_user_recurrence *y;
    dp_err *e;
    int n;
    char word[WORDS_MOST][WORD_MOST];
    int said[COUNT(INPUTS) + 4]; /* the lines of its statements; 0: not yet */
    dp_reading reading;
} reader;

static dp_status refuse(const reader *r, const char *word, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static dp_status refuse(const reader *r, const char *word, const char *format, ...) {
    char text[600];
    va_list ap;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    return dp_fail(r->e, DP_EINPUT, "%s:%d: '%s' %s", r->path, r->line, word, text);
}

/* ---- names ----------------------------------------------------------------------------------- */

static int is_name(const char *s) {
    if (!isalpha((unsigned char)*s) && *s != '_') return 0;
    for (const char *x = s; *x; x++)
        if (!isalnum((unsigned char)*x) && *x != '_') return 0;
    return strlen(s) <= DP_NAME_MOST;
}

static int input_named(const dp_user_recurrence *y, const char *name, size_t n) {
    for (int i = 0; i < DP_NINPUTS; i++)
        if (*y->input[i] && strlen(y->input[i]) == n && !strncmp(y->input[i], name, n)) return i;
    return -1;
}

/* A name that files have for something else, or d and it; that of an input in a session's calls. */
static int is_taken(const char *name) {
    static const char *const TAKEN[] = {"o", "do",     "final_state",   "ht",  "s0",    "h0",
                                        "A", "state",  "initial_state", "dht", "A_log", "bias",
                                        "h", "dstate", "cu_seqlens",    "M",   "H",     "dt_bias"};
    for (int i = 0; i < COUNT(TAKEN); i++)
        if (!strcmp(name, TAKEN[i])) return 1;
    return !strncmp(name, "previous_", strlen("previous_"));
}

static dp_status add_name(reader *r, const char *name, dp_input_id at) {
    if (!is_name(name))
        return refuse(r, name, "is no name: letters, digits and _, up to %d", DP_NAME_MOST);
    if (is_taken(name)) return refuse(r, name, "is the name of something else in files");
    if (input_named(r->y, name, strlen(name)) >= 0) return refuse(r, name, "is there already");
    strcpy(r->y->input[at], name);
    return DP_OK;
}

static const struct {
    const char *begin, *end;
} FACTORS[DP_NFACTORS] = {
#define ROW(A, ID, RATE, BEGIN, END) {BEGIN, END},
    DP_GATE_FACTORS(ROW, )
#undef ROW
};

static void known_names(const dp_user_recurrence *y, char *out, size_t size) {
    *out = 0;
    for (int i = 0; i < DP_NINPUTS; i++)
        for (int f = 0; f < (i == DP_INPUT_G ? DP_NFACTORS : 1); f++)
            if (*y->input[i] && i != DP_INPUT_Q && i != DP_INPUT_ANGLE)
                dp_text_add(out, size, " %s%s%s", i == DP_INPUT_G ? FACTORS[f].begin : "",
                            y->input[i], i == DP_INPUT_G ? FACTORS[f].end : "");
}

/* ---- rows ------------------------------------------------------------------------------------ */

static const char *const ENTRY_NAMES[DP_NENTRIES] = {"write", "read", "value", "strength"};

static int is_of(const dp_input_id *list, int n, int input) {
    for (int i = 0; i < n; i++)
        if ((int)list[i] == input) return 1;
    return 0;
}

/* prev(NAME), NAME, or a factor of the gate of n letters; -1: neither. */
static int factor_named(const dp_user_recurrence *y, const char *s, size_t n) {
    if (n > 6 && !strncmp(s, "prev(", 5) && s[n - 1] == ')') {
        const int of = input_named(y, s + 5, n - 6);
        return of < 0 ? -1 : of | DP_PREVIOUS;
    }
    for (int f = 0; f < DP_NFACTORS; f++) {
        const size_t a = strlen(FACTORS[f].begin), z = strlen(FACTORS[f].end);
        if (n > a + z && !strncmp(s, FACTORS[f].begin, a) &&
            !strncmp(s + n - z, FACTORS[f].end, z) &&
            input_named(y, s + a, n - a - z) == DP_INPUT_G)
            return DP_NINPUTS + f;
    }
    return input_named(y, s, n);
}

static dp_status add_factor(reader *r, const char *word, dp_entry_kind kind, const char *s,
                            size_t n, dp_entry *y) {
    char known[300], name[WORD_MOST];
    const int f = factor_named(r->y, s, n);
    snprintf(name, sizeof name, "%.*s", (int)n, s);
    const int of = f < 0 ? f : dp_factor_input(f);
    if (of < 0 || of == DP_INPUT_Q || of == DP_INPUT_G || of == DP_INPUT_ANGLE) {
        known_names(r->y, known, sizeof known);
        return refuse(r, word, "has '%s', which is no factor; known:%s", name, known);
    }
    const int fits = kind == DP_ENTRY_VALUE      ? is_of(dp_row_values, DP_VALUES_MOST, of)
                     : kind == DP_ENTRY_STRENGTH ? is_of(NUMBERS, COUNT(NUMBERS), of)
                                                 : !is_of(dp_row_values, DP_VALUES_MOST, of);
    if (!fits)
        return refuse(r, word, "has '%s', which is not of %s", name,
                      kind == DP_ENTRY_VALUE      ? "values"
                      : kind == DP_ENTRY_STRENGTH ? "number: only numbers may stand in a strength"
                                                  : "keys, number and gate");
    if (y->n == DP_MAX_FACTORS) return refuse(r, word, "has more than %d factors", DP_MAX_FACTORS);
    y->of[y->n++] = (unsigned char)f;
    return DP_OK;
}

static dp_status parse_product(reader *r, const char *word, dp_entry_kind kind, const char *text,
                               dp_entry *y) {
    dp_status s = DP_OK;
    int keys = 0;
    *y = (dp_entry){.sign = 1};
    if (*text == '-') {
        y->sign = -1;
        text++;
    }
    if (kind == DP_ENTRY_STRENGTH && !strcmp(text, "1")) return DP_OK;
    for (; !s; text++) {
        const size_t n = strcspn(text, "*");
        s = add_factor(r, word, kind, text, n, y);
        text += n;
        if (!*text) break;
    }
    for (int i = 0; i < y->n; i++)
        keys += is_of(dp_row_keys, DP_KEYS_MOST, dp_factor_input(y->of[i]));
    if (!s && kind < DP_ENTRY_VALUE && !keys)
        return refuse(r, word, "has no key: one of keys must be in it");
    return s;
}

static dp_status parse_row(reader *r) {
    dp_recurrence *to = &r->y->rows;
    if (to->n == DP_MAX_ROWS) return refuse(r, "row", "stands here once too often: %d", to->n);
    dp_token_row *row = &to->row[to->n++];
    dp_entry *entry[DP_NENTRIES] = {&row->write, &row->read, &row->value, &row->strength};
    row->strength.sign = 1;
    int said[DP_NENTRIES] = {0};
    for (int i = 1; i < r->n; i++) {
        const char *word = r->word[i], *equals = strchr(word, '=');
        int kind = 0;
        while (kind < DP_NENTRIES &&
               (!equals || strlen(ENTRY_NAMES[kind]) != (size_t)(equals - word) ||
                strncmp(word, ENTRY_NAMES[kind], (size_t)(equals - word))))
            kind++;
        if (kind == DP_NENTRIES)
            return refuse(r, word, "is none of write= read= value= strength=, without blanks");
        if (said[kind]++) return refuse(r, word, "stands twice in this row");
        const dp_status s = parse_product(r, word, (dp_entry_kind)kind, equals + 1, entry[kind]);
        if (s) return s;
    }
    if (!row->write.sign) return refuse(r, "row", "has no write=");
    return row->read.sign || row->value.sign ? DP_OK
                                             : refuse(r, "row", "has no read= and no value=");
}

/* ---- statements ------------------------------------------------------------------------------ */

/* Two words of which one must stand; *second: the other does. */
static dp_status choose(const reader *r, int from, const char *a, const char *b, int *second) {
    char said[WORD_MOST] = "";
    for (int i = from; i < r->n; i++)
        dp_text_add(said, sizeof said, "%s%s", *said ? " " : "", r->word[i]);
    *second = !strcmp(said, b);
    return *second || !strcmp(said, a) ? DP_OK : refuse(r, said, "must be %s or %s", a, b);
}

/* Words i .. end - 1: names of keys, or of the query if there may be one, which an earlier line
 * has. */
static dp_status parse_named(reader *r, int i, int end, int query, unsigned *into) {
    for (; i < end; i++) {
        const int of = input_named(r->y, r->word[i], strlen(r->word[i]));
        if (!is_of(dp_row_keys, DP_KEYS_MOST, of) && !(query && of == DP_INPUT_Q))
            return refuse(r, r->word[i], "is none of %skeys, which a line before must name",
                          query ? "query and " : "");
        if (*into >> of & 1) return refuse(r, r->word[i], "stands twice in this line");
        *into |= 1U << of;
    }
    return DP_OK;
}

static dp_status parse_turned(reader *r) {
    if (r->n < 4 || strcmp(r->word[2], "turns"))
        return refuse(r, r->word[0], "must be 'angle NAME turns KEY ..'");
    static const char *const WORD[] = {
#define ROTATION(ID, WORD, ...) WORD,
        DP_ROTATIONS(ROTATION)
#undef ROTATION
    };
    int n = r->n - (r->n > 4);
    for (int i = 0; i < DP_NROTATIONS && r->n > 4; i++)
        if (!strcmp(r->word[n], WORD[i]) && input_named(r->y, WORD[i], strlen(WORD[i])) < 0) {
            r->y->rows.rotation = (signed char)i;
            return parse_named(r, 3, n, 0, &r->y->rows.rotated);
        }
    return parse_named(r, 3, r->n, 0, &r->y->rows.rotated);
}

/* The norm of that word, unless an input has its name; -1: none. */
static int norm_named(const reader *r, const char *word) {
    int i = DP_NNORMS - 1;
    while (i >= 0 && strcmp(dp_norms[i].word, word))
        i--;
    return input_named(r->y, word, strlen(word)) < 0 ? i : -1;
}

static dp_status parse_norm(reader *r) {
    const int eps = r->n > 3 && !strcmp(r->word[r->n - 2], "eps"),
              norm = r->n > 2 ? norm_named(r, r->word[1]) : -1;
    if (r->n < 2) return refuse(r, r->word[0], "must be 'norm NAME ..' or 'norm NAME .. eps X'");
    if (norm >= 0) r->y->rows.norm = (signed char)norm;
    if (r->n - 2 * eps < 2 + (norm >= 0)) return refuse(r, r->word[1], "is of no NAME");
    if (eps && dp_number_real(r->word[r->n - 1], 1e-30, 1, &r->y->rows.eps) != DP_NUMBER_OK)
        return refuse(r, r->word[r->n - 1], "is no eps: a number from 1e-30 to 1");
    return parse_named(r, norm < 0 ? 1 : 2, eps ? r->n - 2 : r->n, 1, &r->y->rows.normed);
}

static dp_status parse_reads(reader *r) {
    int i = r->n == 2 ? 0 : DP_NREADINGS;
    while (i < DP_NREADINGS && strcmp(r->word[1], dp_readings[i].word))
        i++;
    r->reading = (dp_reading)i;
#define OR(ID, WORD, ...) " or " WORD
    return i < DP_NREADINGS ? DP_OK
                            : refuse(r, r->word[r->n > 1], "must be%s", DP_READINGS(OR) + 3);
#undef OR
}

static dp_status parse_inputs(reader *r, int which) {
    const int gate = !strcmp(INPUTS[which].word, "gate"),
              angle = !strcmp(INPUTS[which].word, "angle"),
              query = !strcmp(INPUTS[which].word, "query");
    const int names = (gate || angle || query) && r->n > 2 ? 1 : r->n - 1;
    if (names < 1 || names > INPUTS[which].most)
        return refuse(r, r->word[0], "names %d inputs, must be 1 to %d", names, INPUTS[which].most);
    for (int i = 0; i < names; i++) {
        const dp_status s = add_name(r, r->word[1 + i], INPUTS[which].of[i]);
        if (s) return s;
    }
    if (angle) return parse_turned(r);
    if (query && r->n > 2) return choose(r, 2, "along keys", "along values", &r->y->rows.along);
    return gate ? choose(r, 2, "per channel", "per head", &r->y->one_gate) : DP_OK;
}

static dp_status once(reader *r, int which) {
    if (r->said[which]) return refuse(r, r->word[0], "stands in line %d already", r->said[which]);
    r->said[which] = r->line;
    return DP_OK;
}

static dp_status parse_statement(reader *r) {
    enum { NAMED = COUNT(INPUTS), READS, ROWS, NORM };
    const char *word = r->word[0];
    dp_status s;
    if (!strcmp(word, "row")) return parse_row(r);
    if (!strcmp(word, "recurrence")) {
        if ((s = once(r, NAMED))) return s;
        if (r->n != 2 || !is_name(r->word[1]))
            return refuse(r, word, "must have one name: letters, digits and _, up to %d",
                          DP_NAME_MOST);
        strcpy(r->y->name, r->word[1]);
        return DP_OK;
    }
    if (!strcmp(word, "reads")) return (s = once(r, READS)) ? s : parse_reads(r);
    if (!strcmp(word, "rows"))
        return (s = once(r, ROWS)) ? s : choose(r, 1, "together", "in turn", &r->y->rows.in_turn);
    if (!strcmp(word, "norm")) return (s = once(r, NORM)) ? s : parse_norm(r);
    for (int i = 0; i < COUNT(INPUTS); i++)
        if (!strcmp(word, INPUTS[i].word)) return (s = once(r, i)) ? s : parse_inputs(r, i);
    return refuse(r, word,
                  "is no statement: recurrence query gate keys values number angle norm reads rows "
                  "row");
}

static dp_status split(reader *r, const char *line, size_t n) {
    const char *end = line + n, *comment = memchr(line, '#', n);
    if (comment) end = comment;
    r->n = 0;
    while (line < end) {
        size_t k = 0;
        while (line < end && isspace((unsigned char)*line))
            line++;
        while (line + k < end && !isspace((unsigned char)line[k]))
            k++;
        if (!k) break;
        char word[WORD_MOST];
        snprintf(word, sizeof word, "%.*s", (int)(k < sizeof word ? k : sizeof word - 1), line);
        if (r->n == WORDS_MOST || k >= WORD_MOST) return refuse(r, word, "is one word too many");
        strcpy(r->word[r->n++], word);
        line += k;
    }
    return DP_OK;
}

/* A rotation commutes with numbers alone. */
static dp_status check_turned(const reader *r) {
    const dp_user_recurrence *y = r->y;
    for (int i = 0; i < y->rows.n * DP_NENTRIES; i++) {
        const int kind = i % DP_NENTRIES;
        const dp_entry e = dp_entry_of(&y->rows.row[i / DP_NENTRIES], kind);
        const int key = dp_entry_rotated(&y->rows, e);
        int others = 0;
        if (key < 0) continue;
        for (int m = 0; m < e.n; m++)
            others += is_of(dp_row_keys, DP_KEYS_MOST, dp_factor_input(e.of[m])) ||
                      (e.of[m] >= DP_NINPUTS && e.of[m] < DP_PREVIOUS && !y->one_gate);
        const char *name = y->input[dp_factor_input(key)];
        if (kind != DP_ENTRY_WRITE)
            return dp_fail(r->e, DP_EINPUT, "%s: '%s' turns, so it may stand in write alone",
                           r->path, name);
        if (others > 1)
            return dp_fail(
                r->e, DP_EINPUT,
                "%s: '%s' turns, so only numbers and a gate per head may stand beside it", r->path,
                name);
    }
    return DP_OK;
}

/* A query along the values stands in the place of do (recurrence.h), which has neither. */
static dp_status check_along(const reader *r) {
    const dp_user_recurrence *y = r->y;
    const int normed = y->rows.normed >> DP_INPUT_Q & 1;
    if (!y->rows.along || (!normed && !y->rows.rotated)) return DP_OK;
    return dp_fail(r->e, DP_EINPUT, "%s: '%s' reads along values, so it may not %s", r->path,
                   y->input[DP_INPUT_Q], normed ? "have a norm" : "turn by an angle");
}

static dp_status check_all(reader *r) {
    const dp_user_recurrence *y = r->y;
    if (!*y->name) return dp_fail(r->e, DP_EINPUT, "%s: has no line 'recurrence NAME'", r->path);
    for (int i = 0; i < COUNT(INPUTS); i++)
        if (INPUTS[i].least && !r->said[i])
            return dp_fail(r->e, DP_EINPUT, "%s: has no line '%s NAME'", r->path, INPUTS[i].word);
    if (!y->rows.n) return dp_fail(r->e, DP_EINPUT, "%s: has no line 'row ..'", r->path);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (*y->input[i] && i != DP_INPUT_Q && i != DP_INPUT_G && !dp_recurrence_uses(&y->rows, i))
            return dp_fail(r->e, DP_EINPUT, "%s: input '%s' stands in no row", r->path,
                           y->input[i]);
    dp_recurrence_reads(&r->y->rows, r->reading);
    const dp_status s = check_along(r);
    return s ? s : check_turned(r);
}

dp_status dp_user_recurrence_parse(const char *text, const char *path, dp_user_recurrence *y,
                                   dp_err *e) {
    reader r = {.path = path, .y = y, .e = e};
    dp_status s = DP_OK;
    memset(y, 0, sizeof *y);
    text += dp_text_mark(text);
    while (*text && !s) {
        const size_t n = strcspn(text, "\n");
        r.line++;
        s = split(&r, text, n);
        if (!s && r.n) s = parse_statement(&r);
        text += n + (text[n] == '\n');
    }
    return s ? s : check_all(&r);
}

/* ---- the tables ------------------------------------------------------------------------------ */

static dp_user_recurrence installed;
static int is_installed;
static char gradient[DP_NINPUTS][DP_NAME_MOST + 2];
static dp_tensor_field input_before[DP_NINPUTS], result_before[DP_NRESULTS];

const dp_user_recurrence *dp_user_recurrence_installed(void) {
    return is_installed ? &installed : NULL;
}

static void rename_field(dp_tensor_field *f, const char *name) {
    f->name = name;
    f->alias = f->inner = NULL;
}

/* Names, and what they say. */
static void exchange_names(dp_tensor_field *a, dp_tensor_field *b) {
    const char *name = a->name;
    const dp_role said = a->said;
    rename_field(a, b->name);
    rename_field(b, name);
    a->said = b->said;
    b->said = said;
}

static dp_model_info model_of(const dp_user_recurrence *y, const dp_recurrence *rows) {
    return (dp_model_info){.name = y->name,
                           .one_gate = y->one_gate,
                           .strength = DP_BY_ROWS,
                           .rows = rows->n,
                           .of_token = rows};
}

void dp_user_recurrence_set(dp_user_recurrence *y, dp_problem *p) {
    y->model = model_of(y, &y->rows);
    p->model = DP_USER;
    p->user = &y->model;
}

dp_user_recurrence dp_user_recurrence_of(const dp_problem *p) {
    dp_user_recurrence y = {.one_gate = p->user->one_gate, .rows = *p->user->of_token};
    snprintf(y.name, sizeof y.name, "%s", p->user->name);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_fields[i].role == DP_ROLE_REQUIRED && dp_input_belongs(p, i))
            snprintf(y.input[i], sizeof y.input[i], "%s", dp_input_fields[i].name);
    return y;
}

void dp_user_recurrence_install(const dp_user_recurrence *y) {
    if (is_installed) {
        memcpy(dp_input_fields, input_before, sizeof input_before);
        memcpy(dp_result_fields, result_before, sizeof result_before);
    }
    is_installed = y != NULL;
    dp_models[DP_USER] = (dp_model_info){0};
    if (!y) return;
    installed = *y;
    memcpy(input_before, dp_input_fields, sizeof input_before);
    memcpy(result_before, dp_result_fields, sizeof result_before);
    dp_recurrences[DP_USER] = y->rows;
    dp_models[DP_USER] = model_of(&installed, &dp_recurrences[DP_USER]);
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int is_there = *y->input[i] != 0;
        if (dp_input_fields[i].role != DP_ROLE_REQUIRED) continue;
        rename_field(&dp_input_fields[i], installed.input[i]); /* "": nothing is named so */
        snprintf(gradient[i], sizeof gradient[i], is_there ? "d%s" : "%s", installed.input[i]);
    }
    for (int i = 0; i < DP_NRESULTS; i++) {
        const int of = (int)dp_result_fields[i].of;
        if (dp_result_fields[i].role != DP_ROLE_GRADIENT) continue;
        if (dp_input_fields[of].role == DP_ROLE_REQUIRED)
            rename_field(&dp_result_fields[i], gradient[of]);
    }
    if (!y->rows.along) return;
    exchange_names(&dp_input_fields[DP_INPUT_Q], &dp_input_fields[DP_INPUT_DO]);
    exchange_names(&dp_result_fields[DP_RESULT_DQ], &dp_result_fields[DP_RESULT_O]);
}
