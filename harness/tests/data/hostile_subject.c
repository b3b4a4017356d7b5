/* harness/subject/example_ranks.c, and what a library can do to the program that loads it, chosen
 * by the environment variable HOSTILE. Processes that it starts write their numbers to
 * $HOSTILE_PIDS. */
#define _GNU_SOURCE
#define deltaproof_subject_run good_run
#define deltaproof_subject_about good_about
#include "../../subject/example_ranks.c"
#undef deltaproof_subject_run
#undef deltaproof_subject_about
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

static int is(const char *name) {
    const char *h = getenv("HOSTILE");
    return h && !strcmp(h, name);
}
static void note_pid(void) {
    const char *path = getenv("HOSTILE_PIDS");
    const int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
    char text[24];
    const int n = snprintf(text, sizeof text, "%d\n", (int)getpid());
    if (fd < 0 || write(fd, text, (size_t)n) != n) return;
    close(fd);
}
/* 1 in a new process. The old one goes on when that has noted its number: else it may be ended
 * before it is known to have been there. */
static int start(int ready[2]) {
    char byte;
    if (pipe(ready)) return 0;
    if (!fork()) return 1;
    close(ready[1]);
    if (read(ready[0], &byte, 1) < 0) perror("hostile");
    close(ready[0]);
    return 0;
}
static void is_ready(const int ready[2]) {
    note_pid();
    if (write(ready[1], "x", 1) != 1) perror("hostile");
}
/* A process that nothing ends by itself: another session, no parent, no signal at its parent's end.
 */
static void start_daemon(void) {
    int ready[2];
    if (!start(ready)) return;
    setsid();
    if (fork()) _exit(0);
    prctl(PR_SET_PDEATHSIG, 0);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    is_ready(ready);
    for (int i = 0; i < 300; i++)
        sleep(1);
    _exit(0);
}
/* Each starts another before it ends: for some seconds there are always new ones. */
static void start_runners(void) {
    int ready[2];
    if (!start(ready)) return;
    is_ready(ready);
    for (int i = 0; i < 2000; i++) {
        if (i % 200 == 199) note_pid();
        if (fork()) _exit(0);
        usleep(1000);
    }
    note_pid();
    for (int i = 0; i < 300; i++)
        sleep(1);
    _exit(0);
}
/* Every file of memory that is open, by number and by what the kernel shows of it. */
static void truncate_all(void) {
    for (int fd = 3; fd < 256; fd++)
        if (ftruncate(fd, 0)) continue;
    DIR *d = opendir("/proc/self/map_files");
    for (struct dirent *x = d ? readdir(d) : NULL; x; x = readdir(d)) {
        char path[600], to[600];
        snprintf(path, sizeof path, "/proc/self/map_files/%s", x->d_name);
        const ssize_t n = readlink(path, to, sizeof to - 1);
        if (n <= 0) continue;
        to[n] = 0;
        const int fd = strstr(to, "memfd:deltaproof") ? open(path, O_RDWR) : -1;
        if (fd >= 0 && !ftruncate(fd, 0)) fprintf(stderr, "hostile: truncated %s\n", to);
    }
    if (d) closedir(d);
}
/* All that is shared and can be written, and what was made unwritable if that can be undone. */
static void scribble(int byte) {
    FILE *f = fopen("/proc/self/maps", "r");
    char line[600], access[8];
    unsigned long from, to;
    while (f && fgets(line, sizeof line, f)) {
        if (!strstr(line, "memfd:deltaproof")) continue;
        if (sscanf(line, "%lx-%lx %7s", &from, &to, access) != 3) continue;
        if (access[1] != 'w' && mprotect((void *)from, to - from, PROT_READ | PROT_WRITE)) continue;
        memset((void *)from, byte, to - from);
    }
    if (f) fclose(f);
}
static void *eat(void *unused) {
    (void)unused;
    for (size_t n = 0; n < (size_t)1 << 36; n += 1 << 24) {
        char *x = malloc(1 << 24);
        if (!x) abort();
        memset(x, 1, 1 << 24);
    }
    return NULL;
}
static void misbehave(const char *when) {
    char name[64];
    const struct {
        const char *what;
        void (*does)(void);
    } plain[] = {{"daemon", start_daemon}, {"runners", start_runners}, {"truncate", truncate_all}};
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) {
        snprintf(name, sizeof name, "%s-%s", plain[i].what, when);
        if (is(name)) plain[i].does();
    }
    snprintf(name, sizeof name, "hang-%s", when);
    if (is(name))
        for (;;)
            pause();
    snprintf(name, sizeof name, "ones-%s", when);
    if (is(name)) scribble(0xff);
    snprintf(name, sizeof name, "zeros-%s", when);
    if (is(name)) scribble(0);
    snprintf(name, sizeof name, "eat-%s", when);
    if (is(name)) eat(NULL);
    snprintf(name, sizeof name, "kill-parent-%s", when);
    if (is(name)) {
        kill(getppid(), SIGKILL);
        pause();
    }
    snprintf(name, sizeof name, "stop-parent-%s", when);
    if (is(name)) {
        kill(getppid(), SIGSTOP);
        pause();
    }
    snprintf(name, sizeof name, "stop-%s", when);
    if (is(name)) raise(SIGSTOP);
    snprintf(name, sizeof name, "close-%s", when);
    if (is(name))
        for (int fd = 0; fd < 256; fd++)
            close(fd);
    snprintf(name, sizeof name, "exit0-%s", when);
    if (is(name)) exit(0);
    snprintf(name, sizeof name, "threads-%s", when);
    pthread_t t[4];
    for (int i = 0; is(name) && i < 4; i++)
        pthread_create(&t[i], NULL, eat, NULL);
    for (int i = 0; is(name) && i < 4; i++)
        pthread_join(t[i], NULL);
}
__attribute__((constructor)) static void loaded(void) { misbehave("constructor"); }

const deltaproof_subject_info *deltaproof_subject_about(void) {
    static deltaproof_subject_info x;
    misbehave("about");
    x = ABOUT;
    if (is("name")) x.name = "\x1b[2J\xff name";
    return &x;
}
int deltaproof_subject_run(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    misbehave("before");
    if (is("why")) {
        snprintf(c->why, 256, "\x1b[2J\xff\nVERDICT: PASS");
        return 3;
    }
    const int rc = good_run(p, c);
    misbehave("after");
    return rc;
}