/* gpu/exchange/send.cu - elements of a rank to all ranks, or states from rank to rank, packed where
 * the payload is shorter than fp32 (plan/sending.cuh): rounded and packed before they are sent, and
 * fp32 again behind that, so that all read what arrived, of their own rank, too. */
#include "fault.cuh"
#include "plan/paths.cuh"
#include "plan/sending.cuh"
#include "plan/values.cuh"

#define THREADS 256

/* Elements [..][K] in rows of `row` numbers, M from column V on. */
struct Packing {
    int64_t numbers; /* a multiple of 4 */
    int K, V, row, split, less_i;

    /* Is number `i` on the diagonal of an M that is sent less I. */
    __device__ __forceinline__ bool has_one(int64_t i) const {
        return less_i && i % row - V == i / row % K;
    }
};

/* The word of one number, a sum of two bf16; exact in fp32 but for the second rounding. */
__device__ __forceinline__ uint32_t split_word(float x) {
    float hi = rbf(x);
    return pack2(x - hi, hi);
}
__device__ __forceinline__ float joined(uint32_t w) {
    float2 x = unpack2(w);
    return x.x + x.y;
}

/* Four numbers a thread. */
__global__ void k_pack(Packing p, const float *from, uint32_t *to) {
    int64_t i = 4 * ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (i >= p.numbers) return;
    float4 x = *(const float4 *)(from + i);
    if (p.split) {
        *(uint4 *)(to + i) =
            make_uint4(split_word(x.x), split_word(x.y), split_word(x.z), split_word(x.w));
        return;
    }
    float *y = (float *)&x;
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (p.has_one(i + j)) y[j] -= 1.f;
    *(uint2 *)(to + i / 2) = make_uint2(pack2(x.x, x.y), pack2(x.z, x.w));
}

__global__ void k_unpack(Packing p, const uint32_t *from, float *to) {
    int64_t i = 4 * ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (i >= p.numbers) return;
    if (p.split) {
        uint4 w = *(const uint4 *)(from + i);
        *(float4 *)(to + i) = make_float4(joined(w.x), joined(w.y), joined(w.z), joined(w.w));
        return;
    }
    uint2 w = *(const uint2 *)(from + i / 2);
    float2 a = unpack2(w.x), b = unpack2(w.y);
    float4 x = make_float4(a.x, a.y, b.x, b.y);
    float *y = (float *)&x;
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (p.has_one(i + j) && !FAULT(PAYLOAD_NO_I)) y[j] += 1.f;
    *(float4 *)(to + i) = x;
}

static unsigned blocks_of(const Packing &p) {
    return (unsigned)((p.numbers / 4 + THREADS - 1) / THREADS);
}

/* Numbers of slot `from` to words of slot B_PACK, and of B_PACKALL to those of slot `to`. */
static dp_status pack(const Call &c, const Packing &p, int from) {
    k_pack<<<blocks_of(p), THREADS, 0, c.s>>>(p, at<float>(c, from), at<uint32_t>(c, B_PACK));
    CK_LAUNCH(c.e, "k_pack");
    return DP_OK;
}
static dp_status unpack(const Call &c, const Packing &p, int to) {
    k_unpack<<<blocks_of(p), THREADS, 0, c.s>>>(p, at<uint32_t>(c, B_PACKALL), at<float>(c, to));
    CK_LAUNCH(c.e, "k_unpack");
    return DP_OK;
}

static Packing packing_of(const dpg_plan *p, int64_t numbers, int row) {
    dp_payload sent = p->opt.payload;
    return {numbers, p->d.K, p->d.V, row, payloads[sent].split, dp_payloads[sent].less_i};
}

dp_status gather_elements(const Call &c, dpg_comm *comm, int own, int all, int row) {
    int64_t numbers = c.p->buf[own].bytes / 4, words = packed_words(c.p->opt.payload, numbers);
    if (!words)
        return comm->all_gather(comm, at<float>(c, own), at<float>(c, all), numbers, c.s, c.e);
    TRY(pack(c, packing_of(c.p, numbers, row), own));
    TRY(comm->all_gather(comm, at<float>(c, B_PACK), at<float>(c, B_PACKALL), words, c.s, c.e));
    return unpack(c, packing_of(c.p, numbers * c.p->N, row), all);
}

/* Hop j: rank j hands on, in the order of the tokens or against it. */
dp_status hand_states(const Call &c, dpg_comm *comm, int to) {
    const dpg_plan *p = c.p;
    const int by = p->is_bwd ? -1 : 1, at_hop = p->is_bwd ? p->N - 1 - p->rank : p->rank,
              gives = p->is_bwd ? !p->is_first : !p->is_last,
              gets = p->is_bwd ? !p->is_last : !p->is_first;
    const int64_t numbers = (int64_t)p->d.HV * p->d.K * p->d.V,
                  words = packed_words(p->opt.payload, numbers);
    const Packing packing = packing_of(p, numbers, p->d.V);
    float *send = at<float>(c, words ? B_PACK : B_HAND),
          *recv = at<float>(c, words ? B_PACKALL : to);
    for (int hop = 0; hop < p->N - 1; hop++) {
        const int here = hop == at_hop && gives, next = hop == at_hop - 1 && gets;
        if (here) TRY(chain_hand(c));
        if (here && words) TRY(pack(c, packing, B_HAND));
        TRY(comm->hand(comm, here ? send : NULL, next ? recv : NULL, words ? words : numbers, by,
                       c.s, c.e));
        if (next && words) TRY(unpack(c, packing, to));
    }
    return DP_OK;
}
