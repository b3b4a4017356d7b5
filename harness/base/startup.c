/* harness/base/startup.c - checks of arguments, environment and limits, signals, the exit status
 * (startup.h). */
#include "startup.h"
#include "ref/files/output.h"
#include "ref/vocabulary/text.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#define MIB (1ul << 20)
#define STACK_BYTES (1 * MIB)     /* the largest frame is 31 KiB (-fstack-usage); GMP takes 64 */
#define THREAD_BYTES (160 * MIB)  /* OpenBLAS maps 128 MiB for each thread that calls it */
#define PROGRAM_BYTES (512 * MIB) /* program and libraries, with room for small cases */

/* ---- the end --------------------------------------------------------------------------------- */

static int decided;

int dp_under_mpirun(void) {
    static const char *const says[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"};
    for (size_t i = 0; i < sizeof says / sizeof *says; i++)
        if (getenv(says[i])) return 1;
    return 0;
}

int dp_ending(int status) {
    decided = 1;
    return status;
}

static void at_end(int status, DP_UNUSED void *arg) {
    errno = 0;
    const int full = fflush(stdout) || ferror(stdout);
    if (full)
        fprintf(stderr, "deltaproof: standard output: cannot be written%s%s\n", errno ? ": " : "",
                errno ? strerror(errno) : ""); /* what the error was may be long forgotten */
    if (status == 1 && !decided)
        fprintf(stderr, "deltaproof: a library ended the program: no verdict\n");
    if ((status == 0 && full) || (status == 1 && !decided)) _exit(2);
}

/* ---- signals --------------------------------------------------------------------------------- */

static const int SIGNALS[] = {SIGINT, SIGTERM, SIGHUP};
#define NSIGNALS (sizeof SIGNALS / sizeof *SIGNALS)

static int wake[2] = {-1, -1};
static volatile sig_atomic_t woken;
static pthread_mutex_t say_lock = PTHREAD_MUTEX_INITIALIZER;
static void (*say_what)(void *);
static void *say_arg;

void dp_on_interrupt(void (*say)(void *arg), void *arg) {
    pthread_mutex_lock(&say_lock);
    say_what = say;
    say_arg = arg;
    pthread_mutex_unlock(&say_lock);
}

static void die(int sig) {
    signal(sig, SIG_DFL);
    raise(sig);
}

static void on_signal(int sig) {
    const unsigned char byte = (unsigned char)sig;
    const int before = errno;
    if (woken++ || write(wake[1], &byte, 1) != 1) die(sig);
    errno = before;
}

/* Waits for the byte that the handler writes, so that everything may be called here. */
static void *watch(DP_UNUSED void *arg) {
    unsigned char sig;
    sigset_t none;
    while (read(wake[0], &sig, 1) != 1)
        if (errno != EINTR) return NULL;
    pthread_mutex_lock(&say_lock);
    if (say_what) say_what(say_arg);
    fflush(stdout);
    fprintf(stderr, "deltaproof: interrupted by SIG%s: what was not finished is not written\n",
            sigabbrev_np(sig));
    dp_output_end();
    sigemptyset(&none);
    pthread_sigmask(SIG_SETMASK, &none, NULL);
    die(sig);
    _exit(128 + sig);
}

void dp_interrupt_default(void) {
    for (size_t i = 0; i < NSIGNALS; i++)
        signal(SIGNALS[i], SIG_DFL);
}

static int watch_signals(void) {
    pthread_t thread;
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, old;
    signal(SIGCHLD, SIG_DFL); /* ignored, as it may be inherited, children leave no exit status */
    signal(SIGXFSZ, SIG_IGN); /* writing fails with EFBIG instead, and is reported */
    if (pipe2(wake, O_CLOEXEC) || pthread_create(&thread, NULL, watch, NULL)) return -1;
    pthread_detach(thread);
    for (size_t i = 0; i < NSIGNALS; i++)
        if (!sigaction(SIGNALS[i], NULL, &old) && old.sa_handler != SIG_IGN)
            sigaction(SIGNALS[i], &a, NULL);
    return 0;
}

/* ---- what must be there ---------------------------------------------------------------------- */

/* A file that is opened must not become standard output: what is closed is made unusable. */
static void keep_descriptors(void) {
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) open("/dev/null", fd ? O_RDONLY : O_WRONLY);
}

static int check_arguments(int argc, char **argv) {
    char shown[200];
    for (int i = 1; i < argc; i++) {
        const size_t n = strlen(argv[i]), good = dp_text_good(argv[i], n, 0);
        if (good == n) continue;
        dp_text_printable(argv[i], shown, sizeof shown);
        fprintf(stderr,
                "deltaproof: argument %d is not UTF-8 text, or has a control character: %s: give "
                "the file another name\n",
                i, shown);
        return 2;
    }
    return 0;
}

/* OMP_STACKSIZE: a number and B, K, M or G, K where it has none. 0: not understood, and then not
 * used by the run-time library either. No thread is started to ask: ranks may still be forked. */
static size_t openmp_stack(const char *text) {
    char *end;
    errno = 0;
    const unsigned long long n = strtoull(text, &end, 10);
    end += strspn(end, " ");
    const char unit = *end ? *end++ & ~0x20 : 'K';
    const int shift = unit == 'B' ? 0 : unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : -1;
    end += strspn(end, " ");
    return errno || *end || shift < 0 || n >> (62 - shift) ? 0 : (size_t)n << shift;
}

static int check_stacks(void) {
    static const char *const names[] = {"OMP_STACKSIZE", "GOMP_STACKSIZE"};
    struct rlimit r;
    for (int i = 0; i < 2; i++) {
        const char *text = getenv(names[i]);
        const size_t size = text ? openmp_stack(text) : 0;
        if (!size || size >= STACK_BYTES) continue;
        fprintf(stderr, "deltaproof: %s = %s: threads need a stack of at least %lu KiB here\n",
                names[i], text, STACK_BYTES >> 10);
        return 2;
    }
    if (getrlimit(RLIMIT_STACK, &r) || r.rlim_cur >= STACK_BYTES) return 0;
    fprintf(stderr, "deltaproof: ulimit -s %lu: a stack of at least %lu KiB is needed\n",
            (unsigned long)r.rlim_cur >> 10, STACK_BYTES >> 10);
    return 2;
}

extern void *blas_memory_alloc(int) __attribute__((weak));
extern void blas_memory_free(void *) __attribute__((weak));

/* OpenBLAS tries for ever to get its buffers, without a word; here they are got while there is
 * room, and kept by it. */
static void reserve_blas(int threads) {
    void *buffer[64];
    const int n = threads < 64 ? threads : 64;
    if (!blas_memory_alloc || !blas_memory_free) return;
    for (int i = 0; i < n; i++)
        buffer[i] = blas_memory_alloc(0);
    for (int i = 0; i < n; i++)
        blas_memory_free(buffer[i]);
}

enum { MOST_THREADS = 4096 }; /* the run-time library keeps what it knows of each on a stack */

static void check_memory(void) {
    const int threads = omp_get_max_threads();
    if (threads > MOST_THREADS) {
        fprintf(stderr, "deltaproof: %d threads: at most %d (OMP_NUM_THREADS)\n", threads,
                MOST_THREADS);
        _exit(2);
    }
    const size_t need = (size_t)threads * THREAD_BYTES + PROGRAM_BYTES;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *all = mmap(NULL, need, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (all == MAP_FAILED) {
        fprintf(stderr,
                "deltaproof: %zu MiB of address space are needed for %d threads, but: %s (ulimit "
                "-v, -d; fewer threads: OMP_NUM_THREADS)\n",
                need >> 20, threads, strerror(errno));
        _exit(2); /* OpenBLAS waits for its threads at exit, which retry for ever too */
    }
    munmap(all, need);
    reserve_blas(threads);
}

/* Waiting threads spin unless the environment says otherwise before their library is loaded. On a
 * busy machine they take the cores of those who work: a Python test took 19 s in place of 3. So the
 * program starts itself once more; its own children do not get that environment. */
static void let_threads_sleep(char **argv) {
    static const char mark[] = "DELTAPROOF_THREADS_SLEEP";
    static const char *const quiet[][2] = {{"OMP_WAIT_POLICY", "passive"},
                                           {"OPENBLAS_NUM_THREADS", "1"}};
    enum { N = sizeof quiet / sizeof *quiet };
    char self[PATH_MAX] = "", ours[N + 1] = ""; /* by variable: is it ours */
    if (getenv(mark)) {
        snprintf(ours, sizeof ours, "%s", getenv(mark));
    } else {
        if (getenv(quiet[0][0]) || getenv("GOMP_SPINCOUNT")) return;
        if (readlink("/proc/self/exe", self, sizeof self - 1) <= 0) return;
        for (int i = 0; i < N; i++) {
            ours[i] = getenv(quiet[i][0]) ? '0' : '1';
            if (setenv(quiet[i][0], quiet[i][1], 0)) return;
        }
        if (setenv(mark, ours, 1)) return;
        execv(self, argv); /* where it fails, they spin */
    }
    unsetenv(mark);
    for (int i = 0; i < N; i++)
        if (ours[i] == '1') unsetenv(quiet[i][0]);
}

/* The Python module's calls of this program end with the process that made them. */
static void end_with_owner(void) {
    const char *owner = getenv("DELTAPROOF_ALONE");
    if (owner && strtol(owner, NULL, 10) == getppid()) prctl(PR_SET_PDEATHSIG, SIGTERM);
}

int dp_startup(int argc, char **argv) {
    end_with_owner();
    let_threads_sleep(argv);
    keep_descriptors();
    on_exit(at_end, NULL);
    unsetenv("POSIXLY_CORRECT"); /* options may stand behind the case's name */
    unsetenv("ARGP_HELP_FMT");
    if (check_arguments(argc, argv)) return 2;
    if (watch_signals()) {
        fprintf(stderr, "deltaproof: a thread cannot be started: %s\n", strerror(errno));
        return 2;
    }
    check_memory();
    return check_stacks();
}
