/* harness/run/judge_settings.h - the settings that `judge` needs beside tensors. Each comes from
 * its option, else from the metadata of a file, else a complaint names the option to set (judge.h).
 */
#ifndef DP_JUDGE_SETTINGS_H
#define DP_JUDGE_SETTINGS_H
#include "harness/base/complaints.h"
#include "judge.h"
#include "ref/files/safetensors.h"
#ifdef __cplusplus
extern "C" {
#endif

/* A base that files may name: fp16 is base bf16 whose factors and outputs are fp16 (design.h). */
typedef struct {
    const char *name;  /* as it was said */
    const char *base;  /* of the case */
    const char *words; /* of the design that it implies; "": none */
} dp_judge_base;

typedef struct {
    const char *gate, *beta, *l2norm, *claim, *cu; /* as a case file has them; cu NULL: not set */
    dp_judge_base base;
    dp_format gate_dtype;      /* that g is read in; fp64: as IN holds it */
    double scale, lower_bound; /* NAN: not set */
    int ranks, in_vk, out_vk;
    int decays;      /* g is the decay itself, gate log of its logarithm */
    int64_t batch;   /* B of [B,T,..]; 0: there was none (judge_files.h) */
    int64_t queries; /* query heads a value head, where there are several (judge_files.h); else 0 */
    char *folded;    /* cu of either, to be freed */
} dp_judge_settings;

/* All of them; what is missing or not understood is added to *all. */
void dp_judge_settings_read(const dp_judge_options *o, const dp_tensorfile *in,
                            const dp_tensorfile *out, dp_judge_settings *s, dp_complaints *all);

#define DP_JUDGE_GATE_DTYPES "fp32|bf16|fp16"
#define DP_JUDGE_CLAIM "--claim " DP_FORMAT_WORDS " (format of the M chain)"

/* Is it said, by the option (may be NULL) or by metadata, that nothing is erased? */
int dp_judge_without_beta(const dp_tensorfile *in, const char *given);

/* Single ones; dflt NULL: required. */
int dp_judge_rank_count(const dp_tensorfile *out, int given, dp_complaints *all);
int dp_judge_state_vk(const dp_tensorfile *f, const char *given, dp_complaints *all);
const char *dp_judge_claim(const dp_tensorfile *out, const char *given, const char *option,
                           const char *dflt, dp_complaints *all);
dp_judge_base dp_judge_base_of(const dp_tensorfile *out, const char *given, const char *dflt,
                               dp_complaints *all);

/* Is it the name of a recurrence that stands here? */
int dp_judge_is_recurrence(const char *name);
/* Which of these option or metadata `recurrence` name; -1: nobody says, or a user's own. */
int dp_judge_recurrence(const dp_judge_options *o, const dp_tensorfile *in);

#ifdef __cplusplus
}
#endif
#endif
