/* gpu/tests/cpu/cpu.cc - runs CUDA kernels on the CPU, so that their arithmetic and indexing are
 * tested where there is no device.
 *
 * translate.py makes gpu's .cu files C++. A launch runs its blocks one after the other. Each thread
 * of a block is a fiber that runs until it waits. It waits for its warp (shuffles, tensor cores,
 * matrix loads), for its block or a part of it, or for a barrier in shared memory. A warp's
 * instruction runs once all of its running threads have reached it; all must reach the same one.
 * Ranks on one device stay host threads.
 *
 * Not seen here: races, but for those that show when blocks, and the warps of each, run in the
 * reverse order (DP_CPU_ORDER=reverse). Also copies and warpgroup products without a wait, because
 * they are done at once; alignment. Sums of tensor cores are done in fp64 and truncated to fp32.
 * Shared memory and memory from cudaMalloc start as NaN. A launch that asks for more shared memory
 * than its device was told of ends the program. */
#include "machine.h"
#include <cuda.h>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <malloc.h>
#include <map>
#include <mutex>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define MAX_THREADS 1024
#define PARTS 16 /* named barriers of a block */
#define STACK (1 << 17)

namespace cpu {

thread_local uint3 thread, block;
thread_local dim3 block_size, grid_size;

/* ---- fibers ---------------------------------------------------------------------------------- */

enum State { RUNS, AT_WARP, AT_BLOCK, AT_PART, AT_BARRIER, ENDED, STATES };

#if defined(__x86_64__)
/* Saves what the callee must preserve and the stack pointer in *from, and goes on at `to`. */
extern "C" void cpu_switch(void **from, void *to);
asm(".text\n.globl cpu_switch\ncpu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\nmovq %rsp,(%rdi)\n"
    "movq %rsi,%rsp\npopq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
typedef void *Place;
static void go(Place *from, Place *to) { cpu_switch(from, *to); }
static void prepare(Place *p, char *stack, void (*entry)()) {
    void **sp = (void **)(stack + STACK - 64);
    *--sp = NULL;
    *--sp = (void *)entry;
    *p = sp - 6;
    memset(*p, 0, 6 * sizeof *sp);
}
#else
typedef ucontext_t Place;
static void go(Place *from, Place *to) { swapcontext(from, to); }
static void prepare(Place *p, char *stack, void (*entry)()) {
    getcontext(p);
    p->uc_stack.ss_sp = stack;
    p->uc_stack.ss_size = STACK;
    p->uc_link = NULL;
    makecontext(p, entry, 0);
}
#endif

struct Fiber {
    char *stack;
    Place at;
    State state; /* changed by set and release alone */
    unsigned x, y;
    warp_fn fn; /* AT_WARP: what the warp does */
    void *arg;
    const uint64_t *barrier; /* AT_BARRIER: until its phase is not that of `parity` */
    int parity, part;
};

static thread_local struct Machine {
    Fiber fiber[MAX_THREADS];
    Place scheduler;
    int now, count;
    int in[MAX_THREADS / 32][STATES]; /* threads of each warp, by state */
    int part_size[PARTS];
    int voted, vote; /* votes of the block's threads at __syncthreads_or; the last result */
    const Call *kernel;
    char *shared;
} m;
/* Apart: what has a destructor is looked at before each use. */
static thread_local struct Memory {
    int used = 0;
    ~Memory() {
        for (auto &f : m.fiber)
            free(f.stack);
        free(m.shared);
    }
} memory;

static void set(int i, State s) {
    int *in = m.in[i / 32];
    in[m.fiber[i].state]--;
    in[s]++;
    m.fiber[i].state = s;
}

static void go_on_as(int i) {
    m.now = i;
    thread = {m.fiber[i].x, m.fiber[i].y, 0};
}

/* To the next thread of the warp where it can go on, else to the scheduler. */
static void wait(State s) {
    const int i = m.now, next = i + 1;
    set(i, s);
    if (next % 32 && next < m.count && m.fiber[next].state == RUNS) {
        go_on_as(next);
        go(&m.fiber[i].at, &m.fiber[next].at);
    } else
        go(&m.fiber[i].at, &m.scheduler);
}

static void entry() {
    (*m.kernel)();
    wait(ENDED);
}

/* That thread and those of its warp after it; the last of them. */
static int resume(int i) {
    go_on_as(i);
    go(&m.scheduler, &m.fiber[i].at);
    return m.now;
}

/* The threads of a warp, or of a block, that have not ended are all at s. */
static bool all_at(const int *in, int threads, State s) {
    return in[s] && in[s] + in[ENDED] == threads;
}

static int threads_at(State s) {
    int n = 0;
    for (int w = 0; w < (m.count + 31) / 32; w++)
        n += m.in[w][s];
    return n;
}

static bool block_at(State s) {
    const int here = threads_at(s);
    return here && here + threads_at(ENDED) == m.count;
}

/* Lets the threads of warp w that are in state s run; its first thread is 32 w. */
static void release(int w, State s) {
    for (int i = 32 * w; i < 32 * w + 32 && i < m.count; i++)
        if (m.fiber[i].state == s) m.fiber[i].state = RUNS;
    m.in[w][RUNS] += m.in[w][s];
    m.in[w][s] = 0;
}

static void do_warp(int w, int last) {
    void *arg[32] = {};
    warp_fn fn = NULL;
    for (int i = w; i < last; i++) {
        if (m.fiber[i].state != AT_WARP) continue;
        if (fn && fn != m.fiber[i].fn) {
            fprintf(stderr, "threads of one warp are at different instructions\n");
            abort();
        }
        fn = m.fiber[i].fn;
        arg[i - w] = m.fiber[i].arg;
    }
    if (fn) fn(arg);
    release(w / 32, AT_WARP);
}

/* A warp until none of its threads can go on by itself. */
static bool run_warp(int w) {
    int last = std::min(w + 32, m.count);
    bool moved = false;
    const int *in = m.in[w / 32];
    for (bool again = true; again;) {
        again = false;
        for (int i = w; i < last && in[RUNS] + in[AT_BARRIER]; i++) {
            Fiber &f = m.fiber[i];
            if (f.state == AT_BARRIER && barrier_parity(f.barrier) != f.parity) set(i, RUNS);
            if (f.state != RUNS) continue;
            i = resume(i);
            again = true;
        }
        if (all_at(in, last - w, AT_WARP)) {
            do_warp(w, last);
            again = true;
        }
        moved |= again;
    }
    return moved;
}

static bool meet_in_parts() {
    bool moved = false;
    for (int p = 0; p < PARTS && threads_at(AT_PART); p++) {
        int here = 0;
        for (int i = 0; i < m.count; i++)
            here += m.fiber[i].state == AT_PART && m.fiber[i].part == p;
        if (!here || here < m.part_size[p]) continue;
        for (int i = 0; i < m.count; i++)
            if (m.fiber[i].state == AT_PART && m.fiber[i].part == p) set(i, RUNS);
        moved = true;
    }
    return moved;
}

static void run_block(int n, bool reverse) {
    m.count = n;
    memset(m.in, 0, sizeof m.in);
    for (int i = 0; i < n; i++) {
        Fiber &f = m.fiber[i];
        if (!f.stack && !(f.stack = (char *)aligned_alloc(64, STACK))) abort();
        prepare(&f.at, f.stack, entry);
        f.state = RUNS;
        f.x = i % block_size.x;
        f.y = i / block_size.x;
        m.in[i / 32][RUNS]++;
    }
    int warps = (n + 31) / 32;
    for (bool moved = true; moved;) {
        moved = false;
        for (int w = 0; w < warps; w++)
            moved |= run_warp(32 * (reverse ? warps - 1 - w : w));
        moved |= meet_in_parts();
        if (block_at(AT_BLOCK)) {
            m.vote = m.voted;
            m.voted = 0;
            for (int w = 0; w < warps; w++)
                release(w, AT_BLOCK);
            moved = true;
        }
    }
    for (int i = 0; i < n; i++)
        if (m.fiber[i].state != ENDED) {
            fprintf(stderr, "thread %d of block %u waits for ever\n", i, block.x);
            abort();
        }
}

/* Calls that a thread enqueues while it captures. */
static thread_local std::vector<Call> *captured;
static bool captures(const Call &work) {
    if (captured) captured->push_back(work);
    return captured != NULL;
}

/* Dynamic shared memory that launches of a kernel may ask for (cudaFuncSetAttribute). */
static struct {
    std::mutex lock;
    std::map<std::pair<const void *, int>, size_t> most;
    int calls;
} allowed;
static thread_local int device;

int attributes_set() {
    std::lock_guard<std::mutex> held(allowed.lock);
    return allowed.calls;
}

void has_come(unsigned came, unsigned n) {
    if (came == n) return;
    fprintf(stderr, "block %u waits for %u where %u have come\n", block.x, n, came);
    abort();
}

static void check_shared(const void *kernel, size_t bytes) {
    std::lock_guard<std::mutex> held(allowed.lock);
    if (bytes <= 48 << 10 || bytes <= allowed.most[{kernel, device}]) return;
    fprintf(stderr, "a launch asks for %zu bytes of shared memory, which device %d was not told\n",
            bytes, device);
    abort();
}

/* Does an environment variable name the rank of this process, as torchrun says it. */
static bool names_rank(const char *variable) {
    const char *rank = getenv("RANK"), *named = getenv(variable);
    return rank && named && !strcmp(rank, named);
}

/* Memory that other processes may open lies in memory files, in the place of the allocation. */
struct Opened {
    pid_t owner;
    int file;
    size_t bytes;
};
static struct {
    std::mutex lock;
    std::map<void *, Opened> at;
} opened;

/* DP_CPU_IPC_DIES=R: the process with RANK=R is killed once it has opened another's memory. */
static void die_with_windows() {
    std::lock_guard<std::mutex> held(opened.lock);
    if (!opened.at.empty() && names_rank("DP_CPU_IPC_DIES")) raise(SIGKILL);
}

void launch(dim3 grid, dim3 size, size_t bytes, const Work &work) {
    if (captures([=] { launch(grid, size, bytes, work); })) return;
    check_shared(work.kernel, bytes);
    die_with_windows();
    const char *order = getenv("DP_CPU_ORDER");
    bool reverse = order && !strcmp(order, "reverse");
    memory.used = 1;
    m.kernel = &work.run;
    block_size = size;
    grid_size = grid;
    free(m.shared);
    m.shared = (char *)aligned_alloc(1024, (bytes + 2047) / 1024 * 1024);
    if (!m.shared || size.x * size.y > MAX_THREADS) abort();
    const uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t at = reverse ? blocks - 1 - i : i;
        block = {(unsigned)(at % grid.x), (unsigned)(at / grid.x % grid.y),
                 (unsigned)(at / grid.x / grid.y)};
        memset(m.shared, 0xff, bytes);
        run_block((int)(size.x * size.y), reverse);
    }
}

void *shared() { return m.shared; }
void sync_block() { wait(AT_BLOCK); }
int sync_block_or(int x) {
    m.voted |= x != 0;
    wait(AT_BLOCK);
    return m.vote;
}
void sync_part(int id, int n) {
    m.fiber[m.now].part = id;
    m.part_size[id] = n;
    wait(AT_PART);
}
void warp(warp_fn fn, void *arg) {
    m.fiber[m.now].fn = fn;
    m.fiber[m.now].arg = arg;
    wait(AT_WARP);
}
void await_barrier(const uint64_t *b, int parity) {
    if (barrier_parity(b) != parity) return;
    m.fiber[m.now].barrier = b;
    m.fiber[m.now].parity = parity;
    wait(AT_BARRIER);
}

/* ---- what a warp does together ------------------------------------------------------------------
 */

void sync_warp(void **) {}

void exchange(void **lane) {
    double given[32] = {};
    for (int i = 0; i < 32; i++)
        if (lane[i]) given[i] = ((Shuffle *)lane[i])->x;
    for (int i = 0; i < 32; i++)
        if (lane[i]) {
            Shuffle *s = (Shuffle *)lane[i];
            if (s->from >= 0 && s->from < 32) s->x = given[s->from];
        }
}

void vote_any(void **lane) {
    int any = 0;
    for (int i = 0; i < 32; i++)
        any |= lane[i] && *(int *)lane[i];
    for (int i = 0; i < 32; i++)
        if (lane[i]) *(int *)lane[i] = any;
}

float tf32_rna(float x) {
    uint32_t u = __float_as_uint(x);
    return (u & 0x7f800000) == 0x7f800000 ? x : __uint_as_float((u + 0x1000) & ~0x1fffu);
}

/* A sum in fp64, then truncated: what an mma returns is rounded toward zero. */
static float truncated(double x) {
    float f = (float)x;
    return __uint_as_float(__float_as_uint(f) - (fabs((double)f) > fabs(x)));
}

static float half(uint32_t u, int k) { return __uint_as_float(k % 2 ? u & 0xffff0000u : u << 16); }

typedef double Four __attribute__((vector_size(32)));
union Row { /* a number of each column of a fragment */
    double at[8];
    Four half[2];
};

/* c += a b of fragments m16n8kX (PTX ISA), b by rows; c: the four sums of each lane. */
static void multiply(float **c, const double a[16][16], const Row *b, int depth, bool first) {
    for (int r = 0; r < 8; r++) {
        Row sum[2] = {};
        for (int n = 0; n < 8 && !first; n++)
            for (int h = 0; h < 2; h++)
                sum[h].at[n] = c[r * 4 + n / 2][h * 2 + n % 2];
        Four s0 = sum[0].half[0], s1 = sum[0].half[1], s2 = sum[1].half[0], s3 = sum[1].half[1];
        for (int k = 0; k < depth; k++) {
            s0 += a[r][k] * b[k].half[0], s1 += a[r][k] * b[k].half[1];
            s2 += a[r + 8][k] * b[k].half[0], s3 += a[r + 8][k] * b[k].half[1];
        }
        sum[0].half[0] = s0, sum[0].half[1] = s1, sum[1].half[0] = s2, sum[1].half[1] = s3;
        for (int n = 0; n < 8; n++)
            for (int h = 0; h < 2; h++)
                c[r * 4 + n / 2][h * 2 + n % 2] = truncated(sum[h].at[n]);
    }
}

void mma_bf16(void **lane) {
    double a[16][16];
    Row b[16];
    float *c[32];
    Mma **x = (Mma **)lane;
    for (int i = 0; i < 32; i++) {
        c[i] = x[i]->c;
        for (int h = 0; h < 2; h++)
            for (int r = 0; r < 4; r++) {
                a[i / 4 + r % 2 * 8][i % 4 * 2 + h + r / 2 * 8] = half(x[i]->a[r], h);
                if (r < 2) b[i % 4 * 2 + h + r * 8].at[i / 4] = half(x[i]->b[r], h);
            }
    }
    multiply(c, a, b, 16, false);
}

void mma_tf32(void **lane) {
    double a[16][16];
    Row b[8];
    float *c[32];
    Mma **x = (Mma **)lane;
    for (int i = 0; i < 32; i++) {
        c[i] = x[i]->c;
        for (int r = 0; r < 4; r++) {
            a[i / 4 + r % 2 * 8][i % 4 + r / 2 * 4] = __uint_as_float(x[i]->a[r] & ~0x1fffu);
            if (r < 2) b[i % 4 + r * 4].at[i / 4] = __uint_as_float(x[i]->b[r] & ~0x1fffu);
        }
    }
    multiply(c, a, b, 8, false);
}

uint32_t shared_address(const void *p) { return (uint32_t)((const char *)p - m.shared); }
static inline char *in_shared(uint32_t a) { return m.shared + a; }
char *shared_at(uint32_t a) { return in_shared(a); }

/* Matrix i's row j lies at the address of lane 8 i + j; lane l has entries (l / 4, 2 (l % 4) + h).
 */
static inline void matrices(void **lane, bool transposed, bool store) {
    for (int i = 0; i < 4; i++) {
        uint16_t *row[8];
        for (int j = 0; j < 8; j++)
            row[j] = (uint16_t *)in_shared(((Matrices *)lane[8 * i + j])->address);
        for (int l = 0; l < 32; l++)
            for (int h = 0; h < 2; h++) {
                int r = l / 4, c = l % 4 * 2 + h;
                uint16_t *word = transposed ? row[c] + r : row[r] + c;
                uint16_t *mine = (uint16_t *)(((Matrices *)lane[l])->r + i) + h;
                *(store ? word : mine) = *(store ? mine : word);
            }
    }
}
void load_matrices(void **lane) { matrices(lane, false, false); }
void load_transposed(void **lane) { matrices(lane, true, false); }
void store_matrices(void **lane) { matrices(lane, false, true); }
void store_transposed(void **lane) { matrices(lane, true, true); }

/* Eight elements from (row, col) on from a descriptor of warpgroup products. Bits 0-13 are the
 * address in units of 16 bytes, bits 62-63 the rows. 1: 128 bytes, 16-byte pieces p at p ^ (row &
 * 7); 3: 32 bytes, pieces at p ^ (row >> 2 & 1). A step along the rows moves the address inside the
 * swizzle. Columns behind those of a row lie as far on as bits 16-29 say, in units of 16 bytes. */
static const uint16_t *of_descriptor(uint64_t d, int row, int col) {
    bool narrow = d >> 62 == 3;
    int bytes = narrow ? 32 : 128, lead = (int)(d >> 16 & 0x3fff) * 16;
    uint32_t at = (uint32_t)(d & 0x3fff) * 16;
    uint32_t a = at + row * bytes + col * 2 / bytes * lead + col * 2 % bytes;
    a ^= (a >> 7 & (narrow ? 1 : 7)) << 4;
    return (const uint16_t *)in_shared(a);
}

/* A warp's 16 rows of d = A B or d += A B, 16 deep (wgmma.m64nNk16, N = columns). */
void warpgroup(void **lane) {
    Wgmma **x = (Wgmma **)lane;
    double a[16][16];
    Row b[16];
    float *d[32];
    for (int i = 0; i < 32 && x[0]->a; i++)
        for (int r = 0; r < 4; r++)
            for (int h = 0; h < 2; h++)
                a[i / 4 + r % 2 * 8][i % 4 * 2 + h + r / 2 * 8] = half(x[i]->a[r], h);
    for (int i = 0; i < 32 && !x[0]->a; i++) {
        const uint16_t *from = of_descriptor(x[0]->a_rows, x[0]->row0 + i / 2, i % 2 * 8);
        for (int k = 0; k < 8; k++)
            a[i / 2][i % 2 * 8 + k] = half(from[k], 0);
    }
    for (int n = 0; n < x[0]->columns; n += 8) {
        for (int i = 0; i < 16; i++) {
            const uint16_t *from = x[0]->transposed ? of_descriptor(x[0]->b, i, n)
                                                    : of_descriptor(x[0]->b, n + i / 2, i % 2 * 8);
            for (int j = 0; j < 8; j++)
                if (x[0]->transposed)
                    b[i].at[j] = half(from[j], 0);
                else
                    b[i % 2 * 8 + j].at[i / 2] = half(from[j], 0);
        }
        for (int i = 0; i < 32; i++)
            d[i] = x[i]->d[n / 8];
        multiply(d, a, b, 16, x[0]->first);
    }
}

} // namespace cpu

/* ---- runtime --------------------------------------------------------------------------------- */

/* DP_CPU_CAPABILITY=90: the compute capability that the CPU claims. The fast path runs from 80 on;
 * 75, the simple path alone, is what it claims by itself. */
static int capability() {
    const char *c = getenv("DP_CPU_CAPABILITY");
    return c ? atoi(c) : 75;
}
bool cpu::has_warpgroups() { return capability() == 90; }
static int shared_memory() {
    int c = capability();
    return (c >= 90 && c < 120 ? 227 : c == 80 || c == 87 ? 163 : c >= 80 ? 99 : 64) << 10;
}

extern "C" {
cudaError_t cudaMalloc(void **p, size_t n) {
    *p = aligned_alloc(4096, (n / 4096 + 2) * 4096); /* pages of its own: cudaIpcGetMemHandle */
    if (!*p) abort();
    memset(*p, 0xff, n);
    return cudaSuccess;
}
static void *map_file(void *at, const cpu::Opened &x, int file) {
    void *p = mmap(at, x.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED : 0), file, 0);
    if (p == MAP_FAILED) abort();
    return p;
}
cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int device) {
    snprintf(id, n, "cpu:%d", device);
    return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) {
    cpu::Opened x = {getpid(), memfd_create("device", 0), malloc_usable_size(p) / 4096 * 4096};
    static_assert(sizeof x <= sizeof *h, "a handle");
    if (x.file < 0 || (uintptr_t)p % 4096 || write(x.file, p, x.bytes) != (ssize_t)x.bytes) abort();
    map_file(p, x, x.file);
    memcpy(h, &x, sizeof x);
    return cudaSuccess;
}
/* DP_CPU_IPC_DENIED=R: the process with RANK=R may not. */
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned) {
    if (cpu::names_rank("DP_CPU_IPC_DENIED")) return cudaErrorInvalidValue;
    cpu::Opened x;
    memcpy(&x, &h, sizeof x);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)x.owner, x.file);
    int file = open(path, O_RDWR);
    if (file < 0) return cudaErrorInvalidValue;
    *p = map_file(NULL, x, file);
    close(file);
    std::lock_guard<std::mutex> held(cpu::opened.lock);
    cpu::opened.at[*p] = x;
    return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void *p) {
    std::lock_guard<std::mutex> held(cpu::opened.lock);
    munmap(p, cpu::opened.at[p].bytes);
    cpu::opened.at.erase(p);
    return cudaSuccess;
}
cudaError_t cudaFree(void *p) {
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) { return cudaMalloc(p, n); }
cudaError_t cudaFreeHost(void *p) { return cudaFree(p); }
cudaError_t cudaHostRegister(void *, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned) {
    *d = h;
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, cudaMemcpyKind) {
    memcpy(d, s, n);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind, cudaStream_t) {
    if (!cpu::captures([=] { memcpy(d, s, n); })) memcpy(d, s, n);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h,
                              cudaMemcpyKind k, cudaStream_t st) {
    if (cpu::captures([=] { cudaMemcpy2DAsync(d, dp, s, sp, w, h, k, st); })) return cudaSuccess;
    for (size_t i = 0; i < h; i++)
        memcpy((char *)d + i * dp, (const char *)s + i * sp, w);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *d, int v, size_t n) {
    memset(d, v, n);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t) {
    if (!cpu::captures([=] { memset(d, v, n); })) memset(d, v, n);
    return cudaSuccess;
}
struct CUgraph_st {
    std::vector<cpu::Call> work;
};
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    cpu::captured = new std::vector<cpu::Call>;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *g) {
    *g = new CUgraph_st{std::move(*cpu::captured)};
    delete cpu::captured;
    cpu::captured = NULL;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *st) {
    *st = cpu::captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t) {
    for (auto &work : ((cudaGraph_t)x)->work)
        work();
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    delete g;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *d) {
    *d = cpu::device;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, int, int value) {
    std::lock_guard<std::mutex> held(cpu::allowed.lock);
    cpu::allowed.calls++;
    if (value > shared_memory()) return cudaErrorInvalidValue;
    cpu::allowed.most[{kernel, cpu::device}] = (size_t)value;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *n) {
    const char *few = getenv("DP_CPU_DEVICES");
    *n = few ? atoi(few) : 8; /* one memory: enough for 8 ranks over NCCL (nccl.cc) */
    return cudaSuccess;
}
/* DP_CPU_MULTIPROCESSORS=132: with few of them few heads are many (by_teams, fast/state.cuh). */
static int multiprocessors(void) {
    const char *few = getenv("DP_CPU_MULTIPROCESSORS");
    return few ? atoi(few) : 132;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    strcpy(p->name, "CPU in place of a device");
    p->major = capability() / 10;
    p->minor = capability() % 10;
    p->multiProcessorCount = multiprocessors();
    return cudaSuccess;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t, void *x,
                                const cuuint64_t *size, const cuuint64_t *stride,
                                const cuuint32_t *box, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
    if (!x || ((uintptr_t)x | stride[0] | stride[1]) % 16) return 1;
    *map = {
        (char *)x, {size[0], size[1], size[2]}, {stride[0], stride[1]}, {box[0], box[1], box[2]}};
    return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **at, unsigned, int,
                                             cudaDriverEntryPointQueryResult *found) {
    bool known = !strcmp(name, "cuTensorMapEncodeTiled");
    *at = known ? (void *)cuTensorMapEncodeTiled : NULL;
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointNotFound;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr a, int) {
    *v = a == cudaDevAttrComputeCapabilityMajor   ? capability() / 10
         : a == cudaDevAttrComputeCapabilityMinor ? capability() % 10
         : a == cudaDevAttrMultiProcessorCount    ? multiprocessors()
                                                  : shared_memory();
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v) {
    *v = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) {
    *s = NULL;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) { return cudaStreamCreate(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned, int) {
    return cudaStreamCreate(s);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    *e = NULL;
    return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t) { return "none"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaSetDevice(int d) {
    cpu::device = d;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
}
