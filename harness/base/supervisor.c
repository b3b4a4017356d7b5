/* harness/base/supervisor.c - groups of processes that end as a whole (supervisor.h). */
#include "supervisor.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <omp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SUPERVISOR "deltaproof-supervisor" /* argv[0] of the process that watches */
#define BLAS_THREADS "OPENBLAS_NUM_THREADS"
#define ONE_THREAD "DELTAPROOF_ONE_THREAD" /* that variable is ours */
#define END_S 10.0                         /* killed processes that hold a device take time */
#define MOST_PROCESSES 4096

typedef struct {
    int which, status;
} report;

static void nap(double seconds) {
    const struct timespec t = {.tv_nsec = (long)(seconds * 1e9)};
    nanosleep(&t, NULL);
}

/* ---- processes of this machine --------------------------------------------------------------- */

typedef struct {
    pid_t pid, parent, session;
    int ours;
} process;

static int read_process(const char *name, process *p) {
    char path[64], text[512];
    if (!isdigit((unsigned char)*name)) return 0;
    snprintf(path, sizeof path, "/proc/%.20s/stat", name);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    const ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    const char *after = strrchr(text, ')'); /* the name may hold anything */
    char state;
    int group;
    /* NOLINTNEXTLINE(cert-err34-c): a folder of /proc, all digits */
    *p = (process){.pid = atoi(name)};
    if (!after) return 0;
    /* NOLINTNEXTLINE(cert-err34-c): the kernel wrote them */
    return sscanf(after + 1, " %c %d %d %d", &state, &p->parent, &group, &p->session) == 4;
}

static int list_processes(process **list) {
    int n = 0, room = 0;
    DIR *d = opendir("/proc");
    *list = NULL;
    if (!d) return 0;
    for (struct dirent *x = readdir(d); x; x = readdir(d)) {
        if (n == room) {
            room = room ? 2 * room : 256;
            *list = dp_realloc(*list, sizeof **list * (size_t)room);
        }
        n += read_process(x->d_name, &(*list)[n]);
    }
    closedir(d);
    return n;
}

/* Marks what descends from `root`, without it, and what is in its session. */
static int mark_below(process *list, int n, pid_t root) {
    int found = 0, before = -1;
    for (int i = 0; i < n; i++) {
        list[i].ours = list[i].parent == root || list[i].session == root;
        if (list[i].pid == root) list[i].ours = 0;
        found += list[i].ours;
    }
    while (found != before) {
        before = found;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n && !list[i].ours && list[i].pid != root; j++)
                if (list[j].ours && list[j].pid == list[i].parent) found += list[i].ours = 1;
    }
    return found;
}

/* Sends it to all below root; the number of processes that had not got it before. */
static int signal_below(pid_t root, int sig, pid_t *seen, int *nseen) {
    process *list;
    const int n = list_processes(&list);
    int fresh = 0;
    mark_below(list, n, root);
    for (int i = 0; i < n; i++) {
        int known = 0;
        if (!list[i].ours) continue;
        for (int k = 0; k < *nseen; k++)
            known |= seen[k] == list[i].pid;
        kill(list[i].pid, sig);
        fresh += !known;
        if (!known && *nseen < MOST_PROCESSES) seen[(*nseen)++] = list[i].pid;
    }
    free(list);
    return fresh;
}

/* All are stopped before any is killed: one that is stopped starts no other. */
static void kill_below(pid_t root) {
    pid_t seen[MOST_PROCESSES];
    int n = 0;
    if (root <= 1) return;
    for (int i = 0; i < 100 && signal_below(root, SIGSTOP, seen, &n); i++)
        continue;
    n = 0;
    signal_below(root, SIGKILL, seen, &n);
}

/* ---- in the supervisor ----------------------------------------------------------------------- */

typedef struct {
    int socket, signals, n, nfd;
    const char *name;
    pid_t parent, *pid;
} watch;

/* In the child: it becomes process i, whose constructor comes behind supervise. */
static void become(const watch *w, int i, char **argv) {
    static char number[16];
    sigset_t none;
    snprintf(number, sizeof number, "%d", i);
    argv[0] = (char *)w->name;
    argv[1] = number;
    argv[2] = NULL;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NAME, w->name);
    close(w->socket);
    close(w->signals);
    if (getenv(ONE_THREAD)) {
        unsetenv(ONE_THREAD);
        unsetenv(BLAS_THREADS);
    }
    free(w->pid);
}

static void tell(const watch *w, int which, int status) {
    const report r = {which, status};
    if (send(w->socket, &r, sizeof r, MSG_NOSIGNAL) != sizeof r) return; /* then nobody asks */
}

/* Reports members of the group that ended, and reaps their orphans. 0: there is none left. */
static int reap(watch *w) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (int i = 0; i < w->n; i++)
            if (w->pid[i] == pid) {
                w->pid[i] = 0;
                tell(w, i, status);
            }
    return pid == 0;
}

static void end_all(watch *w) {
    for (double t0 = omp_get_wtime(); reap(w) && omp_get_wtime() - t0 < END_S;) {
        kill_below(getpid());
        nap(0.001);
    }
}

/* Until the program that wants them has closed its end of the socket, or is gone. */
static void watch_group(watch *w) {
    struct pollfd f[2] = {{.fd = w->socket, .events = POLLIN},
                          {.fd = w->signals, .events = POLLIN}};
    char buffer[sizeof(struct signalfd_siginfo)];
    for (;;) {
        const int ready = poll(f, 2, 200);
        if (ready > 0 && f[0].revents) return;
        if (ready > 0 && read(w->signals, buffer, sizeof buffer) < 0 && errno != EAGAIN) return;
        reap(w);
        if (getppid() != w->parent) return;
    }
}

static int signal_descriptor(void) {
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_SETMASK, &child, NULL);
    return signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* argv: its name, that of the processes, their number, their descriptors, the parent. Its socket
 * comes behind their descriptors. */
__attribute__((constructor(101))) static void supervise(int argc, char **argv) {
    if (argc != DP_PROCESSES_ARGC || strcmp(argv[0], SUPERVISOR)) return;
    /* NOLINTNEXTLINE(cert-err34-c): words that this program wrote */
    const int n = atoi(argv[2]), nfd = atoi(argv[3]);
    watch w = {.name = argv[1],
               .n = n,
               .nfd = nfd,
               .socket = DP_PROCESSES_FIRST_FD + nfd,
               .signals = signal_descriptor(),
               /* NOLINTNEXTLINE(cert-err34-c): the same */
               .parent = atoi(argv[4]),
               .pid = calloc((size_t)n, sizeof *w.pid)};
    if (!w.pid || w.signals < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1)) _exit(125);
    for (int i = 0; i < n; i++) {
        w.pid[i] = fork();
        if (!w.pid[i]) {
            become(&w, i, argv);
            return;
        }
        if (w.pid[i] < 0) tell(&w, i, 125 << 8);
    }
    for (int fd = DP_PROCESSES_FIRST_FD; fd < w.socket; fd++)
        close(fd);
    watch_group(&w);
    end_all(&w);
    _exit(0);
}

/* ---- in the program -------------------------------------------------------------------------- */

/* In the child of vfork: places the group's descriptors, in two steps because a wanted number may
 * be in use. */
static void place_descriptors(const int *fd, int nfd, int socket) {
    int copy[DP_PROCESSES_MOST_FDS + 1];
    const int null = open("/dev/null", O_RDONLY);
    for (int i = 0; i <= nfd; i++)
        copy[i] = fcntl(i < nfd ? fd[i] : socket, F_DUPFD, 16);
    dup2(null, 0);
    dup2(2, 1); /* standard output is the record's */
    for (int i = 0; i <= nfd; i++)
        dup2(copy[i], DP_PROCESSES_FIRST_FD + i);
    if (close_range((unsigned)(DP_PROCESSES_FIRST_FD + nfd + 1), ~0u, 0))
        for (int i = DP_PROCESSES_FIRST_FD + nfd + 1; i < 1024; i++)
            close(i);
}

/* The environment of a supervisor: OpenBLAS starts threads where it is loaded, which spin. */
static char **with_one_thread(void) {
    static char ours[] = ONE_THREAD "=1", one[] = BLAS_THREADS "=1";
    int n = 0;
    while (environ[n])
        n++;
    char **all = dp_realloc(NULL, (size_t)(n + 3) * sizeof *all);
    memcpy(all, environ, (size_t)n * sizeof *all);
    if (!getenv(BLAS_THREADS)) all[n++] = ours, all[n++] = one;
    all[n] = NULL;
    return all;
}

static void no_signals(void) {
    for (int sig = 1; sig < 32; sig++)
        signal(sig, SIG_DFL);
}

dp_status dp_processes_start(dp_processes *g, const char *name, int n, const int *fd, int nfd,
                             dp_err *e) {
    int pair[2];
    char count[16], fds[16], self[16];
    *g = (dp_processes){.socket = -1};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
        return dp_fail(e, DP_EIO, "a process for a subject: %s", strerror(errno));
    snprintf(count, sizeof count, "%d", n);
    snprintf(fds, sizeof fds, "%d", nfd);
    snprintf(self, sizeof self, "%d", (int)getpid());
    char *const argv[] = {SUPERVISOR, (char *)name, count, fds, self, NULL};
    char **env = with_one_thread();
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* no handler of ours in the child */
    /* NOLINTNEXTLINE(*insecureAPI.vfork,*unix.Vfork): as above; parent and child write this */
    g->supervisor = vfork();
    if (g->supervisor == 0) {
        setsid();
        place_descriptors(fd, nfd, pair[1]);
        no_signals();
        execve("/proc/self/exe", argv, env);
        _exit(125);
    }
    const int why = errno;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    close(pair[1]);
    free(env);
    g->socket = pair[0];
    if (g->supervisor > 0) return DP_OK;
    close(g->socket);
    return dp_fail(e, DP_EIO, "a process for a subject: %s", strerror(why));
}

int dp_processes_wait(dp_processes *g, double seconds, int *which, int *status) {
    struct pollfd f = {.fd = g->socket, .events = POLLIN};
    report r;
    const int ready = poll(&f, 1, seconds > 0 ? (int)(seconds * 1e3) + 1 : 0);
    if (ready <= 0) return 0;
    const ssize_t n = recv(g->socket, &r, sizeof r, 0);
    *which = r.which;
    *status = r.status;
    if (n == (ssize_t)sizeof r) return 1;
    *status = 0;
    if (waitpid(g->supervisor, status, 0) == g->supervisor) kill_below(g->supervisor);
    g->supervisor = 0;
    return -1;
}

void dp_processes_end(dp_processes *g) {
    int status;
    close(g->socket); /* the supervisor reads its end */
    g->socket = -1;
    if (!g->supervisor) return;
    kill(g->supervisor, SIGCONT); /* somebody may have stopped it */
    for (double t0 = omp_get_wtime(); omp_get_wtime() - t0 < END_S + 2; nap(0.0005))
        if (waitpid(g->supervisor, &status, WNOHANG) == g->supervisor) {
            if (!WIFEXITED(status)) kill_below(g->supervisor);
            return;
        }
    kill_below(g->supervisor); /* stopped, or waiting for a process that cannot die */
    kill(g->supervisor, SIGKILL);
    waitpid(g->supervisor, &status, 0);
}
