/* Any program as a subject: what is called, and one call (command.h). */
#include "command.h"
#include "harness/base/supervisor.h"
#include "harness/case/case.h"
#include "ref/files/input.h"
#include "ref/vocabulary/text.h"
#include "subject_parts.h"
#include "tensor_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <omp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define DP_COMMAND_HOST "deltaproof-command-host" /* argv[0] of the process that becomes it */
/* Descriptors of that process: its instructions, its output, and the two pipes between it and the
 * program (serve alone). */
#define DP_COMMAND_TOLD_FD DP_PROCESSES_FIRST_FD
#define DP_COMMAND_PRINTED_FD (DP_PROCESSES_FIRST_FD + 1)
#define DP_COMMAND_TALK_FD (DP_PROCESSES_FIRST_FD + 2)

/* Its instructions: this, and after it the words, each ended by a zero. */
typedef struct {
    int64_t memory;
    int serve, nword;
    char in[4096], out[4096];
} dp_command_told;

/* The last of what it printed. */
typedef struct {
    int fd; /* -1: nobody writes any more */
    size_t n;
    char text[2048];
} dp_command_printed;

struct dp_command {
    int serve, nword;
    char **word;
    int64_t memory;
    char *folder, *in, *out;
    int lock;              /* the folder, locked as long as it is used */
    int seen[DP_NRESULTS]; /* results that the first OUT held */
    int called, runs;      /* runs: the process of serve is there */
    long ncall;
    dp_processes processes; /* while it runs */
    dp_command_printed printed;
    int talk;
};

/* ---- words, without a shell ------------------------------------------------------------------ */

/* Copies one word to `to` and returns where it ends; NULL: a quote or a backslash has no end. */
static const char *copy_word(const char *s, char *to) {
    char quote = 0;
    for (; *s && (quote || !strchr(" \t\n", *s)); s++) {
        if (*s == quote)
            quote = 0;
        else if (!quote && (*s == '\'' || *s == '"'))
            quote = *s;
        else if (*s != '\\' || quote == '\'')
            *to++ = *s;
        else if (!(*to++ = *++s))
            return NULL;
    }
    *to = 0;
    return quote ? NULL : s;
}

/* Splits the text; *n words, to be freed, each and all. NULL, and none: *e says what is
 * wrong with it. */
static char **command_split(const char *text, int *n, dp_err *e) {
    char **word = dp_calloc(strlen(text) / 2 + 2, sizeof *word);
    *n = 0;
    for (const char *s = text + strspn(text, " \t\n"); *s; s += strspn(s, " \t\n")) {
        word[*n] = dp_calloc(strlen(s) + 1, 1);
        s = copy_word(s, word[(*n)++]);
        if (s) continue;
        dp_free_list(word, *n);
        *n = 0;
        dp_fail(e, DP_EINPUT, "%.200s: a quote or a backslash has no end", text);
        return NULL;
    }
    if (*n && **word) return word;
    dp_free_list(word, *n);
    *n = 0;
    dp_fail(e, DP_EINPUT, "names no program");
    return NULL;
}

/* Does the word end in IN or OUT, alone or behind `=`? */
static int command_names(const char *word, const char *name) {
    const size_t n = strlen(word), m = strlen(name);
    return n >= m && !strcmp(word + n - m, name) && (n == m || word[n - m - 1] == '=');
}

static int may_run(const char *path) {
    struct stat st;
    return !stat(path, &st) && S_ISREG(st.st_mode) && !access(path, X_OK);
}

/* Is the program there: a file that may be run, named by a path or in PATH? */
static int command_is_there(const char *word) {
    const char *path = getenv("PATH");
    if (strchr(word, '/')) return may_run(word);
    DP_OWN char *list = dp_strdup(path ? path : "/bin:/usr/bin");
    char *rest = list;
    int found = 0;
    for (const char *dir; !found && (dir = strsep(&rest, ":"));) {
        DP_OWN char *file = dp_text_new("%s/%s", *dir ? dir : ".", word);
        found = may_run(file);
    }
    return found;
}

/* ---- the folder of its files ----------------------------------------------------------------- */

#define PREFIX "deltaproof-run-"
#define LEFT_S 60 /* a folder that is younger may not be locked yet */

static int remove_entry(const char *path, DP_UNUSED const struct stat *st, DP_UNUSED int kind,
                        DP_UNUSED struct FTW *at) {
    return remove(path), 0; /* what cannot be removed stays, and so does its folder */
}

static void remove_all(const char *path) { nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

/* Ours, and locked by nobody: the program that made it is gone. */
static void remove_if_left(const char *path) {
    struct stat st;
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return;
    if (!fstat(fd, &st) && st.st_uid == geteuid() && time(NULL) - st.st_mtime > LEFT_S &&
        !flock(fd, LOCK_EX | LOCK_NB))
        remove_all(path);
    close(fd);
}

static void remove_left(const char *top) {
    DIR *d = opendir(top);
    for (struct dirent *x = d ? readdir(d) : NULL; x; x = readdir(d)) {
        if (strncmp(x->d_name, PREFIX, strlen(PREFIX))) continue;
        DP_OWN char *path = dp_text_new("%s/%s", top, x->d_name);
        remove_if_left(path);
    }
    if (d) closedir(d);
}

/* With serve every call has other names: a late file is no file of the next call. */
static void name_files(struct dp_command *c) {
    char number[24] = "";
    if (c->serve) snprintf(number, sizeof number, "-%ld", c->ncall);
    free(c->in);
    free(c->out);
    c->in = dp_text_new("%s/in%s.safetensors", c->folder, number);
    c->out = dp_text_new("%s/out%s.safetensors", c->folder, number);
}

/* A new folder for its files, with the paths of IN and OUT; those that killed programs left are
 * removed. */
static dp_status command_folder_make(struct dp_command *c, dp_err *e) {
    const char *set = getenv("TMPDIR"), *top = set && *set ? set : "/tmp";
    if (c->serve && strpbrk(top, " \t"))
        return dp_fail(e, DP_EINPUT, "TMPDIR = %s: has a blank, which ends a path of --serve", top);
    remove_left(top);
    char *folder = dp_text_new("%s/" PREFIX "XXXXXX", top);
    if (!mkdtemp(folder)) {
        dp_fail(e, DP_EIO, "%s: a folder for files of a subject cannot be made: %s", top,
                strerror(errno));
        free(folder);
        return DP_EIO;
    }
    c->folder = folder;
    c->lock = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (c->lock >= 0) flock(c->lock, LOCK_EX | LOCK_NB);
    name_files(c);
    if (strlen(c->out) < sizeof((dp_command_told *)0)->out) return DP_OK;
    return dp_fail(e, DP_EINPUT, "TMPDIR: a path of %zu bytes is too long", strlen(c->out));
}

/* No file of the last call is left, and the next has names of its own. */
static void command_folder_clear(struct dp_command *c) {
    remove_all(c->in);
    remove_all(c->out);
    c->ncall++;
    name_files(c);
}

static void command_folder_remove(struct dp_command *c) {
    if (c->folder) remove_all(c->folder);
    if (c->lock >= 0) close(c->lock);
    free(c->folder);
    free(c->in);
    free(c->out);
}

/* ---- the process that becomes the command ---------------------------------------------------- */

/* A file of memory with what the process is told; -1: errno says why. */
static int command_tell(const struct dp_command *c) {
    dp_command_told t = {.memory = c->memory, .serve = c->serve, .nword = c->nword};
    snprintf(t.in, sizeof t.in, "%s", c->in);
    snprintf(t.out, sizeof t.out, "%s", c->out);
    const int fd = memfd_create("deltaproof-command", MFD_CLOEXEC);
    int bad = fd < 0 || write(fd, &t, sizeof t) != sizeof t;
    for (int i = 0; i < c->nword && !bad; i++) {
        const size_t n = strlen(c->word[i]) + 1;
        bad = write(fd, c->word[i], n) != (ssize_t)n;
    }
    if (!bad) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

/* Standard streams. Without serve both outputs go into one pipe. With it, input and output are the
 * pipes to the program. */
static void place_streams(int serve) {
    dup2(DP_COMMAND_PRINTED_FD, 2);
    dup2(serve ? DP_COMMAND_TALK_FD : DP_COMMAND_PRINTED_FD, 1);
    if (serve) dup2(DP_COMMAND_TALK_FD, 0);
    close(DP_COMMAND_TOLD_FD);
    close(DP_COMMAND_PRINTED_FD);
    if (serve) close(DP_COMMAND_TALK_FD);
}

static const dp_command_told *read_told(void) {
    struct stat st;
    if (fstat(DP_COMMAND_TOLD_FD, &st)) _exit(125);
    void *at = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, DP_COMMAND_TOLD_FD, 0);
    if (at == MAP_FAILED) _exit(125);
    return at;
}

/* Under a sanitizer the limit would count its shadow too. A thread that OpenBLAS is still starting
 * ends the process if it gets no memory. There prlimit sets the limit, after the shadow. */
enum { LIMITER_WORDS = 2 };
static int put_limiter(char **word, int64_t memory) {
    static char limit[40];
    if (memory <= 0) return 0;
    snprintf(limit, sizeof limit, "--data=%lld", (long long)memory);
    word[0] = "prlimit";
    word[1] = limit;
    return LIMITER_WORDS;
}

__attribute__((constructor)) static void command_main(int argc, char **argv) {
    if (argc != DP_PROCESSES_ARGC || strcmp(argv[0], DP_COMMAND_HOST)) return;
    const dp_command_told *t = read_told();
    char **word = calloc((size_t)t->nword + 1 + LIMITER_WORDS, sizeof *word);
    char *at = (char *)(t + 1);
    if (!word) _exit(125);
    int n = SHADOW_MEMORY ? put_limiter(word, t->memory) : 0;
    for (int i = 0; i < t->nword; at += strlen(at) + 1, i++)
        word[n++] = at;
    if (!t->serve) {
        setenv("DELTAPROOF_IN", t->in, 1);
        setenv("DELTAPROOF_OUT", t->out, 1);
    }
    place_streams(t->serve);
    dp_subject_limit_memory(SHADOW_MEMORY ? 0 : t->memory);
    /* NOLINTNEXTLINE(*NonNullParamChecker): one word at least */
    execvp(word[0], word);
    dprintf(2, "%s: %s\n", word[0], strerror(errno));
    _exit(127);
}

/* ---- start, talk, end ------------------------------------------------------------------------ */

#define ANSWER 4096   /* bytes of the longest line that serve may answer */
#define SHOWN_LINES 3 /* of what it printed */

/* ---- what it prints -------------------------------------------------------------------------- */

/* Takes what is there, and keeps the last of it. */
static void take_printed(dp_command_printed *p) {
    char piece[sizeof p->text / 2];
    ssize_t n;
    while (p->fd >= 0 && (n = read(p->fd, piece, sizeof piece)) != 0) {
        if (n < 0) return; /* no more as yet */
        if (p->n + (size_t)n > sizeof p->text - 1) {
            memmove(p->text, p->text + p->n / 2, p->n - p->n / 2);
            p->n -= p->n / 2;
        }
        memcpy(p->text + p->n, piece, (size_t)n);
        p->n += (size_t)n;
    }
    if (p->fd >= 0) close(p->fd);
    p->fd = -1;
}

/* ": last | lines", or "". */
static void last_lines(dp_command_printed *p, int lines, char *out, size_t size) {
    char text[sizeof p->text + 8], one[sizeof p->text * 2] = "";
    take_printed(p);
    memcpy(text, p->text, p->n);
    text[p->n] = 0;
    char *line[SHOWN_LINES] = {NULL}, *save;
    int n = 0;
    for (char *t = strtok_r(text, "\r\n", &save); t; t = strtok_r(NULL, "\r\n", &save))
        if (t[strspn(t, " \t")]) line[n++ % lines] = t + strspn(t, " \t");
    for (int i = n < lines ? 0 : n - lines; i < n; i++)
        dp_text_add(one, sizeof one, "%s%s", *one ? " | " : ": ", line[i % lines]);
    dp_text_printable(one, out, size);
}

/* ---- how it ended ---------------------------------------------------------------------------- */

static void say(dp_subject_ending *end, dp_subject_outcome outcome, const char *what,
                const char *more) {
    end->outcome = outcome;
    snprintf(end->why, sizeof end->why, "%s%s", what, more);
}

static void say_ended(struct dp_command *c, int status, dp_subject_ending *end) {
    char what[128], more[400];
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    const int refuses = !c->serve && code == DP_COMMAND_UNSUPPORTED;
    last_lines(&c->printed, refuses ? 1 : SHOWN_LINES, more, sizeof more);
    if (WIFSIGNALED(status)) {
        const char *name = sigabbrev_np(WTERMSIG(status));
        snprintf(what, sizeof what, "crashed: SIG%s%s", name ? name : "?",
                 dp_subject_signal_hint(WTERMSIG(status)));
        say(end, DP_SUBJECT_CRASHED, what, more);
    } else if (refuses) {
        say(end, DP_SUBJECT_REFUSED, *more ? more + 2 : "does not take this problem", "");
    } else if (code || c->serve) {
        snprintf(what, sizeof what, "ended with exit status %d%s", code,
                 c->serve ? " before it answered" : "");
        say(end, DP_SUBJECT_EXITED, what, more);
    }
}

static void say_hung(struct dp_command *c, double limit, dp_subject_ending *end) {
    char what[64], more[400];
    last_lines(&c->printed, SHOWN_LINES, more, sizeof more);
    snprintf(what, sizeof what, "did not %s within %g s", c->serve ? "answer" : "end", limit);
    say(end, DP_SUBJECT_HUNG, what, more);
}

static void say_answer(const char *answer, dp_subject_ending *end) {
    static const char unsupported[] = "unsupported ", failed[] = "failed ";
    char shown[400];
    dp_text_printable(answer, shown, sizeof shown);
    if (!strcmp(answer, "ok"))
        end->outcome = DP_SUBJECT_RETURNED;
    else if (!strncmp(answer, unsupported, sizeof unsupported - 1))
        say(end, DP_SUBJECT_REFUSED, shown + sizeof unsupported - 1, "");
    else if (!strncmp(answer, failed, sizeof failed - 1))
        say(end, DP_SUBJECT_SAYS_FAILED, "failed: ", shown + sizeof failed - 1);
    else {
        snprintf(end->why, sizeof end->why,
                 "answered '%.200s', which is none of: ok, unsupported WHY, failed WHY", shown);
        end->outcome = DP_SUBJECT_BAD_OUTPUT;
    }
}

/* ---- starting and stopping ------------------------------------------------------------------- */

static dp_status start(struct dp_command *c, dp_err *e) {
    int printed[2] = {-1, -1}, talk[2] = {-1, -1};
    const int told = command_tell(c);
    dp_status st = DP_OK;
    if (told < 0 || pipe2(printed, O_CLOEXEC) ||
        (c->serve && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, talk)))
        st = dp_fail(e, DP_EIO, "a process for a subject: %s", strerror(errno));
    const int fd[] = {told, printed[1], talk[1]};
    if (!st) st = dp_processes_start(&c->processes, DP_COMMAND_HOST, 1, fd, 2 + c->serve, e);
    const int no_more[] = {told, printed[1], talk[1], st ? printed[0] : -1, st ? talk[0] : -1};
    for (size_t i = 0; i < sizeof no_more / sizeof *no_more; i++)
        if (no_more[i] >= 0) close(no_more[i]);
    if (st) return st;
    fcntl(printed[0], F_SETFL, O_NONBLOCK);
    c->printed = (dp_command_printed){.fd = printed[0]};
    c->talk = talk[0];
    c->runs = 1;
    return DP_OK;
}

/* Ends the process of serve, if it is there. */
static void command_stop(struct dp_command *c) {
    if (!c->runs) return;
    dp_processes_end(&c->processes);
    if (c->printed.fd >= 0) close(c->printed.fd);
    if (c->talk >= 0) close(c->talk);
    c->printed.fd = c->talk = -1;
    c->runs = 0;
}

/* ---- one call -------------------------------------------------------------------------------- */

typedef struct {
    size_t n;
    char text[ANSWER];
} answer;

/* 1: a whole line arrived, or one that is too long, or another after it. */
static int take_answer(struct dp_command *c, answer *a) {
    if (c->talk < 0) return 0;
    const ssize_t n = recv(c->talk, a->text + a->n, sizeof a->text - 1 - a->n, MSG_DONTWAIT);
    if (n == 0) { /* how it ended is told by its process */
        close(c->talk);
        c->talk = -1;
    }
    if (n <= 0) return 0;
    a->n += (size_t)n;
    a->text[a->n] = 0;
    char *end = memchr(a->text, '\n', a->n);
    if (end == a->text + a->n - 1) *end = 0;
    return end || a->n == sizeof a->text - 1;
}

static void wait_for_news(const struct dp_command *c, double seconds) {
    struct pollfd f[] = {{.fd = c->processes.socket, .events = POLLIN},
                         {.fd = c->printed.fd, .events = POLLIN},
                         {.fd = c->talk, .events = POLLIN}};
    poll(f, 3, seconds < 0.2 ? (int)(seconds * 1e3) + 1 : 200);
}

/* To the end of the call. 1: the process is there, and may be called again. */
static int watch(struct dp_command *c, double limit, dp_subject_ending *end) {
    const double t0 = omp_get_wtime();
    answer a = {0};
    for (;;) {
        int which, status;
        const double rest = limit - (omp_get_wtime() - t0);
        const int came = dp_processes_wait(&c->processes, 0, &which, &status);
        if (came > 0)
            say_ended(c, status, end);
        else if (came < 0)
            say(end, DP_SUBJECT_EXITED, "ended the process that watches it", "");
        if (came) return 0;
        if (take_answer(c, &a)) {
            say_answer(a.text, end);
            return end->outcome != DP_SUBJECT_BAD_OUTPUT;
        }
        if (rest <= 0) {
            say_hung(c, limit, end);
            return 0;
        }
        take_printed(&c->printed);
        wait_for_news(c, rest);
    }
}

/* A line for serve; what it leaves unread is seen as no answer. */
static void tell_paths(const struct dp_command *c) {
    DP_OWN char *line = dp_text_new("%s %s\n", c->in, c->out);
    const size_t n = strlen(line);
    if (send(c->talk, line, n, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)n)
        shutdown(c->talk, SHUT_RD);
}

/* 1: a line is there already, which would be taken for the answer to this call. */
static int answered_unasked(const struct dp_command *c, dp_subject_ending *end) {
    char text[64], shown[200];
    const ssize_t n = recv(c->talk, text, sizeof text - 1, MSG_DONTWAIT);
    if (n <= 0) return 0;
    text[n] = 0;
    dp_text_printable(text, shown, sizeof shown);
    end->outcome = DP_SUBJECT_BAD_OUTPUT;
    snprintf(end->why, sizeof end->why, "answered '%s' before it was asked", shown);
    return 1;
}

/* One call, to its end or to the limit. Afterwards, without serve, none of its processes is left.
 * DP_EIO: no process could be had. */
static dp_status command_call(struct dp_command *c, double limit_s, dp_subject_ending *end,
                              dp_err *e) {
    *end = (dp_subject_ending){.outcome = DP_SUBJECT_RETURNED};
    const dp_status st = c->runs ? DP_OK : start(c, e);
    if (st) return st;
    c->printed.n = 0;
    int stays = !c->serve || !answered_unasked(c, end);
    if (stays && c->serve) tell_paths(c);
    if (stays) stays = watch(c, limit_s, end);
    if (!stays || !c->serve) command_stop(c);
    return DP_OK;
}

/* ---- IN and OUT ------------------------------------------------------------------------------ */

static dp_status command_write_inputs(const struct dp_command *c, const dp_problem *p,
                                      const dp_subject_call *call, dp_err *e) {
    DP_FREED(dp_tensorfile_free) dp_tensorfile f = {0};
    char ranks[16], chunk[16];
    snprintf(ranks, sizeof ranks, "%d", call->N);
    snprintf(chunk, sizeof chunk, "%d", call->chunk);
    if (call->base < DP_NBASES) dp_tensorfile_add_meta(&f, "base", dp_base_names[call->base]);
    dp_tensorfile_add_meta(&f, "claim", dp_formats[call->chain].name);
    dp_tensorfile_add_meta(&f, "ranks", ranks);
    if (call->chunk) dp_tensorfile_add_meta(&f, "chunk", chunk);
    dp_problem y = *p;
    if (call->pool) {
        y.s0 = NULL;
        dp_pool_add(&f, p, call->pool);
    }
    for (int i = 0; call->front && i < DP_NQKV; i++)
        if (call->front->conv[i]) y.in[dp_qkv_input(i)] = NULL;
    if (call->front)
        dp_front_add(&f, p, call->front, call->pool, (dp_format)dp_format_find(call->input_format));
    dp_inputs_add(&f, &y, (dp_format)dp_format_find(call->input_format), call->backward);
    return dp_safetensors_write(c->in, &f, e);
}

/* ---- outputs --------------------------------------------------------------------------------- */

static dp_status check_file(const char *path, dp_err *e) {
    struct stat st;
    if (lstat(path, &st))
        return dp_fail(e, DP_EINPUT, "OUT: %s",
                       errno == ENOENT ? "was not written" : strerror(errno));
    if (S_ISREG(st.st_mode)) return DP_OK;
    return dp_fail(e, DP_EINPUT, "OUT: is a %s, not a regular file",
                   S_ISLNK(st.st_mode)    ? "link"
                   : S_ISDIR(st.st_mode)  ? "folder"
                   : S_ISFIFO(st.st_mode) ? "pipe"
                                          : "device or socket");
}

static dp_status read_file(const char *path, dp_tensorfile *f, dp_err *e) {
    char *bytes;
    size_t n;
    dp_status st = check_file(path, e);
    if (!st) st = dp_input_read(path, dp_input_most(), &bytes, &n, e);
    if (st) return st;
    st = dp_safetensors_parse(bytes, n, "OUT", f, e);
    free(bytes);
    return st;
}

static void check_claim(const dp_tensorfile *f, const char *key, const char *claimed,
                        const char *option, dp_complaints *all) {
    const char *said = dp_tensorfile_meta(f, key);
    if (said && strcmp(said, claimed))
        dp_complain(all, "OUT: metadata `%s` = '%.80s', but it is judged as %s (%s)", key, said,
                    claimed, option);
}

static int is_vk(const dp_tensorfile *f, dp_complaints *all) {
    const char *said = dp_tensorfile_meta(f, "state_layout");
    if (said && strcmp(said, "kv") && strcmp(said, "vk"))
        dp_complain(all, "OUT: metadata `state_layout` = '%.80s' is neither kv nor vk", said);
    return said && !strcmp(said, "vk");
}

static int holds_result(const dp_tensorfile *f, int result) {
    for (int i = 0; i < f->ntensor; i++)
        if (dp_result_find(f->tensor[i].name) == result) return 1;
    return 0;
}

/* Where states lie in a pool, the last ones are in it. */
static int is_called_for(const dp_problem *p, const dp_subject_call *call, int result) {
    return dp_result_exists(p, result) && (call->backward || !dp_result_fields[result].backward) &&
           (!call->pool || result != DP_RESULT_FINAL_STATE);
}

/* A tensor, taken out of the file; an empty one: none is there. */
static dp_tensor take(dp_tensorfile *f, const char *name) {
    dp_tensor taken = {0};
    for (int i = 0; i < f->ntensor && !taken.name; i++)
        if (!strcmp(f->tensor[i].name, name)) {
            taken = f->tensor[i];
            f->tensor[i] = f->tensor[--f->ntensor];
        }
    return taken;
}

/* The data of a tensor that must be there with these axes; NULL: it is not. */
static double *take_data(dp_tensorfile *f, const char *name, int ndim, const int64_t *want,
                         dp_complaints *all) {
    dp_tensor t = take(f, name);
    char have[200], need[200];
    dp_tensor as = {.ndim = ndim};
    memcpy(as.shape, want, sizeof *want * (size_t)ndim);
    if (!t.name) {
        dp_complain(all, "OUT: tensor %s is missing", name);
        return NULL;
    }
    dp_case_shape_text(&t, have, sizeof have);
    dp_case_shape_text(&as, need, sizeof need);
    const int fits = t.dtype[0] != 'I' && dp_case_same_shape(&t, ndim, want, 0);
    if (!fits)
        dp_complain(all, "OUT: tensor %s: %s %s, must be floating %s", name, t.dtype, have, need);
    free(t.name);
    if (fits) return t.data;
    free(t.data);
    return NULL;
}

/* The states that convolution i left in slots, as those of sequences; padding's stay. Slots that
 * the call was not to write must have kept their bits. */
static double *take_conv_pool(dp_tensorfile *f, const dp_problem *p, const dp_subject_call *call,
                              int i, dp_complaints *all) {
    const dp_conv *v = call->front->conv[i];
    const dp_state_pool *pool = call->pool;
    const int64_t n = dp_conv_state_size(v), shape[] = {pool->slots, v->W - 1, v->D};
    char name[24];
    snprintf(name, sizeof name, "conv_pool_%s", dp_qkv_name(i));
    DP_OWN double *is = take_data(f, name, 3, shape, all);
    if (!is) return NULL;
    DP_OWN double *was = dp_conv_pool(pool, p->Nseq, n, call->front->before->of[i]);
    double *states = dp_copy(call->front->before->of[i], p->Nseq * n);
    for (int q = 0; q < p->Nseq; q++)
        if (pool->write[q] >= 0) {
            memcpy(states + q * n, is + pool->write[q] * n, sizeof *is * (size_t)n);
            memcpy(was + pool->write[q] * n, is + pool->write[q] * n, sizeof *is * (size_t)n);
        }
    for (int64_t z = 0; z < pool->slots * n; z++)
        if (is[z] != was[z] && !(isnan(is[z]) && isnan(was[z]))) {
            dp_complain(all,
                        "OUT: %s: slot %lld, which the call is not to write, was overwritten: "
                        "entry %lld was %g, is %g",
                        name, (long long)(z / n), (long long)(z % n), was[z], is[z]);
            break;
        }
    return states;
}

/* Results of convolutions before the recurrence, and the states that they pass on. */
static void take_front(dp_tensorfile *f, const dp_problem *p, const dp_subject_call *call,
                       dp_subject_result *out, dp_complaints *all) {
    for (int i = 0; i < DP_NQKV; i++) {
        const dp_conv *v = call->front->conv[i];
        char name[24];
        if (!v) continue;
        const int64_t y[] = {p->T, dp_qkv_heads(p, i), dp_qkv_width(p, i)},
                      state[] = {p->Nseq, v->W - 1, v->D};
        snprintf(name, sizeof name, "conv_state_%s", dp_qkv_name(i));
        out->y[i] = take_data(f, dp_qkv_name(i), 3, y, all);
        if (v->W > 1)
            out->conv.of[i] =
                call->pool ? take_conv_pool(f, p, call, i, all) : take_data(f, name, 3, state, all);
    }
}

static void check_pool(const dp_tensor *t, const dp_problem *p, const dp_state_pool *pool, int vk,
                       dp_complaints *all) {
    const int64_t want[] = {pool->slots, p->HV, vk ? p->V : p->K, vk ? p->K : p->V};
    char have[200];
    if (!t->name) {
        dp_complain(all, "OUT: tensor pool is missing");
        return;
    }
    dp_case_shape_text(t, have, sizeof have);
    if (t->dtype[0] == 'I' || !dp_case_same_shape(t, 4, want, 0))
        dp_complain(all,
                    "OUT: tensor pool: %s %s, must be the floating [%lld,%lld,%lld,%lld] of IN",
                    t->dtype, have, (long long)want[0], (long long)want[1], (long long)want[2],
                    (long long)want[3]);
}

/* The tensors that it claims to write, and those of its first OUT. */
static void check_there(const struct dp_command *c, const dp_subject *s, const dp_problem *p,
                        const dp_subject_call *call, const dp_tensorfile *f, dp_complaints *all) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if ((s->writes[i] || c->seen[i]) && is_called_for(p, call, i) && !holds_result(f, i))
            dp_complain(all, "OUT: tensor %s is missing%s", dp_result_fields[i].name,
                        s->writes[i] ? "" : ", which the first OUT held");
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (s->writes_stage[i] && (call->backward || !dp_stage_tensors[i].backward) &&
            !dp_tensor_find(f, dp_stage_tensors[i].name))
            dp_complain(all, "OUT: tensor %s is missing", dp_stage_tensors[i].name);
}

static dp_status check_outputs(struct dp_command *c, const dp_subject *s, const dp_problem *p,
                               const dp_subject_call *call, dp_tensorfile *f, dp_tensor *pool,
                               dp_subject_result *out, dp_err *e) {
    dp_tensor dout = {.name = (char *)"do"};
    const dp_tensorfile in = {
        .path = (char *)"IN", .ntensor = call->backward && p->dout, .tensor = &dout};
    dp_complaints all = {0};
    dp_stored_results given = {0};
    dp_tensors_rename(f, dp_by_gates(p));
    if (call->pool) *pool = take(f, DP_SUBJECT_POOL);
    if (call->front) take_front(f, p, call, out, &all);
    dp_outputs_check_names(&in, f, &all);
    check_there(c, s, p, call, f, &all);
    check_claim(f, "base", dp_base_names[call->base], "--base", &all);
    check_claim(f, "claim", dp_formats[call->chain].name, "--chain", &all);
    const int vk = is_vk(f, &all);
    if (call->pool) check_pool(pool, p, call->pool, vk, &all);
    const dp_status st = dp_complaints_end(&all, e);
    if (!st && call->pool && vk) dp_states_transpose(pool, p->K, p->V);
    return st ? st : dp_outputs_load(&in, f, p, call->N, vk, &given, e);
}

/* Its data are those of the result or stage from here on. */
static void move(struct dp_command *c, dp_tensor *t, dp_subject_result *out) {
    const int f = dp_result_find(t->name);
    *(f >= 0 ? &out->r.out[f] : &out->stage[dp_stage_tensor_find(t->name)]) = t->data;
    if (f >= 0 && !c->called) c->seen[f] = 1;
    t->data = NULL;
}

/* The base that OUT's metadata names. DP_EINPUT: none. */
static dp_status command_read_base(const struct dp_command *c, dp_base *base, dp_err *e) {
    DP_FREED(dp_tensorfile_free) dp_tensorfile f = {0};
    dp_status st = read_file(c->out, &f, e);
    const char *said = st ? NULL : dp_tensorfile_meta(&f, "base");
    *base = DP_NBASES;
    for (dp_base b = 0; said && b < DP_NBASES; b++)
        if (!strcmp(said, dp_base_names[b])) *base = b;
    if (!st && *base == DP_NBASES)
        st = dp_fail(e, DP_EINPUT,
                     said ? "OUT: metadata `base` = '%.80s' is none of " DP_BASE_WORDS
                          : "its OUT has no metadata `base`%s",
                     said ? said : "");
    return st;
}

/* Moves what OUT holds to *out, or says in its outcome what is wrong with it. */
static void command_read_outputs(struct dp_command *c, const dp_subject *s, const dp_problem *p,
                                 const dp_subject_call *call, dp_subject_result *out) {
    DP_FREED(dp_tensorfile_free) dp_tensorfile f = {0};
    dp_tensor pool = {0};
    dp_err e = {0};
    dp_status st = read_file(c->out, &f, &e);
    if (!st) st = check_outputs(c, s, p, call, &f, &pool, out, &e);
    for (int i = 0; i < f.ntensor && !st; i++)
        move(c, &f.tensor[i], out);
    if (!st) {
        c->called = 1;
        out->pool = pool.data;
        pool.data = NULL;
    }
    free(pool.name);
    free(pool.data);
    if (st) {
        for (char *x = e.msg; (x = strchr(x, '\n'));)
            *x = ';';
        out->outcome = DP_SUBJECT_BAD_OUTPUT;
        dp_text_printable(e.msg, out->why, sizeof out->why);
    }
}

/* ---- what is called -------------------------------------------------------------------------- */

/* A word with the path where it says IN or OUT; consumes the word. */
static char *with_paths(const struct dp_command *c, char *word) {
    const int in = command_names(word, "IN"), out = command_names(word, "OUT");
    if (!in && !out) return word;
    const int before = (int)(strlen(word) - strlen(in ? "IN" : "OUT"));
    char *text = dp_text_new("%.*s%s", before, word, in ? c->in : c->out);
    free(word);
    return text;
}

static void put_paths(struct dp_command *c, int appended) {
    for (int i = 0; i < c->nword; i++)
        c->word[i] = with_paths(c, c->word[i]);
    if (!appended) return;
    c->word = dp_realloc(c->word, sizeof *c->word * (size_t)(c->nword + 2));
    c->word[c->nword++] = dp_strdup(c->in);
    c->word[c->nword++] = dp_strdup(c->out);
}

/* Its words without folders and paths of a call: what records and messages call it. */
static void name_it(const struct dp_command *c, dp_subject *s) {
    char text[1024] = "";
    for (int i = 0; i < c->nword; i++)
        /* NOLINTNEXTLINE(*NullDereference): nword words, one at least */
        if (!command_names(c->word[i], "IN") && !command_names(c->word[i], "OUT"))
            dp_text_add(text, sizeof text, "%s%s", *text ? " " : "", dp_base_name(c->word[i]));
    dp_text_printable(text, s->name, sizeof s->name);
}

/* Which of the words IN and OUT it has: both, none, or, for serve, none. */
static dp_status check_words(const struct dp_command *c, int *appended, dp_err *e) {
    int in = 0, out = 0;
    for (int i = 0; i < c->nword; i++) {
        in |= command_names(c->word[i], "IN");
        out |= command_names(c->word[i], "OUT");
    }
    *appended = !c->serve && !in;
    if (c->serve && (in || out))
        return dp_fail(e, DP_EINPUT,
                       "--serve: the program is told IN and OUT on its standard input, a line for "
                       "each call: leave the words out");
    if (in != out)
        return dp_fail(e, DP_EINPUT, "--run: has the word %s, but not %s", in ? "IN" : "OUT",
                       in ? "OUT" : "IN");
    /* NOLINTNEXTLINE(*NullDereference): nword words, one at least */
    if (command_is_there(c->word[0])) return DP_OK;
    return dp_fail(e, DP_EINPUT, "%s: %.200s: no program of that name %s",
                   c->serve ? "--serve" : "--run", c->word[0],
                   strchr(c->word[0], '/') ? "is there" : "in PATH");
}

/* ---- what it claims -------------------------------------------------------------------------- */

static dp_status read_claim(const dp_command_claim *q, dp_subject *s, dp_err *e) {
    DP_OWN char *writes = dp_strdup(q->writes ? q->writes : "o");
    s->memory = q->memory > 0 ? q->memory : dp_memory_bytes();
    s->base = q->base;
    s->chain = q->chain;
    s->max_ranks = q->ranks;
    s->path = dp_strdup(q->text);
    s->design = q->design ? dp_strdup(q->design) : NULL;
    dp_status st = dp_subject_read_writes("--writes", writes, s, e);
    if (!st && s->writes_states)
        st = dp_fail(e, DP_EINPUT,
                     "--writes: states of every token are taken from a library alone; a session "
                     "runs the accepted tokens of a program again");
    return st;
}

/* ---- what it says that it claims ------------------------------------------------------------- */

enum { ASKED_T = 16, ASKED_K = 32 }; /* of a problem that most kernels take */

static dp_problem small_problem(void) {
    dp_problem p = {.T = ASKED_T,
                    .H = 1,
                    .HV = 1,
                    .K = ASKED_K,
                    .V = ASKED_K,
                    .R = 1,
                    .Nseq = 1,
                    .model = DP_KDA,
                    .gate = DP_GATE_LOG,
                    .scale = 0.125};
    p.cu = dp_calloc(2, sizeof *p.cu);
    p.cu[1] = ASKED_T;
    for (int i = DP_INPUT_Q; i <= DP_INPUT_BETA; i++) {
        const int64_t n = dp_input_count(&p, i);
        double *x = p.in[i] = dp_doubles(n);
        for (int64_t z = 0; z < n; z++)
            x[z] = i == DP_INPUT_G      ? -0.125
                   : i == DP_INPUT_BETA ? 0.5
                                        : (double)(z * (i + 3) % 7 - 3) / 16;
    }
    return p;
}

/* s->base, from OUT's metadata of one call on a small problem, whose IN names no base. Its process
 * ends: the first call that is judged is a process's first, too. */
static dp_status ask_base(struct dp_command *c, double limit_s, dp_subject *s, dp_err *e) {
    dp_problem p = small_problem();
    dp_err why = {0};
    dp_subject_ending end = {.outcome = DP_SUBJECT_RETURNED};
    const dp_subject_call call = {
        .input_format = "fp32", .N = 1, .base = DP_NBASES, .chain = s->chain};
    dp_status st = command_write_inputs(c, &p, &call, e);
    dp_problem_free(&p);
    if (!st) st = command_call(c, limit_s > 0 ? limit_s : DP_SUBJECT_LIMIT_S, &end, e);
    if (st) return st;
    if (end.outcome == DP_SUBJECT_RETURNED) st = command_read_base(c, &s->base, &why);
    command_folder_clear(c);
    command_stop(c);
    if (end.outcome == DP_SUBJECT_RETURNED && !st) return DP_OK;
    return dp_fail(e, DP_EINPUT,
                   "--%s: give --base, the formats that the program claims (" DP_BASE_WORDS
                   "); asked for it with a small problem: %.600s",
                   c->serve ? "serve" : "run", st ? why.msg : end.why);
}

dp_status dp_command_open(const dp_command_claim *q, dp_subject *s, dp_err *e) {
    struct dp_command *c = dp_calloc(1, sizeof *c);
    dp_err why = {0};
    int appended = 0;
    dp_design design;
    *s = (dp_subject){.command = c};
    c->serve = q->serve;
    c->printed.fd = c->talk = c->lock = -1;
    dp_status st = read_claim(q, s, e);
    c->memory = s->memory;
    if (!st && !(c->word = command_split(q->text, &c->nword, &why)))
        st = dp_fail(e, DP_EINPUT, "%s: %s", q->serve ? "--serve" : "--run", why.msg);
    name_it(c, s);
    if (!st) st = check_words(c, &appended, e);
    if (!st) st = command_folder_make(c, e);
    if (!st) put_paths(c, appended);
    if (!st && q->base == DP_NBASES) st = ask_base(c, q->limit_s, s, e);
    if (!st && q->design) st = dp_design_parse(q->design, s->base, &design, e);
    if (st) dp_subject_close(s);
    return st;
}

void dp_command_close(struct dp_command *c) {
    command_stop(c);
    command_folder_remove(c);
    dp_free_list(c->word, c->nword);
    free(c);
}

/* ---- one call -------------------------------------------------------------------------------- */

dp_status dp_command_run(const dp_subject *s, const dp_problem *p, const dp_subject_call *call,
                         dp_subject_result *out, dp_err *e) {
    struct dp_command *c = s->command;
    dp_subject_ending end;
    const double t0 = omp_get_wtime();
    dp_status st = command_write_inputs(c, p, call, e);
    if (!st) st = command_call(c, call->limit_s, &end, e);
    if (st) return st;
    out->outcome = end.outcome;
    memcpy(out->why, end.why, sizeof out->why);
    if (end.outcome == DP_SUBJECT_RETURNED) command_read_outputs(c, s, p, call, out);
    command_folder_clear(c);
    out->seconds = omp_get_wtime() - t0;
    return DP_OK;
}
