/* gpu/mma.cuh - the tensor-core and bulk-copy instructions as functions; fragments are those of mma.m16n8k16 (PTX ISA): with gr = lane / 4, tc = lane % 4
 * an accumulator holds rows gr, gr + 8 and columns 2 tc, 2 tc + 1. */
#ifndef DPG_MMA_CUH
#define DPG_MMA_CUH
#include "internal.cuh"

__device__ __forceinline__ float ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint32_t pack2(float lo, float hi)
{
    __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *(uint32_t *)&x;
}
__device__ __forceinline__ float2 unpack2(uint32_t x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
__device__ __forceinline__ float dot8(uint4 x, uint4 y)
{
    const uint32_t *xs = (const uint32_t *)&x, *ys = (const uint32_t *)&y;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 a = unpack2(xs[i]), b = unpack2(ys[i]);
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
    }
    return sum;
}
__device__ __forceinline__ float sumsq8(uint4 x)
{
    float2 a = unpack2(x.x), b = unpack2(x.y), c = unpack2(x.z), d = unpack2(x.w);
    return fmaf(a.x, a.x, a.y * a.y) + fmaf(b.x, b.x, b.y * b.y) + (fmaf(c.x, c.x, c.y * c.y) + fmaf(d.x, d.x, d.y * d.y));
}
/* 8 numbers of an input, bf16 or fp32, from element `at` on. */
__device__ __forceinline__ void load8(float y[8], const void *x, int64_t at, int is_bf16)
{
    if (is_bf16) {
        uint4 z = *(const uint4 *)((const bf16 *)x + at);
        *(float2 *)y = unpack2(z.x), *(float2 *)(y + 2) = unpack2(z.y), *(float2 *)(y + 4) = unpack2(z.z), *(float2 *)(y + 6) = unpack2(z.w);
    } else {
        *(float4 *)y = *(const float4 *)((const float *)x + at), *(float4 *)(y + 4) = *(const float4 *)((const float *)x + at + 4);
    }
}
/* The same rounded to bf16; ss: the sum of their squares as given. */
__device__ __forceinline__ uint4 load8_bf16(const void *x, int64_t at, int is_bf16, float &ss)
{
    if (is_bf16) {
        uint4 y = *(const uint4 *)((const bf16 *)x + at);
        ss = sumsq8(y);
        return y;
    }
    float4 a = *(const float4 *)((const float *)x + at), b = *(const float4 *)((const float *)x + at + 4);
    ss = fmaf(a.x, a.x, a.y * a.y) + fmaf(a.z, a.z, a.w * a.w) + (fmaf(b.x, b.x, b.y * b.y) + fmaf(b.z, b.z, b.w * b.w));
    return make_uint4(pack2(a.x, a.y), pack2(a.z, a.w), pack2(b.x, b.y), pack2(b.z, b.w));
}
__device__ __forceinline__ uint32_t lds32(const bf16 *p) { return *(const uint32_t *)p; }
__device__ __forceinline__ uint32_t saddr(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void ldsm4(uint32_t r[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void ldsm4t(uint32_t r[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void stsm4t(uint32_t addr, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
        :: "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void cp16(void *dst, const void *src, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(saddr(dst)), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

__device__ __forceinline__ void bar_init(uint64_t *b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(saddr(b)), "r"(n) : "memory"); }
__device__ __forceinline__ void bar_expect(uint64_t *b, int bytes)
{
#ifndef DPG_PLAIN_LOADS
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(saddr(b)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void bar_arrive(uint64_t *b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(saddr(b)) : "memory"); }
__device__ __forceinline__ void bar_wait(uint64_t *b, int parity)
{
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}"
                 :: "r"(saddr(b)), "r"(parity) : "memory");
}
/* DPG_PLAIN_LOADS: the same words by plain loads and stores of the calling thread, for compute-sanitizer's racecheck, which does not know that
 * a barrier's bytes order a bulk copy before the reads behind it. */
__device__ __forceinline__ void bulk(void *dst, const void *src, int bytes, uint64_t *b)
{
#ifdef DPG_PLAIN_LOADS
    for (int i = 0; i < bytes / 16; i++)
        ((uint4 *)dst)[i] = ((const uint4 *)src)[i];
#else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(saddr(dst)), "l"(src), "r"(bytes), "r"(saddr(b)) : "memory");
#endif
}
/* A warp is done with what a barrier of `n` warps guards: count WARPS(n), __syncwarp() before. DPG_PLAIN_LOADS: every lane arrives, as racecheck does not take a __syncwarp()
 * and lane 0's arrival behind it for the arrival of the others. */
#ifdef DPG_PLAIN_LOADS
#define WARPS(n) (32 * (n))
#else
#define WARPS(n) (n)
#endif
__device__ __forceinline__ void bar_arrive_warp(uint64_t *b, int lane)
{
    if (WARPS(1) > 1 || lane == 0)
        bar_arrive(b);
}
/* Behind the last bulk copy of a bar_expect. */
__device__ __forceinline__ void bar_loaded(uint64_t *b)
{
#ifdef DPG_PLAIN_LOADS
    bar_arrive(b);
#endif
}
/* Shared to global memory; what was written to shared memory before needs async_fence() by the writers. */
__device__ __forceinline__ void bulk_out(void *dst, const void *src, int bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(dst), "r"(saddr(src)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void bulk_read_all() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif
