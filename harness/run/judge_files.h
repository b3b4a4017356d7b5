/* harness/run/judge_files.h - what files of other programs write in another way than judge.h says,
 * brought into that way before anything is checked. */
#ifndef DP_JUDGE_FILES_H
#define DP_JUDGE_FILES_H
#include "judge_settings.h"
#ifdef __cplusplus
extern "C" {
#endif

/* A batch of B > 1: q is [B,T,H,K]. The B sequences become packed ones of B*T tokens: every tensor
 * that begins with [B,T] loses that axis, s->cu says where they begin, and s->batch is B.
 * DP_EINPUT: cu_seqlens or several ranks beside a batch; a tensor of tokens that has another B or
 * T. */
dp_status dp_judge_fold(dp_tensorfile *in, dp_tensorfile *out, dp_judge_settings *s, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
