/* gpu/exchange/send.cu - elements of a rank to all ranks, or states from rank to rank
 * (plan/sending.cuh). A payload shorter than fp32 is rounded and packed before it is sent, and
 * widened to fp32 on arrival. So all ranks read the sent numbers, of their own rank, too. */
#include "fault.cuh"
#include "plan/paths.cuh"
#include "plan/sending.cuh"
#include "plan/values.cuh"
#include <algorithm>
#include <vector>

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

static dp_status pack(const Call &c, const Packing &p, const float *from, uint32_t *to) {
    k_pack<<<blocks_of(p), THREADS, 0, c.s>>>(p, from, to);
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
    const int alone = c.p->N == 1;
    if (!words && alone) return DP_OK;
    if (!words)
        return comm->all_gather(comm, at<float>(c, own), at<float>(c, all), numbers, c.s, c.e);
    TRY(pack(c, packing_of(c.p, numbers, row), at<float>(c, own), at<uint32_t>(c, B_PACK)));
    if (!alone)
        TRY(comm->all_gather(comm, at<float>(c, B_PACK), at<float>(c, B_PACKALL), words, c.s, c.e));
    return unpack(c, packing_of(c.p, numbers * c.p->N, row),
                  at<uint32_t>(c, alone ? B_PACK : B_PACKALL), at<float>(c, all));
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
    if (send && words) TRY(pack(c, p, send, at<uint32_t>(c, B_PACK)));
    TRY(comm->hand(comm, send && words ? at<float>(c, B_PACK) : send,
                   recv && words ? at<float>(c, B_PACKALL) : recv, words ? words : p.numbers, by,
                   c.s, c.e));
    return recv && words ? unpack(c, p, at<uint32_t>(c, B_PACKALL), recv) : DP_OK;
}

/* Message j: the rank in place j sends its result from the received state. */
static dp_status one_by_one(const Call &c, dpg_comm *comm, const float *own, const Packing &state,
                            float *to) {
    const dpg_plan *p = c.p;
    const Order o = order_of(p);
    const int passes = passes_on(&p->opt, p->sends);
    for (int j = 0; j < p->N - 1; j++) {
        const int gives = j == o.place && o.after, gets = j == o.place - 1 && o.before;
        if (gives && passes) TRY((p->is_bwd ? p->path->bwd_pre : p->path->pre)(c));
        if (gives) TRY(chain_hand(c, own, p->needs_m, to, at<float>(c, B_HAND)));
        TRY(hop(c, comm, state, gives ? at<float>(c, B_HAND) : NULL, gets ? to : NULL, o.by));
    }
    return DP_OK;
}

/* Hillis-Steele. After a level the element is that of twice as many ranks up to this one, as far
 * back as its sequence goes. A rank far enough from the sequence's end sends. Room: a received
 * element, and two that are made alternately. */
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

/* The pass of one part, from the state that it received. */
static dp_status pass_link(const Call &c, int link) {
    dpg_plan one = *c.p;
    int row = 0; /* among those of parts that send */
    for (int i = 0; i < link; i++)
        row += (one.is_bwd ? one.links_h[i].pre : one.links_h[i].post) > 0;
    (one.is_bwd ? one.bwd0 : one.pre0) += row;
    (one.is_bwd ? one.nbwd : one.npre) = 1;
    Call x = c;
    x.p = &one;
    return (one.is_bwd ? one.path->bwd_pre : one.path->pre)(x);
}

/* A rank's message to itself: with the payload's rounding, like all messages. */
static dp_status keep(const Call &c, const Packing &p, float *state) {
    if (!packed_words(c.p->opt.payload, p.numbers)) return DP_OK;
    TRY(pack(c, p, state, at<uint32_t>(c, B_PACK)));
    return unpack(c, p, at<uint32_t>(c, B_PACK), state);
}

/* The place of a part's received state: backward from the last on. */
static float *place_of(const dpg_plan *p, float *to, const Packing &state, int link) {
    return to + (p->is_bwd ? p->nlink - 1 - link : link) * state.numbers;
}

/* In the order of the parts. The rank that has one sends its result from the received state, to
 * itself where it has the next one, too. */
static dp_status part_by_part(const Call &c, dpg_comm *comm, const float *own, int64_t pair,
                              const Packing &state, float *to) {
    const dpg_plan *p = c.p;
    auto came_to = [&](int link) {
        if (FAULT(LINK_PASSES_ON)) link = p->is_bwd ? p->nlink - 1 : 0;
        return place_of(p, to, state, link);
    };
    for (int j = 0; j < p->nhop; j++) {
        const Hop &h = p->hops_h[j];
        const int gives = h.from == p->rank, gets = h.to == p->rank;
        float *hand = gives && gets ? came_to(h.in) : at<float>(c, B_HAND);
        if (gives && passes_on(&p->opt, p->sends)) TRY(pass_link(c, h.out));
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

/* ---- a scan over parts ----------------------------------------------------------------------- */

/* Into a message, as it is or packed. */
static dp_status put(const Call &c, const Packing &p, const float *from, float *to) {
    if (packed_words(c.p->opt.payload, p.numbers)) return pack(c, p, from, (uint32_t *)to);
    CK(c.e, cudaMemcpyAsync(to, from, sizeof(float) * p.numbers, cudaMemcpyDeviceToDevice, c.s));
    return DP_OK;
}

/* Pairs or states of n messages in one call. `make` makes that of a part; `room` gets the received
 * ones, in the order of their senders, for the parts in `came`. */
template <class F>
static dp_status at_once(const Call &c, dpg_comm *comm, const Packing &each, const Hop *h, int n,
                         float *room, F make, std::vector<int> *came) {
    const dpg_plan *p = c.p;
    const int64_t packed = packed_words(p->opt.payload, each.numbers),
                  words = packed ? packed : each.numbers;
    float *send = at<float>(c, B_PACK), *recv = packed ? at<float>(c, B_PACKALL) : room;
    std::vector<dpg_piece> gives, gets;
    size_t given = 0;
    came->clear();
    for (int r = 0; r < p->N; r++) {
        gives.push_back({given * words, 0});
        gets.push_back({came->size() * words, 0});
        for (int i = 0; i < n; i++) {
            if (h[i].from == p->rank && h[i].to == r) {
                const float *made;
                TRY(make(h[i].out, &made));
                TRY(put(c, each, made, send + given++ * words));
            }
            if (h[i].to == p->rank && h[i].from == r) came->push_back(h[i].in);
        }
        gives[r].n = given * words - gives[r].at;
        gets[r].n = came->size() * words - gets[r].at;
    }
    if (p->N > 1)
        TRY(comm->all_to_all(comm, send, gives.data(), recv, gets.data(), c.s, c.e));
    else
        CK(c.e, cudaMemcpyAsync(recv, send, sizeof(float) * given * words, cudaMemcpyDeviceToDevice,
                                c.s));
    Packing all = each;
    all.numbers *= came->size();
    if (FAULT(PAIRS_TURNED)) std::reverse(came->begin(), came->end());
    return packed && all.numbers ? unpack(c, all, (const uint32_t *)recv, room) : DP_OK;
}

/* As by_levels, of parts in their order: a call a level, in which a rank sends and gets pairs of
 * all of its parts. Room: three pairs for each part. */
static dp_status by_levels_of_parts(const Call &c, dpg_comm *comm, const float *own,
                                    const Packing &pair, const Packing &state, float *room,
                                    float *to) {
    const dpg_plan *p = c.p;
    const int64_t third = p->slots * pair.numbers;
    float *hand = at<float>(c, B_HAND);
    std::vector<const float *> element;
    std::vector<int> came;
    for (int i = 0; i < p->nlink; i++)
        element.push_back(own + i * pair.numbers);
    auto pair_of = [&](int link, const float **made) {
        *made = element[link];
        return DP_OK;
    };
    auto state_of = [&](int link, const float **made) {
        *made = hand;
        return chain_hand(c, element[link], 0, NULL, hand);
    };
    for (int l = 0, first = 0; l < p->nlevel; first = p->level_end[l++]) {
        const int n = p->level_end[l] - first;
        if (n) TRY(at_once(c, comm, pair, p->pairs_h + first, n, room, pair_of, &came));
        for (size_t k = 0; n && k < came.size(); k++) {
            float *made = room + (1 + l % 2) * third + came[k] * pair.numbers;
            TRY(chain_compose_pair(c, element[came[k]], room + k * pair.numbers, made));
            element[came[k]] = made;
        }
    }
    TRY(at_once(c, comm, state, p->hops_h, p->nhop, room, state_of, &came));
    for (size_t k = 0; k < came.size(); k++)
        CK(c.e, cudaMemcpyAsync(place_of(p, to, state, came[k]), room + k * state.numbers,
                                sizeof(float) * state.numbers, cudaMemcpyDeviceToDevice, c.s));
    return DP_OK;
}

dp_status hand_states(const Call &c, dpg_comm *comm, int own, int all, int to) {
    const dpg_plan *p = c.p;
    const int64_t states = (int64_t)p->d.HV * p->d.K * p->d.V,
                  pairs = p->buf[own].bytes / 4 / message_parts(p);
    const Packing state = packing_of(p, states, p->d.V),
                  pair = packing_of(p, pairs, p->d.V + p->d.K);
    const float *element = at<float>(c, own);
    if (exchanges[p->opt.exchange].levels)
        return (p->owned ? by_levels_of_parts : by_levels)(c, comm, element, pair, state,
                                                           at<float>(c, all), at<float>(c, to));
    if (p->owned) return part_by_part(c, comm, element, pairs, state, at<float>(c, to));
    return one_by_one(c, comm, element, state, at<float>(c, to));
}
