/* harness/record/record_diff.h - two records side by side. It lists runs and tensors that appeared,
 * vanished or are no longer judged, changed verdicts, and errors that moved, against run-to-run
 * noise. Reads records, never runs anything.
 *
 * An error (a tensor's rel_fro, or its share on one rank) has moved when |ln(new / old)| exceeds
 * twice its noise. Its noise is the largest |ln| between OLD and any record of `again`, further
 * runs of OLD's program. Without `again`, simulated runs and judged files have no noise: they
 * repeat bit for bit. The noise of other backends then counts as unknown, 0, and the summary says
 * so. It has become worse when it moved up by more than the factor `worse`. Verdicts do not depend
 * on that factor; how much growth matters is the reader's to say.
 *
 * Cases, and the tensors of all cases together (`pooled`), are compared by their names.
 *
 * NEW is worse when an error became worse. It is worse when a verdict did: of the record, of a run,
 * of a tensor, of a row of `pooled`. It is worse when a judged run or tensor, a case or such a row
 * is gone. It is worse when a tensor is unjudged, or when more cases could not be judged at all.
 * Lost and new items are listed apart from worse ones, a line a case where that has more than three
 * runs. Records are the same when nothing of that differs, nor their digests.
 */
#pragma once
#include "record_read.h"
#include <stdio.h>

typedef struct {
    const dp_old_record *old, *new, *again;
    int nagain, verbose; /* verbose: every error that moved, not the 20 that moved most */
    double worse;
} dp_diff_request;

typedef enum { DP_DIFF_NOT_WORSE = 0, DP_DIFF_WORSE = 1, DP_DIFF_NOTHING_IN_COMMON = 2 } dp_diff;

/* Prints to f; *json (NULL: not wanted): the comparison, to be freed. */
dp_diff dp_record_diff(const dp_diff_request *q, FILE *f, json_t **json);
