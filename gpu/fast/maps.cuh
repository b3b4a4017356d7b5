/* gpu/fast/maps.cuh - tensors of rows as the copy engine knows them. One instruction brings 64
 * tokens of 64 columns of a head to a tile (ROWS), or of 16 to a slice (SLICES). Another writes a
 * tile (fill_tile, drain_tile, instructions.cuh). A chunk of fewer tokens goes by lanes, which put
 * zeros behind its end and leave what follows it alone. */
#ifndef DPG_MAPS_CUH
#define DPG_MAPS_CUH
#include "plan/paths.cuh"
#include <cuda.h>

/* Which tensors of a call; HALVES more than one: in tiles of half as many tokens. */
enum MappedRows {
    ROWS_OF_K,
    ROWS_OF_Q,
    ROWS_OF_V,
    ROWS_OF_O,
    ROWS_OF_DO,
    ROWS_OF_DV,
    HALVES,
    MAPPED = 2 * HALVES
};

/* A map of x: bf16, [tokens of the rank][heads][width], width a multiple of 64; made once for each
 * address in a row. A tile has `tokens`, the same in all calls of a plan.
 * DP_EDEVICE: the driver has no such copies, or not of x. */
dp_status map_rows(const Call &c, CUtensorMap *map, MappedRows which, const void *x, int heads,
                   int width, int tokens = DP_CHUNK, int columns = 64);
#endif
