/* gpu/plan/split.cu - a rank's share of a problem: its tokens, chunks and sequences (math.md g.2).
 * With several parts also the parts and the merges over them.
 */
#include "plan/parts.cuh"
#include "plan/paths.cuh"
#include "plan/sending.cuh"
#include "ref/vocabulary/segments.h"
#include <algorithm>
#include <stdlib.h>
#include <vector>

/* The sequences of the first and the last token of a part, and how many parts before and behind it
 * they have. */
struct Around {
    int first, last, pre, post;
};
static Around around(const Parts &parts, int i) {
    const dpg_problem *p = parts.p;
    Around x = {0, p->Nseq - 1};
    while (p->cu[x.first + 1] <= parts.cut(i))
        x.first++;
    while (p->cu[x.last] >= parts.cut(i + 1) || p->cu[x.last] == p->cu[x.last + 1])
        x.last--;
    x.pre = i - parts.at(p->cu[x.first]);
    x.post = parts.at(p->cu[x.last + 1] - 1) - i;
    return x;
}

/* Part i behind the rank's tokens so far: local sub-sequences are the global ones cut to it, empty
 * ones vanish. */
static void add_part(dpg_plan *pl, const Parts &parts, int i, int e) {
    const dpg_problem *p = parts.p;
    const Around x = around(parts, i);
    int64_t a = parts.cut(i), b = parts.cut(i + 1), shift = pl->d.L - a;
    int tok = pl->d.tok;
    Link *k = &pl->links_h[e];
    *k = {i, pl->d.nseq, pl->d.nseq, x.pre, x.post};
    for (int s = x.first; s <= x.last; s++) {
        int64_t lo = p->cu[s] > a ? p->cu[s] : a, hi = p->cu[s + 1] < b ? p->cu[s + 1] : b;
        if (lo >= hi) continue;
        Seq *q = &pl->seqs_h[pl->d.nseq];
        q->c0 = pl->d.NT;
        for (int64_t t = lo; t < hi; t += tok, pl->d.NT++)
            pl->chunks_h[pl->d.NT] = {t + shift, (int)(hi - t < tok ? hi - t : tok), pl->d.nseq};
        q->c1 = pl->d.NT;
        q->gseq = s;
        q->starts = p->cu[s] >= a;
        q->ends = p->cu[s + 1] <= b;
        q->part = e;
        k->last = pl->d.nseq++;
    }
    pl->d.L += b - a;
}

/* The states that go from part to part, in the plan's direction. */
static dp_status list_hops(dpg_plan *pl, const Parts &parts, dp_err *e) {
    const int64_t *cu = parts.p->cu;
    std::vector<int> given(pl->N, 0);
    pl->hops_h = (Hop *)calloc(parts.n(), sizeof(Hop));
    if (!pl->hops_h) return dpg_fail(e, DP_ENOMEM, "%s:%d: hops of a plan", __FILE__, __LINE__);
    for (int i = 0, s = 0; i + 1 < parts.n(); i++) {
        const int64_t behind = parts.cut(i + 1);
        const int from = parts.owner(i), to = parts.owner(i + 1), out = given[from]++;
        while (cu[s + 1] < behind)
            s++;
        if (cu[s] >= behind || cu[s + 1] == behind) continue;
        pl->hops_h[pl->nhop++] =
            pl->is_bwd ? Hop{to, from, given[to], out} : Hop{from, to, out, given[to]};
    }
    if (pl->is_bwd) std::reverse(pl->hops_h, pl->hops_h + pl->nhop);
    return DP_OK;
}

/* The pairs of a scan over parts. At distance d a part receives the pair that ends d parts before
 * it. It does so if its state depends on the received one and its sequence goes back so far. */
static dp_status list_pairs(dpg_plan *pl, const Parts &parts, dp_err *e) {
    const int n = parts.n(), by = pl->is_bwd ? -1 : 1;
    std::vector<int> given(pl->N, 0), link, before;
    std::vector<Hop> pairs;
    for (int i = 0; i < n; i++) {
        const Around x = around(parts, i);
        const int passes = x.first == x.last && x.pre && x.post;
        link.push_back(given[parts.owner(i)]++);
        before.push_back(!passes ? 0 : pl->is_bwd ? x.post : x.pre);
    }
    for (int d = 1; d < n; d *= 2) {
        for (int i = 0; i < n; i++)
            if (before[i] >= d)
                pairs.push_back(
                    {parts.owner(i - by * d), parts.owner(i), link[i - by * d], link[i]});
        pl->level_end[pl->nlevel++] = (int)pairs.size();
    }
    pl->pairs_h = (Hop *)calloc(pairs.size() + 1, sizeof(Hop));
    if (!pl->pairs_h) return dpg_fail(e, DP_ENOMEM, "%s:%d: pairs of a plan", __FILE__, __LINE__);
    std::copy(pairs.begin(), pairs.end(), pl->pairs_h);
    return DP_OK;
}

dp_status split_tokens(dpg_plan *pl, const dpg_problem *p, dp_err *e) {
    const Parts parts = {p, pl->N};
    int64_t L = 0;
    int n = 0;
    std::vector<int> owned(pl->N, 0);
    for (int i = 0; i < parts.n(); i++) {
        owned[parts.owner(i)]++;
        if (parts.owner(i) == pl->rank) L += parts.cut(i + 1) - parts.cut(i);
    }
    for (int r = 0; r < pl->N; r++)
        pl->slots = owned[r] > pl->slots ? owned[r] : pl->slots;
    pl->nlink = owned[pl->rank];
    pl->all = parts.n();
    pl->owned = p->own.parts > 0;
    /* sub-sequences, segments, and what list_rows adds */
    size_t rows = L / pl->d.tok + 2 * (size_t)p->Nseq + 4 * (size_t)pl->nlink + 2;
    pl->links_h = (Link *)calloc(pl->nlink + 1, sizeof(Link));
    pl->seqs_h = (Seq *)calloc(rows, sizeof(Seq));
    pl->chunks_h = (Chunk *)calloc(L / pl->d.tok + p->Nseq + pl->nlink + 1, sizeof(Chunk));
    pl->cuts_h = (Cut *)calloc(p->Nseq + 1, sizeof(Cut));
    if (!pl->links_h || !pl->seqs_h || !pl->chunks_h || !pl->cuts_h)
        return dpg_fail(e, DP_ENOMEM, "%s:%d: tables of a plan", __FILE__, __LINE__);
    for (int i = 0; i < parts.n(); i++)
        if (parts.owner(i) == pl->rank) add_part(pl, parts, i, n++);
    for (int i = 0; i < n; i++)
        pl->needs_m |= link_needs_m(pl->links_h[i]);
    if (pl->owned && hands_on(&pl->opt, pl->sends) && exchanges[pl->opt.exchange].levels)
        TRY(list_pairs(pl, parts, e));
    if (pl->owned) return list_hops(pl, parts, e);
    pl->pre = pl->links_h[0].pre;
    pl->post = pl->links_h[0].post;
    pl->is_first = pl->pre == 0;
    pl->is_last = pl->post == 0;
    pl->whole = pl->seqs_h[pl->d.nseq - 1].starts;
    return DP_OK;
}

/* ---- segments -------------------------------------------------------------------------------- */

/* Several ranks wait for each other's (M, H). Segments side by side keep a card of 132
 * multiprocessors busy where a chain of chunks per head would not. M takes one block a segment and
 * head. Fewer than 4 chunks a segment, or more than 16 segments, and composing them costs more than
 * it saves. */
static int segments_of_rank(const dpg_plan *pl, int chunks) {
    int n = 128 / pl->d.HV;
    n = n < chunks / 4 ? n : chunks / 4;
    return n < 1 ? 1 : n < 16 ? n : 16;
}

/* One rank, whose (M, H) nobody asks for: by time alone. */
static int chunks_of_segment(const dpg_plan *pl, const std::vector<int> &chunks) {
    const Dims &d = pl->d;
    const dpg_options &o = pl->opt;
    dp_segments_case c = {d.HV,
                          d.K,
                          d.V,
                          d.Kg == 1,
                          fast_may_be_bare(pl) != 0,
                          o.backward != 0,
                          o.save == DPG_SAVE_ALL,
                          pl->device.sms};
    const int most = dp_segments_most(&c, chunks.data(), (int)chunks.size());
    if (most || pl->is_bwd || !c.backward || c.save_all) return most;
    c.backward = 0; /* its backward asks for no segments */
    return dp_segments_most(&c, chunks.data(), (int)chunks.size());
}

/* Segments of each local sub-sequence. Owned parts are segments already. */
static std::vector<int> segment_counts(const dpg_plan *pl) {
    const dpg_options &o = pl->opt;
    std::vector<int> count(pl->d.nseq, 1), chunks;
    if (pl->owned || o.path != DPG_PATH_FAST || o.chain_how != DPG_CHAIN_AUGMENTED) return count;
    for (int i = 0; i < pl->d.nseq; i++)
        chunks.push_back(pl->seqs_h[i].c1 - pl->seqs_h[i].c0);
    if (o.segments) {
        count.back() = o.segments < chunks.back() ? o.segments : chunks.back();
    } else if (pl->N > 1) {
        count.back() = segments_of_rank(pl, chunks.back());
    } else {
        int most = o.segment_chunks ? o.segment_chunks : chunks_of_segment(pl, chunks);
        for (int i = 0; i < pl->d.nseq; i++)
            count[i] = dp_segments_of(chunks[i], most);
    }
    return count;
}

/* Segment i of n of a sub-sequence. */
static Seq segment_of(const Seq &whole, int i, int n) {
    int64_t chunks = whole.c1 - whole.c0;
    Seq q = whole;
    q.c0 = whole.c0 + (int)(chunks * i / n);
    q.c1 = whole.c0 + (int)(chunks * (i + 1) / n);
    q.starts = whole.starts && i == 0;
    q.ends = whole.ends && i == n - 1;
    return q;
}

/* Rows of a pass: whole sub-sequences, then segments; where one is cut, sub-sequences behind. */
void cut_segments(dpg_plan *pl, int whole) {
    int nseq = pl->d.nseq, last = nseq - 1;
    pl->nrow = pl->nwhole = nseq;
    pl->nseg = 1;
    if (pl->owned) return;
    std::vector<Seq> seqs(pl->seqs_h, pl->seqs_h + nseq);
    std::vector<int> count = whole ? std::vector<int>(nseq, 1) : segment_counts(pl);
    int any = *std::max_element(count.begin(), count.end()) > 1;
    auto is_cut = [&](int i) { return count[i] > 1 || (i == last && (!any || pl->N > 1)); };
    pl->nrow = pl->nseg = 0;
    for (int i = 0; i < nseq; i++)
        if (!is_cut(i)) pl->seqs_h[pl->nrow++] = seqs[i];
    pl->nwhole = pl->nrow;
    for (int i = 0; i < nseq; i++) {
        if (!is_cut(i)) continue;
        pl->cuts_h[pl->ncut++] = {pl->nseg, count[i]};
        for (int j = 0; j < count[i]; j++) {
            pl->seqs_h[pl->nrow] = segment_of(seqs[i], j, count[i]);
            pl->seqs_h[pl->nrow++].part = pl->nseg++;
        }
    }
    if (pl->nseg == 1) return;
    pl->whole0 = pl->nrow;
    std::copy(seqs.begin(), seqs.end(), pl->seqs_h + pl->whole0);
}

/* ---- rows beside the sub-sequences ----------------------------------------------------------- */

/* Span i. A later one's chunks, on fewer multiprocessors, take about as long as the pass before
 * them; less where value heads share a block. */
static Seq span_of(const dpg_plan *pl, const Seq &whole, int i) {
    static const int BY[2][SPANS + 1] = {{0, 4, 7, 9}, {0, 2, 5, 9}};
    const int *NINTHS = BY[fast_heads_of_block(pl) > 2];
    const int64_t n = whole.c1 - whole.c0;
    Seq q = segment_of(whole, i, SPANS);
    q.c0 = whole.c0 + (int)(n * NINTHS[i] / 9);
    q.c1 = whole.c0 + (int)(n * NINTHS[i + 1] / 9);
    return q;
}

void list_rows(dpg_plan *pl) {
    Seq *q = pl->seqs_h;
    const Link *l = pl->links_h;
    int n = pl->whole0 ? pl->whole0 + pl->d.nseq : pl->nrow;
    pl->pre0 = pl->owned ? n : pl->nwhole;
    for (int i = 0; pl->owned && i < pl->nlink; i++)
        if (l[i].post) q[n++] = q[l[i].last];
    pl->npre = pl->owned ? n - pl->pre0 : pl->nseg - pl->is_last;
    pl->bwd0 = pl->owned ? n : pl->whole0;
    for (int i = 0; pl->owned && i < pl->nlink; i++)
        if (l[i].pre) q[n++] = q[l[i].first];
    pl->nbwd = pl->owned ? n - pl->bwd0 : 1;
    pl->spans = fast_spans(pl);
    pl->span0 = n;
    for (int i = 0; i < pl->spans; i++)
        q[n++] = span_of(pl, q[0], i);
    pl->run0 = n;
    for (int i = 0; pl->by_part && i < pl->nlink; i++, n++) {
        q[n].c0 = q[l[i].first].c0;
        q[n].c1 = q[l[i].last].c1;
        q[n].part = i;
    }
    if (!pl->by_part) q[n++].c1 = pl->d.NT;
    pl->nrun = n - pl->run0;
}

/* The merges of a rank's parts with parts before them (dir = 1) or after them (-1). */
static std::vector<Fold> folds_of(const dpg_plan *pl, int dir) {
    std::vector<Fold> w;
    for (int i = 0; i < pl->nlink; i++) {
        const Link &l = pl->links_h[dir > 0 ? i : pl->nlink - 1 - i];
        if (!(dir > 0 ? l.pre : l.post)) continue;
        int from = dir > 0 ? l.part - l.pre : l.part + l.post;
        if (w.empty() || w.back().from != from) w.push_back({from, 0});
        w.back().to = l.part;
    }
    return w;
}

dp_status upload_tables(dpg_plan *pl, const dpg_problem *p, dp_err *e) {
    const Parts parts = {p, pl->N};
    std::vector<Fold> fwd, bwd;
    std::vector<int> place, link, given(pl->N, 0);
    if (pl->owned) {
        fwd = folds_of(pl, 1);
        bwd = folds_of(pl, -1);
    }
    for (int i = 0; i < pl->all; i++) {
        int r = parts.owner(i), at = given[r]++;
        place.push_back(r * pl->slots + at);
        link.push_back(r == pl->rank ? at : -1);
    }
    const struct {
        const void *from;
        size_t bytes;
        const void **to;
    } t[] = {{pl->chunks_h, pl->d.NT * sizeof(Chunk), (const void **)&pl->d.chunk},
             {pl->seqs_h, (pl->run0 + pl->nrun) * sizeof(Seq), (const void **)&pl->d.seq},
             {pl->cuts_h, pl->ncut * sizeof(Cut), (const void **)&pl->cuts},
             {pl->links_h, pl->nlink * sizeof(Link), (const void **)&pl->links},
             {fwd.data(), fwd.size() * sizeof(Fold), (const void **)&pl->folds.fold},
             {bwd.data(), bwd.size() * sizeof(Fold), (const void **)&pl->folds_bwd.fold},
             {place.data(), place.size() * sizeof(int), (const void **)&pl->folds.place},
             {link.data(), link.size() * sizeof(int), (const void **)&pl->folds.link}};
    size_t bytes = 0;
    for (auto &x : t)
        bytes += x.bytes;
    CK(e, cudaMalloc(&pl->tables, bytes + 8));
    char *to = (char *)pl->tables;
    for (auto &x : t) {
        if (x.bytes) CK(e, cudaMemcpy(to, x.from, x.bytes, cudaMemcpyHostToDevice));
        *x.to = to;
        to += x.bytes;
    }
    pl->folds.n = (int)fwd.size();
    pl->folds_bwd.n = (int)bwd.size();
    pl->folds_bwd.place = pl->folds.place;
    pl->folds_bwd.link = pl->folds.link;
    return DP_OK;
}
