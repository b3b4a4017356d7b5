/* harness/record/provenance.h - the sources of a record's numbers: files by their hashes, the
 * kernel's commit, a label, and a caller's description of its surroundings.
 */
#ifndef DP_PROVENANCE_H
#define DP_PROVENANCE_H
#include "ref/vocabulary/problem.h"
#include "schema.h"

#include <jansson.h>

#define DP_MAX_NOTES 64
typedef struct {
    const char *label, *kernel_commit; /* NULL: not said */
    int nnote;
    const char *note[DP_MAX_NOTES]; /* KEY=VALUE, KEY not empty */
    int nfile;
    struct {
        const char *role, *path;
        int64_t bytes;
        char xxh128[33];
    } file[3];
} dp_provenance;

/* Hashes the file as it is now. path NULL, or a file that cannot be read (which its reader says):
 * nothing is added. */
void dp_provenance_file(dp_provenance *p, const char *role, const char *path);

/* The value of the note KEY; NULL: there is none. */
const char *dp_provenance_note(const dp_provenance *p, const char *key);

/* NULL: there is nothing to say. */
json_t *dp_provenance_json(const dp_provenance *p);
extern const dp_object_schema dp_provenance_schema; /* what it says */
#endif
