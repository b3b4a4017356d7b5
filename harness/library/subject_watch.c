/* Starts the processes that load a library, watches them, and says how they ended
 * (subject_parts.h). */
#define _GNU_SOURCE
#include "ref/vocabulary/text.h"
#include "subject_parts.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- what the processes say of themselves ---------------------------------------------------- */

/* One look, after which it cannot change; numbers outside of what they may be are no statement. */
static dp_subject_state look(const dp_subject_memory *s, int r) {
    char why[sizeof((dp_subject_state *)0)->why];
    dp_subject_state st;
    memcpy(&st, &((const dp_subject_said *)s->map)->state[r], sizeof st);
    st.why[sizeof st.why - 1] = 0;
    dp_text_printable(st.why, why, sizeof why);
    memcpy(st.why, why, sizeof why);
    if ((int)st.at < DP_PHASE_IDLE || st.at > DP_PHASE_REFUSED) st.at = DP_PHASE_RUNNING;
    if (st.region < 0 || st.region >= s->c->nregion) st.region = -1;
    if (st.call < 0 || st.call >= s->c->calls) st.call = 0;
    return st;
}

static void text_of(char *text, size_t size) {
    char shown[512];
    text[size - 1] = 0;
    dp_text_printable(text, shown, size < sizeof shown ? size : sizeof shown);
    memcpy(text, shown, size < sizeof shown ? size : sizeof shown);
}

dp_subject_about dp_subject_look_about(const dp_subject_memory *s) {
    dp_subject_about a;
    memcpy(&a, &((const dp_subject_said *)s->map)->about, sizeof a);
    text_of(a.name, sizeof a.name);
    text_of(a.base, sizeof a.base);
    text_of(a.chain, sizeof a.chain);
    text_of(a.writes, sizeof a.writes);
    text_of(a.design, sizeof a.design);
    return a;
}

const char *dp_subject_signal_hint(int sig) {
    return sig == SIGKILL ? " (from outside: the machine may have run out of memory)" : "";
}

static const char *signal_name(int sig) {
    const char *n = sigabbrev_np(sig);
    return n ? n : "?";
}

const char *dp_subject_base_name(const char *path) {
    return strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
}

void dp_subject_on_rank(const dp_subject_memory *s, int r, char *text, size_t size) {
    if (s->c->processes > 1)
        snprintf(text, size, "rank %d ", r);
    else
        *text = 0;
}

/* ---- processes ------------------------------------------------------------------------------- */

double dp_subject_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void say_signal(const dp_subject_memory *s, int r, int sig, dp_subject_ending *end) {
    const dp_subject_state st = look(s, r);
    const size_t size = sizeof end->why;
    char who[24], at[288] = "";
    dp_subject_on_rank(s, r, who, sizeof who);
    if (st.have_fault && st.pc && st.pc < 1u << 30)
        snprintf(at, sizeof at, ", at %.255s+0x%llx", dp_subject_base_name(s->c->lib),
                 (unsigned long long)st.pc);
    end->outcome = DP_SUBJECT_CRASHED;
    if (!st.have_fault)
        snprintf(end->why, size, "%scrashed: SIG%s%s%s", who, signal_name(sig), at,
                 dp_subject_signal_hint(sig));
    else if (st.region < 0)
        snprintf(end->why, size, "%scrashed: SIG%s at address 0x%llx%s", who, signal_name(sig),
                 (unsigned long long)st.address, at);
    else {
        const dp_subject_region *x = &s->c->region[r][st.region];
        end->outcome = DP_SUBJECT_OUT_OF_BOUNDS;
        if (x->input && !st.before && st.wrote && st.off < x->n * 8 && st.address)
            snprintf(end->why, size, "%swrote to the input %s%s", who, x->name, at);
        else
            snprintf(end->why, size, "%s%s %lld bytes %s of %s%s", who, st.wrote ? "wrote" : "read",
                     (long long)st.off, st.before ? "before the beginning" : "past the end",
                     x->name, at);
    }
}

/* One process of the group has ended. 1: that decides. */
static int ended(const dp_subject_memory *s, int r, int status, dp_subject_ending *end) {
    const dp_subject_state st = look(s, r);
    const size_t size = sizeof end->why;
    char who[24];
    dp_subject_on_rank(s, r, who, sizeof who);
    if (WIFSIGNALED(status))
        say_signal(s, r, WTERMSIG(status), end);
    else if (st.at == DP_PHASE_REFUSED) {
        end->outcome = DP_SUBJECT_REFUSED;
        snprintf(end->why, size, "%s%.400s", who, st.why);
    } else if (st.at != DP_PHASE_DONE) {
        end->outcome = DP_SUBJECT_EXITED;
        snprintf(end->why, size, "%sended its process with exit status %d before it returned", who,
                 WEXITSTATUS(status));
    } else if (st.ret == DP_SUBJECT_UNSUPPORTED) {
        end->outcome = DP_SUBJECT_REFUSED;
        snprintf(end->why, size, "%.400s", st.why[0] ? st.why : "does not take this problem");
    } else if (st.ret) {
        end->outcome = DP_SUBJECT_SAYS_FAILED;
        snprintf(end->why, size, "%sfailed: returned %d%s%.400s", who, st.ret,
                 st.why[0] ? ": " : "", st.why);
    } else
        return 0;
    end->call = st.call;
    return 1;
}

/* A rank that has returned leaves the others waiting for ever in a collective that it did not
 * enter. */
static int deserted(const dp_subject_memory *s, const char *alive, dp_subject_ending *end) {
    int waiting = 0, top = 0, gone = -1;
    for (int r = 0; r < s->c->processes; r++) {
        const dp_subject_state st = look(s, r);
        if (!alive[r] || st.at != DP_PHASE_GATHERING) continue;
        waiting++;
        if (st.gathers > top) top = st.gathers;
    }
    for (int r = 0; r < s->c->processes; r++)
        if (!alive[r] && look(s, r).gathers < top) gone = r;
    if (!waiting || gone < 0) return 0;
    const int calls = look(s, gone).gathers;
    end->outcome = DP_SUBJECT_HUNG;
    end->call = look(s, gone).call;
    snprintf(
        end->why, sizeof end->why,
        "would wait for ever: rank %d returned after %d calls of all_gather, others are in call %d",
        gone, calls, calls + 1);
    return 1;
}

static void say_hung(const dp_subject_memory *s, const char *alive, double limit,
                     dp_subject_ending *end) {
    int n = snprintf(end->why, sizeof end->why, "did not return within %g s", limit);
    const int size = (int)sizeof end->why;
    end->outcome = DP_SUBJECT_HUNG;
    end->call = look(s, 0).call;
    for (int r = 0; r < s->c->processes && s->c->processes > 1; r++) {
        const dp_subject_state st = look(s, r);
        if (alive[r]) end->call = st.call;
        const char *what = !alive[r]                     ? "returned"
                           : st.at == DP_PHASE_GATHERING ? "waits in all_gather"
                           : st.at == DP_PHASE_LOADING   ? "is being loaded"
                                                         : "computes";
        if (n < size)
            n +=
                snprintf(end->why + n, (size_t)(size - n), "%s rank %d %s", r ? "," : ":", r, what);
        if (n < size && st.at == DP_PHASE_GATHERING && alive[r])
            n += snprintf(end->why + n, (size_t)(size - n), " number %d", st.gathers);
    }
}

static void say_unwatched(int status, dp_subject_ending *end) {
    end->outcome = DP_SUBJECT_EXITED;
    if (WIFSIGNALED(status))
        snprintf(end->why, sizeof end->why, "ended the process that watches it: SIG%s",
                 signal_name(WTERMSIG(status)));
    else
        snprintf(end->why, sizeof end->why, "the process that watches it ended with exit status %d",
                 WEXITSTATUS(status));
}

/* Starts all processes and waits for them, for the limit, or for the first that fails. Then it ends
 * the others, with all processes that they started. */
dp_status dp_subject_run_processes(const dp_subject_memory *s, double limit, dp_subject_ending *end,
                                   dp_err *e) {
    const int n = s->c->processes, fd[] = {s->given, s->made};
    const double t0 = dp_subject_now();
    char alive[DP_SUBJECT_MAX_RANKS];
    dp_processes group;
    int left = n, stop = 0, r, status;
    *end = (dp_subject_ending){.outcome = DP_SUBJECT_RETURNED};
    const dp_status st = dp_processes_start(&group, DP_SUBJECT_HOST, n, fd, 2, e);
    if (st) return st;
    memset(alive, 1, sizeof alive);
    while (left && !stop) {
        const double rest = limit - (dp_subject_now() - t0);
        const int came = dp_processes_wait(&group, rest < 0.02 ? rest : 0.02, &r, &status);
        if (came < 0) {
            say_unwatched(status, end);
            stop = 1;
        } else if (came && r >= 0 && r < n && alive[r]) {
            alive[r] = 0;
            left--;
            stop = ended(s, r, status, end);
        } else if (rest <= 0) {
            say_hung(s, alive, limit, end);
            stop = 1;
        }
        if (left && !stop) stop = deserted(s, alive, end);
    }
    dp_processes_end(&group);
    return DP_OK;
}
