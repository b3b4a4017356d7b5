/* gpu/plan/split.cu - a rank's share of a problem: its tokens, chunks and sequences (math.md g.2).
 */
#include "plan/paths.cuh"
#include <stdlib.h>

/* Local sub-sequences are the global ones cut to [a, b); empty ones vanish. */
void split_tokens(dpg_plan *pl, const dpg_problem *p) {
    int64_t L = p->T / pl->N, a = pl->rank * L, b = a + L;
    int f = 0, l = p->Nseq - 1, nseq = 0, nt = 0;
    while (p->cu[f + 1] <= a)
        f++;
    while (p->cu[l] >= b || p->cu[l] == p->cu[l + 1])
        l--;
    pl->pre = (int)(pl->rank - p->cu[f] / L);
    pl->post = (int)((p->cu[l + 1] - 1) / L - pl->rank);
    pl->is_first = pl->pre == 0;
    pl->is_last = pl->post == 0;
    int tok = pl->d.tok;
    pl->seqs_h = (Seq *)calloc(l - f + 1 + L / tok + 1, sizeof(Seq));
    pl->chunks_h = (Chunk *)calloc(L / tok + (l - f + 1) + 1, sizeof(Chunk));
    for (int s = f; s <= l; s++) {
        int64_t lo = p->cu[s] > a ? p->cu[s] : a, hi = p->cu[s + 1] < b ? p->cu[s + 1] : b;
        if (lo >= hi) continue;
        pl->seqs_h[nseq].c0 = nt;
        for (int64_t t = lo; t < hi; t += tok, nt++) {
            pl->chunks_h[nt].t0 = t - a;
            pl->chunks_h[nt].len = (int)(hi - t < tok ? hi - t : tok);
            pl->chunks_h[nt].seq = nseq;
        }
        pl->seqs_h[nseq].c1 = nt;
        pl->seqs_h[nseq].gseq = s;
        pl->seqs_h[nseq].starts = p->cu[s] >= a;
        pl->seqs_h[nseq].ends = p->cu[s + 1] <= b;
        nseq++;
    }
    pl->d.L = L;
    pl->d.NT = nt;
    pl->d.nseq = nseq;
    pl->needs_m = nseq == 1 && !pl->is_first && !pl->is_last;
    pl->whole = pl->seqs_h[nseq - 1].starts;
}

/* Segments side by side keep a card of 132 multiprocessors busy where a chain of chunks per head
 * would not: M takes one block a segment and head. Fewer than 4 chunks a segment, or more than 16
 * segments, and composing them costs more than it saves. One rank alone, whose (M, H) nobody asks
 * for, gains where few heads leave most of the card idle for long: T 131,072 HV 8, forward 2.93
 * -> 2.28 ms, backward 9.5 -> 8.0. */
int segment_count(const dpg_plan *pl, const dpg_options *o) {
    Seq q = pl->seqs_h[pl->d.nseq - 1];
    int chunks = q.c1 - q.c0, n = 128 / pl->d.HV;
    if (o->path != DPG_PATH_FAST || o->chain_how != DPG_CHAIN_AUGMENTED) return 1;
    if (o->segments) return o->segments < chunks ? o->segments : chunks;
    if (pl->N == 1 && (pl->d.nseq > 1 || pl->d.HV > 8 || chunks < 512)) return 1;
    n = n < chunks / 4 ? n : chunks / 4;
    return n < 1 ? 1 : n < 16 ? n : 16;
}

/* Replaces the last local sub-sequence by its segments. */
void cut_segments(dpg_plan *pl) {
    int last = pl->d.nseq - 1, n = pl->nseg;
    Seq whole = pl->seqs_h[last];
    for (int i = 0; i < n; i++) {
        Seq *q = &pl->seqs_h[last + i];
        *q = whole;
        q->c0 = whole.c0 + (int)((int64_t)(whole.c1 - whole.c0) * i / n);
        q->c1 = whole.c0 + (int)((int64_t)(whole.c1 - whole.c0) * (i + 1) / n);
        q->starts = whole.starts && i == 0;
        q->ends = whole.ends && i == n - 1;
        q->part = i;
    }
}
