/* harness/fuzz/mutate.h - changes that keep the form of their input. JSON stays JSON, a safetensors
 * file keeps a header that describes its data, a case file is lines of `key = value`. So most of
 * what is tried gets past the first check and into the code behind it.
 */
#pragma once
#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t state;
} rng;
rng rng_new(unsigned seed);
uint32_t below(rng *r, uint32_t n); /* 0 .. n-1 */

/* Words that names and texts are chosen from; both lists end with NULL. */
typedef struct {
    const char *const *names, *const *texts;
} words;

/* One change somewhere in it. */
void mutate_json(json_t *root, rng *r, const words *w);

/* Each returns the new size, at most `most`; 0: what is there has not this form. */
size_t mutate_safetensors(uint8_t *data, size_t size, size_t most, rng *r, const words *w);
size_t mutate_case(uint8_t *data, size_t size, size_t most, rng *r);

/* libFuzzer's own. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);

/* Where files are written: $TMPDIR, else in memory, else /tmp. */
const char *scratch_folder(void);

/* The program is wrong: says what, and ends the run. */
void must(int ok, const char *what, const char *more);
