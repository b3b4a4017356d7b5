/* The selected runs of a case: its lists, reduced to the options (case.h). */
#include "case.h"

int dp_select(int ncase, const int *in_case, int nwant, const int *want, int *out) {
    int n = 0;
    for (int i = 0; i < ncase; i++) {
        int keep = nwant == 0;
        for (int j = 0; j < nwant; j++)
            keep |= want[j] == in_case[i];
        if (keep) out[n++] = in_case[i];
    }
    return n;
}

int dp_case_chains(const dp_case *c, int N, int nwant, const int *want, int out[DP_NFORMATS]) {
    const int n = dp_select(c->nchain, (const int *)c->chain, nwant, want, out);
    int all = nwant > 0; /* who asks for one gets it */
    for (int i = 0; i < c->nranks; i++)
        all |= c->ranks[i] == N && c->all_chains[i];
    return n > 1 && (N == 1 || !all) ? 1 : n;
}

int dp_case_most_ranks(const dp_case *c, int most) {
    int n = 1;
    for (int i = 0; i < c->nranks; i++)
        if (c->ranks[i] > n && c->ranks[i] <= most) n = c->ranks[i];
    return n;
}
