/* GoogleTest behind gt.h, and the test program's main: closing line `N passed, N failed, N
 * skipped`. */
#include "gt.h"
#include "sanitized.h"
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <string>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {
struct Reg {
    const char *suite, *name, *file;
    int line;
    void (*body)(void);
};
std::vector<Reg> &regs() {
    static std::vector<Reg> r;
    return r;
}
/* CPU seconds of this process and of those it waited for. */
double cpu_seconds() {
    double s = 0;
    for (int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
        rusage u;
        getrusage(who, &u);
        s += (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec);
        s += 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
    }
    return s;
}
std::vector<std::pair<double, std::string>> costs; /* of tests that ran */
class CTest : public testing::Test {
  public:
    explicit CTest(const Reg &r) : reg(r) {}
    void TestBody() override {
        if (const char *why = gt_left_out(reg.suite, reg.name))
            GTEST_SKIP() << "left out under sanitizers: " << why;
        const double before = cpu_seconds();
        reg.body();
        costs.emplace_back(cpu_seconds() - before, std::string(reg.suite) + "." + reg.name);
    }

  private:
    Reg reg;
};
void print_costs(size_t most) {
    std::sort(costs.rbegin(), costs.rend());
    printf("%.0f s of CPU time; most of it:", cpu_seconds());
    for (size_t i = 0; i < costs.size() && i < most; i++)
        printf("%s %s %.0f", i ? "," : "", costs[i].second.c_str(), costs[i].first);
    printf("\n");
}
std::string vformat(const char *fmt, va_list ap) {
    char b[4096];
    vsnprintf(b, sizeof b, fmt, ap);
    return b;
}
std::string tmp;
const char *env(const char *k, const char *d) {
    const char *v = getenv(k);
    return v && *v ? v : d;
}
} // namespace

extern "C" {
void gt_register(const char *s, const char *n, const char *f, int l, void (*b)(void)) {
    regs().push_back({s, n, f, l, b});
}
void gt_fail(const char *file, int line, const char *expr, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    ADD_FAILURE_AT(file, line) << expr << ": " << vformat(fmt, ap);
    va_end(ap);
}
static void skip_here(const std::string &why) { GTEST_SKIP() << why; }
void gt_skip(const char *, int, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    skip_here(vformat(fmt, ap));
    va_end(ap);
}
const char *gt_tmpdir(void) {
    if (tmp.empty()) {
        char t[] = "/tmp/dp-test-XXXXXX";
        const char *d = mkdtemp(t);
        if (!d) {
            perror("mkdtemp");
            exit(2);
        }
        tmp = d;
    }
    return tmp.c_str();
}
const char *gt_cache(void) {
    static const std::string of_all = env("XDG_CACHE_HOME", "");
    static const std::string at =
        of_all.empty() ? std::string(gt_tmpdir()) + "/cache" : of_all + "/deltaproof";
    return at.c_str();
}
int gt_run(const char *command, char *out, int size) {
    std::string c = std::string("{ ") + command + "\n} 2>&1";
    FILE *f = popen(c.c_str(), "r");
    if (!f) return -1;
    std::string all;
    char b[4096];
    size_t n;
    while ((n = fread(b, 1, sizeof b, f)) > 0)
        all.append(b, n);
    int st = pclose(f);
    if (out && size > 0) snprintf(out, size, "%s", all.c_str());
    return WIFEXITED(st) ? WEXITSTATUS(st) : 128 + WTERMSIG(st);
}
static bool is_free(int port) {
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    at.sin_port = htons((uint16_t)port);
    const int s = socket(AF_INET, SOCK_STREAM, 0);
    const bool ok = s >= 0 && !bind(s, (const sockaddr *)&at, sizeof at);
    if (s >= 0) close(s);
    return ok;
}
/* Below those that the kernel gives to whoever connects; processes side by side begin far apart. */
int gt_port(void) {
    static int next = getpid() % 10000 * 97;
    int port;
    do
        port = 12000 + next++ % 10000 * 2;
    while (!is_free(port) || !is_free(port + 1));
    return port;
}
const char *gt_program(void) { return env("DP_PROGRAM", "build/deltaproof"); }
const char *gt_cases(void) { return env("DP_CASES", "cases"); }
}
extern "C" void openblas_set_num_threads(int);

int main(int argc, char **argv) {
    openblas_set_num_threads(1); // as the program does
    testing::InitGoogleTest(&argc, argv);
    for (const Reg &r : regs()) {
        testing::RegisterTest(r.suite, r.name, nullptr, nullptr, r.file, r.line,
                              [r]() -> testing::Test * { return new CTest(r); });
    }
    int rc = RUN_ALL_TESTS();
    if (!tmp.empty()) gt_run(("rm -rf " + tmp).c_str(), nullptr, 0);
    const testing::UnitTest &u = *testing::UnitTest::GetInstance();
    int ran = u.successful_test_count() + u.failed_test_count() + u.skipped_test_count();
    print_costs(10);
    printf("%d passed, %d failed, %d skipped\n", u.successful_test_count(), u.failed_test_count(),
           u.skipped_test_count());
    return rc || !ran;
}