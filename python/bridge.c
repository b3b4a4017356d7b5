/* python/bridge.c - a subject (harness/deltaproof_subject.h) whose kernel is a Python function. It
 * sends every call to the process that listens on the Unix socket $DELTAPROOF_BRIDGE, and returns
 * the answer (python/deltaproof/server.py). A copy named bridge-1.so uses $DELTAPROOF_BRIDGE-1.
 *
 * One connection a call. The request: lines `KEY VALUE`, then for every input a line `in NAME NDIM
 * SHAPE..`, for every output `out NAME NDIM SHAPE..`, an empty line. The inputs' numbers follow as
 * doubles, one array after the other. The answer: a line `ok`, `unsupported WHY` or `failed WHY`.
 * After `ok` come the outputs' doubles in the order of their lines. After `ok but ds0` come those
 * of all others: the call has no state, and the function no gradient of it. For `about` the answer
 * is four lines: name, base, chain, writes, and a fifth, the design, or `-`: not declared.
 */
#include "harness/deltaproof_subject.h"
#include "ref/vocabulary/activations.h"
#include "ref/vocabulary/tensors.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { LINE = 512 };

/* The part of this library's file name between `bridge` and `.so`. It is empty, or -1 if the file
 * is a copy for the second of two functions. */
static void own_suffix(char suffix[16]) {
    static const char stem[] = "bridge";
    Dl_info own;
    *suffix = 0;
    if (!dladdr((void *)own_suffix, &own)) return;
    const char *slash = strrchr(own.dli_fname, '/'), *name = slash ? slash + 1 : own.dli_fname;
    if (strncmp(name, stem, sizeof stem - 1)) return;
    snprintf(suffix, 16, "%.*s", (int)strcspn(name + sizeof stem - 1, "."), name + sizeof stem - 1);
}

static FILE *connect_to_server(void) {
    const char *path = getenv("DELTAPROOF_BRIDGE");
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    char suffix[16];
    own_suffix(suffix);
    if (fd < 0 || !path) return NULL;
    const int n = snprintf(to.sun_path, sizeof to.sun_path, "%s%s", path, suffix);
    if (n >= (int)sizeof to.sun_path) return NULL;
    if (!connect(fd, (struct sockaddr *)&to, sizeof to)) return fdopen(fd, "r+");
    close(fd);
    return NULL;
}

/* ---- about ----------------------------------------------------------------------------------- */

static struct {
    int asked;
    char line[5][LINE]; /* name, base, chain, writes, design */
} said;

static int read_line(FILE *f, char line[LINE]) {
    if (!fgets(line, LINE, f)) return 0;
    line[strcspn(line, "\n")] = 0;
    return 1;
}

static int ask(void) {
    FILE *f = said.asked++ ? NULL : connect_to_server();
    int n = 0;
    if (!f) return *said.line[4] != 0;
    fputs("about\n\n", f);
    fflush(f);
    while (n < 5 && read_line(f, said.line[n]))
        n++;
    fclose(f);
    return n == 5;
}

const deltaproof_subject_info *deltaproof_subject_about(void) {
    static deltaproof_subject_info info = {
        .abi = DP_SUBJECT_ABI, .kind = DP_SUBJECT_WHOLE, .max_ranks = 1};
    if (!ask()) return NULL;
    info.name = said.line[0];
    info.base = said.line[1];
    info.chain = said.line[2];
    info.writes = said.line[3];
    return &info;
}

const char *deltaproof_subject_design(void) {
    return ask() && strcmp(said.line[4], "-") ? said.line[4] : NULL;
}

/* The function says of each problem whether it is for it. */
const char *deltaproof_subject_recurrences(void) {
    return "gdn kda mkda gdn2 gla ssd gated-deltaproduct dplr own";
}

/* ---- run ------------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    const double *data;
    int by_key; /* its axis 2 is of keys */
    int ndim;
    int64_t shape[4];
} array;

static int64_t count(int ndim, const int64_t *shape) {
    int64_t n = 1;
    for (int i = 0; i < ndim; i++)
        n *= shape[i];
    return n;
}

static void say_array(FILE *f, const char *what, const char *name, int ndim, const int64_t *shape) {
    fprintf(f, "%s%s %d", what, name, ndim);
    for (int i = 0; i < ndim; i++)
        fprintf(f, " %lld", (long long)shape[i]);
    fputc('\n', f);
}

static void say_integers(FILE *f, const char *name, int n, const int64_t *x) {
    fputs(name, f);
    for (int i = 0; i < n; i++)
        fprintf(f, "%s%lld", i ? "," : " ", (long long)x[i]);
    fputc('\n', f);
}

static void say_settings(FILE *f, const deltaproof_subject_problem *p) {
#define WORD(ID, WORD, ...) WORD,
    static const char *const gate[] = {DP_GATES(WORD)}, *const beta[] = {DP_BETAS(WORD)};
    const char *form = p->beta || p->erase || p->lr_a ? beta[p->beta_form] : "none";
    fprintf(f, "run\ngate %s\nbeta_form %s\nl2norm %d\nbackward %d\n", gate[p->gate_form], form,
            p->l2norm, p->backward);
    fprintf(f,
            "scale %.17g\nlower_bound %.17g\ninput_format %s\nbase %s\nR %d\nKg %d\n"
            "chunk %d\nrecurrence %s\n",
            p->scale, p->lower_bound, p->input_format, p->base, p->R, p->Kg, p->chunk,
            p->recurrence);
    say_integers(f, "cu_seqlens", p->Nseq + 1, p->cu);
    if (p->nslot) say_integers(f, "read_slot", p->Nseq, p->read_slot);
    if (p->nslot) say_integers(f, "write_slot", p->Nseq, p->write_slot);
    const int drafts = deltaproof_subject_drafts(p);
    if (drafts) say_integers(f, "draft_slots", p->Nseq * drafts, p->draft_slot);
    if (drafts) say_integers(f, "accepted", p->Nseq, p->accepted);
    if (p->nslot && deltaproof_subject_rings(p)) {
        say_integers(f, "ring_slot", p->Nseq, p->ring_slot);
        say_integers(f, "ring_tokens", p->Nseq, p->ring_tokens);
    }
    if (drafts && p->parent) say_integers(f, "parents", (int)p->tokens, p->parent);
}

enum { MOST_INPUTS = 32 };
/* Inputs of x: of a call's tokens, or of those before it, which have no axis for keys; returns
 * their number. */
static int inputs_of(const deltaproof_subject_problem *p, const deltaproof_subject_problem *x,
                     array a[MOST_INPUTS]) {
    const int64_t H = p->H, HV = p->HV, K = p->K, V = p->V, R = p->R, Kg = p->Kg, N = p->Nseq,
                  P = p->P, T = x == p ? p->tokens : N;
#define ROW(FIELD, ALIAS, ...) {sizeof ALIAS > 1 ? ALIAS : #FIELD, x->FIELD, __VA_ARGS__},
#define KEY(ID, FIELD, ALIAS) ROW(FIELD, ALIAS, 0, 3, {T, HV, K})
#define VALUE(ID, FIELD, ALIAS) ROW(FIELD, ALIAS, 0, 3, {T, HV, V})
#define NUMBER(ID, FIELD, ALIAS) ROW(FIELD, ALIAS, 1, 3, {T, HV, R})
#define ANGLE(ID, FIELD, ALIAS) ROW(FIELD, ALIAS, 0, 3, {T, HV, P})
    const array all[] = {{"q", x->q, 0, 3, {T, H, K}},
                         {"k", x->k, 1, 4, {T, H, R, K}},
                         {"v", x->v, 1, 4, {T, HV, R, V}},
                         {"g", x->g, 0, 3, {T, HV, Kg}},
                         {"beta", x->beta, 1, 3, {T, HV, R}},
                         {"A_log", x->A_log, 0, 1, {HV}},
                         {"dt_bias", x->dt_bias, 0, 2, {HV, Kg}},
                         {"initial_state", x->initial_state, 0, 4, {N, HV, K, V}},
                         {"do", x->dout, 0, 3, {T, HV, V}},
                         {"dht", x->dfinal_state, 0, 4, {N, HV, K, V}},
                         DP_ROW_INPUTS(KEY, VALUE, NUMBER, ANGLE)};
    int n = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (!all[i].data) continue;
        a[n] = all[i];
        if (a[n].by_key && x != p) a[n].shape[2] = a[n].shape[--a[n].ndim];
        n++;
    }
    return n;
}

/* Sends settings, names and shapes, and the inputs. */
static void send_problem(FILE *f, const deltaproof_subject_problem *p,
                         const deltaproof_subject_call *c) {
    const int64_t pool_shape[] = {p->nslot, p->HV, p->K, p->V};
    const double *pool = deltaproof_subject_find(c, "pool");
    const deltaproof_subject_problem *x[] = {p, deltaproof_subject_previous(p)};
    static const char *const what[] = {"in ", "in previous_"};
    array in[2][MOST_INPUTS];
    int n[2] = {0};
    say_settings(f, p);
    for (int k = 0; k < 2; k++) {
        if (x[k]) n[k] = inputs_of(p, x[k], in[k]);
        for (int i = 0; i < n[k]; i++)
            say_array(f, what[k], in[k][i].name, in[k][i].ndim, in[k][i].shape);
    }
    if (pool) say_array(f, "in ", "pool", 4, pool_shape);
    for (int i = 0; i < c->count; i++)
        say_array(f, "out ", c->tensor[i].name, c->tensor[i].ndim, c->tensor[i].shape);
    fputc('\n', f);
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < n[k]; i++)
            fwrite(in[k][i].data, 8, (size_t)count(in[k][i].ndim, in[k][i].shape), f);
    if (pool) fwrite(pool, 8, (size_t)count(4, pool_shape), f);
    fflush(f);
}

static int receive(FILE *f, const deltaproof_subject_call *c) {
    char line[LINE];
    if (!read_line(f, line)) {
        snprintf(c->why, 256, "the Python process closed the connection");
        return 1;
    }
    const int lacks = !strcmp(line, "ok but ds0");
    if (!lacks && strcmp(line, "ok")) {
        const int skip = !strncmp(line, "unsupported ", 12);
        snprintf(c->why, 256, "%.255s", strchr(line, ' ') ? strchr(line, ' ') + 1 : line);
        return skip ? DP_SUBJECT_UNSUPPORTED : 1;
    }
    for (int i = 0; i < c->count; i++) {
        const size_t n = (size_t)count(c->tensor[i].ndim, c->tensor[i].shape);
        if (lacks && !strcmp(c->tensor[i].name, "ds0")) continue;
        if (fread(c->tensor[i].data, 8, n, f) == n) continue;
        snprintf(c->why, 256, "the answer ends inside %s", c->tensor[i].name);
        return 1;
    }
    return DP_SUBJECT_OK;
}

int deltaproof_subject_run(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    FILE *f = connect_to_server();
    if (!f) {
        snprintf(c->why, 256, "no Python process listens on $DELTAPROOF_BRIDGE");
        return 1;
    }
    send_problem(f, p, c);
    const int status = receive(f, c);
    fclose(f);
    return status;
}
