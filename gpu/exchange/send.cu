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

static dp_status pack(const Call &c, const Packing &p, const float *from) {
    k_pack<<<blocks_of(p), THREADS, 0, c.s>>>(p, from, at<uint32_t>(c, B_PACK));
    CK_LAUNCH(c.e, "k_pack");
    return DP_OK;
}
static dp_status unpack(const Call &c, const Packing &p, const uint32_t *from, float *to) {
    k_unpack<<<blocks_of(p), THREADS, 0, c.s>>>(p, from, to);
    CK_LAUNCH(c.e, "k_unpack");
    return DP_OK;
}

static Packing packing_of(const dpg_plan *p, int64_t numbers, int row) {
    dp_payload sent = p->opt.payload;
    return {numbers, p->d.K, p->d.V, row, payloads[sent].split, dp_payloads[sent].less_i};
}

/* ---- pairs to all ranks ---------------------------------------------------------------------- */

dp_status gather_elements(const Call &c, dpg_comm *comm, int own, int all, int row) {
    int64_t numbers = c.p->buf[own].bytes / 4, words = packed_words(c.p->opt.payload, numbers);
    if (!words)
        return comm->all_gather(comm, at<float>(c, own), at<float>(c, all), numbers, c.s, c.e);
    TRY(pack(c, packing_of(c.p, numbers, row), at<float>(c, own)));
    TRY(comm->all_gather(comm, at<float>(c, B_PACK), at<float>(c, B_PACKALL), words, c.s, c.e));
    return unpack(c, packing_of(c.p, numbers * c.p->N, row), at<uint32_t>(c, B_PACKALL),
                  at<float>(c, all));
}

/* ---- from rank to rank ----------------------------------------------------------------------- */

/* The ranks of a direction, as the rank that goes through them sees them. */
struct Order {
    int by;            /* to the next one */
    int place;         /* of this one */
    int before, after; /* ranks that share a sequence with it */
};
static Order order_of(const dpg_plan *p) {
    return p->is_bwd ? Order{-1, p->N - 1 - p->rank, p->post, p->pre}
                     : Order{1, p->rank, p->pre, p->post};
}

/* One call that all ranks make: numbers that this one gives, or gets; NULL: it does not. */
static dp_status hop(const Call &c, dpg_comm *comm, const Packing &p, const float *send,
                     float *recv, int by) {
    int64_t words = packed_words(c.p->opt.payload, p.numbers);
    if (send && words) TRY(pack(c, p, send));
    TRY(comm->hand(comm, send && words ? at<float>(c, B_PACK) : send,
                   recv && words ? at<float>(c, B_PACKALL) : recv, words ? words : p.numbers, by,
                   c.s, c.e));
    return recv && words ? unpack(c, p, at<uint32_t>(c, B_PACKALL), recv) : DP_OK;
}

/* Hop j: the rank in place j hands on what it makes of what came. */
static dp_status one_by_one(const Call &c, dpg_comm *comm, const float *own, const Packing &state,
                            float *to) {
    const dpg_plan *p = c.p;
    const Order o = order_of(p);
    const int passes = passes_on(&p->opt, p->N);
    for (int j = 0; j < p->N - 1; j++) {
        const int gives = j == o.place && o.after, gets = j == o.place - 1 && o.before;
        if (gives && passes) TRY((p->is_bwd ? p->path->bwd_pre : p->path->pre)(c));
        if (gives) TRY(chain_hand(c, own, p->needs_m, to, at<float>(c, B_HAND)));
        TRY(hop(c, comm, state, gives ? at<float>(c, B_HAND) : NULL, gets ? to : NULL, o.by));
    }
    return DP_OK;
}

/* Hillis-Steele: after a level the element is that of twice as many ranks up to this one, as far
 * back as its sequence goes; a rank far enough from the sequence's end gives. Room: an element that
 * came, and two that are made in turns. */
static dp_status by_levels(const Call &c, dpg_comm *comm, const float *own, const Packing &pair,
                           const Packing &state, float *room, float *to) {
    const dpg_plan *p = c.p;
    const Order o = order_of(p);
    for (int d = 1, turn = 1; d < p->N; d *= 2) {
        const int gets = p->needs_m && o.before >= d;
        TRY(hop(c, comm, pair, o.after > d ? own : NULL, gets ? room : NULL, o.by * d));
        if (!gets || (FAULT(LEVEL_LOST) && 2 * d >= p->N)) continue;
        float *made = room + turn * pair.numbers;
        TRY(chain_compose_pair(c, own, room, made));
        own = made;
        turn = 3 - turn;
    }
    if (o.after) TRY(chain_hand(c, own, 0, to, at<float>(c, B_HAND)));
    return hop(c, comm, state, o.after ? at<float>(c, B_HAND) : NULL, o.before ? to : NULL, o.by);
}

/* ---- from part to part ----------------------------------------------------------------------- */

/* The pass of one link, from the state that came to it. */
static dp_status pass_link(const Call &c, int link) {
    dpg_plan one = *c.p;
    int row = 0; /* among those of links that hand on */
    for (int i = 0; i < link; i++)
        row += (one.is_bwd ? one.links_h[i].pre : one.links_h[i].post) > 0;
    (one.is_bwd ? one.bwd0 : one.pre0) += row;
    (one.is_bwd ? one.nbwd : one.npre) = 1;
    Call x = c;
    x.p = &one;
    return (one.is_bwd ? one.path->bwd_pre : one.path->pre)(x);
}

/* What a rank hands to itself: as a payload leaves it, like all that is handed on. */
static dp_status keep(const Call &c, const Packing &p, float *state) {
    if (!packed_words(c.p->opt.payload, p.numbers)) return DP_OK;
    TRY(pack(c, p, state));
    return unpack(c, p, at<uint32_t>(c, B_PACK), state);
}

/* In the order of the parts: the rank that has one hands on what it makes of what came to it, to
 * itself where it has the next one, too. Backward the states of links lie from the last on. */
static dp_status part_by_part(const Call &c, dpg_comm *comm, const float *own, int64_t pair,
                              const Packing &state, float *to) {
    const dpg_plan *p = c.p;
    auto came_to = [&](int link) {
        if (FAULT(LINK_PASSES_ON)) link = p->is_bwd ? p->nlink - 1 : 0;
        return to + (p->is_bwd ? p->nlink - 1 - link : link) * state.numbers;
    };
    for (int j = 0; j < p->nhop; j++) {
        const Hop &h = p->hops_h[j];
        const int gives = h.from == p->rank, gets = h.to == p->rank;
        float *hand = gives && gets ? came_to(h.in) : at<float>(c, B_HAND);
        if (gives && passes_on(&p->opt, p->N)) TRY(pass_link(c, h.out));
        if (gives)
            TRY(chain_hand(c, own + h.out * pair, p->needs_m && link_needs_m(p->links_h[h.out]),
                           came_to(h.out), hand));
        if (gives && gets) TRY(keep(c, state, hand));
        if (h.from != h.to)
            TRY(hop(c, comm, state, gives ? hand : NULL, gets ? came_to(h.in) : NULL,
                    h.to - h.from));
    }
    return DP_OK;
}

dp_status hand_states(const Call &c, dpg_comm *comm, int own, int all, int to) {
    const dpg_plan *p = c.p;
    const int64_t states = (int64_t)p->d.HV * p->d.K * p->d.V,
                  pairs = p->buf[own].bytes / 4 / message_parts(p);
    const Packing state = packing_of(p, states, p->d.V),
                  pair = packing_of(p, pairs, p->d.V + p->d.K);
    if (p->owned) return part_by_part(c, comm, at<float>(c, own), pairs, state, at<float>(c, to));
    if (!exchanges[p->opt.exchange].levels)
        return one_by_one(c, comm, at<float>(c, own), state, at<float>(c, to));
    return by_levels(c, comm, at<float>(c, own), pair, state, at<float>(c, all), at<float>(c, to));
}
