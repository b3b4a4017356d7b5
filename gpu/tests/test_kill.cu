/* gpu/tests/test_kill.cu - a rank that dies, stalls, hangs its device or fails at any phase ends
 * every rank, with a message that names it.
 *
 *   test_kill N [shared|nccl] [LIMIT] [few] [ring|scan]
 *
 * Rank 1 of N fails before a step of the forward or backward, or before it waits for the end:
 *   dies     its thread returns
 *   stalls   its thread sleeps until the others have ended, then continues
 *   hangs    a kernel on its stream spins until the others have ended
 *   fails    it calls abort
 * All other ranks must return an error that names rank 1 within LIMIT (1 s) and 4 s more. Rank 1
 * must return an error too if it continues. With `few` it fails only before a gather of each pass
 * and before the end; ring and scan choose the exchange of states. Further runs fail before one of
 * three whole forwards over segments, and with windows (dpg_plan_connect). Exit status 0, 1, or 2
 * (no device). */
#include "steps.h"

enum Kind { DIES, STALLS, HANGS, FAILS };
static const char *const kinds[] = {"dies", "stalls", "hangs", "fails"};

static volatile int *go_on; /* pinned: 1 releases what stalls or hangs */
static bool whole, windows; /* forwards in one call; with windows */
static dp_exchange by;      /* how states get from rank to rank */
static bool fast;           /* the path that has them, not that of gpu/tests/cpu */
enum { WHOLE_FORWARDS = 3 };

struct KillRank : Rank {
    double ended = 0;

    void setup(int rank, int N) {
        const std::vector<int64_t> cu = {0, N * (whole ? 128 : 64)};
        dpg_options o = {};
        o.base = DP_BASE_BF16;
        o.chain = DP_TF32X3;
        o.chain_how = whole ? DPG_CHAIN_AUGMENTED : DPG_CHAIN_DENSE;
        o.segments = whole ? 2 : 0;
        o.backward = !whole;
        o.exchange = by;
        open(small_problem(cu, DP_GATE_LOG, DPG_BF16), o, rank, N,
             [&](const Share &x) { return memory.filled(x.bytes(), 0); });
        fast = dpg_plan_path(plan) == DPG_PATH_FAST;
    }
    dp_status step(int i, dpg_comm *c) {
        if (!whole || i == STEPS) return take_step(*this, i, c);
        return i < WHOLE_FORWARDS ? forward(c) : DP_OK;
    }
    /* Returns whether it goes on. */
    bool go_wrong(int kind, dpg_comm *c) {
        if (kind == FAILS) c->abort(c, "on purpose");
        while (kind == STALLS && !*go_on)
            usleep(1000);
        if (kind == HANGS) k_spin<<<1, 1, 0, stream>>>(go_on);
        return kind == STALLS || kind == HANGS;
    }
    void connect(dpg_comm *c) {
        st = dpg_plan_connect(plan, c, &err);
        if (st != DP_OK || dpg_plan_connected(plan)) return;
        fprintf(stderr, "no windows\n");
        give_up();
    }
    void all_steps(dpg_comm *c, int phase, int kind) {
        CUDA(cudaSetDevice(c->device));
        if (windows) connect(c);
        for (int i = 0; i <= STEPS && st == DP_OK; i++) {
            if (i == phase && c->rank == 1 && !go_wrong(kind, c)) return;
            st = step(i, c);
        }
        ended = seconds();
    }
};

/* phase -1: nothing goes wrong. */
static std::string name_of(int phase, int kind) {
    std::string before = whole && phase < WHOLE_FORWARDS ? text("whole forward %d", phase + 1)
                         : phase >= 0                    ? phases[phase]
                                                         : "";
    std::string name =
        phase < 0 ? "nothing wrong" : text("rank 1 %s before %s", kinds[kind], before.c_str());
    return windows ? name + ", windows" : name;
}

static void judge_rank(const KillRank &r, int rank, const std::string &name, int phase) {
    fact(phase < 0 ? r.st == DP_OK : r.st == DP_EDEVICE && names_rank_1(r.err.msg),
         "%s: rank %d says '%s'", name.c_str(), rank, r.err.msg);
}

static void scene(int N, bool nccl, double limit, int phase, int kind) {
    Comms comm(nccl ? Comms::NCCL : Comms::SHARED, N, limit);
    std::vector<KillRank> r(N);
    std::vector<std::thread> threads;
    std::string name = name_of(phase, kind);
    *go_on = 0;
    for (int i = 0; i < N; i++) {
        CUDA(cudaSetDevice(comm[i].device));
        r[i].setup(i, N);
    }
    double t0 = seconds(), last = 0;
    for (int i = 0; i < N; i++)
        threads.emplace_back([&, i] { r[i].all_steps(&comm[i], phase, kind); });
    for (int i = 0; i < N; i++) {
        if (i == 1) continue;
        threads[i].join();
        last = fmax(last, r[i].ended - t0);
        judge_rank(r[i], i, name, phase);
    }
    *go_on = 1;
    threads[1].join();
    fact(last < limit + 4, "%s: the others ended after %f s", name.c_str(), last);
    if (kind == STALLS || kind == HANGS || phase < 0)
        fact((phase < 0) == (r[1].st == DP_OK), "%s: rank 1 itself says '%s'", name.c_str(),
             r[1].err.msg);
    printf("%-42s %5.2f s  %s\n", name.c_str(), last, r[0].err.msg);
    for (int i = 0; i < N; i++) {
        CUDA(cudaSetDevice(comm[i].device));
        r[i].close();
    }
}

/* Does rank 1 fail so before this step? few: before a gather of each pass and before the end
 * alone. */
static bool wanted(int phase, int kind, bool few) {
    if (few) return phase == 2 || (phase == 8 && kind == HANGS) || (phase == STEPS && kind == DIES);
    return kind == DIES || kind == HANGS || phase == 0 || phase == 2 || phase == 4 ||
           phase == STEPS;
}

static void step_by_step(int N, bool nccl, double limit, bool few) {
    scene(N, nccl, 20, -1, FAILS); /* first launches of all kernels are slow */
    for (int phase = 0; phase <= STEPS; phase++)
        for (int kind : {DIES, STALLS, HANGS, FAILS})
            if (wanted(phase, kind, few)) scene(N, nccl, limit, phase, kind);
    scene(N, nccl, limit, -1, FAILS);
}

static void whole_forwards(int N, bool nccl, double limit, bool few) {
    scene(N, nccl, 20, -1, FAILS);
    for (int phase : {0, 1, 2, (int)STEPS})
        for (int kind : {DIES, STALLS, HANGS, FAILS})
            if (!few || (phase == 1 && kind != FAILS)) scene(N, nccl, limit, phase, kind);
    scene(N, nccl, limit, -1, FAILS);
}

int main(int argc, char **argv) {
    int N = argc > 1 ? atoi(argv[1]) : 3;
    bool nccl = argc > 2 && !strcmp(argv[2], "nccl"), few = argc > 4;
    const char *how = argc > 5 ? argv[5] : "";
    by = !strcmp(how, "ring")   ? DP_EXCHANGE_RING
         : !strcmp(how, "scan") ? DP_EXCHANGE_SCAN
                                : DP_EXCHANGE_ALLGATHER;
    double limit = argc > 3 ? atof(argv[3]) : 1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    devices("test_kill");
    if (N < 2) {
        fprintf(stderr, "test_kill: fewer than 2 ranks\n");
        return 2;
    }
    CUDA(
        cudaHostAlloc((void **)&go_on, sizeof *go_on, cudaHostAllocPortable | cudaHostAllocMapped));
    step_by_step(N, nccl, limit, few);
    whole = true;
    whole_forwards(N, nccl, limit, few);
    /* ranks that share a device alternate, so that none outruns a dead one */
    windows = nccl && fast && by == DP_EXCHANGE_ALLGATHER;
    if (windows) whole_forwards(N, nccl, limit, few);
    return verdict();
}
