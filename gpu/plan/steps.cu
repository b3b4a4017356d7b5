/* gpu/plan/steps.cu - the order of the stages, forward and backward, and where ranks meet. */
#include "fault.cuh"
#include "plan/paths.cuh"
#include "plan/sending.cuh"

float *came(const Call &c) {
    return passes_on(&c.p->opt, c.p->sends) && !FAULT(PASS_FROM_ZERO)
               ? at<float>(c, c.p->is_bwd ? B_DSOUT : B_SIN)
               : NULL;
}

/* A stage over the rank's tokens, if it has any. */
static dp_status over_tokens(step_fn f, const Call &c) { return c.p->d.NT ? f(c) : DP_OK; }

/* Steps that wait for other ranks, or for chunks, go on a stream of the plan beside the caller's.
 * A plan without such a stream has the caller's alone. */
static Call beside(const Call &c) {
    Call side = c;
    if (c.p->side) side.s = c.p->side;
    return side;
}

/* The side stream goes on behind what the caller's has by now; the caller's behind what the side
 * stream has by now. */
static dp_status fork(const Call &c) {
    if (!c.p->side) return DP_OK;
    CK(c.e, cudaEventRecord(c.p->forked, c.s));
    CK(c.e, cudaStreamWaitEvent(c.p->side, c.p->forked, 0));
    return DP_OK;
}
static dp_status join(const Call &c) {
    if (!c.p->side) return DP_OK;
    CK(c.e, cudaEventRecord(c.p->joined, c.p->side));
    CK(c.e, cudaStreamWaitEvent(c.s, c.p->joined, 0));
    return DP_OK;
}

/* Halos, or their gradients, of all parts to all ranks. */
static dp_status gather_halos(const Call &c, dpg_comm *comm, int own, int all) {
    if (c.p->N == 1) return DP_OK;
    return comm->all_gather(comm, at<float>(c, own), at<float>(c, all), c.p->buf[own].bytes / 4,
                            c.s, c.e);
}

/* From inputs, for which the ranks of the token path may need those of the token before. */
static dp_status from_inputs(const Call &c, dpg_comm *comm, step_fn chunks) {
    const dpg_plan *pl = c.p;
    if (pl->halo) {
        TRY(pl->path->halo(c));
        TRY(gather_halos(c, comm, B_HALO, B_HALOALL));
        TRY(pl->path->halo_came(c));
    }
    return over_tokens(chunks, c);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* Zeros in an element of which every word is sent, and some are not made. */
static dp_status clear_element(const Call &c) {
    const dpg_plan *pl = c.p;
    if (pl->N > 1 && !pl->needs_m && !pl->window.mine)
        CK(c.e, cudaMemsetAsync(at<float>(c, B_HM), 0, pl->buf[B_HM].bytes, c.s));
    return DP_OK;
}

/* (M, H) of the last local sub-sequence as the uniform element of math.md g.3. It is (0, 0) if no
 * later rank continues the sequence. M = 0 if the state that leaves the rank does not depend on the
 * state that enters. With segments also (M, H) of every segment, if a later one's initial state
 * needs it. */
static dp_status pre_process(const Call &c) {
    dpg_plan *pl = c.p;
    TRY(clear_element(c));
    if (pl->is_last && pl->nseg == 1) return DP_OK;
    TRY(pl->path->pre(c));
    int dense = pl->opt.chain_how == DPG_CHAIN_DENSE && !pl->path->makes_m;
    return pl->needs_m && dense ? chain_pre_m(c) : DP_OK;
}

/* (M, H) of the parts, zeros where nobody reads them. */
static dp_status pre_process_links(const Call &c) {
    dpg_plan *pl = c.p;
    size_t each = pl->buf[B_HM].bytes / pl->slots;
    char *hm = (char *)at<float>(c, B_HM);
    for (int i = 0; i < pl->slots; i++)
        if (i >= pl->nlink || !link_needs_m(pl->links_h[i]))
            CK(c.e, cudaMemsetAsync(hm + i * each, 0, each, c.s));
    if (pl->npre) TRY(pl->path->pre(c));
    int dense = pl->opt.chain_how == DPG_CHAIN_DENSE && !pl->path->makes_m;
    return dense ? chain_links_m(c) : DP_OK;
}

/* Data that the backward cannot recompute without the other ranks: S_in, and the M of the ranks
 * that its merge multiplies by. Through windows they come later. */
static dp_status save(const Call &c) {
    dpg_plan *pl = c.p;
    const Dims &d = pl->d;
    size_t states = 4 * (size_t)pl->saved_states * d.HV * d.K * d.V;
    if (!dpg_saved_bytes(pl)) return DP_OK;
    if (!c.t->saved)
        return dpg_fail(c.e, DP_EINPUT, "dpg_forward: options.backward needs dpg_tensors.saved");
    CK(c.e,
       cudaMemcpyAsync(c.t->saved, at<float>(c, B_SIN), states, cudaMemcpyDeviceToDevice, c.s));
    if (!pl->saved_ms || pl->window.mine) return DP_OK;
    size_t word = sizeof(float), row = word * (d.V + d.K), rows = pl->saved_ms * d.HV * d.K;
    const float *m =
        pl->owned ? gathered(c, B_HM, B_HMALL)
                  : at<float>(c, B_HMALL) + (size_t)(pl->rank + 1) * d.HV * d.K * (d.V + d.K);
    CK(c.e, cudaMemcpy2DAsync((char *)c.t->saved + states, word * d.K, m + d.V, row, word * d.K,
                              rows, cudaMemcpyDeviceToDevice, c.s));
    return DP_OK;
}

/* From (M, H) of this rank to the states that it starts from. */
static dp_status exchange(const Call &c, dpg_comm *comm, int steps) {
    dpg_plan *pl = c.p;
    int hands = hands_on(&pl->opt, pl->sends);
    /* a pass from the state that comes is part of handing it on */
    if (steps & DPG_STEP_PRE && !passes_on(&pl->opt, pl->sends))
        TRY(pl->owned ? pre_process_links(c) : pre_process(c));
    if (steps & (DPG_STEP_PRE | DPG_STEP_COMPOSE) && (pl->nseg > 1 || pl->window.mine))
        TRY(chain_compose(c));
    if (pl->window.mine && steps & DPG_STEP_GATHER)
        TRY(comm->enter(comm, c.s, c.e));
    else if (hands && steps & DPG_STEP_GATHER)
        TRY(hand_states(c, comm, B_HM, B_HMALL, B_SIN));
    else if (pl->sends && steps & DPG_STEP_GATHER)
        TRY(gather_elements(c, comm, B_HM, B_HMALL, pl->d.V + pl->d.K));
    if (!(steps & DPG_STEP_MERGE)) return DP_OK;
    /* else the state has come as it is */
    if (pl->owned && !hands) TRY(chain_fold(c));
    if (!pl->owned && (!hands || pl->is_first || pl->nseg > 1)) TRY(chain_merge(c));
    return save(c);
}

/* The chunk kernel over span i. */
static dp_status chunks_of_span(const Call &c, int i) {
    dpg_plan part = *c.p;
    const Seq &span = part.seqs_h[part.span0 + i];
    for (int slot : {B_AQK, B_TB, B_ODD, B_FACTORS, B_KGAM, B_KG, B_QG, B_EC})
        part.buf[slot].off += part.buf[slot].bytes / part.d.NT * span.c0;
    part.d.chunk += span.c0;
    part.d.NT = span.c1 - span.c0;
    Call x = c;
    x.p = &part;
    return part.path->chunks(x);
}
static dp_status state_of_span(const Call &c, int i) {
    dpg_plan part = *c.p;
    part.span = 1 + i;
    Call x = c;
    x.p = &part;
    TRY(part.path->state(x));
    c.p->maps = part.maps;
    c.p->pass_blocks = part.pass_blocks;
    return DP_OK;
}
/* The pass, and the chunk kernel over all spans but the first. */
static dp_status in_spans(const Call &c) {
    for (int i = 0; i < c.p->spans; i++) {
        if (i) TRY(chunks_of_span(c, i));
        TRY(fork(c));
        TRY(state_of_span(beside(c), i));
    }
    return join(c);
}

dp_status dpg_forward_steps(dpg_plan *pl, const dpg_tensors *t, void *ws, dpg_comm *comm,
                            void *stream, int steps, dp_err *e) {
    Call c = {pl, t, NULL, ws, (cudaStream_t)stream, e};
    if (pl->N > 1 && !comm)
        return dpg_fail(e, DP_EINPUT, "dpg_forward: %d ranks and no communicator", pl->N);
    if (pl->heads) return heads_forward(c, comm, steps);
    if (pl->wide) return wide_forward(c, comm, steps);
    const int whole = DPG_STEP_CHUNKS | DPG_STEP_PRE | DPG_STEP_STATE,
              all = (steps & whole) == whole, spans = all ? pl->spans : 0, leads = all && pl->leads;
    if (spans)
        TRY(chunks_of_span(c, 0));
    else if (steps & DPG_STEP_CHUNKS)
        TRY(from_inputs(c, comm, pl->path->chunks));
    if (spans) TRY(fork(c));
    if (leads)
        TRY(clear_element(c));
    else if (pl->N > 1 || pl->nseg > 1 || pl->owned)
        TRY(exchange(spans ? beside(c) : c, comm, steps));
    if (steps & DPG_STEP_STATE) {
        TRY(spans ? in_spans(c) : over_tokens(pl->path->state, c));
        pl->left_in = ws;
    }
    if (leads) TRY(exchange(c, comm, (steps & ~DPG_STEP_PRE) | DPG_STEP_COMPOSE));
    return pl->window.mine && steps & DPG_STEP_STATE ? window_keep(c) : DP_OK;
}

dp_status dpg_forward(dpg_plan *pl, const dpg_tensors *t, void *ws, dpg_comm *comm, void *stream,
                      dp_err *e) {
    return dpg_forward_steps(pl, t, ws, comm, stream, DPG_STEP_ALL, e);
}

/* ---- backward -------------------------------------------------------------------------------- */

static dp_status restore(const Call &c) {
    const dpg_plan *b = c.p;
    size_t states = 4 * (size_t)b->saved_states * b->d.HV * b->d.K * b->d.V;
    if (dpg_saved_bytes(b) && !c.t->saved)
        return dpg_fail(c.e, DP_EINPUT, "dpg_backward: no dpg_tensors.saved");
    if (states)
        CK(c.e,
           cudaMemcpyAsync(at<float>(c, B_SIN), c.t->saved, states, cudaMemcpyDeviceToDevice, c.s));
    return DP_OK;
}

/* (dM, dH) of the first local sub-sequence, the uniform element of math.md g.3. They are zeros if
 * no earlier rank needs them. If the gradient that leaves the rank does not depend on the gradient
 * that enters, dM = 0. With parts also dH of every part, if an earlier one's gradient needs it. */
static dp_status pre_process_bwd(const Call &c) {
    const dpg_plan *b = c.p;
    float *dhm = at<float>(c, B_DHM);
    if (b->N > 1 || b->owned) CK(c.e, cudaMemsetAsync(dhm, 0, b->buf[B_DHM].bytes, c.s));
    if (b->owned) {
        if (b->nbwd) TRY(b->path->bwd_pre(c));
        return b->opt.send_dh_only || b->path->makes_m ? DP_OK : chain_links_dm(c);
    }
    if (b->is_first && b->parts == 1) return DP_OK;
    TRY(b->path->bwd_pre(c));
    if (b->parts > 1 && !b->is_first) TRY(chain_compose_bwd(c));
    int dense = !b->opt.send_dh_only && !b->path->makes_m;
    return b->needs_m && dense ? chain_pre_dm(c, dhm + b->d.V, dh_row(b)) : DP_OK;
}

/* dq and dk beside the sums over ranks. */
static dp_status finish(const Call &c, dpg_comm *comm) {
    const dpg_plan *b = c.p;
    Call side = beside(c);
    if (!b->d.NT) CK(c.e, cudaMemsetAsync(at<float>(c, B_GSUM), 0, b->buf[B_GSUM].bytes, c.s));
    const int sums = c.g->dA_log || c.g->ddt_bias;
    TRY(over_tokens(b->path->bwd_sums, c));
    if (b->halo) {
        TRY(b->path->halo_bwd(c));
        TRY(gather_halos(c, comm, B_DHALO, B_DHALOALL));
    }
    if (sums) TRY(fork(c)); /* what is forked is joined: a graph must end on one stream */
    TRY(over_tokens(b->path->bwd_norm, c));
    if (!sums) return DP_OK;
    if (b->N > 1)
        TRY(comm->all_gather(comm, at<float>(c, B_GSUM), at<float>(c, B_GALL),
                             b->buf[B_GSUM].bytes / 4, side.s, c.e));
    TRY(sum_over_ranks(side));
    return join(c);
}

/* From dH of this rank to the gradients that it starts from. */
static dp_status exchange_bwd(const Call &side, dpg_comm *comm, int steps) {
    const dpg_plan *b = side.p;
    int hands = hands_on(&b->opt, b->sends);
    if (steps & DPG_BWD_GATHER && b->sends)
        TRY(hands ? hand_states(side, comm, B_DHM, B_DHMALL, B_DSOUT)
                  : gather_elements(side, comm, B_DHM, B_DHMALL, dh_row(b)));
    if (b->owned) return steps & DPG_BWD_MERGE && !hands ? chain_fold_bwd(side) : DP_OK;
    int merges = b->parts > 1 || (!b->is_last && !hands);
    return steps & DPG_BWD_MERGE && merges ? chain_merge_bwd(side) : DP_OK;
}

static dp_status backward_steps(const Call &c, dpg_comm *comm, int steps) {
    const dpg_plan *b = c.p;
    int recompute = steps & DPG_BWD_RECOMPUTE && !saves_all(b);
    if (recompute) {
        TRY(restore(c));
        TRY(from_inputs(c, comm, b->path->bwd_chunks));
    }
    if (steps & DPG_BWD_DAV) TRY(over_tokens(b->path->bwd_dv_local, c));
    int pre = (b->N > 1 || b->parts > 1 || b->owned) && !passes_on(&b->opt, b->sends);
    if (steps & DPG_BWD_PRE && pre) TRY(pre_process_bwd(c));
    TRY(fork(c));
    /* enqueued before a gather, at which host threads meet */
    if (recompute) TRY(over_tokens(b->path->bwd_states, c));
    TRY(exchange_bwd(beside(c), comm, steps));
    TRY(join(c));
    if (steps & DPG_BWD_STATE) TRY(over_tokens(b->path->bwd_state, c));
    if (steps & DPG_BWD_INTRA) TRY(over_tokens(b->path->bwd_intra, c));
    return steps & DPG_BWD_GATE ? finish(c, comm) : DP_OK;
}

dp_status dpg_backward_steps(dpg_plan *pl, const dpg_tensors *t, const dpg_grads *g, void *ws,
                             dpg_comm *comm, void *stream, int steps, dp_err *e) {
    Call c = {pl->heads || pl->wide ? pl : pl->bwd, t, g, ws, (cudaStream_t)stream, e};
    if (!pl->opt.backward)
        return dpg_fail(e, DP_EINPUT, "dpg_backward: the plan was made without options.backward");
    if (pl->N > 1 && !comm)
        return dpg_fail(e, DP_EINPUT, "dpg_backward: %d ranks and no communicator", pl->N);
    if (pl->heads) return heads_backward(c, comm, steps);
    if (pl->wide) return wide_backward(c, comm, steps);
    if (saves_all(pl) && pl->left_in != ws)
        return dpg_fail(e, DP_EINPUT,
                        "dpg_backward: under save all it reads what the forward left in the "
                        "workspace, and no forward of this plan ran in this one");
    c.overlaps = steps == DPG_BWD_ALL && !c.p->side;
    return backward_steps(c, comm, steps);
}

dp_status dpg_backward(dpg_plan *pl, const dpg_tensors *t, const dpg_grads *g, void *ws,
                       dpg_comm *comm, void *stream, dp_err *e) {
    return dpg_backward_steps(pl, t, g, ws, comm, stream, DPG_BWD_ALL, e);
}
