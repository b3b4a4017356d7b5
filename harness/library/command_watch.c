/* Starts a command, talks to it, and says how its call ended (command_parts.h). */
#define _GNU_SOURCE
#include "command_parts.h"
#include "ref/vocabulary/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

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
    size_t used = 0;
    for (int i = n < lines ? 0 : n - lines; i < n; i++)
        used += (size_t)snprintf(one + used, sizeof one - used, "%s%s", used ? " | " : ": ",
                                 line[i % lines]);
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
    const int told = dp_command_tell(c);
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

void dp_command_stop(struct dp_command *c) {
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
    const double t0 = dp_subject_now();
    answer a = {0};
    for (;;) {
        int which, status;
        const double rest = limit - (dp_subject_now() - t0);
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
    char *line;
    const int n = asprintf(&line, "%s %s\n", c->in, c->out);
    if (n < 0) abort();
    if (send(c->talk, line, (size_t)n, MSG_NOSIGNAL | MSG_DONTWAIT) != n)
        shutdown(c->talk, SHUT_RD);
    free(line);
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

dp_status dp_command_call(struct dp_command *c, double limit_s, dp_subject_ending *end, dp_err *e) {
    *end = (dp_subject_ending){.outcome = DP_SUBJECT_RETURNED};
    const dp_status st = c->runs ? DP_OK : start(c, e);
    if (st) return st;
    c->printed.n = 0;
    int stays = !c->serve || !answered_unasked(c, end);
    if (stays && c->serve) tell_paths(c);
    if (stays) stays = watch(c, limit_s, end);
    if (!stays || !c->serve) dp_command_stop(c);
    return DP_OK;
}
