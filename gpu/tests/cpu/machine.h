/* gpu/tests/cpu/machine.h - what the threads of a block do together, for kernels on the CPU
 * (cpu.cc). */
#ifndef CPU_MACHINE_H
#define CPU_MACHINE_H
#include <stdint.h>

namespace cpu {

/* One instruction of a warp, done once: by lane what each gave, NULL where a thread has ended. */
typedef void (*warp_fn)(void **lane);
void warp(warp_fn fn, void *arg);

struct Shuffle {
    double x;
    int from; /* lane; none of 0 .. 31: keeps its own */
};
struct Mma {
    float *c;
    const uint32_t *a, *b; /* bf16: pairs; tf32: words */
};
struct Matrices {
    uint32_t *r, address;
};
struct Wgmma {
    float (*d)[4];
    const uint32_t *a; /* NULL: a warp's rows from row0 on of what a_rows describes */
    uint64_t a_rows, b;
    int columns, row0, transposed, first;
};
/* Does the device that the CPU stands for have products of warpgroups. */
bool has_warpgroups();
void sync_warp(void **lane);
void exchange(void **lane);
void vote_any(void **lane);
void mma_bf16(void **lane);
void mma_tf32(void **lane);
void load_matrices(void **lane);
void load_transposed(void **lane);
void store_matrices(void **lane);
void store_transposed(void **lane);
void warpgroup(void **lane);

/* Kernels run one after the other: a wait for n of them would be for ever if fewer had come. */
void has_come(unsigned came, unsigned n);

float tf32_rna(float x);
void sync_part(int id, int n);
/* Shared memory as instructions address it. */
uint32_t shared_address(const void *p);
char *shared_at(uint32_t a);

/* A barrier in shared memory: arrivals that a phase takes, those that it still waits for, phases.
 */
struct Barrier {
    uint16_t count, left;
    uint32_t phase;
};
static inline int barrier_parity(const uint64_t *b) { return ((const Barrier *)b)->phase & 1; }
/* Until the phase of this parity has ended. */
void await_barrier(const uint64_t *b, int parity);

} // namespace cpu
#endif
