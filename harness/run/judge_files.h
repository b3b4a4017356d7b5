/* harness/run/judge_files.h - brings files of other programs into the form of judge.h, before
 * anything is checked. */
#ifndef DP_JUDGE_FILES_H
#define DP_JUDGE_FILES_H
#include "judge_settings.h"
#ifdef __cplusplus
extern "C" {
#endif

/* An input of the file, under its name or its alias, to be changed; NULL: not there. */
dp_tensor *dp_judge_input(const dp_tensorfile *f, dp_input_id input);

/* An axis of keys that is 1 long, k [T,H,1,K] and v [T,HV,1,V] beside q [T,H,K]: it goes, from beta
 * and the gradients too. */
void dp_judge_one_key(dp_tensorfile *in, dp_tensorfile *out);

/* IN has no g, and no setting contradicts log: there is no decay, and g becomes zeros. It has one
 * number a head or, where `said` (dp_judge_recurrence) has gates of channels, K. Returns whether it
 * did. Added to *all: dg in OUT, several keys a token where nobody says how their rows read. */
int dp_judge_no_gate(dp_tensorfile *in, const dp_tensorfile *out, const char *gate, int said,
                     dp_complaints *all);

/* A batch of B > 1: q is [B,T,H,K]. The B sequences become packed ones of B*T tokens. Every tensor
 * that begins with [B,T] loses that axis, s->cu has their begins, and s->batch is B. DP_EINPUT:
 * cu_seqlens or several ranks beside a batch; a tensor of tokens that has another B or T.
 *
 * Several query heads a value head: q [T,H n,K], o and do [T,HV n,V] beside k and v of H = HV
 * heads. Query head h n + j of token t becomes head h of token t n + j. Tokens with j > 0 have no
 * key, no value and no decay. The number n goes to s->queries. DP_EINPUT: stages, dg of a log
 * gate. */
dp_status dp_judge_fold(dp_tensorfile *in, dp_tensorfile *out, dp_judge_settings *s, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
