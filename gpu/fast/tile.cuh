/* gpu/fast/tile.cuh - tiles of 64 rows in shared memory: pieces of 16 bytes, fragments. It also has
 * the orders in which a warp names the rows of a 16 x 16 block for matrix loads. */
#ifndef DPG_TILE_CUH
#define DPG_TILE_CUH
#include "instructions.cuh"
#include "plan/values.cuh"

#define C DP_CHUNK
#define LN2 0.6931471805599453f

__device__ __forceinline__ uint32_t lds32(const bf16 *p) { return *(const uint32_t *)p; }

/* An A fragment from n-tiles a, b of an accumulator. */
__device__ __forceinline__ void fragment(uint32_t r[4], const float a[4], const float b[4]) {
    r[0] = pack2(a[0], a[1]);
    r[1] = pack2(a[2], a[3]);
    r[2] = pack2(b[0], b[1]);
    r[3] = pack2(b[2], b[3]);
}

/* ---- where a piece lies ---------------------------------------------------------------------- */

/* Element offset of piece p of a row: ROWS of any width; slice sl of SLICES(rows), p in {0, 1}. */
__device__ __forceinline__ int rows_at(int row, int p) {
    return ((p / 8 * C + row) * 8 + (p % 8 ^ (row & 7))) * 8;
}
__device__ __forceinline__ int piece_at(int rows, int sl, int row, int p) {
    return ((sl * rows + row) * 2 + (p ^ (row >> 2 & 1))) * 8;
}

/* Two orders in which a warp's lanes name the rows of a 16 x 16 block for ldsm4. DOWN: A as it
 * stands, or B = [k][n] with ldsm4t. ACROSS: B = [n][k] as it stands, or A' with ldsm4t. */
__device__ __forceinline__ int down_row(int lane) { return lane % 16; }
__device__ __forceinline__ int down_p(int lane) { return lane / 16; }
__device__ __forceinline__ int across_row(int lane) { return lane % 8 + lane / 16 * 8; }
__device__ __forceinline__ int across_p(int lane) { return lane / 8 % 2; }

/* The lane's row of a tile in ROWS. A walk along its pieces takes one LOP3 a step, because 2 j + p
 * ^ r = 2 j ^ (p ^ r). The address at(j, i) is of pieces 2 j and 2 j + 1, columns 16 j .., in the
 * row 16 i further down. */
template <int ROWS_OF_TILE = C> struct Walk {
    uint32_t a;
    __device__ __forceinline__ Walk(const bf16 *tile, int row, int p)
        : a(saddr(tile) + row * 128 + ((p ^ (row & 7)) << 4)) {}
    __device__ __forceinline__ uint32_t at(unsigned j, unsigned i = 0) const {
        return (a ^ (j % 4 * 32)) + j / 4 * (ROWS_OF_TILE * 128) + i * 2048;
    }
    /* The same of a tile of 64 columns. */
    __device__ __forceinline__ uint32_t of_64(unsigned j, unsigned i = 0) const {
        return (a ^ j * 32) + i * 2048;
    }
};
__device__ __forceinline__ Walk<> walk_down(const bf16 *tile, int row0, int lane) {
    return Walk<>(tile, row0 + down_row(lane), down_p(lane));
}
__device__ __forceinline__ Walk<> walk_across(const bf16 *tile, int row0, int lane) {
    return Walk<>(tile, row0 + across_row(lane), across_p(lane));
}
/* The lane's place in 16 rows of a slice of 16 columns. Slices and 16-row blocks further on are
 * constant distances away (rows * 32 bytes, 512 bytes). */
__device__ __forceinline__ uint32_t slice_down(const bf16 *slice, int row0, int lane) {
    return saddr(slice + piece_at(C, 0, row0 + down_row(lane), down_p(lane)));
}
__device__ __forceinline__ uint32_t slice_across(const bf16 *slice, int row0, int lane) {
    return saddr(slice + piece_at(C, 0, row0 + across_row(lane), across_p(lane)));
}

/* Operands of a warpgroup's products. ROWS on a multiple of 1,024 bytes, whose layout is the tensor
 * cores' 128-byte swizzle; `lead` matters to no product of 64 columns. */
__device__ __forceinline__ uint64_t rows_desc(const bf16 *tile, int lead) {
    return (uint64_t)(saddr(tile) >> 4) | (uint64_t)lead << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}
/* A slice of `rows` rows on a multiple of 256 bytes, from row0, a multiple of 8, on. It has 16
 * columns, or where rows are the depth also those of the next slice; the 32-byte swizzle. */
__device__ __forceinline__ uint64_t slice_desc(const bf16 *slice, int row0, int rows) {
    return (uint64_t)(saddr(slice) / 16 + row0 * 2) | (uint64_t)(rows * 2) << 16 |
           (uint64_t)16 << 32 | (uint64_t)3 << 62;
}

/* The operand 16 n bytes further on. */
__device__ __forceinline__ uint64_t desc_at(uint64_t desc, int n) {
    return desc >> 32 << 32 | ((uint32_t)desc + n);
}

/* n threads of a block meet at its barrier `id`. In plain builds all of them do: after barriers of
 * a part of a block racecheck no longer recognises those of the whole block. */
__device__ __forceinline__ void meet_part(int id, int n) {
#ifdef DPG_PLAIN_LOADS
    __syncthreads();
#else
    sync_part(id, n);
#endif
}

/* Two n-tiles. */
__device__ __forceinline__ void two(float c0[4], float c1[4], const uint32_t a[4],
                                    const uint32_t b[4]) {
    mma(c0, a, b[0], b[1]);
    mma(c1, a, b[2], b[3]);
}

/* Two accumulators side by side, 16 x 16, to bf16 where `at` points for the lane (ROWS or a slice,
 * by across_row and across_p). */
__device__ __forceinline__ void store_16x16(uint32_t at, const float a[4], const float b[4]) {
    uint32_t r[4] = {pack2(a[0], a[1]), pack2(b[0], b[1]), pack2(a[2], a[3]), pack2(b[2], b[3])};
    stsm4(at, r);
}

/* Element (k, v) of a state or of X', TILES n-tiles of 8 rows, from the transposed fragments of 16
 * columns, through f(k, v, float &). */
template <int TILES, class F> __device__ __forceinline__ void each(float (*S)[4], int lane, F f) {
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            f(j * 8 + lane % 4 * 2 + e % 2, lane / 4 + e / 2 * 8, S[j][e]);
}

/* ---- rows of inputs -------------------------------------------------------------------------- */

/* Row (token t0 + r >> lr, head, key) of a tensor of `heads` heads of 1 << lr keys. */
__device__ __forceinline__ int64_t row_at(int64_t t0, int heads, int head, int r, int lr) {
    return (((t0 + (r >> lr)) * heads + head) << lr) + (r & ((1 << lr) - 1));
}

/* The same row from row 0 of its tile, which stands at row_at(t0, heads, head, 0, lr). */
__device__ __forceinline__ unsigned row_in(int heads, int r, int lr) {
    return (((unsigned)(r >> lr) * heads) << lr) + (r & ((1 << lr) - 1));
}

/* Addresses in the rows of a tile, of `width` numbers each: number `at` of row r. Row 0 is row
 * `first` of x. */
struct TileRows {
    const char *row0;
    unsigned token, row;
    int lr;
    __device__ __forceinline__ TileRows(const void *x, int64_t first, int heads, int lr, int width,
                                        int at, int is_bf16)
        : row(width * (is_bf16 ? 2 : 4)), lr(lr) {
        token = (heads << lr) * row;
        row0 = made_address((const char *)x + first * row + at * (is_bf16 ? 2 : 4));
    }
    __device__ __forceinline__ const char *operator[](int r) const {
        return row0 + (uint64_t)(unsigned)(r >> lr) * token + (r & ((1 << lr) - 1)) * row;
    }
};

/* N (2 or 4) numbers of an input, bf16 or fp32, from element `at` on, rounded to bf16. Adds the
 * squares of the unrounded numbers to ss. */
template <int N>
__device__ __forceinline__ void load_pairs(uint32_t y[N / 2], const void *x, int64_t at,
                                           int is_bf16, float &ss) {
    float f[N];
    if (is_bf16) {
        if (N == 4)
            *(uint2 *)y = *(const uint2 *)((const bf16 *)x + at);
        else
            *y = *(const uint32_t *)((const bf16 *)x + at);
#pragma unroll
        for (int i = 0; i < N; i += 2)
            *(float2 *)(f + i) = unpack2(y[i / 2]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            *(float2 *)(f + i) = *(const float2 *)((const float *)x + at + i);
            y[i / 2] = pack2(f[i], f[i + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        ss = fmaf(f[i], f[i], ss);
}

/* N numbers as they are. */
template <int N>
__device__ __forceinline__ void load_values(float y[N], const void *x, int64_t at, int is_bf16) {
    float unused = 0.f;
    uint32_t p[N / 2];
    if (!is_bf16) {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            *(float2 *)(y + i) = *(const float2 *)((const float *)x + at + i);
        return;
    }
    load_pairs<N>(p, x, at, true, unused);
#pragma unroll
    for (int i = 0; i < N; i += 2)
        *(float2 *)(y + i) = unpack2(p[i / 2]);
}

/* One number of an input, or two neighbouring ones, as they stand in memory: nothing waits for them
 * before they are used. */
struct RawWord {
    uint32_t w;
    __device__ __forceinline__ void load(const void *x, int64_t at, int is_bf16) {
        w = is_bf16 ? ((const uint16_t *)x)[at] : ((const uint32_t *)x)[at];
    }
    __device__ __forceinline__ float get(int is_bf16) const {
        return __uint_as_float(is_bf16 ? w << 16 : w);
    }
};
struct RawPair {
    uint32_t w[2];
    __device__ __forceinline__ void load(const void *x, int64_t at, int is_bf16) {
        if (is_bf16)
            w[0] = *(const uint32_t *)((const bf16 *)x + at);
        else
            *(float2 *)w = *(const float2 *)((const float *)x + at);
    }
    __device__ __forceinline__ float2 get(int is_bf16) const {
        return is_bf16 ? unpack2(w[0]) : make_float2(__uint_as_float(w[0]), __uint_as_float(w[1]));
    }
};

/* N pairs to shared or global memory. */
template <int N> __device__ __forceinline__ void store_pairs(bf16 *to, const uint32_t y[N / 2]) {
    if (N == 4)
        *(uint2 *)to = make_uint2(y[0], y[1]);
    else
        *(uint32_t *)to = y[0];
}

/* The same from there. */
template <int N> __device__ __forceinline__ void copy_pairs(uint32_t y[N / 2], const bf16 *from) {
    if (N == 4)
        *(uint2 *)y = *(const uint2 *)from;
    else
        *y = *(const uint32_t *)from;
}

/* One value of R rows in every lane of a warp: their sums over the warp. Lane l gets that of row
 * l / (32 / R), in 32 / R lanes alike: each step halves the rows that a lane still holds. */
template <int R> __device__ __forceinline__ float row_sums(float x[R], int lane) {
#pragma unroll
    for (int n = R / 2, m = 16; n; n /= 2, m /= 2) {
        bool upper = lane & m;
#pragma unroll
        for (int i = 0; i < n; i++) {
            float send = upper ? x[i] : x[i + n], keep = upper ? x[i + n] : x[i];
            x[i] = keep + __shfl_xor_sync(~0u, send, m);
        }
    }
#pragma unroll
    for (int m = 32 / R / 2; m; m /= 2)
        x[0] += __shfl_xor_sync(~0u, x[0], m);
    return x[0];
}

/* ---- products of a warpgroup with a tile, each committed ------------------------------------- */

#define HALF (C * 128 / 16) /* 64 tokens of 64 channels, in units of 16 bytes */

/* x [64 tokens] = rows of a tile (wd: rows_desc(.., 1)) times a state of K channels. */
template <int K>
__device__ __forceinline__ void wg_times_rows(float (*x)[4], const uint32_t (*state)[4],
                                              uint64_t wd) {
#pragma unroll
    for (int j = 0; j < K / 16; j++)
        wg_mul<0>(x, state[j], wd + j / 4 * HALF + j % 4 * 2, j == 0);
    wg_commit();
}

/* x' = A' B', or x' += A' B', of a lower triangular tile B [64][64] (td: rows_desc(B, 1)). Blocks
 * of 16 x 16 above the diagonal are left out: zeros there would carry what is not finite to earlier
 * tokens. */
template <bool ADDS>
__device__ __forceinline__ void wg_times_lower(float (*x)[4], const uint32_t (*a)[4], uint64_t td) {
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int n = p; n < 4; n++)
            wg_mul_16<0>(x + 2 * n, a[p], td + n * (HALF / 4) + p * 2, !ADDS && p == 0);
    wg_commit();
}

/* x' = A' B of such a tile (td: rows_desc(B, 64)), likewise. */
__device__ __forceinline__ void wg_times_upper(float (*x)[4], const uint32_t (*a)[4], uint64_t td) {
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int n = 0; n <= p; n++)
            wg_mul_16<1>(x + 2 * n, a[p], td + p * (HALF / 4) + n * 2, p == n);
    wg_commit();
}

/* y [K / 64][64 channels] = kg' X (kd: rows_desc(kg, 64)), 64 channels a commit. */
template <int K>
__device__ __forceinline__ void wg_times_kg(float (*y)[8][4], const uint32_t (*X)[4], uint64_t kd) {
#pragma unroll
    for (int j = 0; j < K / 64; j++) {
#pragma unroll
        for (int p = 0; p < 4; p++)
            wg_mul<1>(y[j], X[p], kd + j * HALF + p * (HALF / 4), p == 0);
        wg_commit();
    }
}
#endif
