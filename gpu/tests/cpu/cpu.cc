/* gpu/tests/cpu/cpu.cc - runs CUDA kernels on the CPU, so that their arithmetic and indexing are tested where there is no device.
 *
 * translate.py turns gpu/(plan simple simple_bwd chain comm conv truth).cu into C++; a launch runs its blocks one after the other, each thread of a block a fiber
 * that runs until its next barrier or shuffle. Ranks on one device stay host threads. Not seen here: races inside a block (threads of a warp
 * run one after the other between barriers), alignment, and the fast path, whose instructions have no counterpart; the tensor-core products of
 * the M chain are done in fp64 and truncated to fp32. Shared memory and memory from cudaMalloc start as NaN. */
#include <cuda_runtime.h>
#include "internal.cuh"
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define MAX_THREADS 1024
#define STACK (1 << 16)

namespace cpu {

thread_local uint3 thread, block;
thread_local dim3 block_size, grid_size;

/* ---- fibers ---------------------------------------------------------------------------------------------------------------------- */

enum State { RUNS, AT_WARP, AT_BLOCK, ENDED };

#if defined(__x86_64__)
/* Saves what the callee must preserve and the stack pointer in *from, and goes on at `to`. */
extern "C" void cpu_switch(void **from, void *to);
asm(".text\n.globl cpu_switch\ncpu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\nmovq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
typedef void *Place;
static void go(Place *from, Place *to) { cpu_switch(from, *to); }
static void prepare(Place *p, char *stack, void (*entry)())
{
    void **sp = (void **)(stack + STACK - 64);
    *--sp = NULL;
    *--sp = (void *)entry;
    *p = sp - 6;
    memset(*p, 0, 6 * sizeof *sp);
}
#else
typedef ucontext_t Place;
static void go(Place *from, Place *to) { swapcontext(from, to); }
static void prepare(Place *p, char *stack, void (*entry)())
{
    getcontext(p);
    p->uc_stack.ss_sp = stack, p->uc_stack.ss_size = STACK, p->uc_link = NULL;
    makecontext(p, entry, 0);
}
#endif

struct Fiber { char *stack; Place at; State state; };

static thread_local struct Machine {
    Fiber fiber[MAX_THREADS];
    Place scheduler;
    int now;
    const std::function<void()> *kernel;
    void *shared;
    double word[MAX_THREADS];
    uint32_t fragment[MAX_THREADS][6];
    ~Machine()
    {
        for (auto &f : fiber)
            free(f.stack);
        free(shared);
    }
} m;

static void wait(State s)
{
    m.fiber[m.now].state = s;
    go(&m.fiber[m.now].at, &m.scheduler);
}

static void entry()
{
    (*m.kernel)();
    wait(ENDED);
}

static void resume(int i)
{
    m.now = i;
    thread.x = i % block_size.x, thread.y = i / block_size.x, thread.z = 0;
    m.fiber[i].state = RUNS;
    go(&m.scheduler, &m.fiber[i].at);
}

/* All threads of a block: warps go on until every lane is at a barrier of the block, then all go on. */
static void run_block(int n)
{
    for (int i = 0; i < n; i++) {
        if (!m.fiber[i].stack && !(m.fiber[i].stack = (char *)aligned_alloc(64, STACK)))
            abort();
        prepare(&m.fiber[i].at, m.fiber[i].stack, entry);
        m.fiber[i].state = RUNS;
    }
    for (int live = n; live;) {
        for (int w = 0; w < n; w += 32)
            for (bool again = true; again;) {
                again = false;
                for (int i = w; i < w + 32 && i < n; i++)
                    if (m.fiber[i].state == RUNS || m.fiber[i].state == AT_WARP) {
                        resume(i);
                        again |= m.fiber[i].state == AT_WARP;
                    }
            }
        live = 0;
        for (int i = 0; i < n; i++) {
            if (m.fiber[i].state == AT_BLOCK)
                m.fiber[i].state = RUNS;
            live += m.fiber[i].state != ENDED;
        }
    }
}

void launch(dim3 grid, dim3 size, size_t bytes, const std::function<void()> &kernel)
{
    m.kernel = &kernel, block_size = size, grid_size = grid;
    free(m.shared);
    m.shared = aligned_alloc(256, (bytes + 511) / 256 * 256);
    if (!m.shared || size.x * size.y > MAX_THREADS)
        abort();
    for (block.z = 0; block.z < grid.z; block.z++)
        for (block.y = 0; block.y < grid.y; block.y++)
            for (block.x = 0; block.x < grid.x; block.x++) {
                memset(m.shared, 0xff, bytes);
                run_block((int)(size.x * size.y));
            }
}

void *shared() { return m.shared; }
void sync_block() { wait(AT_BLOCK); }

double shuffle_xor(double x, int mask)
{
    int me = m.now;
    m.word[me] = x;
    wait(AT_WARP);
    double y = m.word[me ^ mask];
    wait(AT_WARP);
    return y;
}
float shuffle_xor(float x, int mask) { return (float)shuffle_xor((double)x, mask); }

/* ---- tensor cores ---------------------------------------------------------------------------------------------------------------- */

static float word_of(uint32_t u) { return __uint_as_float(u); }

float tf32_rna(float x)
{
    uint32_t u = __float_as_uint(x);
    return (u & 0x7f800000) == 0x7f800000 ? x : word_of((u + 0x1000) & ~0x1fffu);
}

/* A sum in fp64, then truncated: what an mma returns is rounded toward zero. */
static float truncated(double x)
{
    float f = (float)x;
    return fabs((double)f) > fabs(x) ? nextafterf(f, 0.f) : f;
}

/* Fragments of m16n8kX (PTX ISA): a(row, k), b(k, col) find the lane and register that holds an entry. */
template <class A, class B> static void product(float c[4], int depth, A a, B b)
{
    int lane = m.now % 32;
    wait(AT_WARP);
    for (int i = 0; i < 4; i++) {
        double sum = c[i];
        for (int k = 0; k < depth; k++)
            sum += (double)a(lane / 4 + i / 2 * 8, k) * b(k, lane % 4 * 2 + i % 2);
        c[i] = truncated(sum);
    }
    wait(AT_WARP);
}

void mma_tf32(float c[4], const float a[4], const float b[2])
{
    int w = m.now / 32 * 32;
    memcpy(m.fragment[m.now], a, 16);
    memcpy(m.fragment[m.now] + 4, b, 8);
    product(c, 8, [&](int r, int k) { return word_of(m.fragment[w + r % 8 * 4 + k % 4][r / 8 + k / 4 * 2] & ~0x1fffu); },
            [&](int k, int n) { return word_of(m.fragment[w + n * 4 + k % 4][4 + k / 4] & ~0x1fffu); });
}

void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    int w = m.now / 32 * 32;
    auto half = [](uint32_t u, int k) { return word_of(k % 2 ? u & 0xffff0000u : u << 16); };
    memcpy(m.fragment[m.now], a, 16);
    memcpy(m.fragment[m.now] + 4, b, 8);
    product(c, 16, [&](int r, int k) { return half(m.fragment[w + r % 8 * 4 + k % 8 / 2][r / 8 + k / 8 * 2], k); },
            [&](int k, int n) { return half(m.fragment[w + n * 4 + k % 8 / 2][4 + k / 8], k); });
}

}

/* ---- runtime --------------------------------------------------------------------------------------------------------------------- */

extern "C" {
cudaError_t cudaMalloc(void **p, size_t n)
{
    *p = aligned_alloc(256, (n + 511) / 256 * 256);
    if (!*p)
        abort();
    memset(*p, 0xff, n);
    return cudaSuccess;
}
cudaError_t cudaFree(void *p)
{
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) { return cudaMalloc(p, n); }
cudaError_t cudaFreeHost(void *p) { return cudaFree(p); }
cudaError_t cudaHostRegister(void *, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned) { *d = h; return cudaSuccess; }
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, cudaMemcpyKind)
{
    memcpy(d, s, n);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind k, cudaStream_t) { return cudaMemcpy(d, s, n, k); }
cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t)
{
    for (size_t i = 0; i < h; i++)
        memcpy((char *)d + i * dp, (const char *)s + i * sp, w);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *d, int v, size_t n)
{
    memset(d, v, n);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t) { return cudaMemset(d, v, n); }
cudaError_t cudaGetDevice(int *d)
{
    *d = 0;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *n)
{
    const char *few = getenv("DP_CPU_DEVICES");
    *n = few ? atoi(few) : 8;                            /* one memory: enough for 8 ranks over NCCL (nccl.cc) */
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int)
{
    strcpy(p->name, "CPU in place of a device");
    p->major = 9, p->minor = 0;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v)
{
    *v = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *s)
{
    *s = NULL;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned, int) { return cudaStreamCreate(s); }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = *greatest = 0;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned)
{
    *e = NULL;
    return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t) { return "none"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
}

/* The fast path is not among the translated files: it takes no problem here. */
static dp_status no_fast(dp_err *e) { return dpg_fail(e, DP_EDEVICE, "the fast path does not run on the CPU"); }
int fast_supports(const dpg_problem *, const dpg_options *) { return 0; }
dp_status fast_chunks(dpg_plan *, const dpg_tensors *, void *, cudaStream_t, dp_err *e) { return no_fast(e); }
dp_status fast_pre(dpg_plan *, const dpg_tensors *, void *, cudaStream_t, dp_err *e) { return no_fast(e); }
dp_status fast_state(dpg_plan *, const dpg_tensors *, void *, cudaStream_t, dp_err *e) { return no_fast(e); }
int fast_bwd_supports(const dpg_problem *, const dpg_options *) { return 0; }
extern const BwdOps fast_bwd;
const BwdOps fast_bwd = {};
