/* gpu/instructions.cuh - every instruction that CUDA C++ has no word for, as a function. No other
 * file of kernels holds assembly. gpu/tests/cpu/include/instructions.cuh is the same list for the
 * CPU.
 *
 * Fragments are those of mma.m16n8k16 (PTX ISA). With gr = lane / 4, tc = lane % 4 an accumulator
 * holds rows gr, gr + 8 and columns 2 tc, 2 tc + 1.
 *
 * Copies between global and shared memory come in three forms with the same meaning:
 *   DPG_BULK  (9.0 and up) the copy engine, one thread starts a copy, a barrier counts its bytes
 *   otherwise (8.x)        cp.async of 16 bytes by every lane, all lanes arrive at the barrier
 *   -DDPG_PLAIN_LOADS      plain loads and stores by every lane, for compute-sanitizer's racecheck,
 *                          which does not know that a barrier's bytes order a bulk copy before the
 *                          reads behind it */
#ifndef DPG_INSTRUCTIONS_CUH
#define DPG_INSTRUCTIONS_CUH
#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

#if !defined(DPG_PLAIN_LOADS) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DPG_BULK 1
#else
#define DPG_BULK 0
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
/* 7.5: the simple path alone, whose chain is fp32 there (plan/create.cu). Products, asynchronous
 * copies and barriers are empty there: the fast kernels compile and are never called. */
#define DPG_NO_MMA 1
#endif
/* Blocks of 227 KB of shared memory. */
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030)
#define ROOMY_BLOCKS 1
#else
#define ROOMY_BLOCKS 0
#endif

/* Blocks of a kernel that start together, n in a row of a grid that n divides; before
 * __launch_bounds__. One by one where a device has no clusters. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define TOGETHER(n) __cluster_dims__((n), 1, 1)
#else
#define TOGETHER(n)
#endif

/* Earlier stores are read again after it, not kept in a register. */
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

/* The same number, where what follows from it would otherwise stay in registers for long. */
__device__ __forceinline__ unsigned made_number(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* The same address in global memory. The compiler does not know how it was made, and so adds a
 * distance to it in one instruction. */
__device__ __forceinline__ const char *made_address(const char *p) {
    asm("" : "+l"(p));
    __builtin_assume(__isGlobal(p));
    return p;
}

/* The thread's lane, so that the compiler keeps it: it would read it again wherever it needs it,
 * and wait for it. */
__device__ __forceinline__ int kept_lane() {
    int lane = threadIdx.x % 32;
    return __shfl_sync(~0u, lane, lane);
}
/* The thread's warp, which the compiler knows to be that of all lanes. */
__device__ __forceinline__ int kept_warp() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

/* ---- arithmetic ------------------------------------------------------------------------------ */

__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* The larger one; NaN if one of them is. */
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    return a < b || b != b ? b : a;
#else
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#endif
}
__device__ __forceinline__ float fma_ftz(float a, float b, float c) {
    float y;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
    return y;
}
__device__ __forceinline__ float tf32_rna(float x) {
    uint32_t r = 0;
#ifndef DPG_NO_MMA
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
#endif
    return __uint_as_float(r);
}

/* ---- floats of 8 bits ------------------------------------------------------------------------ */

/* Does code for this device convert them; what follows is empty where it does not. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define FP8_CONVERSIONS 1
#else
#define FP8_CONVERSIONS 0
#endif
/* Two of fp16. */
__device__ __forceinline__ float2 of_fp16(uint32_t halves) {
    float2 y;
    asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.f32.f16 %0, x;\ncvt.f32.f16 %1, y;\n}"
        : "=f"(y.x), "=f"(y.y)
        : "r"(halves));
    return y;
}
/* To nearest even. */
__device__ __forceinline__ uint32_t to_fp16(float x, float y) {
    uint32_t halves = 0;
#ifndef DPG_NO_MMA
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(y), "f"(x));
#endif
    return halves;
}
/* The low (HIGH: the high) two of four codes, e5m2 or e4m3. */
template <bool E5M2, bool HIGH> __device__ __forceinline__ float2 of_fp8(uint32_t codes) {
#if FP8_CONVERSIONS
    uint16_t low, high;
    uint32_t halves;
    asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(codes));
    if (E5M2)
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(HIGH ? high : low));
    else
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(HIGH ? high : low));
    return of_fp16(halves);
#else
    return make_float2(0, 0);
#endif
}
/* To nearest even, at most the largest number. */
template <bool E5M2> __device__ __forceinline__ uint32_t to_fp8(float x, float y) {
    uint16_t codes = 0;
#if FP8_CONVERSIONS
    if (E5M2)
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(y), "f"(x));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(y), "f"(x));
#endif
    return codes;
}

/* ---- grids that follow one another ----------------------------------------------------------- */

/* The stores of kernels before can be read, and the next kernel may start as far as its own wait.
 * All threads of every block, before the first access to memory. */
__device__ __forceinline__ void await_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* The next kernel may start as far as its own wait. */
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- numbers by which kernels that run at once wait for each other --------------------------- */

/* Behind what this thread has stored, or has seen stored. */
__device__ __forceinline__ void add_release(unsigned *x, unsigned n) {
#ifndef DPG_NO_MMA
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(x), "r"(n) : "memory");
#else
    *x += n;
#endif
}
/* Once *x is n or more, what others had stored before they added is there. */
__device__ __forceinline__ void await_acquire(const unsigned *x, unsigned n) {
#if DPG_BULK
    for (unsigned y = 0;;) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(y) : "l"(x) : "memory");
        if (y >= n) break;
        __nanosleep(200);
    }
#endif
}
/* Also for copies in bulk of this thread. */
__device__ __forceinline__ void bulk_fence() {
#if DPG_BULK
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

/* ---- tensor cores ---------------------------------------------------------------------------- */

/* c += a b: 16 x 8, 16 deep, bf16; 8 deep, tf32. */
__device__ __forceinline__ void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
#ifndef DPG_NO_MMA
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
__device__ __forceinline__ void mma_tf32(float c[4], const float a[4], const float b[2]) {
#ifndef DPG_NO_MMA
    const uint32_t *A = (const uint32_t *)a, *B = (const uint32_t *)b;
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(B[0]), "r"(B[1]));
#endif
}

/* Shared memory as the copies and matrix loads address it. */
__device__ __forceinline__ uint32_t saddr(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Four 8 x 8 matrices of bf16 whose rows lie at the addresses of lanes 0-7, 8-15, 16-23, 24-31: as
 * they stand, and transposed. */
__device__ __forceinline__ void ldsm4(uint32_t r[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}
__device__ __forceinline__ void ldsm4t(uint32_t r[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}
/* The reverse of both. */
__device__ __forceinline__ void stsm4(uint32_t addr, const uint32_t r[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        uint32_t row = __shfl_sync(~0u, addr, 8 * i + lane / 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(r[i]) : "memory");
    }
#endif
}
__device__ __forceinline__ void stsm4t(uint32_t addr, const uint32_t r[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        uint32_t t, row = __shfl_sync(~0u, addr, 8 * i + lane / 4);
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(r[i]));
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(t) : "memory");
    }
#endif
}

/* ---- warpgroup products (9.0a) --------------------------------------------------------------- */

__device__ __forceinline__ void wg_fence() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wg_commit() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int N> __device__ __forceinline__ void wg_wait() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}

#define R4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define R32(d) R4(d[0]), R4(d[1]), R4(d[2]), R4(d[3]), R4(d[4]), R4(d[5]), R4(d[6]), R4(d[7])

/* Does code for this device have them; what follows is empty where it has not. */
__device__ __forceinline__ bool has_warpgroups() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    return true;
#else
    return false;
#endif
}
/* 4 n-tiles of a sum may be read from here on, behind the wait for it. */
__device__ __forceinline__ void wg_done(float (*d)[4]) {
    asm volatile("" : R4(d[0]), R4(d[1]), R4(d[2]), R4(d[3])::"memory");
}
/* All but the last N groups have ended, and d may be read: as operands its words cannot be read
 * before. */
template <int N> __device__ __forceinline__ void wg_wait(float (*d)[4]) {
    wg_wait<N>();
    asm volatile("" : R32(d)::"memory");
}
/* d = A B if first, else d += A B: 64 rows, 64 columns, 16 deep; B by descriptor. T: B is [16][64]
 * in memory, else [64][16]. SIGN: -1 takes -A. */
template <int T, int SIGN = 1>
__device__ __forceinline__ void wg_mul(float (*d)[4], const uint32_t a[4], uint64_t b, bool first) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %38, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,"
                 "%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
                 "%29,%30,%31}, {%32,%33,%34,%35}, %36, p, %39, 1, %37;\n}"
                 : R32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(T), "r"((int)first),
                   "n"(SIGN));
#endif
}

/* The same of 128 columns. */
template <int T, int SIGN = 1>
__device__ __forceinline__ void wg_mul_128(float (*d)[4], const uint32_t a[4], uint64_t b,
                                           bool first) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %70, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,"
                 "%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
                 "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"
                 "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
                 "{%64,%65,%66,%67}, %68, p, %71, 1, %69;\n}"
                 : R32(d), R32((d + 8))
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(T), "r"((int)first),
                   "n"(SIGN));
#endif
}

/* The same of 16 columns. */
template <int T>
__device__ __forceinline__ void wg_mul_16(float (*d)[4], const uint32_t a[4], uint64_t b,
                                          bool first) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %14, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, "
                 "{%8,%9,%10,%11}, %12, p, 1, 1, %13;\n}"
                 : R4(d[0]), R4(d[1])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(T), "r"((int)first));
#endif
}

/* The same of 32 columns. */
template <int T>
__device__ __forceinline__ void wg_mul_32(float (*d)[4], const uint32_t a[4], uint64_t b,
                                          bool first) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %22, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,"
                 "%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, %21;\n}"
                 : R4(d[0]), R4(d[1]), R4(d[2]), R4(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(T), "r"((int)first));
#endif
}

/* A warpgroup asks for registers that others of its block have released, so that it has N a
 * thread. */
template <int N> __device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N> __device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

/* d = A B if first, else d += A B: 64 rows, 32 columns, 16 deep; A [64][16] and B in shared memory,
 * by descriptor. T: B is [16][32] in memory, else [32][16]. */
template <int T>
__device__ __forceinline__ void wg_mul_32(float (*d)[4], uint64_t a, uint64_t b, bool first) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,"
                 "%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, %19;\n}"
                 : R4(d[0]), R4(d[1]), R4(d[2]), R4(d[3])
                 : "l"(a), "l"(b), "r"((int)first), "n"(T));
#endif
}

/* ---- copies of a block's own loads ----------------------------------------------------------- */

/* 16 bytes, or zeros. */
__device__ __forceinline__ void cp16(void *dst, const void *src, bool valid) {
#ifndef DPG_NO_MMA
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(saddr(dst)), "l"(src),
                 "r"(valid ? 16 : 0));
#endif
}
__device__ __forceinline__ void cp_commit() {
#ifndef DPG_NO_MMA
    asm volatile("cp.async.commit_group;");
#endif
}
template <int N> __device__ __forceinline__ void cp_wait() {
#ifndef DPG_NO_MMA
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

/* ---- barriers in shared memory --------------------------------------------------------------- */

/* The count of a full barrier of one producer warp, and of an empty one of `warps` reading warps.
 * Plain loads: every lane arrives, as racecheck does not take a __syncwarp() and lane 0's arrival
 * behind it for the arrival of the others. */
#define FULL_COUNT (DPG_BULK ? 1 : 32)
#ifdef DPG_PLAIN_LOADS
#define EMPTY_COUNT(warps) (32 * (warps))
#else
#define EMPTY_COUNT(warps) (warps)
#endif

__device__ __forceinline__ void bar_init(uint64_t *b, int n) {
#ifndef DPG_NO_MMA
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(saddr(b)), "r"(n) : "memory");
#endif
}
/* Behind the last bar_init, before the barrier that lets others use them. */
__device__ __forceinline__ void bar_init_end() {
#if DPG_BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void bar_arrive(uint64_t *b) {
#ifndef DPG_NO_MMA
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(saddr(b))
                 : "memory");
#endif
}
__device__ __forceinline__ void bar_wait(uint64_t *b, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BAR_ASK "mbarrier.try_wait.parity.shared.b64"
#else
#define BAR_ASK "mbarrier.test_wait.parity.shared.b64"
#endif
#ifndef DPG_NO_MMA
    asm volatile("{\n.reg .pred p;\nagain:\n" BAR_ASK " p, [%0], %1;\n@p bra done;\nbra again;\n"
                 "done:\n}" ::"r"(saddr(b)),
                 "r"(parity)
                 : "memory");
#endif
}
/* The warp is done with what a barrier of EMPTY_COUNT guards; __syncwarp() before. */
__device__ __forceinline__ void bar_arrive_warp(uint64_t *b, int lane) {
    if (EMPTY_COUNT(1) > 1 || lane == 0) bar_arrive(b);
}
/* Threads of a part of a block: named barrier `id`, n threads. */
__device__ __forceinline__ void sync_part(int id, int n) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}

/* ---- copies by one producer warp, all lanes together ----------------------------------------- */

/* The copy engine and products of a warpgroup may read this thread's stores after the next
 * barrier. */
__device__ __forceinline__ void drain_fence() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* Opens, fills and closes a barrier of FULL_COUNT; bytes: all that will come, multiples of 16. */
__device__ __forceinline__ void fill_begin(uint64_t *b, int bytes, int lane) {
#if DPG_BULK
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(saddr(b)), "r"(bytes)
                     : "memory");
#endif
}
__device__ __forceinline__ void fill(void *dst, const void *src, int bytes, uint64_t *b, int lane) {
#if DPG_BULK
    if (lane == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                     "[%1], %2, [%3];" ::"r"(saddr(dst)),
                     "l"(src), "r"(bytes), "r"(saddr(b))
                     : "memory");
#else
    for (int i = lane; i < bytes / 16; i += 32)
#ifdef DPG_PLAIN_LOADS
        ((uint4 *)dst)[i] = ((const uint4 *)src)[i];
#else
        cp16((uint4 *)dst + i, (const uint4 *)src + i, true);
#endif
#endif
}
__device__ __forceinline__ void fill_end(uint64_t *b, int lane) {
    (void)lane;
#ifdef DPG_PLAIN_LOADS
    drain_fence();
    bar_arrive(b);
#elif !DPG_BULK && !defined(DPG_NO_MMA)
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(saddr(b)) : "memory");
#endif
}

/* L2 fetches what somebody will read; bytes: a multiple of 16. By one thread. */
__device__ __forceinline__ void fetch_to_L2(const void *src, int bytes) {
#if DPG_BULK
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
#endif
}

/* The same barrier where all lanes of some warps copy 16 bytes each as well, of FULL_COUNT_16. The
 * first of these warps does the work of fill(). */
#define FULL_COUNT_16(warps) (DPG_BULK + 32 * (warps))
__device__ __forceinline__ void fill16(void *dst, const void *src, bool valid) {
#ifdef DPG_PLAIN_LOADS
    *(uint4 *)dst = valid ? *(const uint4 *)src : make_uint4(0, 0, 0, 0);
#else
    cp16(dst, src, valid);
#endif
}
__device__ __forceinline__ void fill16_end(uint64_t *b, int lane) {
#if DPG_BULK
    (void)lane;
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(saddr(b)) : "memory");
#else
    fill_end(b, lane);
#endif
}

/* The same where products of a warpgroup read what the lanes copied. */
__device__ __forceinline__ void fill16_end_for_products(uint64_t *b, int lane) {
#if DPG_BULK
    (void)lane;
    cp_commit();
    cp_wait<0>();
    drain_fence();
    bar_arrive(b);
#else
    fill_end(b, lane);
#endif
}

/* Shared to global memory by one warp. Before: drain_fence() by all who wrote the words, then a
 * barrier. The words may be overwritten behind drain_wait() of the same warp and a barrier. */
__device__ __forceinline__ void drain(void *dst, const void *src, int bytes, int lane) {
#if DPG_BULK
    if (lane == 0)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
                     "r"(saddr(src)), "r"(bytes)
                     : "memory");
#else
    for (int i = lane; i < bytes / 16; i += 32)
        ((uint4 *)dst)[i] = ((const uint4 *)src)[i];
#endif
}
__device__ __forceinline__ void drain_commit(int lane) {
#if DPG_BULK
    if (lane == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
__device__ __forceinline__ void drain_wait(int lane) {
#if DPG_BULK
    if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

/* All but the last N groups of this warp's drains are in memory. */
template <int N> __device__ __forceinline__ void drain_done(int lane) {
#if DPG_BULK
    if (lane == 0) asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
#else
    __syncwarp();
#endif
}

/* fill() and drain() of n pieces, each lane some. In global memory they are neighbours, in shared
 * memory `each` bytes apart. Before: the fences of drain(). */
__device__ __forceinline__ void fill_pieces(void *dst, int each, const void *src, int bytes, int n,
                                            uint64_t *b, int lane) {
    for (int i = DPG_BULK ? lane : 0; i < n; i += DPG_BULK ? 32 : 1)
        fill((char *)dst + i * each, (const char *)src + i * bytes, bytes, b, DPG_BULK ? 0 : lane);
}
/* Ends with the wait of every lane for its own. */
__device__ __forceinline__ void drain_pieces(void *dst, int bytes, const void *src, int each, int n,
                                             int lane) {
    for (int i = DPG_BULK ? lane : 0; i < n; i += DPG_BULK ? 32 : 1)
        drain((char *)dst + i * bytes, (const char *)src + i * each, bytes, DPG_BULK ? 0 : lane);
    drain_commit(0);
    drain_wait(0);
}

/* ---- tiles of tensors (fast/maps.cuh), by the copy engine ------------------------------------ */

/* Does it do them here; else lanes do. */
#define MAPPED_TILES DPG_BULK

/* One lane of a warp, all of which come here. The compiler then knows that no other does what
 * follows, and asks for a copy without a loop over lanes. */
__device__ __forceinline__ bool elected(int lane) {
#if DPG_BULK
    uint32_t is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(is));
    return is;
#else
    return lane == 0;
#endif
}
/* Fetches the map of later copies. */
__device__ __forceinline__ void ask_for_map(const CUtensorMap &map) {
#if DPG_BULK
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}
/* 64 tokens from `token` on of 64 columns of a head to ROWS on a multiple of 1,024 bytes. They are
 * part of the bytes that `b` waits for. */
__device__ __forceinline__ void fill_tile(__nv_bfloat16 *dst, const CUtensorMap &map, int column,
                                          int head, int64_t token, uint64_t *b, int lane) {
#if DPG_BULK
    if (lane == 0)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(saddr(dst)),
                     "l"(&map), "r"(column), "r"(head), "r"((int)token), "r"(saddr(b))
                     : "memory");
#endif
}
/* Back, as drain() does. */
__device__ __forceinline__ void drain_tile(const CUtensorMap &map, int column, int head,
                                           int64_t token, const __nv_bfloat16 *src, int lane) {
#if DPG_BULK
    if (lane == 0)
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], "
                     "[%4];" ::"l"(&map),
                     "r"(column), "r"(head), "r"((int)token), "r"(saddr(src))
                     : "memory");
#endif
}
#endif
